"""The trunk of one draft layer as an objective sees it: on this rank alone, or split over context-parallel ranks.

An objective runs its backward pass by pass, so the trunk begins a segment: what passes leave of its gradient is collected here, and
`segments` says where the backward goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from specdraft_kernels.block_attention import block_attention
from specdraft_kernels.branch_attention import branch_attention
from specdraft_kernels.zigzag_ring import Exchange, Trunk, ZigzagLayout

Attended = tuple[torch.Tensor, torch.Tensor]


def leaf_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, where a segment begins: the gradient that reaches it is collected here."""
    return tensor.detach().requires_grad_()


@dataclass(frozen=True, kw_only=True)
class Split:
    """How the rows of a packed batch lie on the ranks of a context-parallel group; this rank's batch holds its own."""

    layout: ZigzagLayout
    exchange: Exchange


class DraftTrunk(Protocol):
    """Keys and values of a layer's trunk, and attention over them."""

    def branch_attention(
        self, q: torch.Tensor, k_branch: torch.Tensor, v_branch: torch.Tensor, *, anchors: torch.Tensor
    ) -> Attended:
        """See `specdraft_kernels.branch_attention`."""

    def block_attention(
        self, q: torch.Tensor, k_block: torch.Tensor, v_block: torch.Tensor, sequences: torch.Tensor, prefix: torch.Tensor
    ) -> Attended:
        """See `specdraft_kernels.block_attention`."""

    def segments(self) -> Sequence[tuple[torch.Tensor, torch.Tensor | None]]:
        """After the backward of all passes: the keys and values it was made of, each with its gradient."""


class LocalTrunk:
    """All rows are here."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
        """`keys`, `values`: ``[N, Hkv, D]``; `cu_seqlens`: where documents begin, and the last one's end."""
        self._made, self._leaves, self._cu_seqlens = (keys, values), (leaf_of(keys), leaf_of(values)), cu_seqlens

    def branch_attention(
        self, q: torch.Tensor, k_branch: torch.Tensor, v_branch: torch.Tensor, *, anchors: torch.Tensor
    ) -> Attended:
        return branch_attention(q, *self._leaves, k_branch, v_branch, self._cu_seqlens, anchors=anchors)

    def block_attention(
        self, q: torch.Tensor, k_block: torch.Tensor, v_block: torch.Tensor, sequences: torch.Tensor, prefix: torch.Tensor
    ) -> Attended:
        return block_attention(q, *self._leaves, k_block, v_block, self._cu_seqlens, sequences, prefix)

    def segments(self) -> Sequence[tuple[torch.Tensor, torch.Tensor | None]]:
        return [(tensor, leaf.grad) for tensor, leaf in zip(self._made, self._leaves, strict=True)]


class SplitTrunk:
    """Each rank holds its rows; every rank makes it and calls the same methods in the same order."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, split: Split, *, passes: int) -> None:
        """`keys`, `values`: ``[layout.rows, Hkv, D]``."""
        self._made, self._leaves = (keys, values), (leaf_of(keys), leaf_of(values))
        self._trunk = Trunk(*self._leaves, split.layout, split.exchange, passes=passes, stepwise=True)
        self.branch_attention, self.block_attention = self._trunk.branch_attention, self._trunk.block_attention

    def segments(self) -> Sequence[tuple[torch.Tensor, torch.Tensor | None]]:
        self._trunk.send_home()
        return [(tensor, leaf.grad) for tensor, leaf in zip(self._made, self._leaves, strict=True)]
