"""The learner: trains its own fp32 copy of the draft in pieces short enough to run between two requests.

It never touches a served tensor. `pieces` is one endless generator; whoever drives it may stop after any piece for as long as
it likes. Pieces are sized by measurement: the number of anchors per microbatch follows the slowest piece seen.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer_bridge.draft import checkpoint, products
from trainer_bridge.draft.interface import Acceptance, DraftType, FrozenTarget, Objective
from trainer_bridge.draft.packing import AnchorSampling, microbatches, pack
from trainer_bridge.errors import SampleError
from trainer_bridge.taps import TapSample
from vllm_specdraft.anchor_budget import AnchorBudget
from vllm_specdraft.config import EngineConfig
from vllm_specdraft.gate import MIN_SAMPLES, Gate, Patience, Verdict
from vllm_specdraft.learner_state import LearnerState, identity_of
from vllm_specdraft.replay import Replay
from vllm_specdraft.teachers import Teachers

MAX_ROWS = 1024
"""Rows per packed microbatch: bounds the trunk's piece."""
FIRST_SAMPLES = 8
"""Samples that a new draft is shown before its first step."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A draft that the gate let through, as it was when it was measured."""

    state: dict[str, torch.Tensor]
    digest: str
    verdict: Verdict


@dataclass(kw_only=True)
class Progress:
    """What the learner did since start."""

    seconds: float = 0.0
    """Time spent in pieces, in seconds."""
    tokens: int = 0
    """Anchors trained, each with all its passes."""
    steps: int = 0
    """Optimizer steps."""
    slices: int = 0
    loss: float | None = None
    """Mean over the last steps, nats per label summed over passes."""
    gradient_norm: float | None = None
    vocabulary_changes: int = 0
    """Draft tokens that were given to tokens the traffic uses."""
    skipped_steps: int = 0
    """Steps dropped because loss or gradient was not finite."""
    zero_gradient_steps: int = 0
    """Steps whose gradient was exactly zero: they train nothing, and say that something is wrong with the samples."""
    evaluations: int = 0
    """Measurements on held-out samples."""


