"""A trainer's microbatch as the draft sees it: tokens shifted and labelled before anything is split, then this rank's share.

Shifting after the split would be wrong at every boundary between ranks, and lengths that were padded would shift padding in. Token
ids are few bytes, so every rank of the draft's stage has those of the whole microbatch; what lies split are hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from specdraft_kernels.zigzag_ring import Exchange, ZigzagLayout, lookahead

from trainer_bridge.draft.packing import AnchorSampling, PackedBatch
from trainer_bridge.draft.trunk import Split
from trainer_bridge.errors import SampleError


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Documents laid end to end, before they are split over context-parallel ranks."""

    token_ids: torch.Tensor
    """``[tokens]`` int64."""
    loss_mask: torch.Tensor
    """``[tokens]`` bool: True for tokens that the policy generated. Only those are labels."""
    lengths: tuple[int, ...]
    """Tokens per document; padding at a document's end counts where the trainer computes it, and is False in `loss_mask`."""
    prompts: tuple[str, ...] = ()
    """Per document what its prompt is called, for samples (`trainer_bridge.cotrain.samples`): siblings share it."""

    def __post_init__(self) -> None:
        if not self.lengths:
            raise SampleError("a microbatch needs at least one document; an empty one has the length 0")
        tokens = sum(self.lengths)
        if self.token_ids.shape != (tokens,) or self.loss_mask.shape != (tokens,) or self.loss_mask.dtype != torch.bool:
            raise SampleError(
                f"documents of {self.lengths} tokens need token_ids and a bool loss_mask of shape [{tokens}], not "
                f"{list(self.token_ids.shape)} and {self.loss_mask.dtype} {list(self.loss_mask.shape)}"
            )
        if self.prompts and len(self.prompts) != len(self.lengths):
            raise SampleError(f"{len(self.prompts)} prompts for {len(self.lengths)} documents")

    @classmethod
    def of_rows(cls, token_ids: torch.Tensor, loss_mask: torch.Tensor) -> Microbatch:
        """Of a padded batch: `token_ids` and `loss_mask` ``[documents, length]``."""
        documents, length = token_ids.shape
        return cls(token_ids=token_ids.flatten(), loss_mask=loss_mask.flatten().bool(), lengths=(length,) * documents)

    @cached_property
    def positions(self) -> torch.Tensor:
        """``[tokens]`` int64, from 0 in every document."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    @cached_property
    def documents(self) -> torch.Tensor:
        """``[tokens]`` int64."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))

    def shifted(self, passes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids ``[tokens, passes + 1]`` of the tokens 1, 2, .. ahead (0 beyond a document's end), and which passes have a label
        ``[tokens, passes]``: both the token after the row and the pass's own are generated ones."""
        ends = torch.tensor(self.lengths).cumsum(0)[self.documents]
        ahead = torch.arange(self.token_ids.shape[0])[:, None] + 1 + torch.arange(passes + 1)[None, :]
        inside = ahead < ends[:, None]
        ahead = ahead.clamp_max(max(0, self.token_ids.shape[0] - 1))
        generated = self.loss_mask[ahead] & inside
        return self.token_ids[ahead] * inside, generated[:, :1] & generated[:, 1:]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one context-parallel rank has to do of a microbatch."""

    split: Split | None
    positions: torch.Tensor
    """``[rows]``, of this rank's rows, padding included."""
    documents: torch.Tensor
    future_ids: torch.Tensor
    """``[rows, passes + 1]``"""
    anchors: torch.Tensor
    """``[A]`` of this rank's rows."""
    valid: torch.Tensor
    """``[A, passes]``"""
    num_documents: int

    @property
    def rows(self) -> int:
        """Rows of hidden states that this rank's stages compute."""
        return self.positions.shape[0]

    def batch(self, taps: torch.Tensor, final: torch.Tensor) -> PackedBatch:
        """With this rank's hidden states ``[rows, K * hidden]`` and ``[rows, hidden]``. All ranks of the group call it."""
        teacher_rows = None
        if self.split is not None:
            final, ahead = lookahead(final, self.split.layout, self.split.exchange, self.valid.shape[1])
            teacher_rows = ahead[self.anchors]
        return PackedBatch(
            taps=taps, final=final, positions=self.positions, document=self.documents, future_ids=self.future_ids,
            anchors=self.anchors, valid=self.valid, num_documents=self.num_documents, split=self.split, teacher_rows=teacher_rows,
        )  # fmt: skip


def share_of(microbatch: Microbatch, passes: int, *, sampling: AnchorSampling | None, exchange: Exchange | None) -> Share:
    """This rank's share.

    Args:
        passes: proposed tokens.
        sampling: which anchors are trained; seeded alike on all ranks of the group, which draw for the whole microbatch.
        exchange: of the context-parallel group; None where sequences are not split.
    """
    future, valid = microbatch.shifted(passes)
    picked = valid[:, 0].nonzero().squeeze(1)
    if sampling is not None and picked.numel():
        picked = sampling.take(picked)
        valid[picked] = sampling.limit(valid[picked])
    trained = torch.zeros(valid.shape[0], dtype=torch.bool)
    trained[picked] = True
    if exchange is None or exchange.ranks == 1:
        split, positions, documents = None, microbatch.positions, microbatch.documents
    else:
        layout = ZigzagLayout(microbatch.lengths, exchange.ranks)
        split = Split(layout=layout, exchange=exchange)
        positions, documents = layout.positions(exchange.rank), layout.sequences(exchange.rank)
        future, valid, trained = (layout.split(part, exchange.rank) for part in (future, valid, trained))
    anchors = trained.nonzero().squeeze(1)
    return Share(
        split=split, positions=positions, documents=documents, future_ids=future, anchors=anchors, valid=valid[anchors],
        num_documents=len(microbatch.lengths),
    )  # fmt: skip


def token_counts(microbatches: Sequence[Microbatch], vocab_size: int) -> torch.Tensor:
    """``[vocab]`` int64: how often generated tokens are which."""
    ids = torch.cat([microbatch.token_ids[microbatch.loss_mask] for microbatch in microbatches])
    return torch.bincount(ids, minlength=vocab_size)
