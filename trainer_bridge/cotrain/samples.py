"""Samples for engines' learners, made where a trainer computes hidden states anyway.

The other way to a fresh draft: instead of training it here, send what it learns from to an engine (`trainer_bridge.taps.stream`),
whose learner treats it like taps of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from specdraft_kernels.zigzag_ring import ZigzagLayout

from trainer_bridge.cotrain.microbatch import Microbatch
from trainer_bridge.draft.interface import FrozenTarget
from trainer_bridge.errors import TapOrderError
from trainer_bridge.taps import TapSample


class SampleCollector:
    """Stands in a draft's place in `CoTraining`. Documents that context-parallel ranks split are put together on the first one."""

    def __init__(
        self, *, tap_layers: Sequence[int], policy_version: int, name: str, context: dist.ProcessGroup | None = None
    ) -> None:
        """
        Args:
            policy_version: of the policy that runs; to be kept up to date.
            name: of this data parallel rank's samples: their ids begin with it.
            context: ranks that split sequences.
        """
        self.policy_version = policy_version
        self.samples: list[TapSample] = []
        """Of the last step, on the first context-parallel rank."""
        self._tap_layers, self._name, self._context = tuple(tap_layers), name, context
        self._ranks, self._rank = (dist.get_world_size(context), dist.get_rank(context)) if context is not None else (1, 0)
        self._batches: Sequence[Microbatch] = ()
        self._steps = self._next = 0

    def vocabulary(self) -> torch.Tensor | None:
        """No head rows are needed: the engine has the policy's."""
        return None

    def begin_step(self, microbatches: Sequence[Microbatch], target: FrozenTarget) -> list[int]:
        """Announce the microbatches of a step, in their order; the rows of hidden states that this rank has of each."""
        self._batches, self._next, self.samples = microbatches, 0, []
        return [ZigzagLayout(one.lengths, self._ranks).rows if self._ranks > 1 else sum(one.lengths) for one in microbatches]

    @torch.no_grad()
    def add(self, index: int, taps: torch.Tensor, final: torch.Tensor) -> None:
        """One microbatch's hidden states, ``[rows, K * hidden]`` and ``[rows, hidden]``. Raises `TapOrderError` out of turn."""
        if index != self._next:
            raise TapOrderError(f"microbatch {index} was given; it is the turn of microbatch {self._next}")
        self._next += 1
        microbatch = self._batches[index]
        taps, final = self._whole(microbatch, taps), self._whole(microbatch, final)
        if self._rank:
            return
        begin = 0
        for document, length in enumerate(microbatch.lengths):
            rows = slice(begin, begin + length)
            begin += length
            generated = microbatch.loss_mask[rows].nonzero()
            # Padding, and a prompt without an answer, teach nothing.
            count = int(generated[-1]) + 1 if generated.numel() else 0
            if count < 2:
                continue
            ids, mask = microbatch.token_ids[rows][:count].cpu(), microbatch.loss_mask[rows][:count].cpu()
            owner = f"{self._name}-{self._steps}-{index}-{document}"
            self.samples.append(
                TapSample(
                    request_id=owner, group_id=microbatch.prompts[document] if microbatch.prompts else owner,
                    policy_version=self.policy_version, token_ids=ids, positions=torch.arange(count), loss_mask=mask,
                    tap_layers=self._tap_layers, taps=taps[rows][: count - 1].cpu().clone(),
                    final=final[rows][: count - 1].cpu().clone(), final_is_normed=True,
                ).validate()
            )  # fmt: skip

    def finish_step(self) -> None:
        """All microbatches have come: `samples` is whole."""
        self._steps += 1

    def abort_step(self) -> None:
        """Forget the step."""
        self.samples = []

    def _whole(self, microbatch: Microbatch, rows: torch.Tensor) -> torch.Tensor:
        """All rows of the microbatch, documents one behind the other."""
        if self._ranks == 1:
            return rows
        rows = rows.contiguous()
        shards = [torch.empty_like(rows) for _ in range(self._ranks)]
        dist.all_gather(shards, rows, group=self._context)
        return ZigzagLayout(microbatch.lengths, self._ranks).join(shards)
