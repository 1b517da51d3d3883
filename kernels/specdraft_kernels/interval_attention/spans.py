"""What each query sees, as integers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Per query ``a`` of ``A`` the trunk rows ``first[a] <= n < stop[a]``, and the first ``own[a]`` keys of its group.

    Both bounds are non-decreasing: queries stand in the order of the rows they see, which is what lets a kernel skip whole tiles.
    A query with ``first[a] == stop[a]`` sees nothing of the trunk.

    Worked example, two documents of 3 and 2 rows, every row a query, causal: ``first = 0 0 0 3 3``, ``stop = 1 2 3 4 5``.
    """

    first: torch.Tensor
    """``[A]`` int64."""
    stop: torch.Tensor
    """``[A]`` int64."""
    own: torch.Tensor | None = None
    """``[A]`` int64, how many of its group's own keys a query sees; None: all of them."""
    cu_seqlens: torch.Tensor | None = None
    """``[documents + 1]`` int64 when every trunk row is a query, causal in its own document: varlen kernels want it so."""

    def __post_init__(self) -> None:
        if self.first.shape != self.stop.shape or self.first.dim() != 1:
            raise ValueError(f"first {tuple(self.first.shape)} and stop {tuple(self.stop.shape)} must both be [queries]")
        if self.own is not None and self.own.shape != self.first.shape:
            raise ValueError(f"own {tuple(self.own.shape)} must be [queries] = {tuple(self.first.shape)}")

    def check(self, rows: int) -> None:
        """Raise `ValueError` for bounds outside of `rows` trunk rows or out of order. Reads the tensors: costs a GPU a wait."""
        first, stop = self.first, self.stop
        if first.numel() == 0:
            return
        if int(first.min()) < 0 or int(stop.max()) > rows or bool((first > stop).any()):
            raise ValueError(f"a query's rows lie outside of the trunk's {rows} rows, or end before they begin")
        if bool((first.diff() < 0).any()) or bool((stop.diff() < 0).any()):
            raise ValueError("queries must stand in the order of their documents and of their rows in them: sort the anchors")

    def part(self, begin: int, end: int) -> Spans:
        """Of queries ``begin <= a < end`` only."""
        own = None if self.own is None else self.own[begin:end]
        return replace(self, first=self.first[begin:end], stop=self.stop[begin:end], own=own, cu_seqlens=None)
