"""The draft's side of co-training: loss, gradients and steps of the draft, on the ranks of the policy's last stage.

Hidden states, embeddings and teacher come detached from the policy (arXiv 2609.07108, section 3), the draft has an optimizer, a
learning rate and a gradient norm of its own, and the loss of every pass is divided by its labels over all microbatches and all data
and context parallel ranks, so that each label counts once whatever the layout.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from specdraft_kernels.zigzag_ring import Exchange
from torch import nn

from trainer_bridge.cotrain.microbatch import Microbatch, Share, share_of, token_counts
from trainer_bridge.cotrain.options import CoTrainOptions
from trainer_bridge.draft import products
from trainer_bridge.draft.interface import DraftType, FrozenTarget, Objective
from trainer_bridge.draft.layers import DraftModel
from trainer_bridge.draft.packing import AnchorSampling
from trainer_bridge.errors import CheckpointError, TapOrderError


@dataclass(frozen=True, kw_only=True)
class DraftGroups:
    """Groups of the draft's stage. None: of one rank."""

    context: dist.ProcessGroup | None = None
    """Ranks that split sequences."""
    replicas: dist.ProcessGroup | None = None
    """Data and context parallel ranks together: over them gradients and label counts are summed."""
    data_rank: int = 0
    """Which of the data parallel ranks this is: they draw other anchors."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step of the draft came to."""

    loss: float
    """Nats per label, summed over passes; over all ranks."""
    gradient_norm: float
    """Before the clip."""
    labels: list[int]
    """Per pass, over all ranks."""
    skipped: bool
    """Loss or gradient was not finite: no weight was changed."""
    seconds: float
    """Time that this rank spent on the draft."""


@dataclass
class _Step:
    """Between `begin_step` and `finish_step`."""

    shares: list[Share]
    objective: Objective
    labels: torch.Tensor
    narrow: products.Narrow
    next_one: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)


