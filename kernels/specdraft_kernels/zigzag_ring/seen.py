"""What the local queries of a context-parallel rank see, by position in their sequence, and where that lies."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from specdraft_kernels.interval_attention import Spans
from specdraft_kernels.zigzag_ring.layout import ZigzagLayout


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Per local query the positions ``low <= p < high`` of its sequence, and how many of its group's own keys."""

    layout: ZigzagLayout
    sequences: torch.Tensor
    """``[A]`` int64, ascending."""
    low: torch.Tensor
    """``[A]`` int64; below 0 counts as 0."""
    high: torch.Tensor
    """``[A]`` int64, ascending within a sequence; may exceed its length where it counts padding."""
    own: torch.Tensor | None = None

    def in_shard(self, rank: int) -> Spans:
        """As intervals of the rows that `rank` holds."""
        stop = self.layout.rows_below(self.sequences, self.high, rank)
        first = self.layout.rows_below(self.sequences, torch.minimum(self.low, self.high), rank)
        return Spans(first=first, stop=stop, own=self.own)

    def in_packed(self) -> Spans:
        """As intervals of the rows of the packed batch, all ranks' shares joined."""
        device = self.sequences.device
        begins = torch.tensor([*itertools.accumulate(self.layout.lengths, initial=0)], device=device)[self.sequences]
        lengths = torch.tensor(self.layout.lengths or (0,), device=device)[self.sequences]
        stop = self.high.clamp_min(0).minimum(lengths)
        first = torch.minimum(self.low.clamp_min(0), stop)
        return Spans(first=begins + first, stop=begins + stop, own=self.own)


def of_branch(
    layout: ZigzagLayout, rank: int, *, anchors: torch.Tensor | None, window: int | None, passes: int, device: torch.device
) -> Seen:
    """Of pass ``passes + 1``: the trunk up to the query's own row, the latest `window` positions only if one is given."""
    sequences, positions = layout.sequences(rank).to(device), layout.positions(rank).to(device)
    if anchors is not None:
        sequences, positions = sequences[anchors], positions[anchors]
    low = torch.zeros_like(positions) if window is None else positions + passes - window + 1
    return Seen(layout=layout, sequences=sequences, low=low, high=positions + 1)


def of_blocks(
    layout: ZigzagLayout, sequences: torch.Tensor, prefix: torch.Tensor, *, width: int, slots: torch.Tensor | None
) -> Seen:
    """The first ``prefix`` positions of each block's sequence, for each of its `width` slots."""
    own = None if slots is None else slots.repeat_interleave(width)
    high = prefix.repeat_interleave(width)
    return Seen(layout=layout, sequences=sequences.repeat_interleave(width), low=torch.zeros_like(high), high=high, own=own)
