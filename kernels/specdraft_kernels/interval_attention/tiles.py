"""Cutting spans into rectangles and triangles that an ordinary attention kernel takes, as Python integers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specdraft_kernels.interval_attention.spans import Spans

BLOCK = 256
"""Queries per masked tile: bounds the mask, whatever the number of rows."""
_SHORTEST_RUN = 32
"""A run of neighbouring rows that is shorter goes into a masked tile with others: each tile walks the whole trunk before it."""


@dataclass(frozen=True)
class Tile:
    """Queries ``begin <= a < end`` against rows ``low <= n < high``."""

    begin: int
    end: int
    low: int
    high: int
    kind: str
    """``full``: every query sees every row. ``causal``: a square, query i sees its rows 0..i. ``masked``: by the spans."""


def tiles(spans: Spans) -> Iterator[Tile]:
    """Tiles that cover every (query, row) pair that is seen exactly once, and in which every query sees at least one row."""
    first, stop = spans.first.tolist(), spans.stop.tolist()
    queries, begin = len(first), 0
    while begin < queries:
        if first[begin] == stop[begin]:
            begin += 1
            continue
        end = begin + 1
        while end < queries and first[end] == first[begin] and stop[end] == stop[end - 1] + 1:
            end += 1
        if end - begin >= _SHORTEST_RUN or end == queries or first[end] != first[begin]:
            # A run of neighbouring rows of one document without a window: all before it, and the triangle.
            if stop[begin] - 1 > first[begin]:
                yield Tile(begin, end, first[begin], stop[begin] - 1, "full")
            yield Tile(begin, end, stop[begin] - 1, stop[end - 1], "causal")
            begin = end
            continue
        end = _block(first, stop, begin)
        yield from _ragged(first, stop, begin, end)
        begin = end


def _block(first: list[int], stop: list[int], begin: int) -> int:
    """Where a block of queries that begins at `begin` ends: at an empty one, at another document, or where its mask would grow."""
    end = begin + 1
    while end < len(first) and first[end] < min(stop[end], stop[begin]):
        if end - begin >= BLOCK and (first[end] != first[begin] or stop[end] != stop[begin]):
            break
        end += 1
    return end


def _ragged(first: list[int], stop: list[int], begin: int, end: int) -> Iterator[Tile]:
    """Three parts: what the window cuts on the left, what all see, what the queries' own rows cut on the right."""
    left, middle_low = first[begin], first[end - 1]
    middle_high, right = stop[begin], stop[end - 1]
    # The right part begins with a row that all see, so that no query of it sees nothing; the left part ends with one.
    low = middle_low + 1 if middle_low > left else middle_low
    high = middle_high - 1 if right > middle_high else middle_high
    if low > high or high - low < BLOCK // 4:
        yield Tile(begin, end, left, right, "masked" if left != middle_low or right != middle_high else "full")
        return
    if low > left:
        yield Tile(begin, end, left, low, "masked")
    if high > low:
        yield Tile(begin, end, low, high, "full")
    if right > high:
        yield Tile(begin, end, high, right, "masked")
