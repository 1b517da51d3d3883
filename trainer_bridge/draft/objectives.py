"""What objectives over a reduced draft vocabulary share: the teacher, segments of a backward, and the account of a measurement."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

import torch

from trainer_bridge.draft.interface import Acceptance, FrozenTarget, Objective
from trainer_bridge.draft.layers import DraftModel
from trainer_bridge.draft.packing import PackedBatch

Model = TypeVar("Model", bound=DraftModel)


def backward(segments: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Backward of what segments gave, each with the gradient that its leaf collected; None: nothing reached it."""
    reached = [(output, gradient) for output, gradient in segments if gradient is not None]
    torch.autograd.backward([output for output, _ in reached], [gradient for _, gradient in reached])


class DraftObjective(Objective, Generic[Model]):
    """Soft cross-entropy against the target's distribution over the draft vocabulary."""

    def __init__(self, model: Model, target: FrozenTarget, *, passes: int) -> None:
        """`passes`: proposed tokens."""
        self.model, self.target, self.passes = model, target, passes
        self._loss = 0.0
        self.vocabulary_changed()

    def vocabulary_changed(self) -> None:
        self._kept = self.model.kept()
        self._teacher_head = self.target.head[self._kept].to(self.model.lm_head.weight.dtype)

    def take_loss(self) -> float:
        loss, self._loss = self._loss, 0.0
        return loss

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        # It may belong to a policy in training: the draft's loss must not reach it.
        return self.target.embedding.detach()[ids].to(self.model.lm_head.weight.dtype)

    @torch.no_grad()
    def _teacher(self, batch: PackedBatch, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Teacher logits ``[U, draft_vocab]`` of the rows that label something, and each label's row among them ``[A, D]``."""
        rows, index = torch.where(valid, batch.teachers(), batch.anchors[:, None]).unique(return_inverse=True)
        return batch.final[rows] @ self._teacher_head.T, index

    @staticmethod
    def _acceptance(batch: PackedBatch, accepted: torch.Tensor, hits: torch.Tensor) -> Acceptance:
        """Of `accepted` ``[A]`` fp64, each anchor's tokens with the bonus token, and `hits` ``[D]``."""
        owner = batch.document[batch.anchors]
        sums = torch.zeros(batch.num_documents, dtype=torch.float64).index_add_(0, owner, accepted)
        return Acceptance(accepted_sum=sums, anchors=torch.bincount(owner, minlength=batch.num_documents), hits=hits)
