"""The tensor-parallel ranks of one engine: the first one learns and decides, the others follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainer_bridge.draft.interface import FrozenTarget


class RankError(RuntimeError):
    """Another rank failed; the text is what it said."""


class Ranks:
    """This worker among the tensor-parallel ranks. With one rank every call is free."""

    def __init__(self) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        self._group = get_tp_group()
        self.rank: int = self._group.rank_in_group
        self.size: int = self._group.world_size

    @property
    def leads(self) -> bool:
        """Whether this rank learns and decides."""
        return self.rank == 0

    def share(self, make: Callable[[], Any]) -> Any:
        """What the first rank makes, on every rank. Its error is raised on every rank, so nobody waits for it in vain."""
        if self.size == 1:
            return make()
        if self.leads:
            try:
                made = make()
            except Exception as error:
                self._group.broadcast_object((None, f"{type(error).__name__}: {error}"), src=0)
                raise
            self._group.broadcast_object((made, None), src=0)
            return made
        made, failure = self._group.broadcast_object(src=0)
        if failure is not None:
            raise RankError(failure)
        return made

    def all_agree(self, fine: bool) -> bool:
        """Whether it is fine on every rank; the same answer everywhere."""
        if self.size == 1:
            return fine
        vote = torch.tensor([int(fine)])
        torch.distributed.all_reduce(vote, torch.distributed.ReduceOp.MIN, group=self._group.cpu_group)
        return bool(vote.item())

    def gather_rows(self, shard: torch.Tensor, rows: int) -> torch.Tensor:
        """``[rows, ...]``: the first `rows` rows of a weight that is split by rows, its padding left out."""
        whole = shard if self.size == 1 else self._group.all_gather(shard, dim=0)
        return whole[:rows]


def frozen_target(runner: Any, ranks: Ranks) -> FrozenTarget:
    """Embedding and head of the served target, whole. A collective: every rank takes part."""
    vocab_size, target = runner.model_config.get_vocab_size(), runner.get_model()
    embedding = ranks.gather_rows(target.model.embed_tokens.weight.detach(), vocab_size)
    if target.lm_head is target.model.embed_tokens:
        return FrozenTarget(embedding=embedding, head=embedding)
    return FrozenTarget(embedding=embedding, head=ranks.gather_rows(target.lm_head.weight.detach(), vocab_size))
