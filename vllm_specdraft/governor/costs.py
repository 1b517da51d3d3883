"""What a step costs with each number of verified tokens, relative to a step without any, per batch size.

Speed on a shared machine drifts by tens of percent within a minute, so no duration is compared with an old one: whatever the engine
does now sets the level, and what changes within the first steps after a switch, with the batch as large as before, belongs to the
switch.

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
ANCHOR_STEPS = 6
"""Steps with one batch size after which the level is that size's, and a switch can be measured."""
_LEVEL_GAIN = 0.05
_ARRIVAL = 2
"""Steps that the level from another batch size counts as."""
_LEAST_GAIN = 0.2
"""Of a new measurement in the average of those before."""
_DISBELIEVED = 0.35
"""A measurement that is off by more (log) replaces what was known: that is no noise, but a machine that was cold, say."""
_OUTLIER = 0.7
"""Steps whose log duration is off by more are not counted: something else happened in them."""
_NEAR = math.log(1.6)
"""Another batch size's measurement holds for this one when the two differ by no larger factor."""
_STAY_ERROR, _NEAR_ERROR = 0.06, 0.05
"""Of one measurement, and of another batch size's in addition (log)."""
_FEW_DRAFTS = 0.2
"""Draft tokens per request that tell little of what more of them cost."""
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
    drafts: float
    """Draft tokens per request in those steps."""
    stays: int = 1


