"""What a step costs with each number of verified tokens, relative to a step without any, per batch size.

Speed on a shared machine drifts by tens of percent within a minute, so no duration is compared with an old one: whatever the engine
does now sets the level, and what changes within the first steps after a switch belongs to the switch.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

LEARNED_STEPS = 12
"""Steps after a switch that tell what was switched to; later ones tell how fast the machine is."""
LEAST_STEPS = 4
"""A shorter stay tells nothing."""
_LEVEL_GAIN = 0.05
_LEAST_GAIN = 0.2
"""Of a new measurement in the average of those before."""
_DISBELIEVED = 0.35
"""A measurement that is off by more (log) replaces what was known: that is no noise, but a machine that was cold, say."""
_OUTLIER = 0.7
"""Steps whose log duration is off by more are not counted: something else happened in them."""
_NEAR = math.log(1.6)
"""Another batch size's measurement holds for this one when the two differ by no larger factor."""
_PRIOR = 0.12
"""Cost of one more verified token, as a share of a step, before anything was measured; a little less than anywhere seen."""
_OPTIMISM = 0.4
"""Part of the proportional cost that fewer tokens than were measured may have."""


def bucket_of(batch: int) -> int:
    """The batch sizes that are measured together, by their smallest: each up to 15 alone, then eight to a doubling."""
    grain = 1 << max(0, batch.bit_length() - 4)
    return batch // grain * grain


@dataclass
class _Known:
    """Log duration of a step, in the units of the level."""

    value: float
    stays: int = 1


@dataclass
class StepCosts:
    """Estimates per (bucket, tokens). `most`: tokens verified at most; a larger number stands for something else that is measured
    and tells nothing of the others."""

    most: int = 1 << 30
    _found: dict[int, dict[int, _Known]] = field(default_factory=dict)
    _level: float | None = None
    _stay: tuple[int, int] | None = None
    _over: list[float] = field(default_factory=list)
    """Log durations of this stay's first steps over the level."""
    _broken_off: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    """Of stays too short to tell anything, which may go on."""
    _outliers: int = 0

    def observe(self, bucket: int, tokens: int, seconds: float) -> None:
        """One step in which every request verified `tokens` draft tokens and was drafted as many."""
        duration = math.log(max(seconds, 1e-6))
        if self._level is None:
            self._level = duration
        if (bucket, tokens) != self._stay:
            self.settle()
            self._stay, self._over = (bucket, tokens), self._broken_off.pop((bucket, tokens), [])
        known = self._found.get(bucket, {}).get(tokens)
        if known is not None and abs(duration - self._level - known.value) > _OUTLIER and self._outliers < LEAST_STEPS:
            self._outliers += 1
            return
        self._outliers = 0
        if len(self._over) < LEARNED_STEPS:
            self._over.append(duration - self._level)
            if len(self._over) == LEARNED_STEPS:
                self._learn()
        elif known is not None:
            self._level += _LEVEL_GAIN * (duration - self._level - known.value)

    def settle(self) -> None:
        """The stay is over: learn from what there is of it."""
        if self._stay is not None and len(self._over) < LEARNED_STEPS:
            if len(self._over) >= LEAST_STEPS:
                self._learn()
            elif self._over:
                self._broken_off[self._stay] = self._over
        self._stay, self._over = None, []

    def _learn(self) -> None:
        assert self._stay is not None
        bucket, tokens = self._stay
        # Not the median: drafts from the text make few steps long. A step in which something else happened is left out.
        most = statistics.median(self._over) + _OUTLIER
        value = math.log(statistics.fmean(math.exp(one) for one in self._over if one <= most))
        cells = self._found.setdefault(bucket, {})
        if tokens not in cells:
            cells[tokens] = _Known(value)
            return
        known = cells[tokens]
        known.stays += 1
        gain = 1.0 if abs(value - known.value) > _DISBELIEVED else max(1 / known.stays, _LEAST_GAIN)
        known.value += gain * (value - known.value)

    def stays(self, bucket: int, tokens: int) -> int:
        """How often it was measured."""
        known = self._found.get(bucket, {}).get(tokens)
        return known.stays if known is not None else 0

    def relative(self, bucket: int, tokens: int) -> tuple[float, bool]:
        """Log of a step's cost over that of a step without drafts, and whether that is measured, here or at a near batch size.

        Never below 0: drafts make no step cheaper, a machine that got faster meanwhile does.
        """
        if tokens == 0:
            return 0.0, True
        cost, measured = self._relative(bucket, tokens)
        return max(0.0, cost), measured

    def _relative(self, bucket: int, tokens: int) -> tuple[float, bool]:
        here = self._found.get(bucket, {})
        if tokens in here and 0 in here:
            return here[tokens].value - here[0].value, True
        measured = {b: cells[tokens].value - cells[0].value for b, cells in self._found.items() if tokens in cells and 0 in cells}
        if measured:
            nearest = min(measured, key=lambda other: abs(math.log(other / bucket)))
            if abs(math.log(nearest / bucket)) <= _NEAR:
                return measured[nearest], True
            if nearest < bucket:
                # More rows never make verification cheaper.
                return measured[nearest], False
        return math.log1p(self._guess(bucket, tokens) if tokens <= self.most else _PRIOR), False

    def _guess(self, bucket: int, tokens: int) -> float:
        """Extra cost, as a share of a step, from other numbers of tokens here, or where it was measured with fewer requests.

        The cost grows faster than the number: fewer tokens cost less than in proportion, more cost more.
        """
        with_drafts = [
            b for b, cells in self._found.items() if b <= bucket and 0 in cells and any(0 < n <= self.most for n in cells)
        ]
        if not with_drafts:
            return _PRIOR * tokens
        cells = self._found[max(with_drafts)]
        shares = {n: max(0.0, math.exp(known.value - cells[0].value) - 1) / n for n, known in cells.items() if 0 < n <= self.most}
        fewer = [n for n in shares if n <= tokens]
        if fewer:
            return tokens * shares[max(fewer)]
        return _OPTIMISM * tokens * shares[min(shares)]

    def seconds(self, bucket: int, tokens: int) -> float | None:
        """Of a step, at the machine's present speed; None where it was not measured."""
        known = self._found.get(bucket, {}).get(tokens)
        return math.exp(known.value + self._level) if known is not None and self._level is not None else None
