"""The worker's side: an extension class whose methods vLLM can call, and the agent behind it.

Everything here runs in the worker's main thread: between two messages, or inside one. With tensor parallelism the first rank
has the `WorkerAgent`, which taps, learns and decides; the others have a `FollowerAgent`, which only swaps what it is given.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer_bridge.draft import checkpoint, registry
from trainer_bridge.draft.interface import FrozenTarget
from trainer_bridge.errors import BridgeError, SampleError
from trainer_bridge.taps import stream
from vllm_specdraft import compat, learner_state, report, status
from vllm_specdraft.config import EngineConfig
from vllm_specdraft.gate import MIN_SAMPLES, Probation, probation
from vllm_specdraft.idle import IdleMonitor, IdleState
from vllm_specdraft.learner import Learner
from vllm_specdraft.learner_state import Checkpointer
from vllm_specdraft.ranks import Ranks
from vllm_specdraft.replay import Replay
from vllm_specdraft.runner_tap import RunnerTap
from vllm_specdraft.slots import DraftSlots, Wanted
from vllm_specdraft.swap import DraftSwap, target_digest
from vllm_specdraft.updates import NO_PREVIOUS, PolicyUpdates

logger = logging.getLogger(__name__)

UNREAD = frozenset({learner_state.VERSION_KEY, "dtype", "torch_dtype", "transformers_version", "_name_or_path"})
"""Entries of a draft's config that do not change what it computes."""
STATUS_INTERVAL_S = 0.3
TAP_SHARE = 0.25
"""Rows of running requests may take this share of the replay's bytes, on top of them."""
ROLLBACK_TRIES = 3
KEPT_UPDATES = 50
CLOSE_S = 4.0
"""Longest that the end of the process waits for its last checkpoint, in seconds."""


_agent: WorkerAgent | FollowerAgent | None = None


def agent_of_process() -> WorkerAgent | FollowerAgent:
    """The agent of this worker's process. Raises `RuntimeError` where there is none."""
    if _agent is None:
        raise RuntimeError(
            "specdraft taps and learns in a worker process of its own, and this worker has none: "
            "use the multiprocess executor (distributed_executor_backend='mp')"
        )
    return _agent