class DraftCoTrainer:
    """Owns the draft, its optimizer and its place in the run. One on every rank of the draft's stage; all make the same calls."""

    def __init__(
        self,
        kind: DraftType,
        model: nn.Module,
        options: CoTrainOptions | None = None,
        groups: DraftGroups | None = None,
        *,
        product_dtype: torch.dtype | None = None,
    ) -> None:
        """`model`: the same on all ranks; its dtype (fp32 as a rule) is that of all its arithmetic, whatever the policy's is.
        `product_dtype`: of the factors of matrix products, see `trainer_bridge.draft.products`."""
        self.kind, self.model, self.options = kind, model, options or CoTrainOptions()
        self.groups = groups or DraftGroups()
        self.passes = self.options.passes or kind.default_tokens
        self.steps = 0
        self._product_dtype = product_dtype
        self._exchange = Exchange(self.groups.context) if self.groups.context is not None else None
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.options.learning_rate, betas=self.options.betas, weight_decay=self.options.weight_decay
        )
        self._step: _Step | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the draft's weights and arithmetic."""
        return next(self.model.parameters()).dtype

    def vocabulary(self) -> torch.Tensor | None:
        """Target ids whose head rows the next step needs: those that the draft may propose; None: no further ones than its own.

        All where the vocabulary is adapted: tokens of other data parallel ranks may come in.
        """
        if not isinstance(self.model, DraftModel):
            return None
        return torch.arange(self.model.vocab_size) if self._adapts() else self.model.kept()

    @torch.no_grad()
    def begin_step(self, microbatches: Sequence[Microbatch], target: FrozenTarget) -> list[int]:
        """Announce the microbatches of a step, in their order.

        Args:
            microbatches: of this data parallel rank; the same on all its context parallel ranks.
            target: the policy as it is during this step.

        Returns:
            Rows of hidden states that this rank has of each.
        """
        if self._step is not None:
            raise TapOrderError("a step of the draft has begun and was not finished")
        began = time.perf_counter()
        if self._adapts():
            self._adapt_vocabulary(microbatches, target)
        shares = [
            share_of(microbatch, self.passes, sampling=self._sampling(index), exchange=self._exchange)
            for index, microbatch in enumerate(microbatches)
        ]
        objective = self.kind.objective(self.model, _detached(target), passes=self.passes)
        labels = torch.stack([objective.counted(share.valid).sum(0) for share in shares]).sum(0)
        self._sum(labels)
        self.model.zero_grad(set_to_none=True)
        self._step = _Step(shares, objective, labels, products.Narrow(self._product_dtype))
        self._step.seconds += time.perf_counter() - began
        self._target = target
        return [share.rows for share in shares]

    def add(self, index: int, taps: torch.Tensor, final: torch.Tensor) -> None:
        """The draft's work on one microbatch: loss, and gradients into the draft.

        Args:
            index: of the microbatch; they come in order.
            taps: ``[rows, K * hidden]``, this rank's rows, in any floating dtype; tap layers side by side, ascending.
            final: ``[rows, hidden]``, after the policy's final norm.

        Raises:
            TapOrderError: it is not this microbatch's turn.
        """
        step = self._running()
        if index != step.next_one:
            raise TapOrderError(f"the draft was given microbatch {index}; it is the turn of microbatch {step.next_one}")
        began = time.perf_counter()
        step.next_one += 1
        share = step.shares[index]
        batch = share.batch(taps.detach().to(self.dtype), final.detach().to(self.dtype))
        if self.steps == 0 and index == 0 and self.kind.meet(self.model, _detached(self._target), batch):
            self._spread_weights()
        with step.narrow:
            for _ in step.objective.pieces(batch, step.labels):
                pass
        step.losses.append(step.objective.take_loss())
        step.seconds += time.perf_counter() - began

    def finish_step(self) -> StepResult:
        """Sum gradients over the ranks, clip them, and take the optimizer's step; what is not finite changes nothing.

        Raises `TapOrderError` when a microbatch is missing.
        """
        step = self._running()
        if step.next_one < len(step.shares):
            raise TapOrderError(f"the draft has seen {step.next_one} of {len(step.shares)} microbatches of this step")
        began = time.perf_counter()
        self._step = None
        parameters = list(self.model.parameters())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._sum(parameter.grad)
        loss = torch.tensor(sum(step.losses), dtype=torch.float64)
        self._sum(loss)
        norm = float(nn.utils.clip_grad_norm_(parameters, self.options.max_gradient_norm))
        skipped = not (math.isfinite(float(loss)) and math.isfinite(norm))
        if not skipped:
            for group in self._optimizer.param_groups:
                group["lr"] = self.options.learning_rate * min(1.0, (self.steps + 1) / max(1, self.options.warmup_steps))
            self._optimizer.step()
        self.steps += 1
        return StepResult(
            loss=float(loss), gradient_norm=norm, labels=step.labels.tolist(), skipped=skipped,
            seconds=step.seconds + time.perf_counter() - began,
        )  # fmt: skip

    def abort_step(self) -> None:
        """Forget a step that was begun: the optimizer takes none. A vocabulary that it began by adapting stays adapted."""
        self._step = None
        self.model.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to go on bitwise: put it into the policy's checkpoint."""
        return {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. Raises `CheckpointError` when it is of another draft; nothing is changed then."""
        own = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
        if own != found:
            different = sorted(name for name in own.keys() | found.keys() if own.get(name) != found.get(name))
            raise CheckpointError(
                f"the state is of another draft: {', '.join(different[:3])} differ; build it from the config it was saved with"
            )
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
        self.abort_step()

    def _running(self) -> _Step:
        if self._step is None:
            raise TapOrderError("no step of the draft has begun: call begin_step first")
        return self._step

    def _sampling(self, index: int) -> AnchorSampling:
        """Drawn from the place in the run alone, so that a resumed run draws the same."""
        place = (self.options.seed, self.steps, self.groups.data_rank, index)
        return AnchorSampling(
            share=self.options.anchor_share or self.kind.anchor_share,
            deep_share=self.options.deep_anchor_share,
            random=torch.Generator().manual_seed(zlib.crc32(repr(place).encode())),
        )

    def _adapts(self) -> bool:
        every = self.options.vocabulary_every_steps
        return every > 0 and self.steps % every == 0

    def _adapt_vocabulary(self, microbatches: Sequence[Microbatch], target: FrozenTarget) -> None:
        counts = token_counts(microbatches, target.head.shape[0])
        if self._exchange is not None and self._exchange.rank:
            # Context parallel ranks have seen the same tokens.
            counts.zero_()
        self._sum(counts)
        for name, rows in self.kind.adapt_vocabulary(self.model, _detached(target), counts).items():
            moments = self._optimizer.state.get(self.model.get_parameter(name), {})
            for key in ("exp_avg", "exp_avg_sq"):
                if key in moments:
                    moments[key][rows] = 0

    def _sum(self, tensor: torch.Tensor) -> None:
        if self.groups.replicas is not None:
            dist.all_reduce(tensor, group=self.groups.replicas)

    @torch.no_grad()
    def _spread_weights(self) -> None:
        """What a new draft took from its first samples, it took from those of one rank."""
        if self.groups.replicas is not None:
            for tensor in self.model.state_dict().values():
                dist.broadcast(tensor, group=self.groups.replicas, group_src=0)


def _detached(target: FrozenTarget) -> FrozenTarget:
    return FrozenTarget(embedding=target.embedding.detach(), head=target.head.detach())
