"""Which token lies where: packed sequences cut into two chunks per rank, so that causal work is even. Integers only.

Each sequence is padded to a multiple of ``2C`` tokens and cut into ``2C`` equal chunks; rank ``r`` of ``C`` holds chunks ``r`` and
``2C - 1 - r``, in this order, sequence after sequence (arXiv 2609.07108).

Worked example, sequences of 7 and 3 tokens on 2 ranks: chunks of 2 and of 1 token(s)::

    sequence 0:  0 1 | 2 3 | 4 5 | 6 .        sequence 1:  0 | 1 | 2 | .
    rank 0:      0 1 6 .  0 .                 rank 1:      2 3 4 5  1 2

A rank's tokens of one sequence are in ascending order, so what a query sees of any rank's share of its sequence is one interval.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class ZigzagLayout:
    """Where the tokens of packed sequences of `lengths` lie on `ranks` context-parallel ranks."""

    lengths: tuple[int, ...]
    ranks: int

    def __init__(self, lengths: Sequence[int], ranks: int) -> None:
        object.__setattr__(self, "lengths", tuple(int(length) for length in lengths))
        object.__setattr__(self, "ranks", ranks)
        if ranks < 1 or any(length < 0 for length in self.lengths):
            raise ValueError(f"sequences of {self.lengths} tokens on {ranks} ranks: lengths are 0 or more, ranks 1 or more")

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Tokens per chunk, by sequence: an empty sequence has chunks of 0."""
        return tuple(-(-length // (2 * self.ranks)) for length in self.lengths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First local row of each sequence, and the number of local rows: the same on every rank."""
        return tuple(itertools.accumulate((2 * chunk for chunk in self.chunks), initial=0))

    @property
    def rows(self) -> int:
        """Local rows of a rank, padding included."""
        return self.starts[-1]

    def ranges(self, rank: int) -> list[tuple[int, int, int]]:
        """``(sequence, first position, end position)`` of what `rank` holds, in the order of its rows, padding included."""
        found = []
        for sequence, chunk in enumerate(self.chunks):
            for index in (rank, 2 * self.ranks - 1 - rank):
                found.append((sequence, index * chunk, (index + 1) * chunk))
        return found

    def owner(self, sequence: int, position: int) -> tuple[int, int]:
        """The rank and local row of a token. Raises `IndexError` where there is none."""
        if not 0 <= position < self.lengths[sequence]:
            raise IndexError(f"sequence {sequence} has {self.lengths[sequence]} tokens: no position {position}")
        index, within = divmod(position, self.chunks[sequence])
        front = index < self.ranks
        rank = index if front else 2 * self.ranks - 1 - index
        return rank, self.starts[sequence] + within + (0 if front else self.chunks[sequence])

    def sequences(self, rank: int) -> torch.Tensor:
        """``[rows]`` int64: the sequence of each local row."""
        return torch.cat([torch.full((end - begin,), s) for s, begin, end in self.ranges(rank)] or [torch.zeros(0)]).long()

    def positions(self, rank: int) -> torch.Tensor:
        """``[rows]`` int64: positions in their sequence; at or beyond its length for padding."""
        return torch.cat([torch.arange(begin, end) for _, begin, end in self.ranges(rank)] or [torch.zeros(0)]).long()

    def real(self, rank: int) -> torch.Tensor:
        """``[rows]`` bool: False for padding."""
        return self.positions(rank) < torch.tensor(self.lengths or (0,))[self.sequences(rank)]

    def packed_rows(self, rank: int) -> torch.Tensor:
        """``[rows]`` int64: row in the packed, unsplit batch; -1 for padding."""
        begins = torch.tensor([*itertools.accumulate(self.lengths, initial=0)])
        return torch.where(self.real(rank), begins[self.sequences(rank)] + self.positions(rank), -1)

    def split(self, packed: torch.Tensor, rank: int) -> torch.Tensor:
        """The rows of `packed` ``[tokens, ...]`` that `rank` holds, ``[rows, ...]``; padding is zeros."""
        if packed.shape[0] != sum(self.lengths):
            raise ValueError(f"{packed.shape[0]} rows, but the sequences have {sum(self.lengths)} tokens")
        rows = self.packed_rows(rank).to(packed.device)
        found = packed[rows.clamp_min(0)] if packed.shape[0] else packed.new_zeros(rows.shape[0], *packed.shape[1:])
        return torch.where((rows >= 0).view(-1, *[1] * (packed.dim() - 1)), found, torch.zeros_like(found))

    def join(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse of `split`: the packed batch from all ranks' rows."""
        if len(shards) != self.ranks:
            raise ValueError(f"{len(shards)} shards of {self.ranks} ranks")
        packed = shards[0].new_zeros(sum(self.lengths), *shards[0].shape[1:])
        for rank, shard in enumerate(shards):
            rows = self.packed_rows(rank).to(shard.device)
            packed[rows[rows >= 0]] = shard[rows >= 0]
        return packed

    def rows_below(self, sequences: torch.Tensor, positions: torch.Tensor, rank: int) -> torch.Tensor:
        """How many local rows of `rank` lie before each ``(sequence, position)``: every row of an earlier sequence, and those of
        its own at a lower position. Positions below 0 count as 0."""
        chunk = torch.tensor(self.chunks, device=sequences.device)[sequences]
        front = (positions - rank * chunk).clamp_min(0).minimum(chunk)
        back = (positions - (2 * self.ranks - 1 - rank) * chunk).clamp_min(0).minimum(chunk)
        return torch.tensor(self.starts, device=sequences.device)[sequences] + front + back
