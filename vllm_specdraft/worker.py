"""The worker's side: an extension class whose methods vLLM can call, and the agent behind it.

Everything here runs in the worker's main thread: between two messages, or inside one.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch

from trainer_bridge.draft import checkpoint, registry
from trainer_bridge.draft.interface import FrozenTarget
from trainer_bridge.errors import BridgeError
from vllm_specdraft import compat, status
from vllm_specdraft.config import EngineConfig
from vllm_specdraft.gate import Verdict
from vllm_specdraft.idle import IdleMonitor, IdleState
from vllm_specdraft.learner import Learner
from vllm_specdraft.replay import Replay
from vllm_specdraft.runner_tap import RunnerTap
from vllm_specdraft.swap import DraftSwap, target_digest

logger = logging.getLogger(__name__)

STATUS_INTERVAL_S = 0.3


class SpecdraftWorker:
    """Mixed into vLLM's worker class (``--worker-extension-cls``); all names carry our prefix."""

    specdraft_agent: WorkerAgent

    def specdraft_start(self) -> WorkerAgent:
        """Build the agent once the models are loaded. Called by the patched worker loop."""
        config = EngineConfig.from_environment()
        if config is None:
            raise RuntimeError("specdraft's worker extension is set but SPECDRAFT_CONFIG is not: use `specdraft serve`")
        compat.check_engine(self.model_runner)  # type: ignore[attr-defined]
        self.specdraft_agent = WorkerAgent(self.model_runner, config)  # type: ignore[attr-defined]
        return self.specdraft_agent

    def specdraft_swap(self, request: dict[str, Any]) -> dict[str, Any]:
        """Swap a draft in. See `WorkerAgent.swap`."""
        return self.specdraft_agent.swap(request)

    def specdraft_control(self, request: dict[str, Any]) -> dict[str, Any]:
        """Pause, resume, save, or just report. See `WorkerAgent.control`."""
        return self.specdraft_agent.control(request)


