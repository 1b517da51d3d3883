"""DFlash's objective (arXiv 2602.06036, section 4), cut into pieces that fit between two requests.

One microbatch: the trunk's keys and values of every layer, then the layers for the blocks of the anchors alone, then head and loss.
Segments are joined by detached leaves and the backward runs them in reverse, as with EAGLE-3. An anchor of the packing, row i whose
next token was generated, is the block at position p = i + 1: its trunk are rows 0..i, slot 0 is token i + 1, and slot j, whose
label is that of pass j, proposes token i + 1 + j. A slot after a hole in the answer has no label: the engine would never get there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from specdraft_kernels.distill_loss import TeacherLogits, distill_loss

from trainer_bridge.draft import products
from trainer_bridge.draft.dflash.model import DFlashDraft, Layer
from trainer_bridge.draft.interface import Acceptance, FrozenTarget
from trainer_bridge.draft.objectives import DraftObjective, backward
from trainer_bridge.draft.packing import PackedBatch
from trainer_bridge.draft.trunk import DraftTrunk, leaf_of


@dataclass
class _Blocks:
    """The anchors' blocks: what they are, and what they see."""

    document: torch.Tensor
    """``[A]``"""
    prefix: torch.Tensor
    """``[A]`` trunk rows that a block sees, of its own document."""
    positions: torch.Tensor
    """``[A * W]``"""
    width: int


class BlockObjective(DraftObjective[DFlashDraft]):
    """Soft cross-entropy of every slot against the target's distribution over the draft vocabulary."""

    def __init__(self, model: DFlashDraft, target: FrozenTarget, *, passes: int, slot_decay: float = 0.8) -> None:
        """`passes`: proposed tokens, slots 1..passes. `slot_decay`: slot j counts ``slot_decay ** (j - 1)``."""
        super().__init__(model, target, passes=passes)
        self.slot_decay = slot_decay

    def pieces(self, batch: PackedBatch, normalisers: torch.Tensor) -> Iterator[None]:
        valid = self.counted(batch.valid)
        teacher, teacher_row = self._teacher(batch, valid)
        yield
        with torch.enable_grad():
            trunk = self._trunk(batch)
            trunks = [self._layer_trunk(layer, trunk, batch) for layer in self.model.each_layer()]
        yield
        blocks = self._blocks(batch)
        with torch.enable_grad():
            inputs = [self._inputs(batch)]
        hidden, outputs = [leaf_of(inputs[0])], list[torch.Tensor]()
        for layer, own in zip(self.model.each_layer(), trunks, strict=True):
            with torch.enable_grad():
                outputs.append(self._layer(layer, hidden[-1], own, blocks))
            hidden.append(leaf_of(outputs[-1]))
            yield
        weights = self.slot_decay ** torch.arange(self.passes, dtype=torch.float64)
        loss = self._head(hidden[-1], teacher, teacher_row, valid, weights, float((weights * normalisers).sum()))
        yield
        for output, above in zip(reversed(outputs), reversed(hidden[1:]), strict=True):
            torch.autograd.backward([output], [above.grad])
            yield
        backward([(inputs[0], hidden[0].grad), *(segment for own in trunks for segment in own.segments())])
        # Counted at the end only: an iterator that is closed early leaves no loss behind.
        self._loss += loss
        yield

    def counted(self, valid: torch.Tensor) -> torch.Tensor:
        # Slots that have a label, and all slots before them too.
        return valid.long().cumprod(1).bool()

    @torch.no_grad()
    def measure(self, batch: PackedBatch) -> Acceptance:
        trunk, blocks = self._trunk(batch), self._blocks(batch)
        hidden = self._inputs(batch)
        for layer in self.model.each_layer():
            hidden = self._layer(layer, hidden, self._layer_trunk(layer, trunk, batch), blocks)
        proposed = self._kept[self.model.logits(hidden).argmax(-1)].view(-1, self.passes)
        hit = (batch.valid & (proposed == batch.future_ids[batch.anchors, 1:])).long().cumprod(1)
        return self._acceptance(batch, 1 + hit.sum(1).double(), hit.sum(0))

    def _blocks(self, batch: PackedBatch) -> _Blocks:
        width = self.passes + 1
        document = batch.document[batch.anchors]
        first = batch.positions[batch.anchors] + 1
        return _Blocks(
            document=document,
            prefix=batch.prefix(),
            positions=(first[:, None] + torch.arange(width)).flatten(),
            width=width,
        )

    def _inputs(self, batch: PackedBatch) -> torch.Tensor:
        """``[A * W, hidden]``"""
        return self.model.slots(self._embed(batch.future_ids[batch.anchors, 0]), self.passes + 1).flatten(0, 1)

    def _trunk(self, batch: PackedBatch) -> torch.Tensor:
        # Taps may belong to a policy in training: the draft's loss must not reach it.
        return self.model.combine(batch.taps.detach())

    def _layer_trunk(self, layer: Layer, trunk: torch.Tensor, batch: PackedBatch) -> DraftTrunk:
        return batch.trunk(*self.model.keys_values(layer, trunk, batch.positions))

    def _layer(self, layer: Layer, hidden: torch.Tensor, trunk: DraftTrunk, blocks: _Blocks) -> torch.Tensor:
        """One decoder layer for all slots ``[A * W, hidden]``; the last one gives those that propose, ``[A * (W - 1), hidden]``."""
        x = layer.input_layernorm(hidden)
        shape = (blocks.document.shape[0], blocks.width)
        own = [each.unflatten(0, shape) for each in self.model.keys_values(layer, x, blocks.positions)]
        positions, queries = blocks.positions, blocks.width
        if layer is self.model.each_layer()[-1]:
            # Of slot 0 nobody reads more than its keys and values.
            x, hidden, positions = (each.unflatten(0, shape)[:, 1:].flatten(0, 1) for each in (x, hidden, positions))
            queries -= 1
        q = self.model.queries(layer, x, positions).unflatten(0, (shape[0], queries))
        attended, _ = trunk.block_attention(q, own[0], own[1], blocks.document, blocks.prefix)
        return layer.finish(hidden, attended.flatten(0, 1))

    def _head(
        self,
        hidden: torch.Tensor,
        teacher: torch.Tensor,
        teacher_row: torch.Tensor,
        valid: torch.Tensor,
        weights: torch.Tensor,
        normaliser: float,
    ) -> float:
        """Loss of all slots that propose, and its gradient into `hidden` and the head."""
        anchors = valid.shape[0]
        slots = hidden.view(anchors, self.passes, hidden.shape[-1])
        with torch.enable_grad():
            loss = distill_loss(
                self.model.norm(slots[valid]),
                self.model.lm_head.weight,
                TeacherLogits(teacher, row=teacher_row[valid]),
                weights=weights.expand(anchors, -1)[valid],
                normaliser=max(normaliser, 1e-30),
                gradient_dtype=products.dtype(),
            )
            # Also where no label is left.
            (loss + 0.0 * hidden.sum()).backward()
        return float(loss.detach())
