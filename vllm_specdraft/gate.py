"""Judgements over drafts: publish a candidate? go back to the draft before? go on learning?

Before a publish the held-out samples decide, after it what the engine itself measures.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer_bridge.draft.interface import Acceptance
from vllm_specdraft.acceptance import MeasuredAcceptance


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
MOST_GAIN = 0.5
"""However many drafts had to be taken back, no more gain than this is asked for."""
STANDARD_ERRORS = 2.0
"""The gate looks again and again at nearly the same samples: one standard error would let chance through soon."""


class Gate:
    """Publishes when the paired gain exceeds `min_gain` plus two standard errors, on enough samples."""

    def __init__(self, *, min_gain: float) -> None:
        """`min_gain`: in tokens per target step."""
        self._least, self._min_gain = min_gain, min_gain

    @property
    def min_gain(self) -> float:
        """Gain that is asked for now, in tokens per target step."""
        return self._min_gain

    def setback(self) -> None:
        """A published draft had to be taken back: the held-out samples promised too much, ask for twice as much."""
        self._min_gain = max(self._least, min(2 * max(self._min_gain, 0.01), MOST_GAIN))

    def reset(self) -> None:
        """A published draft proved itself in the engine, or somebody asked for more: ask for no more than at first."""
        self._min_gain = self._least

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


class Probation(enum.Enum):
    """What the engine's own acceptance says of a draft that was just published."""

    RUNNING = "RUNNING"
    """Not enough requests yet."""
    PASSED = "PASSED"
    FAILED = "FAILED"
    """Worse than its predecessor was, beyond chance."""


PASSED_REQUESTS = 64
"""After so many requests without failing a draft has passed."""


def probation(before: MeasuredAcceptance | None, after: MeasuredAcceptance | None, *, margin: float) -> Probation:
    """Compare a published draft with the one before it, as the engine measured both.

    Args:
        margin: loss in accepted length that is not worth a swap, in tokens per target step.

    The two saw different requests, so the errors of both count, and a change of traffic looks like a change of draft: the
    margin and two standard errors keep small ones from mattering.
    """
    if before is None or after is None or not before.is_enough or not after.is_enough:
        return Probation.RUNNING
    error = math.hypot(before.standard_error, after.standard_error)
    if before.length - after.length > margin + STANDARD_ERRORS * error:
        return Probation.FAILED
    return Probation.PASSED if after.requests >= PASSED_REQUESTS else Probation.RUNNING


class Patience:
    """Says when learning no longer pays: no measurement has been better than the best for a while, and nothing new came."""

    def __init__(self, *, evaluations: int, progress: float = 0.005, fresh_share: float = 0.1, fresh_samples: int = 8) -> None:
        """`evaluations`: measurements without progress before learning rests, 0 for never; `progress`: gain over the best
        that counts, in tokens per step; learning goes on once `fresh_share` of the samples, and at least `fresh_samples`,
        are new."""
        self._limit, self._progress = evaluations, progress
        self._share, self._least = fresh_share, fresh_samples
        self._best = -math.inf
        self._since = 0
        self._rested_at: int | None = None

    def judged(self, verdict: Verdict, samples_added: int) -> None:
        """One more measurement, when `samples_added` samples had come in all."""
        if self._rested_at is not None:
            # Learning went on with new samples: what was best on the old ones says nothing.
            self.renew()
        if verdict.candidate > self._best + self._progress:
            self._best, self._since = verdict.candidate, 0
            return
        self._since += 1
        if self._limit and self._since >= self._limit:
            self._rested_at = samples_added

    def renew(self) -> None:
        """Another draft serves, or somebody asked for more learning: begin anew."""
        self._rested_at, self._since, self._best = None, 0, -math.inf

    def waiting_for(self, samples_added: int, num_train: int) -> str | None:
        """Why learning rests, in words; None while it pays."""
        if self._rested_at is None:
            return None
        wanted = max(self._least, math.ceil(self._share * num_train))
        fresh = samples_added - self._rested_at
        if fresh >= wanted:
            return None
        return f"new samples: {fresh} of {wanted} (no better draft in the last {self._limit} measurements)"
