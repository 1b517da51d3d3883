"""Training-time test for EAGLE-3 (arXiv 2503.01840, section 3.2), cut into pieces that fit between two requests.

One microbatch is a chain of short segments: the trunk (keys and values of pass 1 for all rows), then per pass the decoder
layer and the head for the anchors only. Segments are joined by detached leaves, and the backward runs segment by segment in
reverse, so the caller may stop after any of them without holding one long autograd graph. Restricting queries, MLP and head
to the anchors is exact: with one layer, pass 1's keys and values depend on no attention. Each pass is restricted further, to the
anchors that still have a label in it or after it: passes after the first depend on their own anchor only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from specdraft_kernels.distill_loss import TeacherLogits, distill_loss

from trainer_bridge.draft import products
from trainer_bridge.draft.eagle3.model import Eagle3Draft
from trainer_bridge.draft.interface import Acceptance, FrozenTarget
from trainer_bridge.draft.objectives import DraftObjective, backward
from trainer_bridge.draft.packing import PackedBatch
from trainer_bridge.draft.trunk import DraftTrunk, leaf_of


@dataclass
class _Pass:
    """One pass's segment: which anchors it was for, and what its backward starts from."""

    rows: torch.Tensor
    """``[R]`` indices of the batch's anchors, ascending."""
    output: torch.Tensor
    hidden: torch.Tensor
    own: tuple[torch.Tensor, torch.Tensor] | None
    own_leaves: tuple[torch.Tensor, torch.Tensor] | None

    def leaves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Its own keys and values as later passes see them."""
        assert self.own_leaves is not None
        return self.own_leaves

    def backward(self) -> None:
        segments = [(self.output, self.hidden.grad)]
        if self.own is not None and self.own_leaves is not None:
            segments += [(tensor, leaf.grad) for tensor, leaf in zip(self.own, self.own_leaves, strict=True)]
        backward(segments)


def _picked(tensor: torch.Tensor, of: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of `tensor`, which has a row for each of `of`, for `rows`, some of them in the same order."""
    return tensor if rows.shape == of.shape else tensor[torch.searchsorted(of, rows)]


class TrainingTimeTest(DraftObjective[Eagle3Draft]):
    """Soft cross-entropy against the target's distribution over the draft vocabulary, `passes` passes deep."""

    def __init__(self, model: Eagle3Draft, target: FrozenTarget, *, passes: int, pass_decay: float = 0.8) -> None:
        """`pass_decay`: pass d counts ``pass_decay ** (d - 1)``."""
        super().__init__(model, target, passes=passes)
        self.pass_decay = pass_decay

    def pieces(self, batch: PackedBatch, normalisers: torch.Tensor) -> Iterator[None]:
        teacher, teacher_row = self._teacher(batch, batch.valid)
        yield
        with torch.enable_grad():
            hidden0, trunk = self._trunk(batch)
        start = leaf_of(hidden0[batch.anchors])
        hidden, rows = start, torch.arange(batch.anchors.shape[0])
        yield
        segments: list[_Pass] = []
        loss = 0.0
        for d in range(self.passes):
            # What has no label from here on needs no pass from here on.
            alive = rows[batch.valid[rows, d:].any(1)]
            if alive.numel() == 0 and batch.split is None:
                break
            with torch.enable_grad():
                branch = [(_picked(k, s.rows, alive), _picked(v, s.rows, alive)) for s in segments[1:] for k, v in [s.leaves()]]
                output, own = self._layer(batch, d, alive, _picked(hidden, rows, alive), trunk, branch)
            hidden, rows = leaf_of(output), alive
            leaves = (leaf_of(own[0]), leaf_of(own[1])) if own else None
            segments.append(_Pass(rows, output, hidden, own, leaves))
            yield
            scale = self.pass_decay**d / max(1, int(normalisers[d]))
            loss += self._head(hidden, teacher, teacher_row[rows, d], batch.valid[rows, d], scale)
            yield
        while segments:
            segments.pop().backward()
            yield
        scattered = torch.zeros_like(hidden0)
        if start.grad is not None:
            scattered[batch.anchors] = start.grad
        backward([(hidden0, scattered), *trunk.segments()])
        # Counted at the end only: an iterator that is closed early leaves no loss behind.
        self._loss += loss
        yield

    @torch.no_grad()
    def measure(self, batch: PackedBatch) -> Acceptance:
        hidden0, trunk = self._trunk(batch)
        hidden, rows = hidden0[batch.anchors], torch.arange(batch.anchors.shape[0])
        accepted = torch.ones(batch.anchors.shape[0], dtype=torch.float64)
        branch: list[tuple[torch.Tensor, torch.Tensor]] = []
        hits = torch.zeros(self.passes, dtype=torch.int64)
        for d in range(self.passes):
            hidden, own = self._layer(batch, d, rows, hidden, trunk, branch)
            if own is not None:
                branch.append(own)
            proposed = self._kept[self.model.logits(hidden).argmax(-1)]
            good = batch.valid[rows, d] & (proposed == batch.future_ids[batch.anchors[rows], d + 1])
            # A draft that was rejected is not continued.
            rows, hidden = rows[good], hidden[good]
            branch = [(k[good], v[good]) for k, v in branch]
            accepted[rows] += 1
            hits[d] = rows.shape[0]
        return self._acceptance(batch, accepted, hits)

    def _trunk(self, batch: PackedBatch) -> tuple[torch.Tensor, DraftTrunk]:
        # Taps may belong to a policy in training: the draft's loss must not reach it.
        hidden0 = self.model.combine(batch.taps.detach())
        x = self.model.layer_input(self._embed(batch.future_ids[:, 0]), hidden0)
        return hidden0, batch.trunk(*self.model.keys_values(x, batch.positions))

    def _layer(
        self,
        batch: PackedBatch,
        d: int,
        rows: torch.Tensor,
        hidden: torch.Tensor,
        trunk: DraftTrunk,
        branch: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """The decoder layer in pass ``d`` (0-based) for the anchors `rows`, and its own keys and values (None in pass 0)."""
        anchors = batch.anchors[rows]
        x = self.model.layer_input(self._embed(batch.future_ids[anchors, d]), hidden)
        positions = batch.positions[anchors] + d
        own = self.model.keys_values(x, positions) if d else None
        pairs = [*branch, own] if own else []
        empty = hidden.new_empty(hidden.shape[0], 0, self.model.kv_heads, self.model.head_dim)
        k_branch = torch.stack([k for k, _ in pairs], 1) if pairs else empty
        v_branch = torch.stack([v for _, v in pairs], 1) if pairs else empty
        q = self.model.queries(x, positions)
        attended, _ = trunk.branch_attention(q, k_branch, v_branch, anchors=anchors)
        return self.model.finish_layer(hidden, attended), own

    def _head(self, hidden: torch.Tensor, teacher: torch.Tensor, row: torch.Tensor, valid: torch.Tensor, scale: float) -> float:
        """Loss of one pass, and its gradient into `hidden` and the head."""
        labelled = valid.nonzero().squeeze(1)
        with torch.enable_grad():
            loss = distill_loss(
                self.model.norm(hidden[labelled]),
                self.model.lm_head.weight,
                TeacherLogits(teacher, row=row[labelled]),
                normaliser=1 / scale,
                gradient_dtype=products.dtype(),
            )
            # Also where no label is left: a pass whose anchors have labels in later passes only.
            (loss + 0.0 * hidden.sum()).backward()
        return float(loss.detach())
