"""Gather once: the whole trunk on every rank, brought together once per layer and used by all passes.

The gradient of the gathered trunk is summed in fp32 over all passes, where it lies, and each rank's share is sent home once.
"""

from __future__ import annotations

from typing import Any

import torch

from specdraft_kernels.interval_attention import arithmetic
from specdraft_kernels.zigzag_ring.exchange import Exchange
from specdraft_kernels.zigzag_ring.layout import ZigzagLayout


class Gathered:
    """Keys and values of the whole packed batch, and room for their gradient."""

    def __init__(self, layout: ZigzagLayout, exchange: Exchange) -> None:
        self.layout, self.exchange = layout, exchange
        self.k = self.v = torch.empty(0)
        self._gradient: tuple[torch.Tensor, torch.Tensor] | None = None

    def bring(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Gather all shards; returns a token that passes depend on, so that the gradient goes home after the last of them."""
        return _Bring.apply(k, v, self)

    def add(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """One pass's gradient of the whole trunk."""
        if self._gradient is None:
            self._gradient = (dk, dv)
        else:
            self._gradient[0].add_(dk)
            self._gradient[1].add_(dv)

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The sum over the passes; forgotten here."""
        gradient, self._gradient = self._gradient, None
        return gradient


class _Bring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: torch.Tensor, v: torch.Tensor, held: Gathered) -> torch.Tensor:
        exchange, layout = held.exchange, held.layout
        others = [peer for peer in range(exchange.ranks) if peer != exchange.rank]
        mine = (k.contiguous(), v.contiguous())
        buffers = {peer: (torch.empty_like(mine[0]), torch.empty_like(mine[1])) for peer in others}
        exchange.start(
            [(peer, tensor) for peer in others for tensor in mine],
            [(peer, buffer) for peer in others for buffer in buffers[peer]],
        ).wait()
        buffers[exchange.rank] = mine
        shards = [buffers[rank] for rank in range(exchange.ranks)]
        held.k, held.v = (layout.join([shard[which] for shard in shards]) for which in (0, 1))
        ctx.held, ctx.dtype = held, k.dtype
        return k.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        held, dtype = ctx.held, ctx.dtype
        whole = held.take()
        exchange, layout = held.exchange, held.layout
        if whole is None:
            # No pass of this rank trains through the trunk; the others still wait for its share.
            nothing = torch.zeros_like(held.k, dtype=arithmetic.accumulation_dtype(dtype))
            whole = (nothing, nothing.clone())
        others = [peer for peer in range(exchange.ranks) if peer != exchange.rank]
        mine = [layout.split(part, exchange.rank) for part in whole]
        sends = [(peer, layout.split(part, peer)) for peer in others for part in whole]
        buffers = {peer: [torch.empty_like(part) for part in mine] for peer in others}
        exchange.start(sends, [(peer, buffer) for peer in others for buffer in buffers[peer]]).wait()
        for peer in others:
            for part, buffer in zip(mine, buffers[peer], strict=True):
                part.add_(buffer)
        return mine[0].to(dtype), mine[1].to(dtype), None


class GatheredAttention(torch.autograd.Function):
    """``(q, token, own_k, own_v, held, spans, scale, backend) -> (out, lse)`` over the gathered trunk."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, token, own_k, own_v, held, spans, scale, backend = arguments
        out, lse = backend.forward(q, held.k, held.v, own_k, own_v, spans, scale)
        ctx.save_for_backward(q, token, own_k, own_v, out, lse)
        ctx.rest = (held, spans, scale, backend)
        ctx.mark_non_differentiable(lse)
        return out.to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, token, own_k, own_v, out, lse = ctx.saved_tensors
        held, spans, scale, backend = ctx.rest
        dq, dk, dv, d_own_k, d_own_v = backend.backward(gradients[0], q, held.k, held.v, own_k, own_v, out, lse, spans, scale)
        held.add(dk, dv)
        own = (d_own_k.to(q.dtype), d_own_v.to(q.dtype))
        return dq.to(q.dtype), torch.zeros_like(token), *own, None, None, None, None
