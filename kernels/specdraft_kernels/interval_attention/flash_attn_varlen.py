"""flash-attn's varlen kernels for the trunk, joined with the own keys by the joint log-sum-exp. Written, never run: needs a GPU.

Its causal mask puts the last query on the last key, so it takes the case in which every trunk row is a query; sampled anchors and
windows of later passes are what the Triton kernel is for.
"""

from __future__ import annotations

from typing import Any

import torch

from specdraft_kernels.interval_attention import arithmetic
from specdraft_kernels.interval_attention.spans import Spans


def _library() -> Any:
    try:
        from flash_attn import flash_attn_interface
    except ImportError as error:
        raise ValueError("attention backend 'flash_attn' needs the package flash-attn; or take 'triton'") from error
    return flash_attn_interface


def _sequences(spans: Spans) -> tuple[torch.Tensor, int]:
    if spans.cu_seqlens is None:
        raise ValueError(
            "attention backend 'flash_attn' takes every row as a query, causal, without a window; this call has anchors, a window, "
            "blocks or a ring's shard: take 'triton'"
        )
    cu = spans.cu_seqlens.int()
    return cu, int(cu.diff().max())


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own_k: torch.Tensor, own_v: torch.Tensor, spans: Spans, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `load_backend`."""
    cu, longest = _sequences(spans)
    out, lse, *_ = _library()._flash_attn_varlen_forward(
        q, k, v, cu, cu, longest, longest, 0.0, scale, causal=True, window_size_left=-1, window_size_right=-1
    )
    out, lse = out.float(), lse.T.float()
    if own_k.shape[1]:
        own = arithmetic.own_forward(q.float(), own_k.float(), own_v.float(), spans, scale)
        out, lse = arithmetic.merge(out, lse, *own)
    return out, lse


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spans: Spans,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """See `load_backend`."""
    cu, longest = _sequences(spans)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _library()._flash_attn_varlen_backward(
        d_out.contiguous(), q, k, v, out.to(q.dtype), lse.T.contiguous(), dq, dk, dv, cu, cu, longest, longest, 0.0, scale,
        causal=True, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    if not own_k.shape[1]:
        return dq, dk, dv, torch.zeros_like(own_k), torch.zeros_like(own_v)
    wide = d_out.float()
    delta = (wide * out.float()).sum(-1)
    own_dq, d_own_k, d_own_v = arithmetic.own_backward(wide, q.float(), own_k.float(), own_v.float(), lse, delta, spans, scale)
    return dq.float() + own_dq, dk, dv, d_own_k, d_own_v
