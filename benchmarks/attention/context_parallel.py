"""Context parallelism over gloo processes: bytes that each form sends, and how much of a slow link is hidden behind computation."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from specdraft_kernels.zigzag_ring import Exchange, Trunk, ZigzagLayout, sent_bytes

PASSES, HEADS, KV_HEADS, SIZE = 3, 8, 2, 64
LENGTHS = (301, 64, 1, 130)
OVERLAP_TOKENS = 6144
REPEATS = 3


def _passes(layout: ZigzagLayout, exchange: Exchange, form: Any, passes: int) -> None:
    """Forward and backward of `passes` passes over one trunk."""
    rows = layout.rows
    k, v = (torch.randn(rows, KV_HEADS, SIZE, requires_grad=True) for _ in range(2))
    trunk = Trunk(k, v, layout, exchange, form=form)
    loss = torch.zeros(())
    for d in range(passes):
        branch = [torch.randn(rows, d, KV_HEADS, SIZE, requires_grad=True) for _ in range(2)]
        loss = loss + trunk.branch_attention(torch.randn(rows, HEADS, SIZE, requires_grad=True), *branch)[0].sum()
    loss.backward()


def counted() -> dict[str, int]:
    """Bytes that this rank sent, by form."""
    found = {}
    for form in ("ring", "gather"):
        exchange = Exchange()
        _passes(ZigzagLayout(LENGTHS, exchange.ranks), exchange, form, PASSES)
        found[form] = exchange.sent_bytes
    return found


def expected(form: Any, ranks: int) -> int:
    """What the formula says for `counted`."""
    return sent_bytes(form, ZigzagLayout(LENGTHS, ranks), KV_HEADS * SIZE, 4, passes=PASSES)


def hidden_share() -> float:
    """Of the time that hops of a slow link take, the share that a ring's pass does not wait for."""
    exchange = Exchange()
    layout = ZigzagLayout([OVERLAP_TOKENS], exchange.ranks)

    def seconds(delay_s: float) -> float:
        exchange.delay_s = delay_s
        dist.barrier()
        began = time.perf_counter()
        _passes(layout, exchange, "ring", 1)
        dist.barrier()
        return time.perf_counter() - began

    seconds(0.0)
    before = exchange.transfers
    plain = seconds(0.0)
    hops = exchange.transfers - before
    # Half of what a hop's computation takes on average: a link that can be hidden, were everything overlapped.
    shared = torch.tensor([0.5 * plain / hops])
    dist.broadcast(shared, 0)
    delay_s = float(shared)
    extra = [seconds(delay_s) - seconds(0.0) for _ in range(REPEATS)]
    return 1 - max(0.0, statistics.median(extra)) / (hops * delay_s)
