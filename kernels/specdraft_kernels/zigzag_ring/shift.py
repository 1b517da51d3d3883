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
    _check(rows, layout, exchange)
    return _Shift.apply(rows, layout, exchange, n)


def lookahead(rows: torch.Tensor, layout: ZigzagLayout, exchange: Exchange, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For every local row those 1 to `n` tokens ahead: each row that lies on another rank travels once, whoever needs it.

    Without a gradient. Every rank of the group calls it.

    Args:
        rows: ``[layout.rows, ...]``, as `ZigzagLayout.split` gives them.

    Returns:
        ``[layout.rows + borrowed, ...]``: the rows and those borrowed; and ``[layout.rows, n]`` int64: where among them the row
        so many tokens ahead is, -1 where its sequence has none.

    Raises:
        ValueError: rows that are not the layout's, or a group of another size.
    """
    _check(rows, layout, exchange)
    me, others = exchange.rank, [peer for peer in range(layout.ranks) if peer != exchange.rank]
    index = torch.full((layout.rows, n), -1)
    moves = [_moves(layout, me, d) for d in range(1, n + 1)]
    for d, by_owner in enumerate(moves):
        if me in by_owner:
            index[by_owner[me][0], d] = by_owner[me][1]
    buffers, offset = {}, layout.rows
    for peer in others:
        found = [(d, *by_owner[peer]) for d, by_owner in enumerate(moves) if peer in by_owner]
        if not found:
            continue
        wanted, place = torch.cat([there for _, _, there in found]).unique(return_inverse=True)
        for (d, here, _), own in zip(found, place.split([here.shape[0] for _, here, _ in found]), strict=True):
            index[here, d] = offset + own
        buffers[peer] = rows.new_empty(wanted.shape[0], *rows.shape[1:])
        offset += wanted.shape[0]
    sends = []
    for peer in others:
        lent = [by_owner[me][1] for d in range(1, n + 1) if me in (by_owner := _moves(layout, peer, d))]
        if lent:
            sends.append((peer, rows.detach()[torch.cat(lent).unique()].contiguous()))
    exchange.start(sends, list(buffers.items())).wait()
    return torch.cat([rows.detach(), *buffers.values()]), index.to(rows.device)


def _check(rows: torch.Tensor, layout: ZigzagLayout, exchange: Exchange) -> None:
    if rows.shape[0] != layout.rows:
        raise ValueError(f"{rows.shape[0]} rows, but the layout has {layout.rows} per rank")
    if exchange.ranks != layout.ranks:
        raise ValueError(f"a layout of {layout.ranks} ranks on a group of {exchange.ranks}")


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