class SpecdraftWorker:
    """Mixed into vLLM's worker class (``--worker-extension-cls``); all names carry our prefix."""

    def specdraft_start(self) -> WorkerAgent | FollowerAgent:
        """Build the agent once the models are loaded. Called by the patched worker loop."""
        config = EngineConfig.from_environment()
        if config is None:
            raise RuntimeError("specdraft's worker extension is set but SPECDRAFT_CONFIG is not: use `specdraft serve`")
        runner = self.model_runner  # type: ignore[attr-defined]
        compat.check_engine(runner)
        ranks = Ranks()
        target = frozen_target(runner, ranks)
        global _agent
        _agent = WorkerAgent(runner, config, ranks, target) if ranks.leads else FollowerAgent(runner, config, ranks)
        return _agent

    @property
    def specdraft_agent(self) -> WorkerAgent | FollowerAgent:
        """The agent behind these methods."""
        return agent_of_process()

    def specdraft_swap(self, request: dict[str, Any]) -> dict[str, Any]:
        """Swap a draft in. See `WorkerAgent.swap`."""
        return agent_of_process().swap(request)

    def specdraft_sync(self, request: dict[str, Any]) -> dict[str, Any]:
        """Build an update aside, drop it, or take a sample. See `WorkerAgent.sync`."""
        if request["op"] == "discard":
            # A session of vLLM's own weight transfer whose client is gone would keep every later one out.
            self._weight_update_active = False
        return agent_of_process().sync(request)

    def specdraft_commit(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve the update that was built. See `WorkerAgent.commit`."""
        return agent_of_process().commit(request)

    def specdraft_control(self, request: dict[str, Any]) -> dict[str, Any]:
        """Pause, resume, save, or just report. See `WorkerAgent.control`."""
        return agent_of_process().control(request)


def frozen_target(runner: Any, ranks: Ranks) -> FrozenTarget:
    """Embedding and head of the served target, whole. A collective: every rank takes part."""
    vocab_size, target = runner.model_config.get_vocab_size(), runner.get_model()
    embedding = ranks.gather_rows(target.model.embed_tokens.weight.detach(), vocab_size)
    if target.lm_head is target.model.embed_tokens:
        return FrozenTarget(embedding=embedding, head=embedding)
    return FrozenTarget(embedding=embedding, head=ranks.gather_rows(target.lm_head.weight.detach(), vocab_size))


class FollowerAgent:
    """A tensor-parallel rank that serves what the first rank decides."""

    def __init__(self, runner: Any, config: EngineConfig, ranks: Ranks) -> None:
        self._runner, self._ranks, self._swapper = runner, ranks, DraftSwap(runner)
        self._updates = PolicyUpdates(runner, ranks, self._swapper, keep_previous=config.keep_previous)

    def wait_s(self) -> float:
        """How long to wait for a message: there is nothing else to do."""
        return 3600.0

    def window_open(self) -> None:
        """Nothing: only the first rank learns."""

    def close(self) -> None:
        """Nothing is held."""

    def swap(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve the draft that the first rank names."""
        with torch.inference_mode(False):
            wanted = self._ranks.share(dict)
            self._swapper.apply(wanted["state"], self._ranks.all_agree)
        return {}

    def sync(self, request: dict[str, Any]) -> dict[str, Any]:
        """Build this rank's part of an update."""
        with torch.inference_mode(False):
            if request["op"] == "open":
                self._updates.open(request["manifest"])
            elif request["op"] == "build":
                self._updates.build(self._ranks.share(float))
            elif request["op"] == "discard":
                self._updates.discard()
        return {}

    def commit(self, request: dict[str, Any]) -> dict[str, Any]:
        """Put this rank's part in, or back."""
        with torch.inference_mode(False):
            wanted = self._ranks.share(dict)
            if request.get("rollback"):
                self._updates.roll_back(wanted["draft"])
                changed = True
            else:
                changed = self._updates.commit(wanted["draft"], version=0, served=None, target_digest="")
            if changed:
                frozen_target(self._runner, self._ranks)
        return {}

    def control(self, request: dict[str, Any]) -> dict[str, Any]:
        """The first rank answers."""
        return {}


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
        self._runner = runner
        self.updates = PolicyUpdates(runner, ranks, self.swapper, keep_previous=config.keep_previous)
        self.draft_policy_version = config.policy_version
        """Policy that the served draft was made for, or learned from last."""
        self.records: list[dict[str, Any]] = []
        """Updates committed, the newest last."""
        self.idle = IdleMonitor(config.cool_ms / 1e3)
        self.policy_version = config.policy_version
        self._target_model = runner.get_model()
        self.target_digest = target_digest(self._target_model)
        """Of the weights served: of the tensors held at the start, of the bytes that came after an update."""
        self._target_mark: str | None = self.target_digest
        """Of the tensors held; None until it is needed after an update."""
        self.checkpointer = self._checkpointer()
        self.last_error: str | None = None
        self.learning_stopped: str | None = None
        self.rollback_wanted: int | None = None
        self._on_probation = self._round_open = self._served_unsaved = False
        self._rollback_failures = 0
        self._saved_steps = self.learner.progress.steps
        self._status_due = 0.0
        self._step_began = 0.0
        self.engine_steps, self.engine_step_seconds = 0, 0.0
        self.recent = report.RecentAcceptance()
        self.tap = RunnerTap(
            runner,
            tap_layers=self._model_config["eagle_aux_hidden_state_layer_ids"],
            num_speculative_tokens=config.num_speculative_tokens,
            policy_version=lambda: self.policy_version,
            max_sample_tokens=config.max_sample_tokens,
            limit_bytes=int(TAP_SHARE * config.replay_bytes),
            deliver=self.replay.add,
            step_began=self._on_step_began,
            step_ended=self._on_step_ended,
            failed=self._on_tap_failed,
        )
        self._write_status(force=True)

    def _checkpointer(self) -> Checkpointer | None:
        config = self.config
        if config.checkpoint_dir is None:
            return None
        return Checkpointer(Path(config.checkpoint_dir), interval_s=config.checkpoint_interval_s, draft_config=self._model_config)

    # -- between messages ------------------------------------------------------------------------------------------------

    def wait_s(self) -> float:
        """How long the worker may wait for a message before `window_open`, in seconds."""
        if self.idle.state is IdleState.BUSY or not self._may_learn():
            return STATUS_INTERVAL_S
        return self.idle.opens_in_s

    def window_open(self) -> None:
        """No message for as long as `wait_s` said: learn for one piece, or write what is due."""
        if self.idle.state is IdleState.OPEN:
            if self._round_open:
                self._round_open = False
                self.replay.round_ended()
            if self._may_learn():
                self._learn()
        self._write_status()

    def _learn(self) -> None:
        try:
            self.learner.run_piece()
        except Exception as error:
            # Learning is a guest in this process: it may fail, the engine must not.
            logger.exception("draft learning stopped")
            self.learning_stopped = self.last_error = f"learning stopped: {type(error).__name__}: {error}"

    def _may_learn(self) -> bool:
        return self.config.learn and self.learning_stopped is None and self.learner.can_learn()

    def _save_if_due(self) -> None:
        """Start a checkpoint when another draft serves since the last one, or its interval is over and something was learned."""
        checkpointer = self.checkpointer
        if checkpointer is None or checkpointer.busy:
            return
        learned = self.learner.progress.steps != self._saved_steps
        failed = checkpointer.error is not None
        if checkpointer.due if failed else self._served_unsaved or (learned and checkpointer.due):
            # What a failed one did not write is still to be written.
            self._served_unsaved |= failed
            self._start_checkpoint(checkpointer)

    def _start_checkpoint(self, checkpointer: Checkpointer) -> None:
        slot = self.slots.served
        saved = self.learner.export(draft_version=slot.version, served_digest=slot.digest, rollbacks=self.slots.rollbacks)
        # The served draft's tensors are written by nobody: they need no copy.
        checkpointer.start(saved, slot.state if self._served_unsaved else None)
        self._served_unsaved, self._saved_steps = False, self.learner.progress.steps

    def close(self) -> None:
        """The process ends: save what was learned since the last checkpoint."""
        checkpointer = self.checkpointer
        if checkpointer is None or (self.learner.progress.steps == self._saved_steps and not self._served_unsaved):
            return
        try:
            checkpointer.wait(CLOSE_S)
            if checkpointer.busy:
                raise TimeoutError(f"an earlier one was not done in {CLOSE_S:g} s")
            self._served_unsaved |= checkpointer.error is not None
            self._start_checkpoint(checkpointer)
            checkpointer.wait(CLOSE_S)
        except Exception:
            logger.exception("the last checkpoint was not written")

    # -- inside messages -------------------------------------------------------------------------------------------------

    def _on_step_began(self) -> None:
        self.idle.step_began()
        self._round_open = True
        self._step_began = time.perf_counter()

    def _on_step_ended(self) -> None:
        self.idle.step_ended()
        self.engine_steps += 1
        self.engine_step_seconds += time.perf_counter() - self._step_began
        self._write_status()

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
                    self.rollback_wanted, self._on_probation = None, False
            self.last_error = f"swap refused, still serving draft {self.slots.served.version}: {error}"
            self._write_status(force=True)
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
        mark = self._target_mark or target_digest(self._target_model)
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
        self._target_mark = mark
        self.learner.served_changed(prepared)
        self.draft_policy_version = self.policy_version
        if request.get("rollback") is not None:
            self.learner.gate.setback()
        self.rollback_wanted, self._rollback_failures = None, 0
        self._on_probation = wanted.verdict is not None
        self.recent.clear()
        self._served_unsaved = True
        self._write_status(force=True)
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

    # -- updates of the policy -------------------------------------------------------------------------------------------

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
                # An engine that rests may be kept longer, by one slice.
                limit_ms = self.config.build_ms if self.idle.state is IdleState.BUSY else self.config.slice_ms
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
            self.learner.check_sample(sample)
        except SampleError as error:
            self.replay.dropped["from_trainer"] += 1
            return {"taken": False, "reason": str(error)}
        before = self.replay.dropped.copy()
        taken = self.replay.add(sample)
        return {"taken": taken, "reason": "" if taken else ", ".join(self.replay.dropped - before)}

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
            self.last_error = f"update refused, still serving policy {self.policy_version}: {error}"
            self._write_status(force=True)
            raise

    def _commit(self, *, rollback: bool) -> dict[str, Any]:
        found: list[tuple[int, str, dict[str, torch.Tensor] | None, nn.Module | None]] = []

        def choose() -> dict[str, Any]:
            version, origin, draft = self._before() if rollback else self._incoming()
            found.append((version, origin, draft, self.learner.prepare_served(draft) if draft is not None else None))
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
                draft, version=self.policy_version, served=self.slots.served.state, target_digest=self.target_digest
            )
        swap_ms = 1e3 * (time.perf_counter() - began)
        # From here on it serves, and nothing below may fail.
        if changed:
            self._target_changed(version, digest, frozen_target(self._runner, self._ranks))
        record = self._draft_came(draft, prepared, origin, swap_ms) if draft is not None and prepared is not None else {}
        record = {
            **record,
            "policy_version": self.policy_version,
            "draft_version": self.slots.served.version,
            "origin": origin,
            "unix_time_s": time.time(),
            "target_digest": self.target_digest,
            "report": {"target": changed, "draft": draft is not None, "swap_ms": round(swap_ms, 2)},
        }
        self.records = [*self.records[-KEPT_UPDATES:], record]
        self._write_status(force=True)
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
        same = previous.draft is None or checkpoint.digest_of(previous.draft) == self.slots.served.digest
        origin = f"rollback of policy {self.policy_version} to policy {previous.version}"
        return previous.version, origin, None if same else previous.draft

    def _target_changed(self, version: int, digest: str, target: FrozenTarget) -> None:
        """Another policy serves: its teacher is another one, and what the served draft was measured against is gone."""
        again = version <= self.policy_version
        if again:
            # A version number that was used before stands for other weights now.
            self.replay.expire(1 << 62)
        self.policy_version, self.target_digest, self._target_mark = version, digest, None
        self.learner.target_changed(version, target, keep=1 if again else self.config.teacher_versions)
        self.tap.collector.acceptance.policy_changed()
        self._on_probation, self.rollback_wanted = False, None
        self.recent.clear()

    def _draft_came(self, draft: dict[str, torch.Tensor], prepared: nn.Module, origin: str, swap_ms: float) -> dict[str, Any]:
        """The draft of an update serves: the learner goes on from it, and its account begins anew."""
        record = self.slots.swapped(
            Wanted(state=draft, origin=origin),
            checkpoint.digest_of(draft),
            was_measured=self.tap.collector.acceptance.draft_changed(),
            swap_ms=round(swap_ms, 2),
            learned_seconds=round(self.learner.progress.seconds, 3),
            policy_version=self.policy_version,
            target_untouched=True,
        )
        self.learner.replace_master(draft)
        self.learner.served_changed(prepared)
        self.draft_policy_version = self.policy_version
        self._on_probation, self._served_unsaved = False, True
        self.recent.clear()
        return record

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
            checkpoint.save(Path(request["directory"]), self.slots.served.state, self._model_config)
        elif action == "checkpoint":
            self._checkpoint_now()
        elif action != "status":
            raise ValueError(f"unknown action {action!r}, known: pause, resume, taps_on, taps_off, save, checkpoint, status")
        self._write_status(force=True)
        return report.of(self)

    def _checkpoint_now(self) -> None:
        if self.checkpointer is None:
            raise BridgeError("there is no directory for checkpoints: start the server with --checkpoint-dir")
        self.checkpointer.wait()
        if not self.checkpointer.busy:
            self._served_unsaved = True
            self._start_checkpoint(self.checkpointer)
            self.checkpointer.wait()
        if self.checkpointer.busy:
            raise BridgeError("the checkpoint is still being written: the status says when it is done")
        if self.checkpointer.error is not None:
            raise BridgeError(self.checkpointer.error)

    # -- status ----------------------------------------------------------------------------------------------------------

    def _watch_probation(self) -> None:
        """Ask for a rollback when the draft published last accepts less, in the engine, than the one before it did."""
        if not self._on_probation or self.rollback_wanted is not None:
            return
        log = self.tap.collector.acceptance
        found = probation(log.before(), log.served(), margin=self.config.rollback_margin)
        if found is Probation.FAILED:
            self.rollback_wanted = self.slots.served.version
        elif found is Probation.PASSED:
            self._on_probation = False
            self.learner.gate.reset()

    def _write_status(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now < self._status_due:
            return
        self._status_due = now + STATUS_INTERVAL_S
        try:
            self._watch_probation()
            self._save_if_due()
            status.write(self._state_dir, report.of(self))
        except Exception:
            # Called around the engine's steps: whatever goes wrong here must not end them.
            logger.exception("the status was not written")
