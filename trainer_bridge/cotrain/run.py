"""Co-training on one rank of the trainer: hooks, channel and draft put together around the trainer's own schedule.

>>> co = CoTraining(view, tap_layers=(2, 16, 29), schedule=one_f_one_b(2, 8), max_rows=4096, draft=draft)   # doctest: +SKIP
>>> with co.step(microbatches):                                                                             # doctest: +SKIP
...     forward_backward(...)                                                                               # doctest: +SKIP
>>> co.result                                                                                               # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from trainer_bridge.cotrain.borrowed import BorrowedWeights, Rows
from trainer_bridge.cotrain.microbatch import Microbatch
from trainer_bridge.cotrain.trainer import DraftGroups, StepResult
from trainer_bridge.draft.interface import FrozenTarget
from trainer_bridge.errors import ConfigError, TapOrderError
from trainer_bridge.taps.channel import Carrier, Slot, TapChannel
from trainer_bridge.taps.hooks import ChunkHooks, ChunkView, Sink
from trainer_bridge.taps.ring import Writing
from trainer_bridge.taps.schedules import Schedule
from trainer_bridge.taps.tap_plan import resolve


@dataclass(frozen=True, kw_only=True)
class PolicyView:
    """What an adapter says of this rank's part of the policy."""

    chunks: Sequence[ChunkView]
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    """Of hidden states."""
    embedding: Rows | None
    """On the first stage, and on the last one where it is tied to the head."""
    head: Rows | None
    """On the last stage."""
    pipeline: dist.ProcessGroup | None = None
    """The pipeline's ranks in the order of its stages: a group that nobody else uses."""
    tensor: dist.ProcessGroup | None = None
    """Tensor-parallel ranks, which hold the same hidden states."""
    groups: DraftGroups = field(default_factory=DraftGroups)


class DraftSide(Protocol):
    """What receives taps on the ranks of the last chunk; see `DraftCoTrainer` for what each method promises."""

    def vocabulary(self) -> torch.Tensor | None:
        """Tokens whose head rows are needed beside those of the step; None: no further ones."""

    def begin_step(self, microbatches: Sequence[Microbatch], target: FrozenTarget) -> list[int]:
        """Rows of hidden states that this rank has of each microbatch."""

    def add(self, index: int, taps: torch.Tensor, final: torch.Tensor) -> None:
        """One microbatch's hidden states."""

    def finish_step(self) -> StepResult | None:
        """All microbatches have come."""

    def abort_step(self) -> None:
        """Forget the step."""


