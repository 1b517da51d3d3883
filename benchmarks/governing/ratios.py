"""Arms and loads of the governor's benchmark, and paired ratios."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

NONE, GOVERNED = "none", "governed"
_T_95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.80, 1.78, 1.77, 1.76, 1.75, 1.75, 1.74, 1.73, 1.73)
"""One-sided 95% points of Student's t from one degree of freedom on."""
_T_MORE = 1.7


def fixed(tokens: int) -> str:
    """The arm that drafts so many tokens in every step."""
    return f"fixed {tokens}"


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests that are sent at once."""

    name: str
    lengths: tuple[int, ...]
    """Tokens of each one's answer at most; greedy answers end where they end, with every arm alike."""
    drains: bool = False
    """Time counts from sending to the last answer's end. Else while all of them run: from when each has its first token to the
    first answer's end."""


@dataclass(kw_only=True)
class Ratios:
    """Paired ratios of two arms' speeds."""

    logs: list[float] = field(default_factory=list)

    def add(self, ratio: float) -> None:
        """One pair."""
        self.logs.append(math.log(ratio))

    @property
    def mean(self) -> float:
        """Geometric mean; NaN of none."""
        return math.exp(statistics.fmean(self.logs)) if self.logs else math.nan

    @property
    def half_width(self) -> float:
        """Between the mean and its lower 95% bound, as a log; infinite for fewer than two pairs."""
        count = len(self.logs)
        if count < 2:
            return math.inf
        point = _T_95[count - 2] if count - 2 < len(_T_95) else _T_MORE
        return point * statistics.stdev(self.logs) / math.sqrt(count)

    @property
    def lower(self) -> float:
        """One-sided lower 95% bound of the mean."""
        return math.exp(statistics.fmean(self.logs) - self.half_width)
