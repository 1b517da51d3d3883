"""Triton: one online softmax that walks a query block's trunk rows and then its own keys, forward and backward.

Ran under the interpreter only (``TRITON_INTERPRET=1``); `benchmarks/gpu_check.py` is what tries it on a GPU.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from specdraft_kernels.interval_attention import arithmetic
from specdraft_kernels.interval_attention.spans import Spans

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _rows_of(base, rows, heads: tl.constexpr, head, size: tl.constexpr, offsets, inside):
    """A tile ``[rows, sizes]`` of one head out of ``[rows, heads, size]``; zeros where `inside` is false or the head has ended."""
    where = rows[:, None].to(tl.int64) * (heads * size) + head * size + offsets[None, :]
    return tl.load(base + where, mask=inside[:, None] & (offsets < size)[None, :], other=0.0)


@triton.jit
def _product(a, b, wide: tl.constexpr, upcast: tl.constexpr):
    """``a @ b`` summed in `wide`. The interpreter multiplies the bit patterns of bf16: there the factors are widened first."""
    if upcast:
        a = a.to(wide)
        b = b.to(wide)
    return tl.dot(a, b, out_dtype=wide, input_precision="ieee")


@triton.jit
def forward_kernel(
    q_at, k_at, v_at, own_k_at, own_v_at, first_at, stop_at, own_at, out_at, lse_at, queries,
    scale: tl.constexpr, heads: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr, keys: tl.constexpr,
    width: tl.constexpr, wide: tl.constexpr, upcast: tl.constexpr,
    block_q: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """One block of queries, one query head."""
    a = tl.program_id(0) * block_q + tl.arange(0, block_q)
    head = tl.program_id(1)
    kv_head = head // (heads // kv_heads)
    d = tl.arange(0, block_d)
    inside = a < queries
    first = tl.load(first_at + a, mask=inside, other=0)
    stop = tl.load(stop_at + a, mask=inside, other=0)
    q = _rows_of(q_at, a, heads, head, size, d, inside)

    top = tl.full([block_q], float("-inf"), dtype=wide)
    total = tl.zeros([block_q], dtype=wide)
    acc = tl.zeros([block_q, block_d], dtype=wide)
    sees = first < stop
    low = tl.min(tl.where(sees, first, 2147483647), 0)
    high = tl.max(tl.where(sees, stop, 0), 0)
    for start in range(low, high, block_n):
        n = start + tl.arange(0, block_n)
        k = _rows_of(k_at, n, kv_heads, kv_head, size, d, n < high)
        v = _rows_of(v_at, n, kv_heads, kv_head, size, d, n < high)
        scores = _product(q, tl.trans(k), wide, upcast) * scale
        seen = (n[None, :] >= first[:, None]) & (n[None, :] < stop[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A query that has seen nothing yet: -inf - -inf would be NaN.
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(scores - safe[:, None])
        shrink = tl.exp(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + _product(weights.to(v.dtype), v, wide, upcast)
        top = new_top

    count = tl.load(own_at + a, mask=inside, other=0)
    wide_q = q.to(wide)
    for key in range(keys):
        at = (a // width) * keys + key
        there = inside & (key < count)
        k = _rows_of(own_k_at, at, kv_heads, kv_head, size, d, there)
        v = _rows_of(own_v_at, at, kv_heads, kv_head, size, d, there)
        score = tl.where(there, tl.sum(wide_q * k.to(wide), 1) * scale, float("-inf"))
        new_top = tl.maximum(top, score)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(score - safe)
        shrink = tl.exp(top - safe)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + weight[:, None] * v.to(wide)
        top = new_top

    some = total > 0
    out = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
    lse = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    where = a[:, None].to(tl.int64) * (heads * size) + head * size + d[None, :]
    tl.store(out_at + where, out, mask=inside[:, None] & (d < size)[None, :])
    tl.store(lse_at + a.to(tl.int64) * heads + head, lse, mask=inside)


@triton.jit
def query_gradient_kernel(
    d_out_at, q_at, k_at, v_at, own_k_at, own_v_at, first_at, stop_at, own_at, lse_at, delta_at, dq_at, queries,
    scale: tl.constexpr, heads: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr, keys: tl.constexpr,
    width: tl.constexpr, wide: tl.constexpr, upcast: tl.constexpr,
    block_q: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """``dq`` of one block of queries and one query head: trunk and own keys."""
    a = tl.program_id(0) * block_q + tl.arange(0, block_q)
    head = tl.program_id(1)
    kv_head = head // (heads // kv_heads)
    d = tl.arange(0, block_d)
    inside = a < queries
    first = tl.load(first_at + a, mask=inside, other=0)
    stop = tl.load(stop_at + a, mask=inside, other=0)
    q = _rows_of(q_at, a, heads, head, size, d, inside)
    d_out = _rows_of(d_out_at, a, heads, head, size, d, inside)
    lse = tl.load(lse_at + a.to(tl.int64) * heads + head, mask=inside, other=0.0)
    delta = tl.load(delta_at + a.to(tl.int64) * heads + head, mask=inside, other=0.0)

    acc = tl.zeros([block_q, block_d], dtype=wide)
    sees = first < stop
    low = tl.min(tl.where(sees, first, 2147483647), 0)
    high = tl.max(tl.where(sees, stop, 0), 0)
    for start in range(low, high, block_n):
        n = start + tl.arange(0, block_n)
        k = _rows_of(k_at, n, kv_heads, kv_head, size, d, n < high)
        v = _rows_of(v_at, n, kv_heads, kv_head, size, d, n < high)
        scores = _product(q, tl.trans(k), wide, upcast) * scale
        seen = (n[None, :] >= first[:, None]) & (n[None, :] < stop[:, None])
        weights = tl.where(seen, tl.exp(tl.where(seen, scores - lse[:, None], 0.0)), 0.0)
        d_scores = weights * (_product(d_out, tl.trans(v), wide, upcast) - delta[:, None]) * scale
        acc += _product(d_scores.to(k.dtype), k, wide, upcast)

    count = tl.load(own_at + a, mask=inside, other=0)
    for key in range(keys):
        at = (a // width) * keys + key
        there = inside & (key < count)
        k = _rows_of(own_k_at, at, kv_heads, kv_head, size, d, there).to(wide)
        v = _rows_of(own_v_at, at, kv_heads, kv_head, size, d, there).to(wide)
        score = tl.sum(q.to(wide) * k, 1) * scale
        weight = tl.where(there, tl.exp(tl.where(there, score - lse, 0.0)), 0.0)
        d_score = weight * (tl.sum(d_out.to(wide) * v, 1) - delta) * scale
        acc += d_score[:, None] * k
    where = a[:, None].to(tl.int64) * (heads * size) + head * size + d[None, :]
    tl.store(dq_at + where, acc, mask=inside[:, None] & (d < size)[None, :])


@triton.jit
def trunk_gradient_kernel(
    d_out_at, q_at, k_at, v_at, first_at, stop_at, lse_at, delta_at, begin_at, end_at, dk_at, dv_at, queries, rows,
    scale: tl.constexpr, heads: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr,
    wide: tl.constexpr, upcast: tl.constexpr, block_q: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """``dk`` and ``dv`` of one block of trunk rows and one key head, summed over the query heads that share it."""
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    kv_head = tl.program_id(1)
    group: tl.constexpr = heads // kv_heads
    d = tl.arange(0, block_d)
    exists = n < rows
    k = _rows_of(k_at, n, kv_heads, kv_head, size, d, exists)
    v = _rows_of(v_at, n, kv_heads, kv_head, size, d, exists)
    dk = tl.zeros([block_n, block_d], dtype=wide)
    dv = tl.zeros([block_n, block_d], dtype=wide)
    begin = tl.load(begin_at + tl.program_id(0))
    end = tl.load(end_at + tl.program_id(0))
    for member in range(group):
        head = kv_head * group + member
        for start in range(begin, end, block_q):
            a = start + tl.arange(0, block_q)
            inside = a < end
            first = tl.load(first_at + a, mask=inside, other=0)
            stop = tl.load(stop_at + a, mask=inside, other=0)
            q = _rows_of(q_at, a, heads, head, size, d, inside)
            d_out = _rows_of(d_out_at, a, heads, head, size, d, inside)
            lse = tl.load(lse_at + a.to(tl.int64) * heads + head, mask=inside, other=0.0)
            delta = tl.load(delta_at + a.to(tl.int64) * heads + head, mask=inside, other=0.0)
            scores = _product(q, tl.trans(k), wide, upcast) * scale
            seen = (n[None, :] >= first[:, None]) & (n[None, :] < stop[:, None])
            weights = tl.where(seen, tl.exp(tl.where(seen, scores - lse[:, None], 0.0)), 0.0)
            dv += _product(tl.trans(weights.to(d_out.dtype)), d_out, wide, upcast)
            d_scores = weights * (_product(d_out, tl.trans(v), wide, upcast) - delta[:, None]) * scale
            dk += _product(tl.trans(d_scores.to(q.dtype)), q, wide, upcast)
    where = n[:, None].to(tl.int64) * (kv_heads * size) + kv_head * size + d[None, :]
    tl.store(dk_at + where, dk, mask=exists[:, None] & (d < size)[None, :])
    tl.store(dv_at + where, dv, mask=exists[:, None] & (d < size)[None, :])


@triton.jit
def own_gradient_kernel(
    d_out_at, q_at, own_k_at, own_v_at, own_at, lse_at, delta_at, dk_at, dv_at, groups,
    scale: tl.constexpr, heads: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr, keys: tl.constexpr,
    width: tl.constexpr, wide: tl.constexpr, block_g: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """``d own_k`` and ``d own_v`` of one block of groups, one key head and one key of each group."""
    g = tl.program_id(0) * block_g + tl.arange(0, block_g)
    kv_head = tl.program_id(1)
    key = tl.program_id(2)
    share: tl.constexpr = heads // kv_heads
    d = tl.arange(0, block_d)
    exists = g < groups
    at = g * keys + key
    k = _rows_of(own_k_at, at, kv_heads, kv_head, size, d, exists).to(wide)
    v = _rows_of(own_v_at, at, kv_heads, kv_head, size, d, exists).to(wide)
    dk = tl.zeros([block_g, block_d], dtype=wide)
    dv = tl.zeros([block_g, block_d], dtype=wide)
    for slot in range(width):
        a = g * width + slot
        there = exists & (key < tl.load(own_at + a, mask=exists, other=0))
        for member in range(share):
            head = kv_head * share + member
            q = _rows_of(q_at, a, heads, head, size, d, there).to(wide)
            d_out = _rows_of(d_out_at, a, heads, head, size, d, there).to(wide)
            lse = tl.load(lse_at + a.to(tl.int64) * heads + head, mask=there, other=0.0)
            delta = tl.load(delta_at + a.to(tl.int64) * heads + head, mask=there, other=0.0)
            weight = tl.where(there, tl.exp(tl.where(there, tl.sum(q * k, 1) * scale - lse, 0.0)), 0.0)
            dv += weight[:, None] * d_out
            d_score = weight * (tl.sum(d_out * v, 1) - delta) * scale
            dk += d_score[:, None] * q
    where = at[:, None].to(tl.int64) * (kv_heads * size) + kv_head * size + d[None, :]
    tl.store(dk_at + where, dk, mask=exists[:, None] & (d < size)[None, :])
    tl.store(dv_at + where, dv, mask=exists[:, None] & (d < size)[None, :])


def _blocks(size: int) -> tuple[int, int, int]:
    """Block sizes of queries, rows and head entries. Tiles are kept within a GPU's shared memory for wide heads."""
    block_d = max(16, triton.next_power_of_2(size))
    side = 16 if INTERPRETED else (64 if block_d <= 128 else 32)
    return side, side, block_d