class CoTraining:
    """One on every rank of the trainer; all make the same calls."""

    def __init__(
        self,
        view: PolicyView,
        *,
        tap_layers: Sequence[int],
        schedule: Schedule,
        max_rows: int,
        draft: DraftSide | None = None,
        defer: int | None = None,
        carrier: Carrier = "shm",
        timeout_s: float = 120.0,
    ) -> None:
        """
        Args:
            view: of an adapter (`trainer_bridge.adapters`).
            tap_layers: of the draft, the same on all ranks.
            schedule: the order in which the trainer runs its chunks, with its number of microbatches.
            max_rows: rows of the longest microbatch on one context-parallel rank.
            draft: on the ranks of the last chunk: a `DraftCoTrainer`, or a `SampleCollector` that makes samples for engines.
            defer: forwards of the last chunk between a microbatch's own and the draft's work on it; the same on all ranks. None:
                all of it when the schedule is over, while earlier stages still finish theirs; 0: at once.
            carrier: ``shm`` where all stages are on one host, else ``group``; on GPUs ``p2p``, or ``cuda`` on one host.
            timeout_s: longest wait for taps, or for room for them.

        Raises:
            ConfigError: on all ranks, when they do not agree, or the plan does not fit the model.
        """
        self.view, self._draft, self._defer = view, draft, defer
        if defer is not None and defer < 0:
            raise ConfigError(f"defer is {defer}, must be 0 or more, or None")
        self._agree(next((gap for gap in map(_gap_of, view.chunks) if gap), None))
        self.plan = resolve(
            {chunk.chunk: _layers_of(chunk) for chunk in view.chunks}, tap_layers, schedule, pipeline=view.pipeline, defer=defer
        )
        shares = dist.get_world_size(view.tensor) if view.tensor is not None else 1
        if view.hidden_size % shares:
            raise ConfigError(f"{view.hidden_size} columns do not divide among {shares} tensor-parallel ranks")
        share = dist.get_rank(view.tensor) if view.tensor is not None else 0
        width = view.hidden_size // shares
        self._columns = slice(share * width, (share + 1) * width)
        self.channel = TapChannel(
            self.plan,
            Slot(rows=max_rows, width=width, dtype=view.dtype),
            pipeline=view.pipeline,
            carrier=carrier,
            device=_device_of(view.chunks),
            timeout_s=timeout_s,
        )
        misplaced = (self.channel.rank == self.plan.draft_rank) != (draft is not None)
        self._agree(
            f"the draft belongs on pipeline rank {self.plan.draft_rank}, that of the last chunk; "
            f"rank {self.channel.rank} was given {'none' if draft is None else 'one'}"
            if misplaced
            else None
        )
        self._borrowed = BorrowedWeights(
            vocab_size=view.vocab_size, embedding=view.embedding, head=view.head, draft_rank=self.plan.draft_rank,
            pipeline=view.pipeline, tensor=view.tensor,
        )  # fmt: skip
        self._kept: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._finals: dict[int, torch.Tensor] = {}
        self._waiting: list[int] = []
        self._rows: list[int] = []
        self.steps = 0
        self.result: StepResult | None = None
        """Of the last step, on the draft's rank; None where samples are collected."""
        self._hooks = [ChunkHooks(chunk, self.plan.of_chunk(chunk.chunk), self._sink(chunk.chunk)) for chunk in view.chunks]

    @contextlib.contextmanager
    def step(self, microbatches: Sequence[Microbatch]) -> Iterator[None]:
        """Around the schedule of one step. Leaving it does what the draft has left to do and steps its optimizer, whose result is
        in `result`; an exception forgets the step.

        Raises `TapError` subclasses when taps are lost, late, or not what they should be.
        """
        self.begin_step(microbatches)
        try:
            yield
            self.finish_step()
        except BaseException:
            self.abort_step()
            raise

    def begin_step(self, microbatches: Sequence[Microbatch]) -> None:
        """Announce a step's microbatches, in order; on every rank of the same data parallel rank the same."""
        if not microbatches:
            raise ConfigError("a step needs at least one microbatch")
        if len(microbatches) > self.plan.schedule.microbatches:
            raise ConfigError(
                f"{len(microbatches)} microbatches; slots were allocated for a schedule of {self.plan.schedule.microbatches}: "
                "make the plan for the longest step"
            )
        ids = torch.cat([microbatch.token_ids for microbatch in microbatches]).unique()
        target = self._borrowed.collect(ids, self._draft.vocabulary() if self._draft is not None else None)
        if self._draft is not None and target is not None:
            self._rows = self._draft.begin_step(microbatches, target)
        for hooks in self._hooks:
            hooks.begin(len(microbatches))

    def finish_step(self) -> None:
        """The schedule is over: do the draft's work that was deferred, and its optimizer's step."""
        for hooks in self._hooks:
            hooks.end()
        if self._draft is not None:
            while self._waiting:
                self._work(self._waiting.pop(0))
            self.result = self._draft.finish_step()
        self.steps += 1

    def abort_step(self) -> None:
        """Forget the step. Taps that others sent meanwhile are an error of the next: start all ranks again, from a checkpoint."""
        for hooks in self._hooks:
            hooks.abort()
        self._kept.clear()
        self._finals.clear()
        self._waiting.clear()
        if self._draft is not None:
            self._draft.abort_step()

    def close(self) -> None:
        """Take the hooks away, and wait until all taps have left: to be called before the process ends."""
        for hooks in self._hooks:
            hooks.close()
        self.channel.close()

    def _agree(self, problem: str | None) -> None:
        """Raise `ConfigError` on all pipeline ranks when one has a problem: the others would wait for it."""
        found = torch.tensor([int(problem is not None)])
        if self.view.pipeline is not None:
            dist.all_reduce(found, group=self.view.pipeline)
        if int(found):
            raise ConfigError(problem or "another pipeline rank was set up in a way that cannot work: see its error")

    def stay(self, chunk: int, microbatch: int, rows: torch.Tensor) -> None:
        """A tap of a chunk that is on the draft's own rank."""
        self._kept.setdefault((chunk, microbatch), []).append(rows)

    def ready(self, microbatch: int, final: torch.Tensor) -> None:
        """The last chunk has run: all taps of this microbatch are there, or on their way."""
        self._finals[microbatch] = final
        self._waiting.append(microbatch)
        while self._defer is not None and len(self._waiting) > self._defer:
            self._work(self._waiting.pop(0))

    def columns(self, rows: torch.Tensor) -> torch.Tensor:
        """This tensor-parallel rank's share of hidden states."""
        return rows[:, self._columns]

    def _sink(self, chunk: int) -> Sink:
        return _Ships(self, chunk) if self.channel.ships(chunk) else _Stays(self, chunk)

    def _work(self, microbatch: int) -> None:
        """The draft's work on one microbatch."""
        assert self._draft is not None
        rows, final = self._rows[microbatch], self._finals.pop(microbatch)
        if final.shape[0] != rows:
            raise TapOrderError(
                f"microbatch {microbatch} has {final.shape[0]} rows of hidden states, its documents make {rows}: microbatches come "
                "in another order than they were announced, or with other padding"
            )
        taps, readings = list[torch.Tensor](), []
        for chunk in range(len(self.plan.layers)):
            if not self.plan.of_chunk(chunk):
                continue
            if (chunk, microbatch) in self._kept:
                taps += self._kept.pop((chunk, microbatch))
            else:
                reading = self.channel.get(chunk, self.steps, microbatch, rows)
                readings.append(reading)
                taps += [self._joined(part.to(final.device)) for part in reading.parts]
        device = final.device
        # The draft's dtypes are its own, whatever the policy's forward runs under.
        with torch.autocast(device.type, enabled=False):
            self._draft.add(microbatch, torch.cat([tap.to(device) for tap in taps], 1), final)
        for reading in readings:
            reading.release()

    def _joined(self, part: torch.Tensor) -> torch.Tensor:
        """All columns of a tap, from the tensor-parallel ranks' shares."""
        if self.view.tensor is None:
            return part
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(self.view.tensor))]
        dist.all_gather(parts, part.contiguous(), group=self.view.tensor)
        return torch.cat(parts, 1)


