"""The governor: how many draft tokens the next step verifies, and whose.

An arm is a number of tokens k of the draft, 0 for none; one arm more (`Governor.ngram`) drafts from matches in the request's own
text, without any model. For each arm it knows what a step costs (`StepCosts`) and what a step gives (`DraftYield`, `TextYield`);
the best has the least time per token. What is not known is tried, a few steps at a time, when it could be better by what is known,
and only while all trials together cost less than a share of the time. It begins without drafts, so that a trial is the worst that
can happen.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_specdraft.governor.costs import LEARNED_STEPS, LEAST_STEPS, StepCosts, bucket_of
from vllm_specdraft.governor.draft_yield import DraftYield, TextYield

HYSTERESIS = 0.03
"""Another k must be better by this share to be switched to; to none at all is switched without."""
FROM_BELOW = 4
"""From this batch size on the first trial is of one token: verification is dear there, and one tells of more."""
TRIAL_STEPS = LEARNED_STEPS + 1
"""Steps that verify what is tried."""
CLEARLY = 1.15
"""A trial ends early when its steps take longer by this factor than its drafts could make good."""
LONGEST_TRIAL = 3 * TRIAL_STEPS
"""Steps after which a trial ends that saw too few it can use: requests came and went."""
TRIAL_SHARE = 0.005
"""Share of the generating time that trials may cost."""
FREE_S = 2.0
"""Time that trials may cost at the start, in seconds."""
FIRST_WAIT, LONGEST_WAIT = 256, 2048
"""Steps between two trials of something that lost; the time doubles with every loss."""
WARM_STEPS = 64
"""First steps of an engine, which say nothing of what a step costs: code is compiled, memory touched for the first time."""
DOUBT_STEPS = 16
"""Steps after which steps without drafts are looked at again once something won over them; four times as many after every win.

What was measured of them first may be of a machine that was cold, and drafts would seem cheap for as long as nobody looks."""
CLOSE, CLOSE_WAIT = 0.15, 512
"""What lost by less waits no longer: one bad measurement must not decide for long, and looking at it costs little."""
UNDECIDED_STEPS = 128
"""Steps between two trials of what seems better, but not by more than the error: to look again costs nothing, if it is."""
HOPELESS = 0.5
"""What lost by more than this waits longest at once."""
CREDIT_S = 30.0
"""The allowance for trials grows no larger."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one engine step was."""

    batch: int
    """Requests in it."""
    verified: int | None
    """Arm whose drafts each request verified; None where they differ, or a prompt was processed."""
    drafted: int
    """Arm whose drafts each request was given for the next step."""
    tokens: int
    """Tokens of answers that it gave."""
    seconds: float
    drafts: tuple[tuple[int, int], ...] = ()
    """Per request that verified some: how many, and how many stood."""
    of_ngram: bool = False
    """Whether those came from the text."""


@dataclass
class _Bucket:
    """One batch size's state."""

    chosen: int = 0
    steps: int = 0
    due: dict[int, int] = field(default_factory=dict)
    """By k: the step from which it may be tried again."""
    wait: dict[int, int] = field(default_factory=dict)
    reported: tuple[int, Mapping[str, Any]] | None = None
    """Steps at the last report, and what it was."""


