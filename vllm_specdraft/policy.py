"""The first rank's part in updates of the policy: what the workers do with one, and what it means for drafts and samples."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

import torch
from torch import nn

from trainer_bridge.draft import checkpoint
from trainer_bridge.draft.interface import FrozenTarget
from trainer_bridge.errors import BridgeError, SampleError
from trainer_bridge.taps import stream
from vllm_specdraft.config import EngineConfig
from vllm_specdraft.idle import IdleMonitor, IdleState
from vllm_specdraft.learner import Learner
from vllm_specdraft.ranks import Ranks, frozen_target
from vllm_specdraft.replay import Replay
from vllm_specdraft.report import RecentAcceptance
from vllm_specdraft.runner_tap import RunnerTap
from vllm_specdraft.saving import Saving
from vllm_specdraft.slots import DraftSlots, Wanted
from vllm_specdraft.updates import NO_PREVIOUS, PolicyUpdates

logger = logging.getLogger(__name__)

KEPT_UPDATES = 50


class Agent(Protocol):
    """Whose drafts, samples and learner follow the policy."""

    config: EngineConfig
    idle: IdleMonitor
    learner: Learner
    replay: Replay
    slots: DraftSlots
    tap: RunnerTap
    recent: RecentAcceptance
    saving: Saving
    policy_version: int
    draft_policy_version: int
    target_digest: str
    target_mark: str | None
    on_probation: bool
    rollback_wanted: int | None
    learning_stopped: str | None
    last_error: str | None

    def write_status(self, *, force: bool = False) -> None:
        """Tell the API server."""


class PolicyLead:
    """Builds updates, commits them on all ranks together with `PolicyUpdates`, and keeps their records."""

    def __init__(self, agent: Agent, runner: Any, ranks: Ranks, updates: PolicyUpdates) -> None:
        self._agent, self._runner, self._ranks, self.updates = agent, runner, ranks, updates
        self.records: list[dict[str, Any]] = []
        """Updates committed, the newest last."""

    def sync(self, request: dict[str, Any]) -> dict[str, Any]:
        """One part of the work on an update, short enough to run between two steps.

        Args:
            request: ``{"op": "open", "manifest": ...}`` starts to build a verified update aside; ``{"op": "build"}`` goes on with
                it (answers ``built``); ``{"op": "discard"}`` drops it; ``{"op": "sample", "header", "payload"}`` puts a
                trainer's sample into the replay (answers ``taken`` and ``reason``).
        """
        with torch.inference_mode(False):
            if request["op"] == "open":
                self.updates.open(request["manifest"])
            elif request["op"] == "build":
                # An engine that rests may be kept longer, by one slice. Between two steps of a running one it only cools.
                rests = self._agent.idle.state is IdleState.OPEN
                limit_ms = self._agent.config.slice_ms if rests else self._agent.config.build_ms
                done, total, built = self.updates.build(self._ranks.share(lambda: 1e-3 * limit_ms))
                return {"done": done, "total": total, "built": built}
            elif request["op"] == "discard":
                self.updates.discard()
            else:
                return self._take_sample(request["header"], request["payload"])
        return {}

    def _take_sample(self, header: dict[str, Any], payload: bytes) -> dict[str, Any]:
        try:
            sample = stream.unpack(header, payload)
            self._agent.learner.check_sample(sample)
        except SampleError as error:
            self._agent.replay.dropped["from_trainer"] += 1
            return {"taken": False, "reason": str(error)}
        before = self._agent.replay.dropped.copy()
        taken = self._agent.replay.add(sample)
        return {"taken": taken, "reason": "" if taken else ", ".join(self._agent.replay.dropped - before)}

    def commit(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve what was built from the next step on, on all ranks, target and draft together; or raise, and nothing changed.

        Args:
            request: ``{}``, or ``{"rollback": True}`` for the version before the last update.

        Returns:
            The record: versions, origin, and what it took.
        """
        try:
            with torch.inference_mode(False):
                return self._commit(rollback=bool(request.get("rollback")))
        except Exception as error:
            self._agent.last_error = f"update refused, still serving policy {self._agent.policy_version}: {error}"
            self._agent.write_status(force=True)
            raise

    def _commit(self, *, rollback: bool) -> dict[str, Any]:
        found: list[tuple[int, str, dict[str, torch.Tensor] | None, nn.Module | None]] = []

        def choose() -> dict[str, Any]:
            version, origin, draft = self._before() if rollback else self._incoming()
            found.append((version, origin, draft, self._agent.learner.prepare_served(draft) if draft is not None else None))
            return {"draft": draft}

        # All that can fail here comes before the other ranks begin: they would wait for this one.
        self._ranks.share(choose)
        version, origin, draft, prepared = found[0]
        began = time.perf_counter()
        digest, previous = self.updates.target_digest, self.updates.previous
        if rollback:
            self.updates.roll_back(draft)
            changed, digest = True, previous.digest if previous is not None else ""
        else:
            changed = self.updates.commit(
                draft,
                version=self._agent.policy_version,
                served=self._agent.slots.served.state,
                target_digest=self._agent.target_digest,
            )
        swap_ms = 1e3 * (time.perf_counter() - began)
        # From here on it serves, and nothing below may fail.
        if changed:
            self._target_changed(version, digest, frozen_target(self._runner, self._ranks))
        record = self._draft_came(draft, prepared, origin, swap_ms) if draft is not None and prepared is not None else {}
        record = {
            **record,
            "policy_version": self._agent.policy_version,
            "draft_version": self._agent.slots.served.version,
            "origin": origin,
            "unix_time_s": time.time(),
            "target_digest": self._agent.target_digest,
            "report": {"target": changed, "draft": draft is not None, "swap_ms": round(swap_ms, 2)},
        }
        self.records = [*self.records[-KEPT_UPDATES:], record]
        self._agent.write_status(force=True)
        return record

    def _incoming(self) -> tuple[int, str, dict[str, torch.Tensor] | None]:
        """Version, origin and draft of the update that was built."""
        manifest = self.updates.manifest()
        draft = self.updates.draft()
        return manifest["version"], f"update {manifest['update']} of job {manifest['job']}", draft

    def _before(self) -> tuple[int, str, dict[str, torch.Tensor] | None]:
        """Version, origin and draft of the version that a rollback brings back."""
        previous = self.updates.previous
        if previous is None:
            raise BridgeError(NO_PREVIOUS)
        same = previous.draft is None or checkpoint.digest_of(previous.draft) == self._agent.slots.served.digest
        origin = f"rollback of policy {self._agent.policy_version} to policy {previous.version}"
        return previous.version, origin, None if same else previous.draft

    def _target_changed(self, version: int, digest: str, target: FrozenTarget) -> None:
        """Another policy serves: its teacher is another one, and what the served draft was measured against is gone."""
        again = version <= self._agent.policy_version
        if again:
            # A version number that was used before stands for other weights now.
            self._agent.replay.expire(1 << 62)
        self._agent.policy_version, self._agent.target_digest = version, digest
        self._agent.target_mark = None
        try:
            self._agent.learner.target_changed(version, target, keep=1 if again else self._agent.config.teacher_versions)
        except Exception as error:
            # It serves already: a guest that cannot follow must not make it look as if it did not.
            logger.exception("learning stopped at the update to policy %d", version)
            self._agent.learning_stopped = f"learning stopped: {type(error).__name__}: {error}"
        self._agent.tap.collector.acceptance.policy_changed()
        self._agent.on_probation, self._agent.rollback_wanted = False, None
        self._agent.recent.clear()

    def _draft_came(self, draft: dict[str, torch.Tensor], prepared: nn.Module, origin: str, swap_ms: float) -> dict[str, Any]:
        """The draft of an update serves: the learner goes on from it, and its account begins anew."""
        record = self._agent.slots.swapped(
            Wanted(state=draft, origin=origin),
            checkpoint.digest_of(draft),
            was_measured=self._agent.tap.collector.acceptance.draft_changed(),
            swap_ms=round(swap_ms, 2),
            learned_seconds=round(self._agent.learner.progress.seconds, 3),
            policy_version=self._agent.policy_version,
            target_untouched=True,
        )
        self._agent.learner.replace_master(draft)
        self._agent.learner.served_changed(prepared)
        self._agent.draft_policy_version = self._agent.policy_version
        self._agent.on_probation, self._agent.saving.served_unsaved = False, True
        self._agent.recent.clear()
        return record