class _Ships:
    """Where taps of a chunk go whose draft is on another rank."""

    def __init__(self, owner: CoTraining, chunk: int) -> None:
        self._owner, self._chunk, self._last = owner, chunk, len(owner.plan.of_chunk(chunk)) - 1
        self._writing: Writing | None = None

    def tap(self, microbatch: int, place: int, rows: torch.Tensor) -> None:
        if place == 0:
            self._writing = self._owner.channel.put(self._chunk, self._owner.steps, microbatch, rows.shape[0])
        if self._writing is None:
            raise TapOrderError(f"chunk {self._chunk}: its tap layers run in another order than their numbers")
        self._writing.write(place, self._owner.columns(rows))
        if place == self._last:
            # At once, not when the chunk is through: the draft may read it while the rest is computed.
            self._writing.commit()
            self._writing = None

    def final(self, microbatch: int, rows: torch.Tensor) -> None:
        raise TapOrderError(f"chunk {self._chunk} is not the last one and has a final norm")

    def end(self, microbatch: int) -> None:
        pass


class _Stays:
    """Where taps of a chunk go that is on the draft's rank, and the final state."""

    def __init__(self, owner: CoTraining, chunk: int) -> None:
        self._owner, self._chunk = owner, chunk
        self._final: torch.Tensor | None = None

    def tap(self, microbatch: int, place: int, rows: torch.Tensor) -> None:
        self._owner.stay(self._chunk, microbatch, rows)

    def final(self, microbatch: int, rows: torch.Tensor) -> None:
        self._final = rows

    def end(self, microbatch: int) -> None:
        if self._final is not None:
            final, self._final = self._final, None
            self._owner.ready(microbatch, final)


def _layers_of(chunk: ChunkView) -> range:
    """Layers of a chunk, which lie one behind the other."""
    return range(min(chunk.layers), max(chunk.layers) + 1) if chunk.layers else range(0)


def _device_of(chunks: Sequence[ChunkView]) -> torch.device:
    """Where the taps are made."""
    return next((parameter.device for chunk in chunks for parameter in chunk.module.parameters()), torch.device("cpu"))


def _gap_of(chunk: ChunkView) -> str | None:
    numbers = sorted(chunk.layers)
    return None if numbers == list(_layers_of(chunk)) else f"chunk {chunk.chunk} has the layers {numbers}, with a gap"
