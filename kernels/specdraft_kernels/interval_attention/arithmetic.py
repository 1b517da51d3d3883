"""What all backends compute alike: in which dtype sums are kept, how two parts of one softmax become one, the own keys' part."""

from __future__ import annotations

import torch

from specdraft_kernels.interval_attention.spans import Spans


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything else: a sum of bf16 parts would lose a bit per part."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two attentions of the same queries ``[A, Hq, D]`` over disjoint keys, with their log-sum-exps ``[A, Hq]``, as one.

    Exact: ``l = logaddexp(l1, l2)``, ``O = exp(l1 - l) O1 + exp(l2 - l) O2``. A part without keys has -inf.
    """
    whole = torch.logaddexp(lse, part_lse)
    # Where neither part has a key, -inf - -inf would be NaN.
    safe = whole.masked_fill(whole == float("-inf"), 0.0)
    return out * (lse - safe).exp()[..., None] + part * (part_lse - safe).exp()[..., None], whole


def _grouped(x: torch.Tensor, groups: int, kv_heads: int) -> torch.Tensor:
    """``[A, Hq, D]`` as ``[B, W, Hkv, G, D]``."""
    queries, heads, size = x.shape
    return x.reshape(groups, queries // groups, kv_heads, heads // kv_heads, size)


def _own_scores(q: torch.Tensor, own_k: torch.Tensor, spans: Spans, scale: float) -> torch.Tensor:
    """``[B, W, Hkv, G, L]``, -inf where a query does not see a key."""
    groups, keys, kv_heads, _ = own_k.shape
    scores = torch.einsum("bwhgd,blhd->bwhgl", _grouped(q, groups, kv_heads), own_k) * scale
    if spans.own is not None:
        unseen = torch.arange(keys, device=q.device) >= spans.own.view(groups, -1, 1)
        scores = scores.masked_fill(unseen[:, :, None, None, :], float("-inf"))
    return scores


def own_forward(
    q: torch.Tensor, own_k: torch.Tensor, own_v: torch.Tensor, spans: Spans, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the own keys alone: ``[A, Hq, D]`` and ``[A, Hq]``. All in one accumulation dtype."""
    scores = _own_scores(q, own_k, spans, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
    out = torch.einsum("bwhgl,blhd->bwhgd", weights, own_v)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


def own_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    spans: Spans,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``dq``'s share, ``d own_k`` and ``d own_v``, in closed form.

    Args:
        lse: ``[A, Hq]`` of the whole row, so that ``exp(s - lse)`` is the weight among all keys.
        delta: ``[A, Hq]``, the row sums of ``d_out * out``.
    """
    groups, _, kv_heads, _ = own_k.shape
    shape = (groups, -1, kv_heads, q.shape[1] // kv_heads, 1)
    scores = _own_scores(q, own_k, spans, scale)
    safe = lse.masked_fill(lse == float("-inf"), 0.0)
    weights = (scores - safe.reshape(shape)).exp()
    d_grouped, q_grouped = _grouped(d_out, groups, kv_heads), _grouped(q, groups, kv_heads)
    d_own_v = torch.einsum("bwhgl,bwhgd->blhd", weights, d_grouped)
    d_scores = weights * (torch.einsum("bwhgd,blhd->bwhgl", d_grouped, own_v) - delta.reshape(shape)) * scale
    d_own_k = torch.einsum("bwhgl,bwhgd->blhd", d_scores, q_grouped)
    return torch.einsum("bwhgl,blhd->bwhgd", d_scores, own_k).reshape(q.shape), d_own_k, d_own_v
