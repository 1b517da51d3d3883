"""Catches a draft whose loss or gradients depend on how the policy is laid out: tokens shifted after the split, padding of odd
lengths that becomes a label, positions that start anew on every rank, a teacher row that lies on another rank, labels counted per
rank, and documents that see each other.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from specdraft_kernels.zigzag_ring import ZigzagLayout

from tests.builders import frozen_target
from tests.cotraining import LENGTHS, PASSES, draft_of, gradients, made
from tests.distributed.processes import on_ranks
from tests.tolerances import REGROUPED_FP64, assert_close
from trainer_bridge.cotrain.options import CoTrainOptions
from trainer_bridge.cotrain.trainer import DraftCoTrainer, DraftGroups
from trainer_bridge.draft.registry import by_name

KINDS, SHARES = ("eagle3", "dflash"), (1.0, 0.5)


def step_of(kind: str, groups: DraftGroups, *, context: int, data: int, share: float) -> dict[str, Any]:
    """One step on this rank: its data parallel rank's microbatches, its context parallel rank's rows."""
    options = CoTrainOptions(
        passes=PASSES, anchor_share=share, deep_anchor_share=share, max_gradient_norm=1e9, vocabulary_every_steps=0
    )
    model = draft_of(kind)
    trainer = DraftCoTrainer(by_name(kind), model, options, groups)
    trainer.steps = 1
    rank = dist.get_rank(groups.context) if groups.context is not None else 0
    batches = [made(lengths, seed) for seed, lengths in enumerate(LENGTHS)][groups.data_rank :: data]
    rows = trainer.begin_step([one.microbatch for one in batches], frozen_target())
    for index, one in enumerate(batches):
        layout = ZigzagLayout(one.microbatch.lengths, context)
        split = (lambda whole: whole) if context == 1 else functools.partial(layout.split, rank=rank)
        assert rows[index] == split(one.final).shape[0]
        trainer.add(index, split(one.taps), split(one.final))
    result = trainer.finish_step()
    return {"loss": result.loss, "labels": result.labels, "norm": result.gradient_norm, **gradients(model)}


def on_context_ranks(directory: Path) -> dict[str, Any]:
    groups = DraftGroups(context=dist.group.WORLD, replicas=dist.group.WORLD)
    return {
        f"{kind} {share}": step_of(kind, groups, context=dist.get_world_size(), data=1, share=share)
        for kind in KINDS
        for share in SHARES
    }


def on_data_and_context_ranks(directory: Path) -> dict[str, Any]:
    """Two data parallel ranks of two context parallel ranks each."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data_rank = dist.get_rank() // 2
    groups = DraftGroups(context=pairs[data_rank], replicas=dist.group.WORLD, data_rank=data_rank)
    return {f"{kind} 1.0": step_of(kind, groups, context=2, data=2, share=1.0) for kind in KINDS}


def assert_like_one_process(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, found in rank.items():
            kind, share = name.split()
            alone = step_of(kind, DraftGroups(), context=1, data=1, share=float(share))
            assert found["labels"] == alone["labels"] and sum(alone["labels"]) > 20
            assert found.keys() == alone.keys() and len(alone) > 10
            for part in alone.keys() - {"labels"}:
                assert_close(torch.as_tensor(found[part]), torch.as_tensor(alone[part]), REGROUPED_FP64, f"{name}: {part}")


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_split_over_context_parallel_ranks_changes_nothing(ranks: int, tmp_path: Path) -> None:
    """The same anchors are drawn too, whoever holds them."""
    assert_like_one_process(on_ranks(on_context_ranks, ranks, tmp_path))


def test_data_parallel_ranks_together_are_one_batch(tmp_path: Path) -> None:
    assert_like_one_process(on_ranks(on_data_and_context_ranks, 4, tmp_path))
