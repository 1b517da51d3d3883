"""Training-time test for EAGLE-3 (arXiv 2503.01840, section 3.2), cut into pieces that fit between two requests.

One microbatch is a chain of short segments: the trunk (keys and values of pass 1 for all rows), then per pass the decoder
layer and the head for the anchors only. Segments are joined by detached leaves, and the backward runs segment by segment in
reverse, so the caller may stop after any of them without holding one long autograd graph. Restricting queries, MLP and head
to the anchors is exact: with one layer, pass 1's keys and values depend on no attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from specdraft_kernels.branch_attention import branch_attention

from trainer_bridge.draft.eagle3.model import Eagle3Draft
from trainer_bridge.draft.interface import Acceptance, FrozenTarget, Objective
from trainer_bridge.draft.packing import PackedBatch


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


@dataclass
class _Pass:
    """One pass's segment: what its backward starts from."""

    output: torch.Tensor
    hidden: torch.Tensor
    own: tuple[torch.Tensor, torch.Tensor] | None
    own_leaves: tuple[torch.Tensor, torch.Tensor] | None

    def backward(self) -> None:
        outputs, gradients = [self.output], [self.hidden.grad]
        if self.own is not None and self.own_leaves is not None:
            for tensor, leaf in zip(self.own, self.own_leaves, strict=True):
                if leaf.grad is not None:
                    outputs.append(tensor)
                    gradients.append(leaf.grad)
        torch.autograd.backward(outputs, gradients)


