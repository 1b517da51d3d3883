"""vLLM's scheduler with a governor: it says per step how many tokens are drafted, and sees what came of it.

In the engine core, so that all ranks are told one decision (``SchedulerOutput.num_spec_tokens_to_schedule``).
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_specdraft.config import EngineConfig
from vllm_specdraft.governor import plan
from vllm_specdraft.governor.gaps import ROWS_PER_STEP
from vllm_specdraft.governor.ngram import NOTHING
from vllm_specdraft.governor.policy import Governor, Step

REPORT_S = 1.0
"""Time between two reports to the worker, which tells the world, in seconds."""
FULL = 0.8
"""Share of the drafts asked for that a step must verify to tell what that costs."""
_BETWEEN_S = 0.005
"""Time between two steps that counts as part of the first; whatever takes longer is no part of generating."""


class _Lookup:
    """What vLLM looks up per batch size."""

    def __init__(self, governor: Governor) -> None:
        self._governor = governor

        self.arm = 0
        """What was chosen last."""

    def __getitem__(self, batch: int) -> int:
        self.arm = self._governor.choose(batch)
        return min(self.arm, self._governor.most)


class GovernedScheduler(Scheduler):
    """For ``--scheduler-cls``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = EngineConfig.from_environment()
        if config is None:
            raise RuntimeError("specdraft's scheduler is set but SPECDRAFT_CONFIG is not: use `specdraft serve`")
        self.specdraft_governor = Governor(self.num_spec_tokens, limit=config.speculate_up_to)
        self.dynamic_sd_lookup = self._lookup = _Lookup(self.specdraft_governor)
        self._drafted = self._verified = 0
        """Arms: what this step was given for the next one, and what it verified."""
        self._backlog = 0
        """Tokens at most that the draft was left out of and has to make up for, in steps that say nothing of what a step costs."""
        self._began = self._ended = 0.0
        self._over: dict[str, Any] | None = None
        self._report_due = 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM does; the step before is over now."""
        now = time.perf_counter()
        if self._over is not None:
            between = min(now - self._ended, _BETWEEN_S) if self._over.pop("goes_on") else 0.0
            self.specdraft_governor.observe(Step(**self._over, seconds=self._ended - self._began + between))
            self._over = None
        self._began = now
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            self._verified, self._drafted = self._drafted, self._lookup.arm
            ngram = self.specdraft_governor.ngram
            setattr(output, plan.FROM_TEXT, self._drafted == ngram)
            setattr(output, plan.VERIFIES_TEXT, self._verified == ngram)
        if now >= self._report_due:
            self._report_due = now + REPORT_S
            setattr(output, plan.REPORT, self.specdraft_governor.report())
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM does; what the step was is noted."""
        if scheduler_output.total_num_scheduled_tokens:
            self._over = self._seen(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._ended = time.perf_counter()
        if self._over is not None:
            self._over["goes_on"] = self.has_unfinished_requests()
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """As vLLM does, without the places where a match had no more tokens."""
        for tokens in draft_token_ids.draft_token_ids:
            if NOTHING in tokens:
                del tokens[tokens.index(NOTHING) :]
            elif len(tokens) > self._drafted:
                # Zeros of a step that vLLM left the drafter out of.
                tokens.clear()
        super().update_draft_token_ids(draft_token_ids)

    def specdraft_weights_changed(self) -> None:
        """Another draft or policy serves from the next step on."""
        self.specdraft_governor.weights_changed()

    def specdraft_drafted(self) -> bool:
        """Whether the step that is over was given drafts, which are to be fetched."""
        return self._over is None or self._over["drafted"] > 0

    def _seen(self, planned: Any, found: Any) -> dict[str, Any]:
        verified = planned.scheduled_spec_decode_tokens
        batch, drafts = len(planned.num_scheduled_tokens), sum(map(len, verified.values()))
        emitted = {request: found.sampled_token_ids[found.req_id_to_index[request]] for request in verified}
        of_ngram = self._verified == self.specdraft_governor.ngram
        # More rows than drafts and one token each: a prompt is among them. Matches are of any length; fewer of a draft's tokens
        # than were asked for come of grammars, of requests that have just begun, and of those that are about to end.
        full = of_ngram or drafts >= FULL * self._verified * batch
        steady = full and batch + drafts == planned.total_num_scheduled_tokens and not self._makes_up(planned)
        return {
            "batch": batch,
            "verified": self._verified if steady else None,
            "drafted": self._drafted,
            "tokens": sum(map(len, found.sampled_token_ids)),
            "drafts": tuple((len(verified[request]), len(tokens) - 1) for request, tokens in emitted.items() if tokens),
            "of_ngram": of_ngram,
        }

    def _makes_up(self, planned: Any) -> bool:
        """Whether the draft also makes up for steps that it was left out of."""
        if self._drafted in (0, self.specdraft_governor.ngram):
            self._backlog += planned.total_num_scheduled_tokens
            return False
        requests = (self.requests.get(request) for request in planned.num_scheduled_tokens)
        self._backlog = min(self._backlog, sum(request.num_computed_tokens for request in requests if request is not None))
        before, self._backlog = self._backlog, max(0, self._backlog - ROWS_PER_STEP)
        return before > 0