@dataclass
class _Trial:
    bucket: int
    arm: int
    steps: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of the steps that tell what it costs."""
    excess_s: float = 0.0


class Governor:
    """Decides per step, from the steps before."""

    def __init__(self, tokens: int, *, limit: int = 0) -> None:
        """
        Args:
            tokens: draft tokens per step at most (K).
            limit: largest batch that is ever drafted for; 0: no limit.
        """
        self.most, self._limit = tokens, limit
        self.ngram = tokens + 1
        """The arm that drafts from the text, as many tokens as the draft at most."""
        self.arms = range(tokens + 2)
        self.costs, self.gives, self.matches = StepCosts(tokens), DraftYield(tokens), TextYield()
        self.fixed: int | None = None
        """Somebody has decided; None: the governor does."""
        self._buckets: dict[int, _Bucket] = {}
        self._trial: _Trial | None = None
        self._allowance_s = FREE_S
        self._warm_steps = 0
        self.trials = self.switches = 0
        self.trial_cost_s = self.busy_s = 0.0

    # -- decide ------------------------------------------------------------------------------------------------------------

    def choose(self, batch: int) -> int:
        """The arm that drafts for the next step."""
        if self.fixed is not None:
            return self.fixed
        if batch < 1 or (self._limit and batch > self._limit):
            return 0
        bucket = bucket_of(batch)
        state = self._state(bucket)
        if self._trial is not None and self._trial.bucket == bucket and (self._trial.seconds or self.costs.anchored(bucket)):
            return self._trial.arm
        best = min(self._known(bucket), key=lambda k: self.score(bucket, k))
        if best != state.chosen and self.score(bucket, best) < self.score(bucket, state.chosen) - self._margin(bucket, best):
            self.switches += 1
            state.chosen = best
        # A trial goes on when the batch is back at its size.
        wanted = self._worth_trying(bucket, state) if self._trial is None else None
        if wanted is not None:
            self.trials += 1
            self._trial = _Trial(bucket=bucket, arm=wanted)
            return wanted
        return state.chosen

    def _margin(self, bucket: int, arm: int) -> float:
        """By how much (log) an arm must be better to be switched to."""
        return max(HYSTERESIS, self.costs.error(bucket, arm)) if arm else 0.0

    def score(self, bucket: int, arm: int, *, errors: float = 0.0) -> float:
        """Log of the time per token over that of steps without drafts; `errors`: see `DraftYield.length`."""
        return self.cost(bucket, arm)[0] - math.log(self.length(arm, errors=errors))

    def cost(self, bucket: int, arm: int) -> tuple[float, bool]:
        """Log of a step's cost over that of one without drafts, and whether that is known."""
        return self.costs.relative(bucket, arm, drafts=self.matches.drafts if arm == self.ngram else None)

    def length(self, arm: int, *, errors: float = 0.0) -> float:
        """Tokens per step of a request."""
        return self.matches.length(errors=errors) if arm == self.ngram else self.gives.length(arm, errors=errors)

    def _known(self, bucket: int) -> list[int]:
        return [arm for arm in self.arms if self.cost(bucket, arm)[1]]

    def _worth_trying(self, bucket: int, state: _Bucket) -> int | None:
        if not self.costs.anchored(bucket) or not self.costs.stays(bucket, state.chosen):
            return None
        now = self.score(bucket, state.chosen)
        found: list[tuple[float, int]] = []
        for k in self.arms:
            if k == state.chosen or state.steps < state.due.get(k, 0):
                continue
            # What was never tried here needs a reason in what it could be at best; the rest is looked at again in time.
            hope = self.score(bucket, k, errors=1.0 if k else 0.0)
            # Steps without drafts are what all is compared with: what other sizes say of them does not do for long.
            if k == 0 or self.costs.stays(bucket, k) or hope < now - HYSTERESIS:
                found.append((hope, k))
        found.sort()
        if bucket >= FROM_BELOW and not any(self.cost(bucket, n)[1] for n in range(1, self.most + 1)):
            found.sort(key=lambda one: one[1])
        return next((k for _, k in found if self._trial_s(bucket, state.chosen, k) <= max(0.0, self._allowance_s)), None)

    def _trial_s(self, bucket: int, chosen: int, arm: int) -> float:
        """Seconds that a trial is expected to cost."""
        slower = math.exp(self.cost(bucket, arm)[0] - self.cost(bucket, chosen)[0])
        lost = slower - self.length(arm) / self.length(chosen)
        return TRIAL_STEPS * (self.costs.seconds(bucket, chosen) or 0.0) * max(0.0, lost)

    # -- learn -------------------------------------------------------------------------------------------------------------

    def observe(self, step: Step) -> None:
        """One step is over. While somebody else decides, nothing is learned of it: those steps would be trials for nothing."""
        if self.fixed is not None:
            return
        self.busy_s += step.seconds
        self._allowance_s = min(CREDIT_S, self._allowance_s + TRIAL_SHARE * step.seconds)
        if step.of_ngram:
            # Not beside a prompt, where who had no match cannot be told from who was not drafted for.
            nothing = [(0, 0)] * (step.batch - len(step.drafts))
            for verified, accepted in (*step.drafts, *nothing) if step.verified is not None else ():
                self.matches.observe(verified, accepted)
        else:
            for verified, accepted in step.drafts:
                self.gives.observe(verified, accepted)
        self._warm_steps += 1
        if self._warm_steps <= WARM_STEPS:
            return
        bucket = bucket_of(step.batch)
        state = self._state(bucket)
        state.steps += 1
        steady = step.verified == step.drafted
        if steady:
            drafts = sum(verified for verified, _ in step.drafts) / step.batch if step.of_ngram else None
            self.costs.observe(bucket, step.drafted, step.seconds, drafts=drafts)
        trial = self._trial
        if trial is None:
            return
        trial.steps += 1
        per_token = self._seconds_per_token(trial.bucket, self._state(trial.bucket).chosen, step.batch)
        if per_token is not None and step.verified is not None and bucket == trial.bucket:
            # A prompt in the batch is nobody's cost, nor is another size.
            trial.excess_s += step.seconds - step.tokens * per_token
        if steady and bucket == trial.bucket and step.drafted == trial.arm:
            trial.seconds.append(step.seconds)
        if len(trial.seconds) >= TRIAL_STEPS or trial.steps >= LONGEST_TRIAL or self._hopeless(trial):
            self._end_trial()

    def _hopeless(self, trial: _Trial) -> bool:
        """Whether the first steps already cost more than the drafts can give back."""
        chosen = self._state(trial.bucket).chosen
        seconds = self.costs.seconds(trial.bucket, chosen)
        if len(trial.seconds) <= LEAST_STEPS or seconds is None:
            return False
        most = seconds * self.length(trial.arm, errors=2.0) / self.length(chosen)
        return statistics.median(trial.seconds) > CLEARLY * most

    def _end_trial(self) -> None:
        trial, self._trial = self._trial, None
        if trial is None:
            return
        self.trial_cost_s += trial.excess_s
        self._allowance_s = max(-FREE_S, self._allowance_s - trial.excess_s)
        self.costs.settle()
        if len(trial.seconds) < LEAST_STEPS:
            # It goes on when the batch is back at its size: what was measured so far is kept.
            return
        state = self._state(trial.bucket)
        behind = self.score(trial.bucket, trial.arm) - self.score(trial.bucket, state.chosen)
        first, times = (FIRST_WAIT, 2) if trial.arm else (DOUBT_STEPS, 4)
        longest = LONGEST_WAIT if behind > CLOSE else CLOSE_WAIT
        wait = min(longest, times * state.wait.get(trial.arm, first // times)) if behind > -HYSTERESIS else FIRST_WAIT
        if behind > HOPELESS:
            wait = LONGEST_WAIT
        elif -self._margin(trial.bucket, trial.arm) < behind < 0 < trial.arm:
            wait = UNDECIDED_STEPS
        state.wait[trial.arm] = wait
        state.due[trial.arm] = state.steps + wait
        # What loses to it is not looked at right after it, and all numbers of tokens have the same drafts: clearly lost with all.
        state.due[state.chosen] = state.steps + (FIRST_WAIT if state.chosen else DOUBT_STEPS)
        for other in range(1, self.most + 1) if 0 < trial.arm <= self.most and behind > CLOSE else ():
            if other != trial.arm and self.costs.stays(trial.bucket, other):
                state.due[other] = max(state.due.get(other, 0), state.steps + wait)

    def fix(self, tokens: int | None) -> None:
        """Draft so many tokens in every step, or decide again. Raises `ValueError` for more than there can be."""
        if tokens is not None and not 0 <= tokens <= self.most:
            raise ValueError(f"tokens is {tokens}, must lie between 0 and {self.most} (--num-speculative-tokens)")
        self._end_trial()
        self.fixed = tokens

    def weights_changed(self) -> None:
        """Another draft or policy serves: old acceptance says little, and drafts that lost may be tried again where none are seen.

        What a step costs is what it was.
        """
        self.gives.changed()
        for state in self._buckets.values():
            if not 0 < state.chosen <= self.most:
                for arm in range(1, self.most + 1):
                    state.due.pop(arm, None)
                    state.wait.pop(arm, None)

    def _state(self, bucket: int) -> _Bucket:
        if (state := self._buckets.get(bucket)) is None:
            state = self._buckets[bucket] = _Bucket(chosen=self._start(bucket))
        return state

    def _start(self, bucket: int) -> int:
        """What a batch size begins with that was not there before: what is best by what others have shown, else no drafts."""
        return min(self._known(bucket), key=lambda k: self.score(bucket, k))

    def _seconds_per_token(self, bucket: int, tokens: int, batch: int) -> float | None:
        seconds = self.costs.seconds(bucket, tokens)
        return None if seconds is None else seconds / (batch * self.length(tokens))

    # -- tell --------------------------------------------------------------------------------------------------------------

    @property
    def learning_pays(self) -> bool:
        """Whether a perfect draft would be faster than none at some batch size that was seen."""
        seen = [bucket for bucket, state in self._buckets.items() if state.steps >= LEARNED_STEPS]
        return not seen or any(self._could_pay(bucket, k) for bucket in seen for k in range(1, self.most + 1))

    def _could_pay(self, bucket: int, tokens: int) -> bool:
        """Also by what other numbers of tokens cost, once one was measured: more than in proportion."""
        measured = any(self.cost(bucket, n)[1] for n in range(1, self.most + 1))
        return not measured or self.cost(bucket, tokens)[0] < math.log(1 + tokens)

    def name(self, arm: int) -> str:
        """How an arm is called in reports."""
        return "ngram" if arm == self.ngram else str(arm)

    def report(self) -> dict[str, Any]:
        """Decisions and the numbers that were compared, per batch size."""
        return {
            "batches": {str(bucket): self._report_of(bucket, state) for bucket, state in sorted(self._buckets.items())},
            "accepted_rates": [round(self.gives.rate(i), 4) for i in range(self.most)],
            "drafts_seen": self.gives.seen,
            "acceptance_collapsed": self.gives.collapsed,
            "trials": self.trials,
            "fixed": self.fixed,
            "trying": self.name(self._trial.arm) if self._trial is not None else None,
            "trial_cost_s": round(self.trial_cost_s, 3),
            "busy_s": round(self.busy_s, 1),
            "switches": self.switches,
            "learning_pays": self.learning_pays,
        }

    def _report_of(self, bucket: int, state: _Bucket) -> Mapping[str, Any]:
        """Of a batch size that was not seen since the last report, that one: all of them are many, and the engine waits."""
        if state.reported is None or state.reported[0] != state.steps:
            state.reported = (state.steps, self._fresh_report_of(bucket, state))
        return state.reported[1]

    def _fresh_report_of(self, bucket: int, state: _Bucket) -> Mapping[str, Any]:
        base = self.costs.seconds(bucket, 0)
        compared = {
            self.name(arm): {
                "step_cost": round(math.exp(self.cost(bucket, arm)[0]), 4),
                "tokens_per_step": round(self.length(arm), 4),
                "time_per_token": round(math.exp(self.score(bucket, arm)), 4),
                "known": self.cost(bucket, arm)[1],
                "stays": self.costs.stays(bucket, arm),
            }
            for arm in self.arms
        }
        return {
            "chosen": self.name(state.chosen),
            "steps": state.steps,
            "plain_step_ms": round(1e3 * base, 2) if base is not None else None,
            "compared": compared,
        }
