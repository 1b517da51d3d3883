"""On the CPU: PyTorch's flash kernel, tile by tile, joined by its log-sum-exp.

The kernel gives the log-sum-exp without a gradient, so autograd must not see the merge. Its backward is called by hand
instead, with the output and log-sum-exp of the WHOLE row: it computes weights as ``exp(s - lse)`` and takes
``rowsum(dO * O)`` off, which makes each tile's gradients exactly that tile's share (arXiv 2205.14135, appendix B.2, for the
two formulas).
"""

from __future__ import annotations

import torch

from specdraft_kernels.interval_attention import arithmetic
from specdraft_kernels.interval_attention.spans import Spans
from specdraft_kernels.interval_attention.tiles import Tile, tiles

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _heads_first(x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Rows ``[begin, end)`` of ``[N, H, D]`` as the kernel's ``[1, H, n, D]``, a view."""
    return x[begin:end].transpose(0, 1)[None]


def _mask(tile: Tile, spans: Spans, dtype: torch.dtype) -> torch.Tensor | None:
    """``[queries, rows]``: 0 where seen, -inf elsewhere; None for tiles without holes."""
    if tile.kind != "masked":
        return None
    rows = torch.arange(tile.low, tile.high)
    first, stop = spans.first[tile.begin : tile.end, None], spans.stop[tile.begin : tile.end, None]
    return torch.zeros(tile.end - tile.begin, tile.high - tile.low, dtype=dtype).masked_fill_(
        (rows < first) | (rows >= stop), float("-inf")
    )


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own_k: torch.Tensor, own_v: torch.Tensor, spans: Spans, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `load_backend`. Half precision is computed in fp32: joined parts must not be rounded in between."""
    dtype = arithmetic.accumulation_dtype(q.dtype)
    q, k, v, own_k, own_v = (x.to(dtype) for x in (q, k, v, own_k, own_v))
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype)
    done = 0
    for tile in tiles(spans):
        mine = slice(tile.begin, tile.end)
        found, found_lse = _forward(
            _heads_first(q, tile.begin, tile.end),
            _heads_first(k, tile.low, tile.high),
            _heads_first(v, tile.low, tile.high),
            0.0,
            tile.kind == "causal",
            attn_mask=_mask(tile, spans, dtype),
            scale=scale,
        )
        part, part_lse = found[0].transpose(0, 1), found_lse[0].T
        if tile.begin >= done:
            out[mine], lse[mine] = part, part_lse
        else:
            out[mine], lse[mine] = arithmetic.merge(out[mine], lse[mine], part, part_lse)
        done = tile.end
    if own_k.shape[1] and q.numel():
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
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for tile in tiles(spans):
        d_query, d_key, d_value = _backward(
            _heads_first(d_out, tile.begin, tile.end),
            _heads_first(q, tile.begin, tile.end),
            _heads_first(k, tile.low, tile.high),
            _heads_first(v, tile.low, tile.high),
            _heads_first(out, tile.begin, tile.end),
            # The kernel walks it as it lies.
            lse[tile.begin : tile.end].T[None].contiguous(),
            0.0,
            tile.kind == "causal",
            attn_mask=_mask(tile, spans, dtype),
            scale=scale,
        )
        dq[tile.begin : tile.end] += d_query[0].transpose(0, 1)
        dk[tile.low : tile.high] += d_key[0].transpose(0, 1)
        dv[tile.low : tile.high] += d_value[0].transpose(0, 1)
    if not own_k.shape[1] or not q.numel():
        return dq, dk, dv, torch.zeros_like(own_k), torch.zeros_like(own_v)
    delta = (d_out * out).sum(-1)
    own_dq, d_own_k, d_own_v = arithmetic.own_backward(d_out, q, own_k, own_v, lse, delta, spans, scale)
    return dq.add_(own_dq), dk, dv, d_own_k, d_own_v