class TrainingTimeTest(Objective):
    """Soft cross-entropy against the target's distribution over the draft vocabulary, `passes` passes deep."""

    def __init__(self, model: Eagle3Draft, target: FrozenTarget, *, passes: int, pass_decay: float = 0.8) -> None:
        """`pass_decay`: pass d counts ``pass_decay ** (d - 1)``."""
        self.model, self.target = model, target
        self.passes, self.pass_decay = passes, pass_decay
        self._loss = 0.0
        self.vocabulary_changed()

    def vocabulary_changed(self) -> None:
        self._kept = self.model.kept()
        self._teacher_head = self.target.head[self._kept].to(self.model.fc.weight.dtype)

    def take_loss(self) -> float:
        loss, self._loss = self._loss, 0.0
        return loss

    def pieces(self, batch: PackedBatch, normalisers: torch.Tensor) -> Iterator[None]:
        with torch.no_grad():
            teacher, teacher_row = self._teacher(batch)
        yield
        with torch.enable_grad():
            hidden0, keys, values = self._trunk(batch)
        trunk = (_leaf(keys), _leaf(values))
        hidden = _leaf(hidden0[batch.anchors])
        start = hidden
        visible = self._visible(batch)
        yield
        segments: list[_Pass] = []
        loss = 0.0
        for d in range(self.passes):
            with torch.enable_grad():
                output, own = self._layer(batch, d, hidden, trunk, [s.own_leaves for s in segments[1:]], visible)
            hidden = _leaf(output)
            leaves = (_leaf(own[0]), _leaf(own[1])) if own else None
            segments.append(_Pass(output, hidden, own, leaves))
            yield
            scale = self.pass_decay**d / max(1, int(normalisers[d]))
            loss += self._head(hidden, teacher, teacher_row[:, d], batch.valid[:, d], scale)
            yield
        while segments:
            segments.pop().backward()
            yield
        assert start.grad is not None
        scattered = torch.zeros_like(hidden0)
        scattered[batch.anchors] = start.grad
        torch.autograd.backward([hidden0, keys, values], [scattered, trunk[0].grad, trunk[1].grad])
        # Counted at the end only: an iterator that is closed early leaves no loss behind.
        self._loss += loss
        yield

    @torch.no_grad()
    def measure(self, batch: PackedBatch) -> Acceptance:
        hidden0, keys, values = self._trunk(batch)
        hidden, visible = hidden0[batch.anchors], self._visible(batch)
        running = torch.ones(batch.anchors.shape[0], dtype=torch.bool)
        accepted = torch.ones(batch.anchors.shape[0], dtype=torch.float64)
        branch: list[tuple[torch.Tensor, torch.Tensor]] = []
        hits = []
        for d in range(self.passes):
            hidden, own = self._layer(batch, d, hidden, (keys, values), branch, visible)
            if own is not None:
                branch.append(own)
            proposed = self._kept[self.model.logits(hidden).argmax(-1)]
            running = running & batch.valid[:, d] & (proposed == batch.future_ids[batch.anchors, d + 1])
            accepted += running
            hits.append(running.sum())
        owner = batch.document[batch.anchors]
        sums = torch.zeros(batch.num_documents, dtype=torch.float64).index_add_(0, owner, accepted)
        return Acceptance(accepted_sum=sums, anchors=torch.bincount(owner, minlength=batch.num_documents), hits=torch.stack(hits))

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.target.embedding.detach()[ids].to(self.model.fc.weight.dtype)

    def _visible(self, batch: PackedBatch) -> torch.Tensor:
        """``[A, N]``: an anchor sees the rows of its own document up to itself."""
        rows = torch.arange(batch.document.shape[0])
        same = batch.document[batch.anchors][:, None] == batch.document[None, :]
        return same & (rows[None, :] <= batch.anchors[:, None])

    def _teacher(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Teacher distributions ``[U, draft_vocab]`` of the rows that label something, and each label's row ``[A, D]``."""
        wanted = batch.anchors[:, None] + 1 + torch.arange(self.passes)[None, :]
        wanted = torch.where(batch.valid, wanted, batch.anchors[:, None])
        rows, index = wanted.unique(return_inverse=True)
        return (batch.final[rows] @ self._teacher_head.T).softmax(-1), index

    def _trunk(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # Taps and embedding may belong to a policy in training: the draft's loss must not reach it.
        hidden0 = self.model.combine(batch.taps.detach())
        x = self.model.layer_input(self._embed(batch.future_ids[:, 0]), hidden0)
        keys, values = self.model.keys_values(x, batch.positions)
        return hidden0, keys, values

    def _layer(
        self,
        batch: PackedBatch,
        d: int,
        hidden: torch.Tensor,
        trunk: tuple[torch.Tensor, torch.Tensor],
        branch: list,
        visible: torch.Tensor,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """The decoder layer for the anchors in pass ``d`` (0-based), and its own keys and values (None in pass 0)."""
        x = self.model.layer_input(self._embed(batch.future_ids[batch.anchors, d]), hidden)
        positions = batch.positions[batch.anchors] + d
        own = self.model.keys_values(x, positions) if d else None
        pairs = [*branch, own] if own else []
        empty = trunk[0].new_empty(hidden.shape[0], 0, *trunk[0].shape[1:])
        k_branch = torch.stack([k for k, _ in pairs], 1) if pairs else empty
        v_branch = torch.stack([v for _, v in pairs], 1) if pairs else empty
        q = self.model.queries(x, positions)
        return self.model.finish_layer(hidden, branch_attention(q, *trunk, k_branch, v_branch, visible)), own

    def _head(self, hidden: torch.Tensor, teacher: torch.Tensor, row: torch.Tensor, valid: torch.Tensor, scale: float) -> float:
        """Loss of one pass, and its gradient into `hidden` and the head: d loss / d logits = scale * (q - p)."""
        rows = valid.nonzero().squeeze(1)
        if rows.numel() == 0:
            hidden.grad = torch.zeros_like(hidden)
            return 0.0
        with torch.enable_grad():
            logits = self.model.logits(hidden[rows])
        with torch.no_grad():
            p, scores = teacher[row[rows]], logits.detach()
            normaliser = scores.logsumexp(-1, keepdim=True)
            loss = scale * float((normaliser.squeeze(1) - (p * scores).sum(-1)).sum())
            gradient = (scores - normaliser).exp_().sub_(p).mul_(scale)
        torch.autograd.backward(logits, gradient)
        return loss
