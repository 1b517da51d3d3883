"""The row ``n`` tokens ahead in the same sequence, wherever it lies.

Labels, teachers and embeddings of later passes are shifted rows. Shifted after the split they would be wrong at every chunk
boundary; here exactly the rows beyond a boundary travel, those of all sequences in one batch.
"""

from __future__ import annotations

from typing import Any

import torch

from specdraft_kernels.zigzag_ring.exchange import Exchange
from specdraft_kernels.zigzag_ring.layout import ZigzagLayout


def shift(rows: torch.Tensor, layout: ZigzagLayout, exchange: Exchange, n: int) -> torch.Tensor:
    """For every local row at position p of its sequence the row at position ``p + n``; zeros where the sequence has none.

    Differentiable: the gradient travels back to the row's owner.

    Args:
        rows: ``[layout.rows, ...]``, as `ZigzagLayout.split` gives them.
        n: tokens; negative to look back. It may exceed a chunk.

    Raises:
        ValueError: rows that are not the layout's, or a group of another size.
    """
    if rows.shape[0] != layout.rows:
        raise ValueError(f"{rows.shape[0]} rows, but the layout has {layout.rows} per rank")
    if exchange.ranks != layout.ranks:
        raise ValueError(f"a layout of {layout.ranks} ranks on a group of {exchange.ranks}")
    return _Shift.apply(rows, layout, exchange, n)


def _moves(layout: ZigzagLayout, rank: int, n: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Per owner the local rows of `rank` whose shifted row it owns, and the owner's rows; both in the order of `rank`'s rows."""
    sequences, positions = layout.sequences(rank), layout.positions(rank)
    lengths = torch.tensor(layout.lengths or (0,))[sequences]
    chunks = torch.tensor(layout.chunks or (0,))[sequences]
    wanted = positions + n
    here = ((positions < lengths) & (wanted >= 0) & (wanted < lengths)).nonzero().squeeze(1)
    sequences, wanted, chunks = sequences[here], wanted[here], chunks[here].clamp_min(1)
    index = wanted // chunks
    front = index < layout.ranks
    owner = torch.where(front, index, 2 * layout.ranks - 1 - index)
    there = torch.tensor(layout.starts)[sequences] + wanted % chunks + torch.where(front, 0, chunks)
    return {peer: (here[owner == peer], there[owner == peer]) for peer in range(layout.ranks) if bool((owner == peer).any())}


def _gather(rows: torch.Tensor, layout: ZigzagLayout, exchange: Exchange, n: int) -> torch.Tensor:
    mine = _moves(layout, exchange.rank, n)
    out = torch.zeros_like(rows)
    others = [peer for peer in range(layout.ranks) if peer != exchange.rank]
    wanted_of_me = {peer: _moves(layout, peer, n).get(exchange.rank) for peer in others}
    sends = [(peer, rows[moves[1]].contiguous()) for peer, moves in wanted_of_me.items() if moves]
    buffers = {peer: rows.new_empty(mine[peer][0].shape[0], *rows.shape[1:]) for peer in others if peer in mine}
    pending = exchange.start(sends, list(buffers.items()))
    if exchange.rank in mine:
        here, there = mine[exchange.rank]
        out[here] = rows[there]
    pending.wait()
    for peer, buffer in buffers.items():
        out[mine[peer][0]] = buffer
    return out


class _Shift(torch.autograd.Function):
    """A shift moves each row to at most one place, so its gradient is the opposite shift."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, layout: ZigzagLayout, exchange: Exchange, n: int) -> torch.Tensor:
        ctx.arguments = (layout, exchange, n)
        return _gather(rows, layout, exchange, n)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        layout, exchange, n = ctx.arguments
        return _gather(gradients[0].contiguous(), layout, exchange, -n), None, None, None
