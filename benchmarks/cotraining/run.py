"""One step of the small policy on one rank: its layout, torch's schedule, and a draft beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from specdraft_kernels.zigzag_ring import Exchange
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from benchmarks.cotraining.policy import Place, Shape, Stage, stages
from trainer_bridge.adapters.views.pipelining import pipelining_policy, schedule_of
from trainer_bridge.cotrain.microbatch import Microbatch
from trainer_bridge.cotrain.options import CoTrainOptions
from trainer_bridge.cotrain.run import CoTraining, DraftSide
from trainer_bridge.cotrain.trainer import DraftCoTrainer, DraftGroups
from trainer_bridge.draft.interface import TargetSpec
from trainer_bridge.draft.registry import by_name

SCHEDULES = {
    "1F1B": (pipelining.Schedule1F1B, 1),
    "GPipe": (pipelining.ScheduleGPipe, 1),
    "interleaved 1F1B": (pipelining.ScheduleInterleaved1F1B, 2),
    "zero bubble": (pipelining.ScheduleInterleavedZeroBubble, 2),
    "zero bubble V": (pipelining.ScheduleZBVZeroBubble, 2),
}
"""Schedules of torch, and stages per rank."""
PASSES = 3
LENGTHS = (9, 1, 14, 6)
"""Documents of a microbatch; the others have them in another order, for torch's buffers have one size."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks of one run share the work. Ranks are counted through context parallelism first."""

    context: int = 1
    pipeline: int = 1
    schedule: str = "1F1B"
    microbatches: int = 4

    @property
    def ranks(self) -> int:
        """Of the world that take part."""
        return self.context * self.pipeline