@dataclass
class StepCosts:
    """Estimates per (bucket, tokens). `most`: tokens verified at most; a larger number stands for something else that is measured
    and tells nothing of the others."""

    most: int = 1 << 30
    _found: dict[int, dict[int, _Known]] = field(default_factory=dict)
    _level: float | None = None
    _stay: tuple[int, int] | None = None
    _measures: bool = True
    """Whether this stay tells what it costs; else it tells the level."""
    _here: int = 0
    """Steps with this batch size, since it is that."""
    _over: list[tuple[float, float]] = field(default_factory=list)
    """Of this stay's first steps: log duration over the level, and draft tokens per request."""
    _broken_off: dict[tuple[int, int], list[tuple[float, float]]] = field(default_factory=dict)
    """Of stays too short to tell anything, which may go on."""
    _outliers: int = 0

    def observe(self, bucket: int, tokens: int, seconds: float, *, drafts: float | None = None) -> None:
        """One step in which every request verified `tokens` draft tokens and was drafted as many; `drafts`: how many it was in the
        mean, where that is no fixed number."""
        duration = math.log(max(seconds, 1e-6))
        if self._level is None:
            self._level = duration
        if (bucket, tokens) != self._stay:
            self._begin(bucket, tokens)
        self._here += 1
        expected = self._expected(bucket, tokens, drafts)
        if expected is not None and abs(duration - self._level - expected) > _OUTLIER and self._outliers < LEAST_STEPS:
            self._outliers += 1
            return
        self._outliers = 0
        if self._measures and len(self._over) < LEARNED_STEPS:
            self._over.append((duration - self._level, tokens if drafts is None else drafts))
            if len(self._over) == LEARNED_STEPS:
                self._learn()
        elif expected is not None:
            gain = max(_LEVEL_GAIN, 1 / (self._here + _ARRIVAL))
            self._level += gain * (duration - self._level - expected)

    def _begin(self, bucket: int, tokens: int) -> None:
        arrived = self._stay is None or self._stay[0] != bucket
        self.settle()
        if arrived:
            self._here = 0
        # A size that has just been arrived at: what is measured would be the error of another size's level.
        self._measures = self.anchored(bucket, self._here) or self.stays(bucket, tokens) == 0
        self._stay, self._over = (bucket, tokens), self._broken_off.pop((bucket, tokens), []) if self._measures else []

    def anchored(self, bucket: int, steps: int | None = None) -> bool:
        """Whether a switch would be measured against this size's own steps."""
        if steps is None:
            steps = self._here if self._stay is not None and self._stay[0] == bucket else 0
        return steps >= ANCHOR_STEPS

    def settle(self) -> None:
        """The stay is over: learn from what there is of it."""
        if self._stay is not None and self._measures and len(self._over) < LEARNED_STEPS:
            if len(self._over) >= LEAST_STEPS:
                self._learn()
            elif self._over:
                self._broken_off[self._stay] = self._over
        self._over = []

    def _learn(self) -> None:
        assert self._stay is not None
        bucket, tokens = self._stay
        # Not the median: drafts from the text make few steps long. A step in which something else happened is left out.
        most = statistics.median(over for over, _ in self._over) + _OUTLIER
        kept = [(math.exp(over), drafts) for over, drafts in self._over if over <= most]
        value, drafts = math.log(statistics.fmean(cost for cost, _ in kept)), statistics.fmean(drafts for _, drafts in kept)
        cells = self._found.setdefault(bucket, {})
        if tokens not in cells:
            cells[tokens] = _Known(value, drafts)
            return
        known = cells[tokens]
        known.stays += 1
        gain = 1.0 if abs(value - known.value) > _DISBELIEVED else max(1 / known.stays, _LEAST_GAIN)
        known.value += gain * (value - known.value)
        known.drafts += gain * (drafts - known.drafts)

    def _expected(self, bucket: int, tokens: int, drafts: float | None) -> float | None:
        """Log duration over the level of a step with so many draft tokens per request; None where nothing like it was measured."""
        cells = self._found.get(bucket, {})
        if tokens not in cells:
            return None
        if drafts is None or 0 not in cells:
            return cells[tokens].value
        return cells[0].value + _over_plain(cells, tokens, drafts)

    def stays(self, bucket: int, tokens: int) -> int:
        """How often it was measured."""
        known = self._found.get(bucket, {}).get(tokens)
        return known.stays if known is not None else 0

    def relative(self, bucket: int, tokens: int, *, drafts: float | None = None) -> tuple[float, bool]:
        """Log of a step's cost over that of a step without drafts, and whether that is measured, here or at a near batch size.

        Never below 0: drafts make no step cheaper, a machine that got faster meanwhile does. `drafts`: see `observe`.
        """
        if tokens == 0:
            return 0.0, True
        source = self._source(bucket, tokens)
        if source is not None:
            cost = _over_plain(self._found[source], tokens, drafts)
            # More rows never make verification cheaper.
            if source <= bucket or self._is_near(source, bucket):
                return max(0.0, cost), self._is_near(source, bucket)
        return math.log1p(self._guess(bucket, tokens) if tokens <= self.most else _PRIOR), False

    def error(self, bucket: int, tokens: int) -> float:
        """Standard error of `relative` (log), where that is measured."""
        source = self._source(bucket, tokens)
        if tokens == 0 or source is None:
            return 0.0
        cells = self._found[source]
        most = 2 / _LEAST_GAIN - 1
        error = _STAY_ERROR * math.sqrt(1 / min(most, cells[tokens].stays) + 1 / min(most, cells[0].stays))
        return error if source == bucket else math.hypot(error, _NEAR_ERROR)

    def _source(self, bucket: int, tokens: int) -> int | None:
        """The batch size whose measurement is used: this one, or the nearest that has one."""
        if tokens in (here := self._found.get(bucket, {})) and 0 in here:
            return bucket
        measured = [other for other, cells in self._found.items() if tokens in cells and 0 in cells]
        return min(measured, key=lambda other: abs(math.log(other / bucket)), default=None)

    @staticmethod
    def _is_near(other: int, bucket: int) -> bool:
        return other == bucket or abs(math.log(other / bucket)) <= _NEAR

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


def _over_plain(cells: dict[int, _Known], tokens: int, drafts: float | None) -> float:
    """Log of a step's cost over that of one without drafts; what it costs more is in proportion to its `drafts` per request."""
    known = cells[tokens]
    cost = known.value - cells[0].value
    if drafts is None:
        return cost
    return math.log1p(max(0.0, math.expm1(cost)) * (drafts + _FEW_DRAFTS) / (known.drafts + _FEW_DRAFTS))