class WorkerAgent:
    """Taps, replay, learner, idle window and draft slots of one worker."""

    def __init__(self, runner: Any, config: EngineConfig) -> None:
        self.config = config
        self._state_dir = Path(config.state_dir)
        self._model_config = checkpoint.read_config(Path(config.draft_dir))
        self._kind = registry.of_config(self._model_config)
        state = checkpoint.read_state(Path(config.draft_dir))
        target_model = runner.get_model()
        vocab_size = runner.model_config.get_vocab_size()
        embedding = target_model.model.embed_tokens.weight.detach()[:vocab_size]
        head = target_model.lm_head.weight.detach()[:vocab_size]
        self.replay = Replay(limit_bytes=config.replay_bytes, held_out_share=config.held_out_share, seed=config.seed)
        with torch.random.fork_rng(devices=[]):
            # The engine draws unseeded samples from the global generator.
            self.learner = Learner(
                kind=self._kind,
                model_config=self._model_config,
                state=state,
                target=FrozenTarget(embedding=embedding, head=head),
                replay=self.replay,
                config=config,
            )
        self.swapper = DraftSwap(runner)
        self.idle = IdleMonitor(config.cool_ms / 1e3)
        self.policy_version = config.policy_version
        self.draft_version = 0
        self._served_state = state
        self._draft_digest = checkpoint.digest_of(state)
        self._target_digest = target_digest(target_model)
        self._target_model = target_model
        self._publishes: list[dict[str, Any]] = []
        self._last_error: str | None = None
        self._learning_stopped: str | None = None
        self._status_due = 0.0
        self._step_began = 0.0
        self._engine_steps, self._engine_step_seconds = 0, 0.0
        self._window: list[tuple[int, int]] = []
        self.tap = RunnerTap(
            runner,
            tap_layers=self._model_config["eagle_aux_hidden_state_layer_ids"],
            num_speculative_tokens=config.num_speculative_tokens,
            policy_version=lambda: self.policy_version,
            max_sample_tokens=config.max_sample_tokens,
            deliver=self.replay.add,
            step_began=self._on_step_began,
            step_ended=self._on_step_ended,
        )
        self._write_status(force=True)

    # -- between messages ------------------------------------------------------------------------------------------------

    def wait_s(self) -> float:
        """How long the worker may wait for a message before `window_open`, in seconds."""
        if self.idle.state is IdleState.BUSY or not self._may_learn():
            return STATUS_INTERVAL_S
        return self.idle.opens_in_s

    def window_open(self) -> None:
        """No message for as long as `wait_s` said: learn for one piece, or write what is due."""
        if self._may_learn() and self.idle.state is IdleState.OPEN:
            try:
                self.learner.run_piece()
            except Exception as error:
                # Learning is a guest in this process: it may fail, the engine must not.
                logger.exception("draft learning stopped")
                self._learning_stopped = self._last_error = f"learning stopped: {type(error).__name__}: {error}"
        self._write_status()

    def _may_learn(self) -> bool:
        return self.config.learn and self._learning_stopped is None and self.learner.can_learn()

    # -- inside messages -------------------------------------------------------------------------------------------------

    def _on_step_began(self) -> None:
        self.idle.step_began()
        self._step_began = time.perf_counter()

    def _on_step_ended(self) -> None:
        self.idle.step_ended()
        self._engine_steps += 1
        self._engine_step_seconds += time.perf_counter() - self._step_began
        self._write_status()

    def swap(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve another draft from the next step on; the old one stays if anything fails.

        Args:
            request: ``{"candidate": DIGEST}`` publishes the learner's candidate of this digest, ``{}`` the draft in training
                as it is now, measured or not, ``{"draft": DIR}`` a checkpoint.

        Returns:
            The publish record. Raises what made it fail, also kept as `last_error`.
        """
        try:
            with torch.inference_mode(False):
                return self._swap(request)
        except Exception as error:
            self.learner.drop_candidate()
            self._last_error = f"swap refused, still serving draft {self.draft_version}: {error}"
            self._write_status(force=True)
            raise

    def _swap(self, request: dict[str, Any]) -> dict[str, Any]:
        state, origin, verdict = self._wanted(request)
        # All that can fail comes before the swap: after it, this draft serves.
        digest = checkpoint.digest_of(state)
        began = time.perf_counter()
        self.swapper.apply(state)
        swap_ms = 1e3 * (time.perf_counter() - began)
        self.draft_version += 1
        self._served_state, self._draft_digest = state, digest
        self.learner.served_changed(state)
        self._window.clear()
        record = {
            "draft_version": self.draft_version,
            "unix_time_s": time.time(),
            "origin": origin,
            "held_out_before": verdict.served if verdict else None,
            "held_out_after": verdict.candidate if verdict else None,
            "digest": digest,
            "swap_ms": round(swap_ms, 2),
            "learned_seconds": round(self.learner.progress.seconds, 3),
            "target_untouched": target_digest(self._target_model) == self._target_digest,
        }
        self._publishes.append(record)
        del self._publishes[:-50]
        self._write_status(force=True)
        return record

    def _wanted(self, request: dict[str, Any]) -> tuple[dict[str, torch.Tensor], str, Verdict | None]:
        """State, origin and verdict of the draft that a swap request names."""
        if directory := request.get("draft"):
            return self._read_draft(Path(directory)), str(directory), None
        candidate = self.learner.candidate
        if (digest := request.get("candidate")) is None:
            return self.learner.state(), "learner, as it was", None
        if candidate is None or candidate.digest != digest:
            raise BridgeError(f"candidate {digest} is no longer the learner's candidate")
        return candidate.state, "learner", candidate.verdict

    def _read_draft(self, directory: Path) -> dict[str, torch.Tensor]:
        """A checkpoint that fits the served draft's shapes and vocabulary. Raises `CheckpointError`."""
        model, config = self._kind.load(directory)
        for key in ("eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "hidden_size", "vocab_size"):
            if config.get(key) != self._model_config.get(key):
                raise BridgeError(f"{directory}: {key} is {config.get(key)}, the engine serves {self._model_config.get(key)}")
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def control(self, request: dict[str, Any]) -> dict[str, Any]:
        """``{"action": "pause" | "resume" | "status"}`` or ``{"action": "save", "directory": DIR}``; the status after it."""
        action = request.get("action")
        if action == "pause":
            self.learner.paused = True
        elif action == "resume":
            self.learner.paused = False
            self._learning_stopped = None
        elif action == "save":
            checkpoint.save(Path(request["directory"]), self._served_state, self._model_config)
        elif action != "status":
            raise ValueError(f"unknown action {action!r}, known: pause, resume, save, status")
        self._write_status(force=True)
        return self.status()

    # -- status ----------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """All that `/specdraft/status` shows."""
        counters, progress, verdict = self.tap.collector.counters, self.learner.progress, self.learner.verdict
        return {
            "unix_time_s": time.time(),
            "policy_version": self.policy_version,
            "draft_version": self.draft_version,
            "draft_digest": self._draft_digest,
            "target_digest": self._target_digest,
            "draft_type": self._kind.name,
            "num_speculative_tokens": self.config.num_speculative_tokens,
            "accepted_length": self._recent_accepted_length(),
            "accepted_per_position": counters.per_position,
            "counters": {
                "draft_steps": counters.draft_steps,
                "drafted_tokens": counters.drafted_tokens,
                "accepted_tokens": counters.accepted_tokens,
                "generated_tokens": counters.generated_tokens,
                "engine_steps": self._engine_steps,
                "engine_step_seconds": round(self._engine_step_seconds, 6),
            },
            "idle_state": self.idle.state.value,
            "learning": {
                "enabled": self.config.learn,
                "paused": self.learner.paused,
                "seconds": round(progress.seconds, 3),
                "tokens": progress.tokens,
                "steps": progress.steps,
                "slices": progress.slices,
                "skipped_steps": progress.skipped_steps,
                "gradient_norm": progress.gradient_norm,
                "vocabulary_changes": progress.vocabulary_changes,
                "slice_ms_p95": self.learner.piece_ms_p95(),
                "loss": progress.loss,
                "held_out_served": verdict.served if verdict else None,
                "held_out_candidate": verdict.candidate if verdict else None,
                "waiting_for": self._learning_stopped or self.learner.waiting_for(),
                "candidate_ready": self.learner.candidate is not None,
                "candidate_digest": self.learner.candidate.digest if self.learner.candidate else None,
            },
            "replay": {
                "samples": self.replay.num_train,
                "held_out_samples": self.replay.num_held_out,
                "bytes": self.replay.nbytes,
                "limit_bytes": self.replay.limit_bytes,
                "added": self.replay.added,
                "dropped": dict(self.replay.dropped + self.tap.collector.dropped),
            },
            "publishes": self._publishes,
            "last_error": self._last_error,
        }

    def _recent_accepted_length(self, window_steps: int = 500) -> float | None:
        """Over about the last `window_steps` draft steps of this draft version."""
        counters = self.tap.collector.counters
        now = (counters.draft_steps, counters.accepted_tokens)
        if not self._window or now[0] > self._window[-1][0]:
            self._window.append(now)
        while len(self._window) > 2 and now[0] - self._window[1][0] >= window_steps:
            self._window.pop(0)
        steps, accepted = now[0] - self._window[0][0], now[1] - self._window[0][1]
        return 1 + accepted / steps if steps else None

    def _write_status(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now < self._status_due:
            return
        try:
            status.write(self._state_dir, self.status())
        except OSError as error:
            logger.warning("cannot write the status file: %s", error)
        self._status_due = now + STATUS_INTERVAL_S