def microbatches(shape: Shape, count: int, lengths: Sequence[int] = LENGTHS) -> list[Microbatch]:
    """Seeded, ragged; a third of each document is its prompt."""
    found, random = [], torch.Generator().manual_seed(11)
    for index in range(count):
        turned = (*lengths[index % len(lengths) :], *lengths[: index % len(lengths)])
        found.append(
            Microbatch(
                token_ids=torch.randint(shape.vocab, (sum(turned),), generator=random),
                loss_mask=torch.cat([torch.arange(length) >= length // 3 for length in turned]),
                lengths=turned,
            )
        )
    return found


def draft_of(kind: str, shape: Shape, tap_layers: Sequence[int], *, seed: int = 5) -> tuple[Any, torch.nn.Module]:
    """A draft type and a random draft of the policy in its dtype."""
    size = shape.hidden // shape.heads
    spec = TargetSpec(
        hidden_size=shape.hidden, intermediate_size=2 * shape.hidden, num_layers=shape.layers, num_heads=shape.heads,
        num_kv_heads=shape.kv_heads, head_dim=size, vocab_size=shape.vocab, rms_norm_eps=1e-6, rope_theta=100.0, max_positions=4096,
    )  # fmt: skip
    of = by_name(kind)
    model = of.build(of.configure(spec, tap_layers=tap_layers, draft_vocab_size=shape.vocab // 2))
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = torch.randn(parameter.shape, generator=random)
            parameter.copy_(1 + 0.1 * spread if parameter.ndim == 1 else spread * parameter.shape[1] ** -0.5)
    of.set_vocabulary(model, torch.arange(0, 2 * (shape.vocab // 2), 2))
    return of, model.to(shape.dtype)


class Runner:
    """The policy's part on this rank, with or without a draft. Every rank of the world makes it."""

    def __init__(
        self,
        layout: Layout,
        shape: Shape,
        batches: Sequence[Microbatch],
        *,
        kind: str | None,
        side: Callable[[DraftGroups], DraftSide] | None = None,
        tap_layers: Sequence[int] = (2, 4, 6),
        options: CoTrainOptions | None = None,
        defer: int | None = None,
        carrier: Any = "shm",
    ) -> None:
        """`kind`: the draft's type; `side`: makes what receives the taps in its place."""
        self.layout, self.batches = layout, batches
        rank = dist.get_rank() if dist.is_initialized() else 0
        options = options or CoTrainOptions(passes=PASSES, max_gradient_norm=1e9, vocabulary_every_steps=0, anchor_share=1.0)
        context, pipeline = _groups(layout)
        self._groups = [context, pipeline]
        self._place = Place(batches, Exchange(context) if layout.context > 1 else None)
        make, per_rank = SCHEDULES[layout.schedule]
        count = layout.pipeline * per_rank
        mine = _mine(layout.schedule, rank // layout.context, layout.pipeline, per_rank)
        self.modules = {index: Stage(shape, stages(shape, count)[index]) for index in mine}
        for module in self.modules.values():
            module.place = self._place
        self._losses: list[torch.Tensor] = []
        parts = [PipelineStage(module, index, count, torch.device("cpu"), group=pipeline) for index, module in self.modules.items()]
        self._schedule = make(parts[0] if per_rank == 1 else parts, len(batches), loss_fn=self._loss, scale_grads=False)
        self.co: CoTraining | None = None
        self.draft: DraftCoTrainer | None = None
        if kind is not None or side is not None:
            self._beside(parts, shape, kind, side, tap_layers, options, defer, carrier)

    def _beside(
        self,
        parts: Sequence[PipelineStage],
        shape: Shape,
        kind: str | None,
        side: Callable[[DraftGroups], DraftSide] | None,
        tap_layers: Sequence[int],
        options: CoTrainOptions,
        defer: int | None,
        carrier: Any,
    ) -> None:
        """Put co-training around the schedule."""
        context, pipeline = self._groups[:2]
        first = next((module.embedding for module in self.modules.values() if module.embedding is not None), None)
        last = next((module for module in self.modules.values() if module.head is not None), None)
        groups = DraftGroups(context=context, replicas=context) if self.layout.context > 1 else DraftGroups()
        view = pipelining_policy(
            parts, {number: layer for module in self.modules.values() for number, layer in module.layers.items()},
            hidden_size=shape.hidden, vocab_size=shape.vocab, dtype=shape.dtype, pipeline=pipeline,
            embedding=None if first is None else first.weight, final_norm=None if last is None else last.norm,
            head=last.head.weight if last is not None and last.head is not None else None, groups=groups,
        )  # fmt: skip
        self._groups.append(view.pipeline)
        receiver: DraftSide | None = None
        if last is not None and side is not None:
            receiver = side(groups)
        elif last is not None and kind is not None:
            of, model = draft_of(kind, shape, tap_layers)
            receiver = self.draft = DraftCoTrainer(of, model, options, groups)
            # Past the first step, whose start is a rank's own.
            self.draft.steps = 1
        rows = max(self._place.positions(index).shape[0] for index in range(len(self.batches)))
        self.co = CoTraining(
            view, tap_layers=tap_layers, schedule=schedule_of(self._schedule), draft=receiver, defer=defer, max_rows=rows,
            carrier=carrier, timeout_s=60.0,
        )  # fmt: skip

    def step(self) -> float:
        """Forward and backward of all microbatches; the policy's loss, on the last stage."""
        self._losses.clear()
        if self.co is None:
            self._forward_backward()
        else:
            with self.co.step(self.batches):
                self._forward_backward()
        return float(sum(self._losses)) if self._losses else 0.0

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of the policy's parameters on this rank."""
        return {
            f"{index}.{name}": parameter.grad.clone()
            for index, module in self.modules.items()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }

    def zero_grad(self) -> None:
        """Forget the policy's gradients."""
        for module in self.modules.values():
            module.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Take hooks and groups away; every rank calls it."""
        if self.co is not None:
            self.co.close()
        for group in self._groups:
            if group is not None:
                dist.destroy_process_group(group)

    def _forward_backward(self) -> None:
        ids = [self._place.split(index, one.token_ids) for index, one in enumerate(self.batches)]
        labels = [self._place.split(index, one.token_ids.roll(-1)) for index, one in enumerate(self.batches)]
        first = any(module.embedding is not None for module in self.modules.values())
        last = any(module.head is not None for module in self.modules.values())
        self._schedule.step(
            *((torch.cat(ids),) if first else ()),
            target=torch.cat(labels) if last else None,
            microbatch=torch.arange(len(self.batches)),
        )

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(logits, labels, reduction="sum") / 100
        self._losses.append(loss.detach())
        return loss


def _mine(schedule: str, rank: int, ranks: int, per_rank: int) -> list[int]:
    """Stages of a pipeline rank."""
    if schedule.endswith("V"):
        return [rank, 2 * ranks - 1 - rank]
    return [rank + turn * ranks for turn in range(per_rank)]


def _groups(layout: Layout) -> tuple[Any, Any]:
    """This rank's context-parallel and pipeline groups; every rank makes all of them."""
    if not dist.is_initialized():
        return None, None
    rank, found = dist.get_rank(), list[Any]()
    of_stages = [range(stage * layout.context, (stage + 1) * layout.context) for stage in range(layout.pipeline)]
    of_contexts = [range(place, layout.ranks, layout.context) for place in range(layout.context)]
    for groups in (of_stages, of_contexts):
        made = [(members, dist.new_group(list(members))) for members in groups]
        found.append(next(group for members, group in made if rank in members))
    return found[0], found[1]