def _constants(q: torch.Tensor, k: torch.Tensor, own_k: torch.Tensor, scale: float) -> dict:
    wide = tl.float64 if q.dtype == torch.float64 else tl.float32
    block_q, block_n, block_d = _blocks(q.shape[2])
    return {
        "scale": scale, "heads": q.shape[1], "kv_heads": k.shape[1], "size": q.shape[2], "keys": own_k.shape[1],
        "width": q.shape[0] // max(1, own_k.shape[0]), "wide": wide,
        "upcast": INTERPRETED and q.dtype in (torch.bfloat16, torch.float16),
        "block_q": block_q, "block_n": block_n, "block_d": block_d,
    }  # fmt: skip


def _integers(spans: Spans, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    own = torch.full_like(spans.first, keys) if spans.own is None else spans.own
    return spans.first.int().contiguous(), spans.stop.int().contiguous(), own.int().contiguous()


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own_k: torch.Tensor, own_v: torch.Tensor, spans: Spans, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `load_backend`."""
    q, k, v, own_k, own_v = (x.contiguous() for x in (q, k, v, own_k, own_v))
    dtype = arithmetic.accumulation_dtype(q.dtype)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=dtype, device=q.device)
    constants = _constants(q, k, own_k, scale)
    if q.numel():
        grid = (triton.cdiv(q.shape[0], constants["block_q"]), q.shape[1])
        forward_kernel[grid](q, k, v, own_k, own_v, *_integers(spans, own_k.shape[1]), out, lse, q.shape[0], **constants)
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
    d_out, q, k, v, own_k, own_v = (x.contiguous() for x in (d_out, q, k, v, own_k, own_v))
    dtype = arithmetic.accumulation_dtype(q.dtype)
    dq, dk, dv, d_own_k, d_own_v = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in (q, k, v, own_k, own_v))
    delta = (d_out.to(dtype) * out.to(dtype)).sum(-1)
    lse = lse.contiguous()
    constants = _constants(q, k, own_k, scale)
    first, stop, own = _integers(spans, own_k.shape[1])
    queries, rows = q.shape[0], k.shape[0]
    if q.numel():
        grid = (triton.cdiv(queries, constants["block_q"]), q.shape[1])
        query_gradient_kernel[grid](d_out, q, k, v, own_k, own_v, first, stop, own, lse, delta, dq, queries, **constants)
    if k.numel():
        trunk = {name: value for name, value in constants.items() if name not in ("keys", "width")}
        starts = torch.arange(0, rows, constants["block_n"], device=q.device, dtype=torch.int32)
        # Queries that may see a block of rows stand together: before `begin` they end before it, from `end` on they begin after it.
        begin = torch.searchsorted(stop, starts, right=True).int()
        end = torch.searchsorted(first, starts + (constants["block_n"] - 1), right=True).int()
        trunk_gradient_kernel[(starts.shape[0], k.shape[1])](
            d_out, q, k, v, first, stop, lse, delta, begin, end, dk, dv, queries, rows, **trunk
        )
    if own_k.numel():
        names = ("scale", "heads", "kv_heads", "size", "keys", "width", "wide", "block_d")
        block_g = constants["block_q"]
        own_gradient_kernel[(triton.cdiv(own_k.shape[0], block_g), k.shape[1], own_k.shape[1])](
            d_out, q, own_k, own_v, own, lse, delta, d_own_k, d_own_v, own_k.shape[0],
            block_g=block_g, **{name: constants[name] for name in names},
        )  # fmt: skip
    return dq, dk, dv, d_own_k, d_own_v
