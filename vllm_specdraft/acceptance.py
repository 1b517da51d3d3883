"""Acceptance as the engine itself measures it, request by request, for the served draft and the one before it.

The gate expects; this is what came of it. Steps of one request are not independent of each other, so the unit of the
uncertainty is the request. Steps verify as many draft tokens as pays at the moment: a step of three also says what two would have
given, and two drafts are compared by the largest number that both were measured with.
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
    draft_tokens: int
    """Per step, of which `length` counts those that stood."""
    requests: int
    steps: int

    @property
    def is_enough(self) -> bool:
        """Whether it says something about the draft."""
        return self.requests >= ENOUGH_REQUESTS and self.steps >= ENOUGH_STEPS


def measured(requests: Iterable[tuple[int, int]], *, draft_tokens: int) -> MeasuredAcceptance | None:
    """Accepted length over requests of ``(draft steps, accepted draft tokens)``; None without a step.

    `draft_tokens`: of each step.

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
    return MeasuredAcceptance(length=1 + rate, standard_error=error, draft_tokens=draft_tokens, requests=count, steps=steps)


class _Counts:
    """One request's."""

    def __init__(self, most: int) -> None:
        self.steps, self.accepted = [0] * most, [0] * most
        """By number of draft tokens, from one on."""

    def add(self, drafted: int, accepted: int) -> None:
        for index in range(min(drafted, len(self.steps))):
            self.steps[index] += 1
            self.accepted[index] += min(accepted, index + 1)


class AcceptanceLog:
    """Counts per request, and apart for the served draft and the one before it that saw traffic.

    A request that runs across a swap goes on with the old draft's KV cache: what it accepts then belongs to neither.
    """

    def __init__(self, most: int) -> None:
        """`most`: draft tokens per step."""
        self._most = most
        self._running: dict[str, _Counts] = {}
        self._across: set[str] = set()
        self._served: deque[_Counts] = deque(maxlen=KEPT_REQUESTS)
        self._before: deque[_Counts] = deque(maxlen=KEPT_REQUESTS)
        self._compared: tuple[MeasuredAcceptance | None, MeasuredAcceptance | None] | None = None
        """None: to be computed anew."""

    def step(self, request_id: str, accepted: int, *, drafted: int) -> None:
        """One target step of a request verified so many draft tokens; `accepted` of them stood."""
        if request_id not in self._across:
            self._running.setdefault(request_id, _Counts(self._most)).add(drafted, accepted)

    def finish(self, request_id: str) -> None:
        """The request ended."""
        self._across.discard(request_id)
        if (counts := self._running.pop(request_id, None)) is not None:
            self._served.append(counts)
            self._compared = None

    def draft_changed(self) -> bool:
        """Another draft serves from here on; what running requests showed so far belongs to the old one.

        Returns whether the old one was measured. If not, the new one will be compared with the one before that.
        """
        self._served.extend(self._running.values())
        self._across.update(self._running)
        self._running.clear()
        was_measured = any(_is_enough(self._at(self._served, tokens)) for tokens in self._numbers())
        if was_measured or not self._before:
            self._before = self._served
        self._served = deque(maxlen=KEPT_REQUESTS)
        self._compared = None
        return was_measured

    def policy_changed(self) -> None:
        """Another policy is drafted for from here on: what was measured before says nothing about it."""
        self._across.update(self._running)
        self._running.clear()
        self._served.clear()
        self._before = deque(maxlen=KEPT_REQUESTS)
        self._compared = None

    def compared(self) -> tuple[MeasuredAcceptance | None, MeasuredAcceptance | None]:
        """The last draft before the served one that saw enough traffic, as it was when it was replaced; and the served one, over
        finished requests. Of as many draft tokens as both saw enough steps of, else of as many as either was measured with."""
        if self._compared is None:
            self._compared = self._compare()
        return self._compared

    def _compare(self) -> tuple[MeasuredAcceptance | None, MeasuredAcceptance | None]:
        pairs = [(self._at(self._before, tokens), self._at(self._served, tokens)) for tokens in self._numbers()]
        for rule in (all, any):
            for pair in pairs:
                if rule(_is_enough(one) for one in pair):
                    return pair
        return next((pair for pair in pairs if pair != (None, None)), (None, None))

    def _numbers(self) -> range:
        """Of draft tokens, the largest first."""
        return range(self._most, 0, -1)

    @staticmethod
    def _at(requests: Iterable[_Counts], tokens: int) -> MeasuredAcceptance | None:
        pairs = ((counts.steps[tokens - 1], counts.accepted[tokens - 1]) for counts in requests)
        return measured(pairs, draft_tokens=tokens)


def _is_enough(found: MeasuredAcceptance | None) -> bool:
    return found is not None and found.is_enough
