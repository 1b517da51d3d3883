"""What each form sends and holds, in bytes: the formulas that the choice follows and that counted bytes are held against.

With ``n`` local rows (padding included), ``w = Hkv * D`` entries of a key row, ``b`` bytes per entry, ``a`` bytes per entry of a
gradient (4; 8 for fp64), ``C`` ranks and ``D`` passes, a rank sends::

    ring     D * (C - 1) * 2 n w * (b + b + a)      keys and values forward and again backward, their gradients backward
    gather       (C - 1) * 2 n w * (b + a)          keys and values once, the gradients' sum over the passes once
"""

from __future__ import annotations

from typing import Literal

from specdraft_kernels.zigzag_ring.layout import ZigzagLayout

BUDGET_BYTES = 4 * 2**30
"""What a gathered trunk with its gradient may take on each rank unless told otherwise."""


def _gradient_bytes(entry_bytes: int) -> int:
    return 8 if entry_bytes == 8 else 4


def sent_bytes(form: Literal["ring", "gather"], layout: ZigzagLayout, width: int, entry_bytes: int, *, passes: int) -> int:
    """Bytes that one rank sends, forward and backward, for one layer. `width`: key heads times head size."""
    shard = (layout.ranks - 1) * 2 * layout.rows * width
    if form == "ring":
        return passes * shard * (2 * entry_bytes + _gradient_bytes(entry_bytes))
    return shard * (entry_bytes + _gradient_bytes(entry_bytes))


def held_bytes(form: Literal["ring", "gather"], layout: ZigzagLayout, width: int, entry_bytes: int) -> int:
    """Bytes that one rank holds at most beside its own shard: what travels in and out, or the whole trunk; and their gradients.

    The gather holds one pass's gradient beside the sum of the passes before it.
    """
    per_entry = entry_bytes + _gradient_bytes(entry_bytes)
    if layout.ranks == 1:
        return 0
    if form == "ring":
        return 2 * 2 * layout.rows * width * per_entry
    return 2 * sum(layout.lengths) * width * (entry_bytes + 2 * _gradient_bytes(entry_bytes))


def choose_form(
    layout: ZigzagLayout, width: int, entry_bytes: int, *, passes: int, budget_bytes: int = BUDGET_BYTES
) -> Literal["ring", "gather"]:
    """``gather`` when two or more passes share the trunk and it fits into `budget_bytes`, else ``ring``.

    With one pass there is nothing to share: the ring hides its hops behind computation and holds less.
    """
    if layout.ranks == 1:
        return "ring"
    fits = held_bytes("gather", layout, width, entry_bytes) <= budget_bytes
    return "gather" if passes >= 2 and fits else "ring"
