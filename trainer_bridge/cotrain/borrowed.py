"""What the draft borrows of the policy in training: rows of its embedding and its head, wherever they lie.

The embedding is on the first stage, the head on the last, either may be split by vocabulary over tensor-parallel ranks, and all
change with every step. The draft's stage gets the rows that a step needs: those of its tokens, and those of the draft's vocabulary.
Where all of it is on the draft's own rank it is used as it is, without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer_bridge.draft.interface import FrozenTarget


@dataclass(frozen=True, kw_only=True)
class Rows:
    """This rank's rows of a ``[vocab, hidden]`` weight. All but padding of the vocabulary."""

    weight: torch.Tensor
    """``[n, hidden]``; padding may follow."""
    start: int = 0
    """Token of its first row."""

    def whole(self, vocab_size: int) -> bool:
        """Whether no other rank holds a part of it."""
        return self.start == 0 and self.weight.shape[0] >= vocab_size

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """``[ids, hidden]``: rows of those that are here, zeros for all others."""
        place = ids - self.start
        here = (place >= 0) & (place < self.weight.shape[0])
        weight = _local(self.weight)
        return torch.where(here[:, None], weight[place.clamp(0, weight.shape[0] - 1)], weight.new_zeros(()))


def _local(weight: torch.Tensor) -> torch.Tensor:
    """The tensor itself; of a DTensor, whose ranks each hold a share, all of it."""
    weight = weight.detach()
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


class BorrowedWeights:
    """Every pipeline and tensor-parallel rank makes one and calls `collect` once per step."""

    def __init__(
        self,
        *,
        vocab_size: int,
        embedding: Rows | None,
        head: Rows | None,
        draft_rank: int = 0,
        pipeline: dist.ProcessGroup | None = None,
        tensor: dist.ProcessGroup | None = None,
    ) -> None:
        """`embedding`: on the first stage, and on the last one where it is tied to the head; `head`: on the last stage."""
        self.vocab_size, self._draft_rank, self._pipeline, self._tensor = vocab_size, draft_rank, pipeline, tensor
        self._embedding, self._head = embedding, head
        self._rank = dist.get_rank(pipeline) if pipeline is not None else 0
        self._tables: dict[str, torch.Tensor] = {}
        travels = torch.tensor([int(self._rank == draft_rank and embedding is None)])
        if pipeline is not None:
            dist.all_reduce(travels, group=pipeline)
        self._travels = bool(travels)
        self._whole = {name: self._all_whole(held) for name, held in (("embedding", embedding), ("head", head)) if held is not None}

    @torch.no_grad()
    def collect(self, ids: torch.Tensor, kept: torch.Tensor | None) -> FrozenTarget | None:
        """The weights of this step, on the draft's rank; None elsewhere.

        Args:
            ids: ``[n]`` distinct tokens of the step.
            kept: ``[draft_vocab]`` the draft's vocabulary, on the draft's rank; None where its head rows are not needed.
        """
        if self._travels and self._rank == 0:
            assert self._embedding is not None, "the first stage has the embedding"
            dist.send(self._embedding.take(ids), group=self._pipeline, group_dst=self._draft_rank)
        if self._rank != self._draft_rank:
            return None
        assert self._head is not None, "the draft is on the rank of the head"
        head = self._table("head", self._head, ids if kept is None else torch.cat([ids, kept]).unique())
        if self._travels:
            rows = torch.empty(ids.shape[0], self._head.weight.shape[1], dtype=self._head.weight.dtype)
            dist.recv(rows, group=self._pipeline, group_src=0)
            return FrozenTarget(embedding=self._filled("embedding", rows, ids), head=head)
        assert self._embedding is not None
        return FrozenTarget(embedding=self._table("embedding", self._embedding, ids), head=head)

    def _table(self, name: str, held: Rows, ids: torch.Tensor) -> torch.Tensor:
        if self._whole[name]:
            return _local(held.weight)[: self.vocab_size]
        return self._filled(name, held.take(ids), ids)

    def _all_whole(self, held: Rows) -> bool:
        """Whether every tensor-parallel rank holds all of it: the first one's padded share of a small vocabulary may be all too."""
        whole = torch.tensor([int(held.whole(self.vocab_size))])
        if self._tensor is not None:
            dist.all_reduce(whole, op=dist.ReduceOp.MIN, group=self._tensor)
        return bool(whole)

    def _filled(self, name: str, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """A table of which rows `ids` hold what the ranks together have; the others are of earlier steps."""
        if self._tensor is not None:
            dist.all_reduce(rows, group=self._tensor)
        if name not in self._tables:
            self._tables[name] = rows.new_zeros(self.vocab_size, rows.shape[1])
        self._tables[name][ids] = rows
        return self._tables[name]