class Learner:
    """Owns the trainable copy, the optimizer, the copy of the served draft, and the candidate for publishing."""

    def __init__(
        self,
        *,
        kind: DraftType,
        model_config: Mapping[str, Any],
        state: Mapping[str, torch.Tensor],
        target: FrozenTarget,
        replay: Replay,
        config: EngineConfig,
        resumed: LearnerState | None = None,
    ) -> None:
        """`state`: tensors of the served draft, checkpoint names; `resumed`: what an earlier process had learned."""
        self.config, self.replay = config, replay
        self.progress = Progress()
        self.paused = False
        self.candidate: Candidate | None = None
        self.verdict: Verdict | None = None
        self._kind, self._model_config = kind, model_config
        self._vocab_size = target.head.shape[0]
        self._model = self._copy(state)
        self._teachers = Teachers(config.policy_version, target)
        self._objectives: dict[tuple[int, int], Objective] = {}
        self._served_model = self.prepare_served(state)
        self._optimizer = self._new_optimizer()
        self._fresh_at = 0
        self.gate = Gate(min_gain=config.publish_min_gain)
        self._patience = Patience(evaluations=config.patience_evaluations)
        self._batch_samples = config.batch_samples or kind.batch_samples
        self._sampling = AnchorSampling(
            share=config.anchor_share or kind.anchor_share,
            deep_share=config.deep_anchor_share,
            random=torch.Generator().manual_seed(config.seed),
        )
        self._dtype = _product_dtype(config.learn_dtype)
        self._budget = AnchorBudget(config.slice_ms)
        self._losses: deque[float] = deque(maxlen=20)
        self._piece_ms: deque[float] = deque(maxlen=1000)
        self._pieces = self._endless()
        if resumed is not None:
            self._resume(resumed)

    def can_learn(self) -> bool:
        """Whether there is something to do."""
        return self.waiting_for() is None

    def resume(self) -> None:
        """Learn again, also where it had stopped to pay, and ask for no more gain than at first."""
        self.paused = False
        self._patience.renew()
        self.gate.reset()

    def waiting_for(self) -> str | None:
        """What keeps the learner from learning, in words; None when nothing does."""
        if self.paused:
            return "resume: paused over HTTP"
        if self.replay.num_train < self.config.min_samples:
            return f"samples: {self.replay.num_train} of {self.config.min_samples}"
        if self.replay.num_held_out < 2:
            return f"held-out samples: {self.replay.num_held_out} of 2 (a share of {self.config.held_out_share:g} of all prompts)"
        return self._patience.waiting_for(self.replay.added, self.replay.num_train)

    def publish_waits_for(self) -> str | None:
        """What keeps the gate from letting any draft through, in words; None when only the draft's quality does."""
        if self.replay.num_held_out >= MIN_SAMPLES:
            return None
        return f"held-out samples: {self.replay.num_held_out} of {MIN_SAMPLES}; where they find no room, --replay-mb makes some"

    def run_piece(self) -> float:
        """Run one piece; its duration in ms. Call only when `can_learn`."""
        began = time.perf_counter()
        try:
            next(self._pieces)
        except BaseException:
            # A generator that raised is over: without a new one, learning could never be resumed.
            self._begin_anew()
            raise
        elapsed = time.perf_counter() - began
        self.progress.seconds += elapsed
        self.progress.slices += 1
        self._piece_ms.append(1e3 * elapsed)
        return 1e3 * elapsed

    def piece_ms_max(self) -> float | None:
        """Longest of the last 1000 pieces, in ms."""
        return max(self._piece_ms, default=None)

    def piece_ms_p95(self) -> float | None:
        """95th percentile of the last 1000 pieces' durations, in ms."""
        if not self._piece_ms:
            return None
        return sorted(self._piece_ms)[math.ceil(0.95 * len(self._piece_ms)) - 1]

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of the trainable draft as it is now, checkpoint names."""
        return {name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}

    def export(self, *, draft_version: int, served_digest: str, rollbacks: int) -> LearnerState:
        """A copy of all that a restart needs; the arguments are the engine's own account of the served draft."""
        moments: dict[str, dict[str, torch.Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
        steps = 0
        for name, parameter in self._model.named_parameters():
            for key, found in self._optimizer.state.get(parameter, {}).items():
                if key in moments:
                    moments[key][name] = found.detach().clone()
                elif key == "step":
                    steps = int(found)
        return LearnerState(
            model=self.state(),
            first_moments=moments["exp_avg"],
            second_moments=moments["exp_avg_sq"],
            optimizer_steps=steps,
            progress=dict(vars(self.progress)),
            draft_version=draft_version,
            served_digest=served_digest,
            rollbacks=rollbacks,
            identity=identity_of(self._model_config),
        )

    def _resume(self, saved: LearnerState) -> None:
        checkpoint.load_state(self._model, saved.model, "learner state")
        self._objectives.clear()
        for name, parameter in self._model.named_parameters():
            if name in saved.first_moments:
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(saved.optimizer_steps)),
                    "exp_avg": saved.first_moments[name].clone(),
                    "exp_avg_sq": saved.second_moments[name].clone(),
                }
        known = vars(self.progress).keys()
        self.progress = Progress(**{key: value for key, value in saved.progress.items() if key in known})

    def prepare_served(self, state: Mapping[str, torch.Tensor]) -> nn.Module:
        """A copy of a draft that is about to be served. Raises `CheckpointError` for one that could not be served."""
        model = self._copy(state)
        # An objective looks at what shapes alone do not tell: a vocabulary that contradicts itself would end the engine.
        self._kind.objective(model, self._teachers.newest, passes=self.config.num_speculative_tokens)
        return model

    def served_changed(self, prepared: nn.Module) -> None:
        """The engine serves the `prepared` draft now: measure against it from here on. A pending candidate is dropped."""
        self._served_model = prepared
        self._objectives.clear()
        self.drop_candidate()
        self._patience.renew()

    def target_changed(self, version: int, target: FrozenTarget, *, keep: int) -> None:
        """Another policy serves. Samples of the newest `keep` policies stay, each with the teacher of its own; older ones go."""
        self._teachers.add(version, target, keep=keep)
        self.replay.expire(self._teachers.oldest)
        self._objectives.clear()
        self.drop_candidate()
        self._patience.renew()
        self.gate.reset()

    def replace_master(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from another draft: its weights, and an optimizer that knows nothing yet."""
        checkpoint.load_state(self._model, state, "draft")
        self._optimizer, self._fresh_at = self._new_optimizer(), self.progress.steps
        self._losses.clear()
        self._begin_anew()

    def check_sample(self, sample: TapSample) -> None:
        """Raise `SampleError` for a sample from outside that this learner could not learn from."""
        hidden = self._teachers.newest.head.shape[1]
        layers = self._kind.tap_layers(self._model_config)
        if not self._teachers.knows(sample.policy_version):
            raise SampleError(
                f"{sample.request_id}: of policy {sample.policy_version}, whose head is not here; "
                f"those of {self._teachers.versions} are"
            )
        if sample.tap_layers != layers or sample.final.shape[1] != hidden:
            raise SampleError(
                f"{sample.request_id}: taps of layers {sample.tap_layers}, {sample.final.shape[1]} wide; "
                f"the draft takes {layers}, {hidden} wide"
            )
        if int(sample.token_ids.max()) >= self._vocab_size or int(sample.token_ids.min()) < 0:
            raise SampleError(f"{sample.request_id}: token ids beyond the vocabulary of {self._vocab_size}")

    def _new_optimizer(self) -> torch.optim.Optimizer:
        config = self.config
        return torch.optim.AdamW(
            self._model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
        )

    def _begin_anew(self) -> None:
        """Leave the step that was under way; its gradients are dropped with it."""
        self._pieces = self._endless()
        self._objectives.clear()

    def _objective_for(self, model: nn.Module, version: int) -> Objective:
        """Trains or measures `model` on samples of one policy, with that policy's teacher."""
        key = (id(model), version)
        if key not in self._objectives:
            self._objectives[key] = self._kind.objective(
                model, self._teachers.of(version), passes=self.config.num_speculative_tokens
            )
        return self._objectives[key]

    def drop_candidate(self) -> None:
        """Forget the candidate: published, or refused. The next measurement may make a new one."""
        self.candidate = self.verdict = None

    def _copy(self, state: Mapping[str, torch.Tensor]) -> nn.Module:
        model = self._kind.build(self._model_config)
        checkpoint.load_state(model, state, "draft")
        return model

    def _endless(self) -> Iterator[None]:
        if self.progress.steps == 0:
            self._meet()
            yield
        while True:
            if self.progress.steps % self.config.evaluate_every_steps == 0:
                self._adapt_vocabulary()
                yield
            yield from self._step()
            if self.progress.steps % self.config.evaluate_every_steps == 0:
                yield from self._evaluate()

    def _meet(self) -> None:
        """Show a new draft its first samples."""
        samples = [sample for sample in self.replay.draw(FIRST_SAMPLES) if self._teachers.knows(sample.policy_version)]
        if samples:
            batch = pack(samples, self.config.num_speculative_tokens)
            self._kind.meet(self._model, self._teachers.of(samples[0].policy_version), batch)

    def _adapt_vocabulary(self) -> None:
        changed = self._kind.adapt_vocabulary(self._model, self._teachers.newest, self.replay.token_counts(self._vocab_size))
        if not changed:
            return
        for name, rows in changed.items():
            parameter = self._model.get_parameter(name)
            for key in ("exp_avg", "exp_avg_sq"):
                if key in (moments := self._optimizer.state.get(parameter, {})):
                    moments[key][rows] = 0
            self.progress.vocabulary_changes += rows.shape[0]
        self._objectives.clear()

    def _step(self) -> Iterator[None]:
        """One optimizer step."""
        samples = [sample for sample in self.replay.draw(self._batch_samples) if self._teachers.knows(sample.policy_version)]
        passes = self.config.num_speculative_tokens
        batches = [
            (self._objective_for(self._model, version), batch)
            for version, group in _by_policy(samples).items()
            for batch in microbatches(group, passes, self._budget.anchors, MAX_ROWS, self._sampling)
        ]
        normalisers = sum((objective.label_counts(batch) for objective, batch in batches), torch.zeros(passes, dtype=torch.int64))
        self._optimizer.zero_grad(set_to_none=True)
        # For this step: at its end the weights change.
        narrow = products.Narrow(self._dtype)
        for objective, batch in batches:
            slowest = 0.0
            pieces = objective.pieces(batch, normalisers)
            while True:
                began = time.perf_counter()
                with narrow:
                    over = next(pieces, StopIteration) is StopIteration
                if over:
                    break
                slowest = max(slowest, 1e3 * (time.perf_counter() - began))
                yield
            self._budget.measured(slowest, batch.anchors.shape[0])
            self.progress.tokens += batch.anchors.shape[0]
        loss = sum(objective.take_loss() for objective, _ in batches)
        norm = float(nn.utils.clip_grad_norm_(self._model.parameters(), self.config.max_gradient_norm))
        # A number that is none would be no JSON.
        self.progress.gradient_norm = norm if math.isfinite(norm) else None
        yield
        self.progress.zero_gradient_steps += norm == 0
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.progress.skipped_steps += 1
        else:
            for group in self._optimizer.param_groups:
                group["lr"] = self.config.learning_rate * min(
                    1.0, (self.progress.steps - self._fresh_at + 1) / max(1, self.config.warmup_steps)
                )
            self._optimizer.step()
            self._losses.append(loss)
            self.progress.loss = sum(self._losses) / len(self._losses)
        self.progress.steps += 1
        yield

    def _evaluate(self) -> Iterator[None]:
        """Measure the trainable and the served draft on the same held-out samples; let the gate decide."""
        served, pairs = self._served_model, []
        for sample in self.replay.held_out(self.config.evaluate_samples):
            if not self._teachers.knows(sample.policy_version):
                # Its policy went while we measured.
                continue
            # Sample by sample: parts of one answer are not independent, so the gate must not count them as samples.
            parts: list[tuple[Acceptance, Acceptance]] = []
            # One measurement is one piece with all its passes, so it gets fewer anchors than a training piece.
            anchors = max(8, self._budget.anchors // 3)
            for batch in microbatches([sample], self.config.num_speculative_tokens, anchors, MAX_ROWS):
                before = self._objective_for(served, sample.policy_version).measure(batch)
                yield
                parts.append((before, self._objective_for(self._model, sample.policy_version).measure(batch)))
                yield
            pairs.append((_together([p[0] for p in parts]), _together([p[1] for p in parts])))
        if not pairs or served is not self._served_model:
            # Another draft is served by now: what was measured against the old one is void.
            return
        verdict = self.gate.decide([p[0] for p in pairs], [p[1] for p in pairs])
        self.verdict = verdict
        self.progress.evaluations += 1
        self._patience.judged(verdict, self.replay.added)
        if verdict.publish:
            candidate = self.state()
            yield
            digest = checkpoint.digest_of(candidate)
            if served is self._served_model:
                self.candidate = Candidate(state=candidate, digest=digest, verdict=verdict)
        yield


def _product_dtype(learn_dtype: str) -> torch.dtype | None:
    """Of the products' factors; None: as they are."""
    return products.fastest() if learn_dtype == "auto" else {"float32": None, "bfloat16": torch.bfloat16}[learn_dtype]


def _by_policy(samples: Sequence[TapSample]) -> dict[int, list[TapSample]]:
    """Samples by their policy: one microbatch has one teacher."""
    groups: dict[int, list[TapSample]] = {}
    for sample in samples:
        groups.setdefault(sample.policy_version, []).append(sample)
    return groups


def _together(parts: Sequence[Acceptance]) -> Acceptance:
    """One sample's acceptance from that of its parts."""
    return Acceptance(
        accepted_sum=torch.stack([part.accepted_sum.sum() for part in parts]).sum()[None],
        anchors=torch.stack([part.anchors.sum() for part in parts]).sum()[None],
        hits=torch.stack([part.hits for part in parts]).sum(0),
    )
