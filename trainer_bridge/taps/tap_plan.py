"""Which taps come from where: the tap layers of every chunk of the model, resolved once and compared on all pipeline ranks.

A tap is the input of a layer, and the chunk that runs the layer ships it. So a layer at the beginning of a stage, whose input
comes from the stage before, is no special case; a chunk may ship several taps or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer_bridge.errors import ConfigError
from trainer_bridge.taps.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class Source:
    """A chunk that ships taps to another rank."""

    chunk: int
    rank: int
    """Of the pipeline."""
    layers: tuple[int, ...]
    slots: int


@dataclass(frozen=True, kw_only=True)
class TapPlan:
    """Raises `ConfigError` for layers that no chunk runs, or that two run."""

    tap_layers: tuple[int, ...]
    """Ascending; the tap at layer ``l`` is what that layer reads."""
    layers: tuple[range, ...]
    """Per chunk of the whole model, in order, the layers it runs; empty ranges where it runs none."""
    ranks: tuple[int, ...]
    """Per chunk the pipeline rank it lies on."""
    schedule: Schedule
    defer: int | None = 0
    """See `Schedule.with_draft`; None: until the end of the step."""

    def __post_init__(self) -> None:
        if list(self.tap_layers) != sorted(set(self.tap_layers)) or not self.tap_layers:
            raise ConfigError(f"tap layers {self.tap_layers}: needs distinct ascending layers")
        runs = [layer for part in self.layers for layer in part]
        if runs != list(range(len(runs))):
            bounds = [(part.start, part.stop) for part in self.layers]
            raise ConfigError(f"chunks run the layers {bounds}: each layer once, in order, from 0")
        if outside := [layer for layer in self.tap_layers if not 0 < layer < len(runs)]:
            raise ConfigError(f"tap layers {outside}: the model has the layers 0 to {len(runs) - 1}, and layer 0 reads embeddings")
        if self.schedule.chunks != len(self.layers):
            raise ConfigError(f"schedule {self.schedule.name} has {self.schedule.chunks} chunks, the model {len(self.layers)}")
        for chunk, rank in enumerate(self.ranks):
            if (runs_it := self.schedule.rank_of(chunk)) != rank:
                raise ConfigError(f"chunk {chunk} lies on pipeline rank {rank}, schedule {self.schedule.name} runs it on {runs_it}")

    @property
    def draft_rank(self) -> int:
        """The pipeline rank of the last chunk, where the draft is."""
        return self.ranks[-1]

    def of_chunk(self, chunk: int) -> tuple[int, ...]:
        """Tap layers that a chunk runs."""
        return tuple(layer for layer in self.tap_layers if layer in self.layers[chunk])

    def sources(self) -> list[Source]:
        """Chunks with taps on other ranks than the draft's, and the slots each needs."""
        defer = self.schedule.microbatches if self.defer is None else self.defer
        slots = self.schedule.slots(defer)
        return [
            Source(chunk=chunk, rank=rank, layers=self.of_chunk(chunk), slots=slots[chunk])
            for chunk, rank in enumerate(self.ranks)
            if rank != self.draft_rank and self.of_chunk(chunk)
        ]


def resolve(
    own: Mapping[int, range],
    tap_layers: Sequence[int],
    schedule: Schedule,
    *,
    pipeline: dist.ProcessGroup | None = None,
    defer: int | None = 0,
    device: torch.device | str = "cpu",
) -> TapPlan:
    """The plan of all pipeline ranks, from what each says of itself. Every rank of the group calls it.

    Args:
        own: layers of this rank's chunks, by chunk number.
        tap_layers: as this rank has them.

    Raises:
        ConfigError: on every rank alike, when ranks name different tap layers, or their chunks make no model.
    """
    mine = [
        len(tap_layers), *tap_layers, -2 if defer is None else defer, schedule.microbatches, len(own),
        *(number for chunk, part in sorted(own.items()) for number in (chunk, part.start, part.stop)),
    ]  # fmt: skip
    said = _all_say(mine, pipeline, device)
    common = len(tap_layers) + 3
    chunks: dict[int, tuple[range, int]] = {}
    for rank, words in enumerate(said):
        if words[: words[0] + 3] != mine[:common]:
            raise ConfigError(
                f"pipeline rank {rank} has tap layers {words[1 : 1 + words[0]]}, deferral and microbatches "
                f"{words[1 + words[0] : 3 + words[0]]}; this rank has {list(tap_layers)} and {mine[common - 2 : common]}: "
                "give all ranks the same"
            )
        rest = words[common + 1 :]
        for chunk, start, stop in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
            if chunk in chunks:
                raise ConfigError(f"chunk {chunk} lies on the pipeline ranks {chunks[chunk][1]} and {rank}")
            chunks[chunk] = (range(start, stop), rank)
    if sorted(chunks) != list(range(len(chunks))):
        raise ConfigError(f"the pipeline's chunks are {sorted(chunks)}: they are counted over the whole model, from 0")
    return TapPlan(
        tap_layers=tuple(tap_layers), layers=tuple(chunks[c][0] for c in range(len(chunks))),
        ranks=tuple(chunks[c][1] for c in range(len(chunks))), schedule=schedule, defer=defer,
    )  # fmt: skip


def _all_say(words: list[int], group: dist.ProcessGroup | None, device: torch.device | str) -> list[list[int]]:
    """The words of every rank."""
    if group is None:
        return [words]
    length = torch.tensor([len(words)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    longest = max(int(each) for each in lengths)
    padded = torch.tensor([*words, *[0] * (longest - len(words))], device=device)
    found = [torch.zeros_like(padded) for _ in lengths]
    dist.all_gather(found, padded, group=group)
    return [each.tolist()[: int(count)] for each, count in zip(found, lengths, strict=True)]
