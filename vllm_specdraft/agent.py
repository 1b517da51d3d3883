"""What the first rank of an engine is besides a worker: it taps, learns, decides, and tells what it does.

Everything here runs in the worker's main thread: between two messages, or inside one.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer_bridge.draft import checkpoint, registry
from trainer_bridge.draft.interface import FrozenTarget
from trainer_bridge.errors import BridgeError
from vllm_specdraft import learner_state, report, status
from vllm_specdraft.config import EngineConfig
from vllm_specdraft.gate import MIN_SAMPLES, Probation, probation
from vllm_specdraft.governor.proposer import GovernedProposer
from vllm_specdraft.heap import Heap
from vllm_specdraft.idle import IdleMonitor, IdleState
from vllm_specdraft.learner import Learner
from vllm_specdraft.learner_state import Checkpointer
from vllm_specdraft.policy import PolicyLead
from vllm_specdraft.ranks import Ranks
from vllm_specdraft.replay import Replay
from vllm_specdraft.runner_tap import RunnerTap
from vllm_specdraft.saving import Saving
from vllm_specdraft.slots import DraftSlots, Wanted
from vllm_specdraft.swap import DraftSwap, target_digest
from vllm_specdraft.updates import PolicyUpdates

logger = logging.getLogger(__name__)

UNREAD = frozenset({learner_state.VERSION_KEY, "dtype", "torch_dtype", "transformers_version", "_name_or_path"})
"""Entries of a draft's config that do not change what it computes."""
HEAP_QUIET_S = 2.0
"""Without a step for so long free pages go back to the system; before, a next batch may need them, and new ones take time."""
STATUS_INTERVAL_S, BUSY_STATUS_INTERVAL_S = 0.3, 1.0
"""A busy engine waits while its status is written."""
TAP_SHARE = 0.25
"""Rows of running requests may take this share of the replay's bytes, on top of them."""
ROLLBACK_TRIES = 3


