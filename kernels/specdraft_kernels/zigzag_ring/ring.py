"""The ring: shards of the trunk travel from rank to rank, once per pass and direction; a rank never holds more than two.

Forward, hop s of C: rank r attends to the shard of rank ``(r - s) mod C`` while the next one arrives; parts are joined by their
log-sum-exp in fp32. Backward: the shards travel again, and the fp32 gradient of each travels one hop behind it, so that both are
under way while a rank computes. The own shard's gradient stays at home; half of it is computed first, while the first shard comes
in, and half last, while the own gradient comes home from the others.
"""

from __future__ import annotations

from typing import Any

import torch

from specdraft_kernels.interval_attention import arithmetic
from specdraft_kernels.zigzag_ring.exchange import Exchange, Pending
from specdraft_kernels.zigzag_ring.seen import Seen


class RingAttention(torch.autograd.Function):
    """``(q, k, v, own_k, own_v, seen, exchange, scale, backend) -> (out, lse)``; k and v are this rank's shard."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, own_k, own_v, seen, exchange, scale, backend = arguments
        out, lse = _ring_forward(q, k, v, own_k, own_v, seen, exchange, scale, backend)
        ctx.save_for_backward(q, k, v, own_k, own_v, out, lse)
        ctx.rest = (seen, exchange, scale, backend)
        ctx.mark_non_differentiable(lse)
        return out.to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = _ring_backward(gradients[0], *ctx.saved_tensors, *ctx.rest)
        return (*(gradient.to(gradients[0].dtype) for gradient in found), None, None, None, None)


def _ring_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    seen: Seen,
    exchange: Exchange,
    scale: float,
    backend: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    shard = (k.contiguous(), v.contiguous())
    out = lse = None
    for hop in range(exchange.ranks):
        following, pending = None, None
        if hop < exchange.ranks - 1:
            following = (torch.empty_like(shard[0]), torch.empty_like(shard[1]))
            pending = exchange.to_next(shard, following)
        spans = seen.in_shard((exchange.rank - hop) % exchange.ranks)
        if out is None or lse is None:
            out, lse = backend.forward(q, *shard, own_k, own_v, spans, scale)
        else:
            out, lse = arithmetic.merge(out, lse, *backend.forward(q, *shard, own_k[:, :0], own_v[:, :0], spans, scale))
        if pending is not None and following is not None:
            pending.wait()
            shard = following
    assert out is not None and lse is not None
    return out, lse


def _ring_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    seen: Seen,
    exchange: Exchange,
    scale: float,
    backend: Any,
) -> tuple[torch.Tensor, ...]:
    dtype = arithmetic.accumulation_dtype(q.dtype)
    dq, dk, dv, d_own_k, d_own_v = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v, own_k, own_v))
    groups, home = own_k.shape[0], seen.in_shard(exchange.rank)
    width = q.shape[0] // max(1, groups)

    def at_home(begin: int, end: int) -> None:
        """Groups of queries ``[begin, end)`` against the own shard and their own keys."""
        mine, group = slice(begin * width, end * width), slice(begin, end)
        found = backend.backward(
            d_out[mine], q[mine], k, v, own_k[group], own_v[group], out[mine], lse[mine],
            home.part(mine.start, mine.stop), scale,
        )  # fmt: skip
        dq[mine] += found[0]
        dk.add_(found[1])
        dv.add_(found[2])
        d_own_k[group], d_own_v[group] = found[3], found[4]

    if exchange.ranks == 1:
        at_home(0, groups)
        return dq, dk, dv, d_own_k, d_own_v
    shard = (torch.empty_like(k, memory_format=torch.contiguous_format), torch.empty_like(v, memory_format=torch.contiguous_format))
    arriving = exchange.to_next((k.contiguous(), v.contiguous()), shard)
    at_home(0, groups // 2)
    gradient, behind = (torch.empty_like(dk), torch.empty_like(dv)), None
    for hop in range(1, exchange.ranks):
        arriving.wait()
        current = shard
        if hop < exchange.ranks - 1:
            shard = (torch.empty_like(current[0]), torch.empty_like(current[1]))
            arriving = exchange.to_next(current, shard)
        spans = seen.in_shard((exchange.rank - hop) % exchange.ranks)
        found = backend.backward(d_out, q, *current, own_k[:, :0], own_v[:, :0], out, lse, spans, scale)
        dq += found[0]
        gradient, behind = _pass_on(exchange, found[1], found[2], gradient, behind)
    at_home(groups // 2, groups)
    assert behind is not None
    behind.wait()
    return dq, dk.add_(gradient[0]), dv.add_(gradient[1]), d_own_k, d_own_v


def _pass_on(
    exchange: Exchange,
    dk: torch.Tensor,
    dv: torch.Tensor,
    earlier: tuple[torch.Tensor, torch.Tensor],
    behind: Pending | None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], Pending]:
    """Add this rank's share of a shard's gradient to what the ranks before it sent along, and send it after the shard."""
    if behind is not None:
        behind.wait()
        dk, dv = dk.add_(earlier[0]), dv.add_(earlier[1])
    incoming = (torch.empty_like(dk), torch.empty_like(dv))
    return incoming, exchange.to_next((dk.contiguous(), dv.contiguous()), incoming)
