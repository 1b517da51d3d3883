"""What `/specdraft/status` shows: one plain dictionary of everything the agent knows of itself."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Any, Protocol

from trainer_bridge.draft.interface import DraftType
from vllm_specdraft.acceptance import MeasuredAcceptance
from vllm_specdraft.config import EngineConfig
from vllm_specdraft.governor.gaps import DraftGaps
from vllm_specdraft.idle import IdleMonitor
from vllm_specdraft.learner import Learner
from vllm_specdraft.learner_state import Checkpointer
from vllm_specdraft.replay import Replay
from vllm_specdraft.runner_tap import RunnerTap
from vllm_specdraft.slots import DraftSlots
from vllm_specdraft.taps import TapCounters
from vllm_specdraft.updates import PolicyUpdates


class RecentAcceptance:
    """Accepted length over about the last `window_steps` draft steps of the served draft."""

    def __init__(self, window_steps: int = 500) -> None:
        self._steps = window_steps
        self._seen: list[tuple[int, int]] = []

    def clear(self) -> None:
        """Another draft serves."""
        self._seen.clear()

    def length(self, counters: TapCounters) -> float | None:
        """Tokens per target step that verified drafts, bonus included; None before the first."""
        now = (counters.draft_steps, counters.accepted_tokens)
        if not self._seen or now[0] > self._seen[-1][0]:
            self._seen.append(now)
        while len(self._seen) > 2 and now[0] - self._seen[1][0] >= self._steps:
            self._seen.pop(0)
        steps, accepted = now[0] - self._seen[0][0], now[1] - self._seen[0][1]
        return 1 + accepted / steps if steps else None


class Updates(Protocol):
    """What is reported of updates of the policy."""

    updates: PolicyUpdates
    records: list[dict[str, Any]]


class Agent(Protocol):
    """What is reported on."""

    config: EngineConfig
    kind: DraftType
    policy_version: int
    target_digest: str
    tap: RunnerTap
    replay: Replay
    learner: Learner
    slots: DraftSlots
    idle: IdleMonitor
    recent: RecentAcceptance
    engine_steps: int
    engine_step_seconds: float
    last_error: str | None
    learning_stopped: str | None
    rollback_wanted: int | None
    draft_policy_version: int
    governor: dict[str, Any] | None
    gaps: DraftGaps | None

    def waiting_for(self) -> str | None:
        """Why the draft does not learn now."""

    @property
    def policy(self) -> Updates:
        """Updates of the policy."""

    @property
    def checkpointer(self) -> Checkpointer | None:
        """What writes the learner's state."""


def of(agent: Agent) -> dict[str, Any]:
    """The status now, as JSON knows it."""
    return _finite(_status(agent))


def _finite(value: Any) -> Any:
    """`value` with every number that JSON does not know (NaN, infinity) as None."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _status(agent: Agent) -> dict[str, Any]:
    counters, slot = agent.tap.collector.counters, agent.slots.served
    before, served = agent.tap.collector.acceptance.compared()
    return {
        "unix_time_s": time.time(),
        "policy_version": agent.policy_version,
        "draft_policy_version": agent.draft_policy_version,
        "draft_is_behind": agent.draft_policy_version < agent.policy_version,
        "previous_policy_version": agent.policy.updates.previous.version if agent.policy.updates.previous else None,
        "updates": agent.policy.records,
        "draft_version": slot.version,
        "draft_digest": slot.digest,
        "previous_draft_version": agent.slots.previous.version if agent.slots.previous else None,
        "target_digest": agent.target_digest,
        "draft_type": agent.kind.name,
        "tap_layers": list(agent.tap.collector.tap_layers),
        "num_speculative_tokens": agent.config.num_speculative_tokens,
        "accepted_length": agent.recent.length(counters),
        "accepted_per_position": counters.per_position,
        "measured": {"served": _measured(served), "before": _measured(before)},
        "counters": {
            "draft_steps": counters.draft_steps,
            "drafted_tokens": counters.drafted_tokens,
            "accepted_tokens": counters.accepted_tokens,
            "generated_tokens": counters.generated_tokens,
            "engine_steps": agent.engine_steps,
            "engine_step_seconds": round(agent.engine_step_seconds, 6),
        },
        "idle_state": agent.idle.state.value,
        "taps_enabled": agent.tap.collector.enabled,
        "governor": _governor(agent),
        "learning": _learning(agent),
        "replay": _replay(agent),
        "publishes": agent.slots.records,
        "rollbacks": agent.slots.rollbacks,
        "rollback_wanted": agent.rollback_wanted,
        "last_error": agent.last_error,
    }


def _governor(agent: Agent) -> dict[str, Any] | None:
    """What the governor reported last, and what the draft was left out of; None where it does not govern."""
    if agent.gaps is None:
        return None
    return {**(agent.governor or {}), "gaps": asdict(agent.gaps.counters)}


def _measured(found: MeasuredAcceptance | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "length": found.length,
        "standard_error": found.standard_error,
        "draft_tokens": found.draft_tokens,
        "requests": found.requests,
        "steps": found.steps,
    }


def _learning(agent: Agent) -> dict[str, Any]:
    learner = agent.learner
    progress, verdict, candidate = learner.progress, learner.verdict, learner.candidate
    checkpointer = agent.checkpointer
    return {
        "enabled": agent.config.learn,
        "paused": learner.paused,
        "seconds": round(progress.seconds, 3),
        "tokens": progress.tokens,
        "steps": progress.steps,
        "slices": progress.slices,
        "skipped_steps": progress.skipped_steps,
        "zero_gradient_steps": progress.zero_gradient_steps,
        "gradient_norm": progress.gradient_norm,
        "vocabulary_changes": progress.vocabulary_changes,
        "slice_ms_p95": learner.piece_ms_p95(),
        "slice_ms_max": learner.piece_ms_max(),
        "loss": progress.loss,
        "evaluations": progress.evaluations,
        "held_out_served": verdict.served if verdict else None,
        "held_out_candidate": verdict.candidate if verdict else None,
        "held_out_error": verdict.standard_error if verdict else None,
        "publish_min_gain": learner.gate.min_gain,
        "waiting_for": agent.waiting_for(),
        "publish_waits_for": learner.publish_waits_for(),
        "candidate_ready": candidate is not None,
        "candidate_digest": candidate.digest if candidate else None,
        "checkpoint_unix_time_s": checkpointer.saved_unix_time_s if checkpointer else None,
        "checkpoint_error": checkpointer.error if checkpointer else None,
    }


def _replay(agent: Agent) -> dict[str, Any]:
    replay, tap = agent.replay, agent.tap.collector
    return {
        "samples": replay.num_train,
        "held_out_samples": replay.num_held_out,
        "longest_samples": replay.num_longest,
        "bytes": replay.nbytes,
        "limit_bytes": replay.limit_bytes,
        "running_bytes": tap.running_bytes,
        "added": replay.added,
        "filled_rows": tap.filled_rows,
        "cut_samples": tap.cut_samples,
        "dropped": dict(replay.dropped + tap.dropped),
    }
