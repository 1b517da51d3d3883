"""Acceptance as the engine itself measures it, request by request, for the served draft and the one before it.

The gate expects; this is what came of it. Steps of one request are not independent of each other, so the unit of the
uncertainty is the request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

KEPT_REQUESTS = 512
"""Requests that a measurement looks back over."""


@dataclass(frozen=True, kw_only=True)
class MeasuredAcceptance:
    """Accepted length of one draft on real traffic."""

    length: float
    """Tokens per target step that verified drafts, bonus token included."""
    standard_error: float
    """Of `length`; infinite with fewer than two requests."""
    requests: int
    steps: int


def measured(requests: Iterable[tuple[int, int]]) -> MeasuredAcceptance | None:
    """Accepted length over requests of ``(draft steps, accepted draft tokens)``; None without a step.

    The error is that of a ratio of sums over independent requests.
    """
    pairs = [(steps, accepted) for steps, accepted in requests if steps]
    if not pairs:
        return None
    steps = sum(s for s, _ in pairs)
    rate = sum(a for _, a in pairs) / steps
    count = len(pairs)
    squares = sum((a - rate * s) ** 2 for s, a in pairs)
    error = math.sqrt(squares * count / (count - 1)) / steps if count > 1 else math.inf
    return MeasuredAcceptance(length=1 + rate, standard_error=error, requests=count, steps=steps)


class AcceptanceLog:
    """Counts per request, and apart for the served draft and its predecessor."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[int, int]] = {}
        self._served: deque[tuple[int, int]] = deque(maxlen=KEPT_REQUESTS)
        self._before: deque[tuple[int, int]] = deque(maxlen=KEPT_REQUESTS)

    def step(self, request_id: str, accepted: int) -> None:
        """One target step of a request verified drafts; `accepted` of them stood."""
        steps, total = self._running.get(request_id, (0, 0))
        self._running[request_id] = (steps + 1, total + accepted)

    def finish(self, request_id: str) -> None:
        """The request ended."""
        if (counts := self._running.pop(request_id, None)) is not None:
            self._served.append(counts)

    def draft_changed(self) -> None:
        """Another draft serves from here on; what running requests showed so far belongs to the old one."""
        self._served.extend(self._running.values())
        self._running.clear()
        self._before, self._served = self._served, deque(maxlen=KEPT_REQUESTS)

    def served(self) -> MeasuredAcceptance | None:
        """The served draft, over finished requests."""
        return measured(self._served)

    def before(self) -> MeasuredAcceptance | None:
        """The draft before it, as it was when it was replaced."""
        return measured(self._before)
