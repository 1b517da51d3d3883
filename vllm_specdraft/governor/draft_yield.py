"""How many tokens a step gives with each number of verified tokens, as the engine sees drafts accepted and refused.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

import math

_HORIZON = 600.0
"""Verified drafts that an estimate looks back over."""
_FAST = 30.0
"""Verified drafts that a sudden change shows in."""
_DOUBTED = 10.0
"""Weight that what was believed keeps once the last drafts contradict it."""
_AFTER_CHANGE = 8.0
"""Weight that what was seen before another draft or policy keeps, beside the prior's."""
_PRIOR_RATE, _PRIOR_WEIGHT = 0.6, 6.0
_PRIOR_MATCHED = (0.0, 1.5, 0.0, 0.0, 1.5, 0.0)
"""Draft tokens of the text that stood, as if it had been seen: little is known, so it is tried once."""
_CHANGED = 3.5
"""Standard errors between the last drafts and those before that are a change, not chance."""
_LONG, _ALARM = 2000.0, 50.0
"""Verified drafts that an alarm compares: the last ones with what was usual."""
_COLLAPSED, _RECOVERED = 0.5, 0.7
"""Share of what was usual that is a collapse, and its end."""


class _Average:
    """Of the last so many values, the newest counting most."""

    def __init__(self, horizon: float) -> None:
        self._keep = 1 - 1 / horizon
        self._sum = self.weight = 0.0

    def add(self, value: float) -> None:
        self._sum = self._keep * self._sum + value
        self.weight = self._keep * self.weight + 1

    @property
    def value(self) -> float:
        return self._sum / self.weight

    def forget(self, weight: float = 0.0) -> None:
        """Count what was seen as `weight` values at most."""
        if self.weight > weight:
            self._sum *= weight / self.weight
            self.weight = weight


class TextYield:
    """Tokens per step with drafts from the text, steps without a match included."""

    def __init__(self) -> None:
        self._accepted, self._squares, self._drafts = _Average(_HORIZON), _Average(_HORIZON), _Average(_HORIZON)
        for accepted in _PRIOR_MATCHED:
            self.observe(2 * accepted, accepted)

    def observe(self, verified: float, accepted: float) -> None:
        """One request's step: so many draft tokens were verified, so many stood."""
        self._drafts.add(verified)
        self._accepted.add(accepted)
        self._squares.add(accepted**2)

    @property
    def drafts(self) -> float:
        """Draft tokens verified per step."""
        return self._drafts.value

    def length(self, *, errors: float = 0.0) -> float:
        """Tokens per step, bonus token included; `errors`: standard errors to add."""
        mean = self._accepted.value
        return 1 + mean + errors * math.sqrt(max(self._squares.value - mean**2, 0.02) / self._accepted.weight)


class DraftYield:
    """Rates of acceptance by position: draft token i is accepted, given that those before it are."""

    def __init__(self, tokens: int) -> None:
        """`tokens`: verified at most."""
        self.most = tokens
        self._accepted = [_PRIOR_RATE * _PRIOR_WEIGHT] * tokens
        self._tried = [_PRIOR_WEIGHT] * tokens
        # Of first draft tokens that stood.
        self._fast, self._alarm, self._usual = _Average(_FAST), _Average(_ALARM), _Average(_LONG)
        self.seen = 0
        """Drafts verified in all."""
        self.collapsed = False
        """Whether far fewer drafts are accepted than were before."""

    def observe(self, verified: int, accepted: int) -> None:
        """One request's step: so many draft tokens were verified, so many stood."""
        self.seen += 1
        for position in range(min(verified, accepted + 1, self.most)):
            keep = 1 - 1 / _HORIZON
            self._accepted[position] = keep * self._accepted[position] + (position < accepted)
            self._tried[position] = keep * self._tried[position] + 1
        for average in (self._fast, self._alarm, self._usual):
            average.add(accepted > 0)
        self._believe_a_change()
        self._watch()

    def changed(self) -> None:
        """Another draft or policy serves: what was seen counts little from here on, less than that it may be good."""
        for position in range(self.most):
            kept = min(_AFTER_CHANGE, self._tried[position])
            self._accepted[position] = kept * self.rate(position) + _PRIOR_WEIGHT * _PRIOR_RATE
            self._tried[position] = kept + _PRIOR_WEIGHT
        self._fast.forget()
        self._alarm.forget()
        self._usual.forget(_ALARM)
        self.collapsed = False

    def _believe_a_change(self) -> None:
        """Let go of what was believed when the last drafts cannot come from it."""
        if self._fast.weight < _FAST / 3:
            return
        before, now = self.rate(0), self._fast.value
        error = math.sqrt(max(before * (1 - before), 0.01) / self._fast.weight)
        if abs(now - before) > _CHANGED * error:
            for position in range(self.most):
                rate = self.rate(position) * min(1.0, now / before) if position else now
                self._tried[position] = min(self._tried[position], _DOUBTED)
                self._accepted[position] = self._tried[position] * rate

    def _watch(self) -> None:
        if self._alarm.weight < _ALARM / 2 or self._usual.weight < 2 * _ALARM:
            return
        now, usual = self._alarm.value, self._usual.value
        self.collapsed = now < (_RECOVERED if self.collapsed else _COLLAPSED) * usual

    def rate(self, position: int) -> float:
        """Share of drafts accepted at a position, of those that came so far."""
        return self._accepted[position] / self._tried[position]

    def length(self, tokens: int, *, errors: float = 0.0) -> float:
        """Tokens per step with so many verified, bonus token included; `errors`: standard errors to add to each rate."""
        found, reached = 1.0, 1.0
        for position in range(tokens):
            rate = self.rate(position)
            rate = min(1.0, rate + errors * math.sqrt(max(rate * (1 - rate), 0.02) / self._tried[position]))
            reached *= rate
            found += reached
        return found
