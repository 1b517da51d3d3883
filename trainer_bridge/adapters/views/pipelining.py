"""Stages of `torch.distributed.pipelining` as the policy of co-training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from trainer_bridge.cotrain.borrowed import Rows
from trainer_bridge.cotrain.groups import own_group
from trainer_bridge.cotrain.run import PolicyView
from trainer_bridge.cotrain.trainer import DraftGroups
from trainer_bridge.errors import ConfigError
from trainer_bridge.taps.hooks import ChunkView
from trainer_bridge.taps.hooks import Rows as RowsOf
from trainer_bridge.taps.schedules import Schedule, forward_only, of_pipelining, one_f_one_b


def pipelining_policy(
    stages: Sequence[PipelineStage],
    layers: Mapping[int, nn.Module],
    *,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    pipeline: dist.ProcessGroup | None = None,
    final_norm: nn.Module | None = None,
    embedding: torch.Tensor | None = None,
    head: torch.Tensor | None = None,
    rows: RowsOf | None = None,
    tensor: dist.ProcessGroup | None = None,
    groups: DraftGroups | None = None,
) -> PolicyView:
    """What `CoTraining` needs to know of a pipeline rank.

    Args:
        stages: this rank's, of one schedule.
        layers: decoder layers of these stages by their number in the whole model, from 0; their first argument is the hidden state.
        dtype: of hidden states.
        pipeline: the group that the schedule runs on, the default group if None; a new one of its ranks is made for taps.
        final_norm, head: of the last stage; `head` is its weight ``[vocab, hidden]``.
        embedding: of the first stage ``[vocab, hidden]``, and of the last one where both are one.
        rows: hidden states to ``[rows, hidden]``; by default all dimensions but the last are flattened.
        tensor, groups: see `PolicyView`.
    """
    chunks = []
    for stage in sorted(stages, key=lambda stage: stage.stage_index):
        module = stage.submod
        own = {number: layer for number, layer in layers.items() if any(part is layer for part in module.modules())}
        norm = final_norm if final_norm is not None and any(part is final_norm for part in module.modules()) else None
        options: dict[str, Any] = {} if rows is None else {"rows": rows}
        counts = _Microbatches(stage).running
        chunks.append(ChunkView(chunk=stage.stage_index, module=module, layers=own, final_norm=norm, counts=counts, **options))
    if missing := sorted(layers.keys() - {number for chunk in chunks for number in chunk.layers}):
        raise ConfigError(f"layers {missing} are in none of the stages {[chunk.chunk for chunk in chunks]}")
    group = pipeline if pipeline is not None else dist.group.WORLD
    return PolicyView(
        chunks=chunks, hidden_size=hidden_size, vocab_size=vocab_size, dtype=dtype,
        embedding=None if embedding is None else Rows(weight=embedding), head=None if head is None else Rows(weight=head),
        pipeline=own_group(group) if group is not None else None, tensor=tensor, groups=groups or DraftGroups(),
    )  # fmt: skip


def schedule_of(schedule: Any) -> Schedule:
    """The order in which a schedule of `torch.distributed.pipelining` runs. Raises `ConfigError` for one that is not known."""
    name = type(schedule).__name__
    if name == "Schedule1F1B":
        return one_f_one_b(schedule._num_stages, schedule._n_microbatches)
    if name == "ScheduleGPipe":
        return forward_only(schedule._num_stages, schedule._n_microbatches)
    # Those of one stage per rank have an order too, which is not the one they run.
    if order := getattr(schedule, "pipeline_order", None):
        return of_pipelining(order, name)
    raise ConfigError(f"the order of {name} is not known: give a trainer_bridge.taps.schedules.Schedule of your own")


class _Microbatches:
    """Knows whether a stage runs a microbatch: before the first step it also runs its module to learn about shapes."""

    def __init__(self, stage: PipelineStage) -> None:
        self._running = False
        forward = stage.forward_one_chunk

        def forward_one_chunk(*arguments: Any, **keywords: Any) -> Any:
            self._running = True
            try:
                return forward(*arguments, **keywords)
            finally:
                self._running = False

        stage.forward_one_chunk = forward_one_chunk  # type: ignore[method-assign]

    def running(self) -> bool:
        """Whether the forward that begins is a microbatch's."""
        return self._running