class WorkerAgent:
    """Taps, replay, learner, idle window and draft slots of one engine."""

    def __init__(self, runner: Any, config: EngineConfig, ranks: Ranks, target: FrozenTarget) -> None:
        self.config = config
        self._ranks = ranks
        self._state_dir = Path(config.state_dir)
        self._state_lock = learner_state.hold(self._state_dir, "--state-dir")
        self._model_config = checkpoint.read_config(Path(config.draft_dir))
        self.kind = registry.of_config(self._model_config)
        state = checkpoint.read_state(Path(config.draft_dir))
        saved = None
        if config.checkpoint_dir is not None:
            saved = learner_state.read(Path(config.checkpoint_dir), learner_state.identity_of(self._model_config))
        self.replay = Replay(
            limit_bytes=config.replay_bytes,
            held_out_share=config.held_out_share,
            seed=config.seed,
            long_quota=config.long_quota,
            least_held_out=MIN_SAMPLES,
        )
        with torch.random.fork_rng(devices=[]):
            # The engine draws unseeded samples from the global generator.
            self.learner = Learner(
                kind=self.kind,
                model_config=self._model_config,
                state=state,
                target=target,
                replay=self.replay,
                config=config,
                resumed=saved,
            )
        version = int(self._model_config.get(learner_state.VERSION_KEY, 0))
        self.slots = DraftSlots(state, version=version, rollbacks=saved.rollbacks if saved else 0)
        self.swapper = DraftSwap(runner)
        self._proposer = GovernedProposer(runner, gap_bytes=config.gap_bytes) if config.governor else None
        self.gaps = self._proposer.gaps if self._proposer is not None else None
        self.governor: dict[str, Any] | None = None
        """What the governor reported last."""
        self._heap = Heap()
        updates = PolicyUpdates(runner, ranks, self.swapper, self._heap, keep_previous=config.keep_previous)
        self.policy = PolicyLead(self, runner, ranks, updates)
        self.draft_policy_version = config.policy_version
        """Policy that the served draft was made for, or learned from last."""
        self.idle = IdleMonitor(config.cool_ms / 1e3)
        self.policy_version = config.policy_version
        self._target_model = runner.get_model()
        self.target_digest = target_digest(self._target_model)
        """Of the weights served: of the tensors held at the start, of the bytes that came after an update."""
        self.target_mark: str | None = self.target_digest
        """Of the tensors held; None until it is needed after an update."""
        self.saving = Saving(config, self._model_config, self.learner, self.slots)
        self.last_error: str | None = None
        self.learning_stopped: str | None = None
        self.rollback_wanted: int | None = None
        self.on_probation = self._round_open = False
        self._rollback_failures = 0
        self._status_written = -math.inf
        self._step_began = 0.0
        self.engine_steps, self.engine_step_seconds = 0, 0.0
        self.recent = report.RecentAcceptance()
        self.tap = RunnerTap(
            runner,
            tap_layers=self.kind.tap_layers(self._model_config),
            num_speculative_tokens=config.num_speculative_tokens,
            policy_version=lambda: self.policy_version,
            max_sample_tokens=config.max_sample_tokens,
            limit_bytes=int(TAP_SHARE * config.replay_bytes),
            deliver=self.replay.add,
            step_began=self._on_step_began,
            step_ended=self._on_step_ended,
            failed=self._on_tap_failed,
            governed=self._on_governed,
        )
        self.write_status(force=True)

    # -- between messages ------------------------------------------------------------------------------------------------

    @property
    def checkpointer(self) -> Checkpointer | None:
        """What writes to ``--checkpoint-dir``."""
        return self.saving.checkpointer

    def close(self) -> None:
        """The process ends: save what was learned since the last checkpoint."""
        self.saving.close()

    def catch_up(self) -> None:
        """Before the worker looks for a message: what the last step left to be done, its answer being on its way."""
        if self.tap.in_step:
            return
        self.tap.catch_up()
        if self._proposer is not None:
            self._proposer.catch_up()
        self.write_status(every_s=BUSY_STATUS_INTERVAL_S)

    def wait_s(self) -> float:
        """How long the worker may wait for a message before `window_open`, in seconds."""
        wait_s = STATUS_INTERVAL_S
        if self.idle.state is not IdleState.BUSY:
            if self._may_learn():
                wait_s = self.idle.opens_in_s
            elif self._heap.wanted:
                wait_s = min(wait_s, max(self.idle.opens_in_s, HEAP_QUIET_S - self.idle.quiet_s))
        return self.idle.waits(wait_s)

    def window_open(self) -> None:
        """No message for as long as `wait_s` said: learn for one piece, or write what is due."""
        self.idle.woke()
        if self.idle.state is IdleState.OPEN:
            if self._round_open:
                self._round_open = False
                self.replay.round_ended()
                self._heap.wanted = True
            if self._heap.wanted and self.idle.quiet_s >= HEAP_QUIET_S and not self.policy.updates.building:
                # A piece at a time, as with learning: a request may come. A build is about to use what is free.
                self._heap.tidy()
            elif self._may_learn():
                self._learn()
        self.write_status()

    def _learn(self) -> None:
        try:
            self.learner.run_piece()
        except Exception as error:
            # Learning is a guest in this process: it may fail, the engine must not.
            logger.exception("draft learning stopped")
            self.learning_stopped = self.last_error = f"learning stopped: {type(error).__name__}: {error}"

    def _may_learn(self) -> bool:
        return self.config.learn and self.waiting_for() is None

    def waiting_for(self) -> str | None:
        """Why the draft does not learn now, in words; None when it may."""
        if self.learning_stopped is not None:
            return self.learning_stopped
        if self.governor is not None and not self.governor["learning_pays"]:
            return "smaller batches: at those seen even a perfect draft would be slower than none"
        return self.learner.waiting_for()

    # -- inside messages -------------------------------------------------------------------------------------------------

    def _on_step_began(self) -> None:
        self.idle.step_began()
        self._round_open = True
        self._step_began = time.perf_counter()

    def _on_step_ended(self) -> None:
        self.idle.step_ended()
        self.engine_steps += 1
        self.engine_step_seconds += time.perf_counter() - self._step_began

    def _on_governed(self, found: dict[str, Any]) -> None:
        if found["acceptance_collapsed"] and not (self.governor and self.governor["acceptance_collapsed"]):
            logger.warning(
                "accepted length collapsed: of draft tokens %s stand, by position; speculation goes on only where it still pays",
                found["accepted_rates"],
            )
        self.governor = found

    def _on_tap_failed(self, error: Exception) -> None:
        logger.error("tapping stopped", exc_info=error)
        self.last_error = f"tapping stopped: {type(error).__name__}: {error}"

    def swap(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve another draft from the next step on; the old one stays if anything fails.

        Args:
            request: ``{"candidate": DIGEST}`` publishes the learner's candidate of this digest, ``{}`` the draft in training
                as it is now, measured or not, ``{"draft": DIR}`` a checkpoint, ``{"rollback": VERSION}`` the draft before
                the served one, which must be VERSION (None: whichever is served).

        Returns:
            The publish record. Raises what made it fail, also kept as `last_error`.
        """
        try:
            with torch.inference_mode(False):
                return self._swap(request)
        except Exception as error:
            candidate = self.learner.candidate
            if candidate is not None and request.get("candidate") == candidate.digest:
                # It would fail again.
                self.learner.drop_candidate()
            if request.get("rollback") is not None:
                self._rollback_failures += 1
                if self._rollback_failures >= ROLLBACK_TRIES:
                    self.rollback_wanted, self.on_probation = None, False
            self.last_error = f"swap refused, still serving draft {self.slots.served.version}: {error}"
            self.write_status(force=True)
            raise

    def _swap(self, request: dict[str, Any]) -> dict[str, Any]:
        found: list[tuple[Wanted, str, nn.Module]] = []

        def choose() -> dict[str, Any]:
            wanted = self._wanted(request)
            found.append((wanted, checkpoint.digest_of(wanted.state), self.learner.prepare_served(wanted.state)))
            return {"state": wanted.state}

        # All that can fail here comes before the other ranks begin: they would wait for this one.
        self._ranks.share(choose)
        wanted, digest, prepared = found[0]
        mark = self.target_mark or target_digest(self._target_model)
        began = time.perf_counter()
        self.swapper.apply(wanted.state, self._ranks.all_agree)
        swap_ms = 1e3 * (time.perf_counter() - began)
        # From here on it serves, and nothing below may fail.
        record = self.slots.swapped(
            wanted,
            digest,
            was_measured=self.tap.collector.acceptance.draft_changed(),
            swap_ms=round(swap_ms, 2),
            learned_seconds=round(self.learner.progress.seconds, 3),
            policy_version=self.policy_version,
            target_untouched=target_digest(self._target_model) == mark,
        )
        self.target_mark = mark
        self.learner.served_changed(prepared)
        self.draft_policy_version = self.policy_version
        if request.get("rollback") is not None:
            self.learner.gate.setback()
        self.rollback_wanted, self._rollback_failures = None, 0
        self.on_probation = wanted.verdict is not None
        self.recent.clear()
        self.saving.served_unsaved = True
        self.write_status(force=True)
        return record

    def _wanted(self, request: dict[str, Any]) -> Wanted:
        """The draft that a swap request names."""
        if "rollback" in request:
            served, previous = self.slots.served, self.slots.previous
            if previous is None:
                raise BridgeError("there is no draft to go back to: none was swapped in since the start or the last rollback")
            if request["rollback"] not in (None, served.version):
                raise BridgeError(f"draft {request['rollback']} is served no longer, it is {served.version}")
            origin = f"rollback of draft {served.version} to draft {previous.version}"
            return Wanted(state=previous.state, origin=origin, rollback=True)
        if directory := request.get("draft"):
            return Wanted(state=self._read_draft(Path(directory)), origin=str(directory))
        candidate = self.learner.candidate
        if (digest := request.get("candidate")) is None:
            return Wanted(state=self.learner.state(), origin="learner, as it was")
        if candidate is None or candidate.digest != digest:
            raise BridgeError(f"candidate {digest} is no longer the learner's candidate")
        return Wanted(state=candidate.state, origin="learner", verdict=candidate.verdict)

    def _read_draft(self, directory: Path) -> dict[str, torch.Tensor]:
        """A checkpoint that fits the served draft's shapes and vocabulary. Raises `CheckpointError`."""
        model, config = self.kind.load(directory)
        for key in sorted((config.keys() | self._model_config.keys()) - UNREAD):
            # The engine built its draft from this config once: another value would be another function of the same weights.
            if config.get(key) != self._model_config.get(key):
                raise BridgeError(f"{directory}: {key} is {config.get(key)}, the engine serves {self._model_config.get(key)}")
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def sync(self, request: dict[str, Any]) -> dict[str, Any]:
        """One part of the work on an update, or a sample. See `PolicyLead.sync`."""
        return self.policy.sync(request)

    def commit(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve the update that was built. See `PolicyLead.commit`."""
        return self.policy.commit(request)

    def control(self, request: dict[str, Any]) -> dict[str, Any]:
        """One action; the status after it.

        Args:
            request: ``{"action": ...}``: ``pause`` and ``resume`` learning, ``taps_on``, ``taps_off``, ``checkpoint`` now,
                ``status``, or ``save`` with a ``directory``.
        """
        action = request.get("action")
        if action == "pause":
            self.learner.paused = True
        elif action == "resume":
            self.learner.resume()
            self.learning_stopped = None
        elif action in ("taps_on", "taps_off"):
            self.tap.collector.enabled = action == "taps_on"
        elif action == "save":
            self.kind.save(Path(request["directory"]), self.slots.served.state, self._model_config)
        elif action == "checkpoint":
            self.saving.now()
        elif action != "status":
            raise ValueError(f"unknown action {action!r}, known: pause, resume, taps_on, taps_off, save, checkpoint, status")
        self.write_status(force=True)
        return report.of(self)

    # -- status ----------------------------------------------------------------------------------------------------------

    def _watch_probation(self) -> None:
        """Ask for a rollback when the draft published last accepts less, in the engine, than the one before it did."""
        if not self.on_probation or self.rollback_wanted is not None:
            return
        before, served = self.tap.collector.acceptance.compared()
        found = probation(before, served, margin=self.config.rollback_margin)
        if found is Probation.FAILED:
            self.rollback_wanted = self.slots.served.version
        elif found is Probation.PASSED:
            self.on_probation = False
            self.learner.gate.reset()

    def write_status(self, *, force: bool = False, every_s: float = STATUS_INTERVAL_S) -> None:
        """Tell the API server, now or when it is time again."""
        now = time.monotonic()
        if not force and now < self._status_written + every_s:
            return
        self._status_written = now
        try:
            self._watch_probation()
            self.saving.start_if_due()
            status.write(self._state_dir, report.of(self))
        except Exception:
            # Called around the engine's steps: whatever goes wrong here must not end them.
            logger.exception("the status was not written")
