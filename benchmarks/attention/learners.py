"""The engine's learner against the plain way, on the same samples and objective; and with fewer anchors in the later passes."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention.padded import PaddedBatch, loss_of
from trainer_bridge.draft import checkpoint, products, registry
from trainer_bridge.draft.packing import AnchorSampling, PackedBatch, pack
from trainer_bridge.taps import TapSample
from vllm_specdraft import drafts
from vllm_specdraft.config import EngineConfig
from vllm_specdraft.learner import Learner
from vllm_specdraft.replay import Replay

PASSES, DECAY, PADDED_ROWS, STEPS = 3, 0.8, 8, 4
PARTS = ("packing", "loss on masked rows only")
"""Of the learner's way, each of which can be left out."""


@dataclass
class Speeds:
    """Trained tokens (anchors) per second, one number per round."""

    padded: list[float] = field(default_factory=list)
    learner: list[float] = field(default_factory=list)
    fp32: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)

    def ratio(self, of: str, to: str) -> float:
        """Median over the rounds of one speed over another of the same round."""
        return statistics.median(a / b for a, b in zip(getattr(self, of), getattr(self, to), strict=True))


class Learners:
    """A draft, samples that the target made, and ways to train the one on the others."""

    def __init__(self, target: Path, draft: Path, samples: Sequence[TapSample], *, held_out: int) -> None:
        """The last `held_out` samples are never trained on."""
        config, weights = drafts.read_target(target)
        self.target = drafts.frozen_of(target, config, weights)
        self._config = checkpoint.read_config(draft)
        self._kind = registry.of_config(self._config)
        self._draft = draft
        self.samples, self.held_out = list(samples[:-held_out]), list(samples[-held_out:])

    def largest_difference(self) -> float:
        """Largest relative difference of a gradient between the two ways, on one padded batch, all in fp32."""
        model, _ = self._kind.load(self._draft)
        loss_of(model, self.target, PaddedBatch.of(self.samples[:PADDED_ROWS]), passes=PASSES, pass_decay=DECAY).backward()
        pairs = zip(model.parameters(), self._gradients(None), strict=True)
        return max(float((parameter.grad - b).abs().max() / parameter.grad.abs().max()) for parameter, b in pairs)

    def least_cosine(self, dtype: torch.dtype) -> float:
        """Least cosine of a gradient with the same in fp32, where products are taken in `dtype`."""
        pairs = zip(self._gradients(None), self._gradients(dtype), strict=True)
        return min(float(torch.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0)) for a, b in pairs)

    def _gradients(self, dtype: torch.dtype | None) -> list[torch.Tensor]:
        model, _ = self._kind.load(self._draft)
        batch = pack(self.samples[:PADDED_ROWS], PASSES)
        with products.Narrow(dtype):
            for _ in self._kind.objective(model, self.target, passes=PASSES).pieces(batch, batch.label_counts()):
                pass
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    def gains(self) -> dict[str, float]:
        """By part of the learner's way, how much longer the same samples take without it, in fp32."""
        part = self.samples[:PADDED_ROWS]
        sampling = AnchorSampling(deep_share=0.25, random=torch.Generator().manual_seed(0))
        ways = {
            "all": [pack(part, PASSES)],
            **{without: _batches_without(without, part) for without in PARTS},
            "sampled anchors": [pack(part, PASSES, sampling=sampling)],
        }
        seconds = {name: min(self._seconds(batches) for _ in range(3)) for name, batches in ways.items()}
        return {
            name: seconds["all"] / taken if name == "sampled anchors" else taken / seconds["all"]
            for name, taken in seconds.items()
            if name != "all"
        }

    def _seconds(self, batches: Sequence[PackedBatch]) -> float:
        model, _ = self._kind.load(self._draft)
        objective = self._kind.objective(model, self.target, passes=PASSES)
        normalisers = torch.stack([batch.label_counts() for batch in batches]).sum(0)
        began = time.perf_counter()
        for batch in batches:
            for _ in objective.pieces(batch, normalisers):
                pass
        return time.perf_counter() - began

    def padded_tokens_per_s(self) -> float:
        """The plain way: padded rows, dense scores."""
        model, _ = self._kind.load(self._draft)
        began = time.perf_counter()
        tokens = sum(itertools.islice(self._padded_steps(model), STEPS // 2))
        return tokens / (time.perf_counter() - began)

    def _padded_steps(self, model: torch.nn.Module) -> Iterator[int]:
        """Train the plain way; yields how many tokens each step trained."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
        for step in itertools.count():
            part = [self.samples[(PADDED_ROWS * step + i) % len(self.samples)] for i in range(PADDED_ROWS)]
            optimizer.zero_grad()
            loss_of(model, self.target, PaddedBatch.of(part), passes=PASSES, pass_decay=DECAY).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            yield pack(part, PASSES).anchors.shape[0]

    def learner(self, **settings: Any) -> Learner:
        """A learner as the engine makes it, on the training samples."""
        replay = Replay(limit_bytes=1 << 30, held_out_share=1e-9, seed=0)
        for sample in self.samples:
            replay.add(sample)
        model, _ = self._kind.load(self._draft)
        config = EngineConfig(
            draft_dir=str(self._draft), state_dir="", num_speculative_tokens=PASSES, evaluate_every_steps=1 << 40, **settings
        )
        return Learner(
            kind=self._kind, model_config=self._config, state=model.state_dict(), target=self.target, replay=replay, config=config
        )

    def learner_tokens_per_s(self, **settings: Any) -> float:
        """The engine's learner, after its budget of anchors has settled."""
        learner = self.learner(**settings)
        self._steps(learner, STEPS)
        tokens, seconds = learner.progress.tokens, learner.progress.seconds
        self._steps(learner, 2 * STEPS)
        return (learner.progress.tokens - tokens) / (learner.progress.seconds - seconds)

    def accepted_after(self, seconds: float, **settings: Any) -> float:
        """Accepted length on the held-out samples after so many seconds of learning."""
        learner = self.learner(**settings)
        while learner.progress.seconds < seconds:
            learner.run_piece()
        model, _ = self._kind.load(self._draft)
        checkpoint.load_state(model, learner.state(), "draft")
        return self._accepted(model)

    def accepted_after_padded(self, seconds: float) -> float:
        """The same of the plain way."""
        model, _ = self._kind.load(self._draft)
        ends = time.perf_counter() + seconds
        for _ in self._padded_steps(model):
            if time.perf_counter() >= ends:
                break
        return self._accepted(model)

    def accepted_after_without(self, part: str, seconds: float) -> float:
        """The same of the learner's way without one of `PARTS`."""
        model, _ = self._kind.load(self._draft)
        objective = self._kind.objective(model, self.target, passes=PASSES)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
        draw, count = random.Random(0), self._kind.batch_samples
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            batches = _batches_without(part, draw.sample(self.samples, count))
            normalisers = torch.stack([objective.label_counts(batch) for batch in batches]).sum(0)
            optimizer.zero_grad()
            with products.Narrow(products.fastest()):
                for batch in batches:
                    for _ in objective.pieces(batch, normalisers):
                        pass
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return self._accepted(model)

    def _accepted(self, model: torch.nn.Module) -> float:
        return self._kind.objective(model, self.target, passes=PASSES).measure(pack(self.held_out, PASSES)).length

    @staticmethod
    def _steps(learner: Learner, count: int) -> None:
        until = learner.progress.steps + count
        while learner.progress.steps < until:
            learner.run_piece()


def _batches_without(part: str, samples: Sequence[TapSample]) -> list[PackedBatch]:
    """Microbatches of the samples without one of `PARTS`."""
    if part == "packing":
        return [pack([sample], PASSES) for sample in samples]
    # Labels on every row, prompts included; the tokens that count stay those of the answers.
    return [pack([dataclasses.replace(sample, loss_mask=torch.ones_like(sample.loss_mask)) for sample in samples], PASSES)]
