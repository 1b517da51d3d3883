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
ENOUGH_REQUESTS, ENOUGH_STEPS = 8, 200
"""Less traffic than this says nothing about a draft."""


@dataclass(frozen=True, kw_only=True)
class MeasuredAcceptance:
    """Accepted length of one draft on real traffic."""

    length: float
    """Tokens per target step that verified drafts, bonus token included."""
    standard_error: float
    """Of `length`; infinite with fewer than two requests."""
    requests: int
    steps: int

    @property
    def is_enough(self) -> bool:
        """Whether it says something about the draft."""
        return self.requests >= ENOUGH_REQUESTS and self.steps >= ENOUGH_STEPS


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
    """Counts per request, and apart for the served draft and the one before it that saw traffic.

    A request that runs across a swap goes on with the old draft's KV cache: what it accepts then belongs to neither.
    """

    def __init__(self) -> None:
        self._running: dict[str, tuple[int, int]] = {}
        self._across: set[str] = set()
        self._served: deque[tuple[int, int]] = deque(maxlen=KEPT_REQUESTS)
        self._before: deque[tuple[int, int]] = deque(maxlen=KEPT_REQUESTS)

    def step(self, request_id: str, accepted: int) -> None:
        """One target step of a request verified drafts; `accepted` of them stood."""
        if request_id in self._across:
            return
        steps, total = self._running.get(request_id, (0, 0))
        self._running[request_id] = (steps + 1, total + accepted)

    def finish(self, request_id: str) -> None:
        """The request ended."""
        self._across.discard(request_id)
        if (counts := self._running.pop(request_id, None)) is not None:
            self._served.append(counts)

    def draft_changed(self) -> bool:
        """Another draft serves from here on; what running requests showed so far belongs to the old one.

        Returns whether the old one was measured. If not, the new one will be compared with the one before that.
        """
        self._served.extend(self._running.values())
        self._across.update(self._running)
        self._running.clear()
        found = measured(self._served)
        was_measured = found is not None and found.is_enough
        if was_measured or not self._before:
            self._before = self._served
        self._served = deque(maxlen=KEPT_REQUESTS)
        return was_measured

    def policy_changed(self) -> None:
        """Another policy is drafted for from here on: what was measured before says nothing about it."""
        self._across.update(self._running)
        self._running.clear()
        self._served.clear()
        self._before = deque(maxlen=KEPT_REQUESTS)

    def served(self) -> MeasuredAcceptance | None:
        """The served draft, over finished requests."""
        return measured(self._served)

    def before(self) -> MeasuredAcceptance | None:
        """The last draft before it that saw enough traffic, as it was when it was replaced."""
        return measured(self._before)
