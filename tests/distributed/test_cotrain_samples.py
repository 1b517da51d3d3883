"""Catches samples of a trainer from which an engine would learn something else than from taps of its own: documents put together in
the wrong order, states of another microbatch, and what a stream changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.cotraining.policy import Shape
from benchmarks.cotraining.run import PASSES, Layout, Runner, draft_of, microbatches
from tests.distributed.processes import on_ranks
from tests.distributed.stand import Stand
from tests.tolerances import LEARNED_FROM_SAMPLES, assert_close
from trainer_bridge.cotrain.samples import SampleCollector
from trainer_bridge.draft.interface import FrozenTarget
from trainer_bridge.draft.packing import PackedBatch, pack
from trainer_bridge.taps import TapSample
from trainer_bridge.taps.stream import SampleStream, unpack

TAP_LAYERS = (2, 4, 6)
SHAPE = Shape(dtype=torch.float32)


def collected(layout: Layout) -> list[TapSample]:
    """Samples of one step, on the rank that puts documents together; an empty list elsewhere."""
    made: list[SampleCollector] = []

    def collector(groups: Any) -> SampleCollector:
        made.append(SampleCollector(tap_layers=TAP_LAYERS, policy_version=1, name="trainer", context=groups.context))
        return made[0]

    runner = Runner(layout, SHAPE, microbatches(SHAPE, layout.microbatches), kind=None, side=collector)
    runner.step()
    runner.close()
    return made[0].samples if made else []


def on_four_ranks(directory: Path) -> list[dict[str, Any]]:
    return [vars(sample) for sample in collected(Layout(context=2, pipeline=2))]


def on_one_rank(directory: Path) -> list[dict[str, Any]]:
    return [vars(sample) for sample in collected(Layout())]


def loss_of(samples: list[TapSample]) -> tuple[float, dict[str, torch.Tensor]]:
    """Of a learner's objective, in fp64."""
    wide = Shape()
    kind, model = draft_of("eagle3", wide, TAP_LAYERS)
    random = torch.Generator().manual_seed(9)
    embedding, head = (torch.randn(SHAPE.vocab, SHAPE.hidden, generator=random, dtype=torch.float64) for _ in range(2))
    objective = kind.objective(model, FrozenTarget(embedding=embedding, head=head), passes=PASSES)
    packed = pack(samples, PASSES)
    batch = PackedBatch(**{**vars(packed), "taps": packed.taps.double(), "final": packed.final.double()})
    for _ in objective.pieces(batch, objective.label_counts(batch)):
        pass
    return objective.take_loss(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_samples_of_a_split_trainer_give_an_engines_learner_the_loss_of_local_taps(stand: Stand, tmp_path: Path) -> None:
    """PP 2 x CP 2, through the bridge."""
    ranks = on_ranks(on_four_ranks, 4, tmp_path)
    local = [TapSample(**fields) for fields in on_ranks(on_one_rank, 1, tmp_path)[0]]
    assert [bool(found) for found in ranks] == [False, False, True, False]
    with SampleStream(stand.endpoint) as stream:
        for fields in ranks[2]:
            stream.send(TapSample(**fields))
        stream.flush()
        assert (stream.taken, stream.refused) == (len(ranks[2]), {})
    arrived = {one.request_id: one for one in (unpack(header, payload) for header, payload in stand.state()["samples"])}
    assert len(local) == len(arrived) > 8
    for sample in local:
        other = arrived[sample.request_id]
        assert torch.equal(other.token_ids, sample.token_ids) and torch.equal(other.loss_mask, sample.loss_mask)
    (loss, gradients), (wanted_loss, wanted) = loss_of([arrived[one.request_id] for one in local]), loss_of(local)
    assert abs(loss / wanted_loss - 1) <= LEARNED_FROM_SAMPLES.relative
    for name, gradient in wanted.items():
        assert_close(gradients[name], gradient, LEARNED_FROM_SAMPLES, name)
