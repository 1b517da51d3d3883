"""The publish gate: is a candidate draft better than the served one on held-out samples, beyond its uncertainty?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer_bridge.draft.interface import Acceptance


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Both drafts on the same held-out anchors."""

    served: float
    """Expected accepted length of the served draft, tokens per target step, bonus included."""
    candidate: float
    gain: float
    """`candidate` - `served`."""
    standard_error: float
    """Of `gain`, from the spread between samples."""
    publish: bool


MIN_SAMPLES = 6
"""Fewer held-out samples than this say nothing about their spread."""
STANDARD_ERRORS = 2.0
"""The gate looks again and again at nearly the same samples: one standard error would let chance through soon."""


class Gate:
    """Publishes when the paired gain exceeds `min_gain` plus two standard errors, on enough samples."""

    def __init__(self, *, min_gain: float) -> None:
        self._min_gain = min_gain

    def decide(self, served: Sequence[Acceptance], candidate: Sequence[Acceptance]) -> Verdict:
        """Compare two drafts measured on the same microbatches, in the same order.

        The error is that of a ratio of sums over independent samples (cluster-robust: anchors of one answer are not
        independent of each other).
        """
        before = torch.cat([a.accepted_sum for a in served])
        after = torch.cat([a.accepted_sum for a in candidate])
        anchors = torch.cat([a.anchors for a in served]).double()
        total = float(anchors.sum())
        if total == 0:
            return Verdict(served=1.0, candidate=1.0, gain=0.0, standard_error=math.inf, publish=False)
        gain = float((after - before).sum()) / total
        residual = (after - before) - gain * anchors
        count = anchors.shape[0]
        error = math.sqrt(float((residual**2).sum()) * count / max(1, count - 1)) / total if count > 1 else math.inf
        return Verdict(
            served=float(before.sum()) / total,
            candidate=float(after.sum()) / total,
            gain=gain,
            standard_error=error,
            publish=count >= MIN_SAMPLES and gain > self._min_gain + STANDARD_ERRORS * error,
        )
