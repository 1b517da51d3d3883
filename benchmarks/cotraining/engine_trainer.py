"""The handle on a trainer's two processes: starts them, hears what they do, and ends them whatever happens."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

import torch.distributed as dist

from benchmarks.cotraining.engine_rank import STAGES, Ended, Loaded, Order, Stepped, run
from benchmarks.sync.weights import digests
from vllm_specdraft.demo.session import SessionError
from vllm_specdraft.drafts import read_target

_SILENCE_S, _END_S = 600.0, 10.0


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of it."""

    round_trip_identity: bool
    """Whether both ranks together gave all of the checkpoint, bit by bit, before the first step."""
    policy_changed: bool
    """Whether the policy is another one after the last step."""
    embeddings_equal: bool
    """Whether both copies of a tied embedding are one; True where embedding and head are two."""
    steps: tuple[Stepped, ...]
    draft_version: int
    """That the engine serves now."""
    sent_bytes: int
    seconds: dict[str, float]
    """Of the trainer's parts."""

    @property
    def labels_per_s(self) -> float:
        """Labels of the draft, all passes together, per second that its rank spent on it."""
        return sum(step.labels for step in self.steps) / sum(step.draft_seconds for step in self.steps)


class Trainer:
    """Use as a context: whatever ends it, its processes end."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._heard: dict[type, list[Any]] = {Loaded: [], Stepped: [], Ended: []}

    def __enter__(self) -> Trainer:
        # The system picks a port, and the store holds it from then on.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(STAGES):
                ours, theirs = context.Pipe(duplex=False)
                self._pipes.append(ours)
                process = context.Process(target=run, args=(rank, self._store.port, self._order, theirs), daemon=True)
                self._processes.append(process)
                process.start()
                theirs.close()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        ends = time.monotonic() + (0.0 if kind else _END_S)
        for process in self._processes:
            if process.pid is not None:
                process.join(max(0.0, ends - time.monotonic()))
                process.kill()
                process.join(_END_S)
        for pipe in self._pipes:
            pipe.close()

    def train(self, on_step: Callable[[Stepped], None], on_loaded: Callable[[], None] = lambda: None) -> Trained:
        """From loading to the engine. Raises `SessionError` when a process fails, ends, or says nothing for long."""
        began = time.perf_counter()
        config, checkpoint = read_target(self._order.target)
        # Engines and megatron ignore it where the embedding is the head.
        expected = sorted(set(checkpoint) - ({"lm_head.weight"} if config.get("tie_word_embeddings") else set()))
        self._hear(Loaded)
        on_loaded()
        loaded_s = time.perf_counter() - began
        self._hear(Ended, on_step)
        loads, ends, steps = self._heard[Loaded], self._heard[Ended], self._heard[Stepped]
        before = digests({name: checkpoint[name] for name in expected})
        after = {name: found for share in ends for name, found in share.digests.items()}
        return Trained(
            round_trip_identity=not any(share.different for share in loads)
            and sorted(name for share in loads for name in share.same) == expected,
            policy_changed=after != before,
            embeddings_equal=len({share.embedding_digest for share in ends}) == 1,
            steps=tuple(steps),
            draft_version=ends[0].draft_version,
            sent_bytes=sum(share.sent_bytes for share in ends),
            seconds={
                "load": loaded_s,
                "train": sum(step.seconds for step in steps),
                "draft": sum(step.draft_seconds for step in steps),
                "save": max(share.save_s for share in ends),
                "update": max(share.update_s for share in ends),
            },
        )

    def _hear(self, until: type, on_step: Callable[[Stepped], None] = lambda step: None) -> None:
        """Take messages until every rank has said one of kind `until`."""
        left = dict(enumerate(self._pipes))
        while left:
            ready = wait(list(left.values()), _SILENCE_S)
            if not ready:
                raise SessionError(f"the trainer said nothing for {_SILENCE_S:.0f} s")
            for rank in [rank for rank, pipe in left.items() if pipe in ready]:
                try:
                    message = left[rank].recv()
                except (EOFError, OSError):
                    self._processes[rank].join(_END_S)
                    code = self._processes[rank].exitcode
                    raise SessionError(f"rank {rank} of the trainer ended (exit code {code})") from None
                if isinstance(message, str):
                    raise SessionError(f"the trainer failed: {message}")
                self._heard[type(message)].append(message)
                if isinstance(message, Stepped):
                    on_step(message)
                if isinstance(message, until):
                    del left[rank]
