"""The reference: one dense score matrix, in any floating dtype. Memory grows with queries times rows."""

from __future__ import annotations

import torch

from specdraft_kernels.interval_attention import arithmetic
from specdraft_kernels.interval_attention.spans import Spans


def _scores(q: torch.Tensor, k: torch.Tensor, spans: Spans, scale: float) -> torch.Tensor:
    """``[A, Hkv, G, N]``, -inf where a query does not see a row."""
    queries, _, size = q.shape
    scores = torch.einsum("ahgd,nhd->ahgn", q.view(queries, k.shape[1], -1, size), k) * scale
    rows = torch.arange(k.shape[0], device=q.device)
    seen = (rows >= spans.first[:, None]) & (rows < spans.stop[:, None])
    return scores.masked_fill(~seen[:, None, None, :], float("-inf"))


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own_k: torch.Tensor, own_v: torch.Tensor, spans: Spans, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `load_backend`."""
    dtype = arithmetic.accumulation_dtype(q.dtype)
    q, k, v, own_k, own_v = (x.to(dtype) for x in (q, k, v, own_k, own_v))
    scores = _scores(q, k, spans, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
    out = torch.einsum("ahgn,nhd->ahgd", weights, v).reshape(q.shape)
    lse = lse.reshape(q.shape[:2])
    if own_k.shape[1]:
        out, lse = arithmetic.merge(out, lse, *arithmetic.own_forward(q, own_k, own_v, spans, scale))
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
    dtype = arithmetic.accumulation_dtype(q.dtype)
    d_out, q, k, v, own_k, own_v, out = (x.to(dtype) for x in (d_out, q, k, v, own_k, own_v, out))
    delta = (d_out * out).sum(-1)
    grouped = (q.shape[0], k.shape[1], -1)
    weights = (_scores(q, k, spans, scale) - lse.masked_fill(lse == float("-inf"), 0.0).view(grouped)[..., None]).exp()
    d_view, q_view = d_out.view(*grouped, q.shape[2]), q.view(*grouped, q.shape[2])
    dv = torch.einsum("ahgn,ahgd->nhd", weights, d_view)
    d_scores = weights * (torch.einsum("ahgd,nhd->ahgn", d_view, v) - delta.view(grouped)[..., None]) * scale
    dk = torch.einsum("ahgn,ahgd->nhd", d_scores, q_view)
    dq = torch.einsum("ahgn,nhd->ahgd", d_scores, k).reshape(q.shape)
    if not own_k.shape[1]:
        return dq, dk, dv, torch.zeros_like(own_k), torch.zeros_like(own_v)
    own_dq, d_own_k, d_own_v = arithmetic.own_backward(d_out, q, own_k, own_v, lse, delta, spans, scale)
    return dq + own_dq, dk, dv, d_own_k, d_own_v
