"""Catches mix-ups between the target's vocabulary and the draft's: they lower acceptance to nothing and raise no error."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import VOCAB, draft, draft_config, frozen_target, sample
from trainer_bridge.draft import checkpoint, vocab
from trainer_bridge.draft.eagle3 import Eagle3
from trainer_bridge.draft.interface import Objective
from trainer_bridge.draft.packing import pack
from trainer_bridge.errors import CheckpointError, ConfigError

COUNTS = st.lists(st.integers(0, 6), min_size=1, max_size=30)
"""Token counts with many ties."""


@settings(deadline=None)
@given(vocab_size=st.integers(1, 40), data=st.data())
def test_d2t_holds_offsets(vocab_size: int, data: st.DataObject) -> None:
    """D17: ``t2d[i + d2t[i]]`` is true for every draft id, and the way back gives the kept ids."""
    kept = sorted(data.draw(st.sets(st.integers(0, vocab_size - 1), min_size=1)))
    d2t, t2d = vocab.maps_of(torch.tensor(kept), vocab_size)
    assert [i + int(d2t[i]) for i in range(len(kept))] == kept
    assert all(bool(t2d[i + d2t[i]]) for i in range(len(kept)))
    assert t2d.nonzero().squeeze(1).tolist() == kept
    assert (d2t.dtype, t2d.dtype) == (torch.int64, torch.bool)
    assert vocab.kept_of(d2t, t2d).tolist() == kept


def test_a_draft_s_maps_are_the_public_ones() -> None:
    """D17, by hand: draft tokens 0, 1, 2 are target tokens 1, 4, 5."""
    model = draft(kept=(1, 4, 5))
    assert model.d2t.tolist() == [1, 3, 3]
    assert model.t2d.nonzero().squeeze(1).tolist() == [1, 4, 5]
    assert model.kept().tolist() == [1, 4, 5]


@pytest.mark.parametrize(
    ("d2t", "marked", "message"),
    [
        ([1, 4, 5], [1, 4, 5], "offsets"),
        ([-1, 3, 3], [4, 5], "offsets"),
        ([1, 3, 9], [1, 4, 5], "offsets"),
        ([1, 3, 3], [1, 4, 6], "offsets"),
        ([1, 3, 3], [1, 4, 5, 6], "marks 4 tokens"),
        ([0, 0, 0], [], "offsets"),
        ([1, 3, 2], [1, 4, 5], "twice"),
        ([1, 3, 2], [1, 4], "twice"),
    ],
    ids=[
        "ids instead of offsets",
        "below the vocabulary",
        "beyond the vocabulary",
        "another token marked",
        "one marked too many",
        "never written",
        "two draft tokens on one target token",
        "two draft tokens on one target token, counted once",
    ],
)
def test_maps_that_contradict_each_other_are_refused(d2t: list[int], marked: list[int], message: str) -> None:
    """D17: ids where offsets belong are the usual reason, but any contradiction is refused."""
    t2d = torch.zeros(8, dtype=torch.bool)
    t2d[marked] = True
    with pytest.raises(CheckpointError, match=message):
        vocab.kept_of(torch.tensor(d2t), t2d)


@settings(deadline=None)
@given(counts=COUNTS, data=st.data())
def test_choose_keeps_the_most_frequent_and_what_must_stay(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    always = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=size))
    kept = vocab.choose(torch.tensor(counts), size, always).tolist()
    by_rank = sorted(range(len(counts)), key=lambda i: (i not in always, -counts[i], i))
    assert kept == sorted(by_rank[:size])


@settings(deadline=None)
@given(counts=st.lists(st.sampled_from([0.0, 0.01, 0.02, 0.5, 1.0]), min_size=2, max_size=20), data=st.data())
def test_choose_orders_decayed_counts_as_well(counts: list[float], data: st.DataObject) -> None:
    """Counts that were aged are fractions: a tie-break must not outweigh a small difference."""
    size = data.draw(st.integers(1, len(counts)))
    kept = vocab.choose(torch.tensor(counts, dtype=torch.float64), size).tolist()
    assert kept == sorted(sorted(range(len(counts)), key=lambda i: (-counts[i], i))[:size])


@pytest.mark.parametrize("size", [0, -1, 6])
def test_a_size_outside_the_vocabulary_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=r"needs 1\.\.5"):
        vocab.choose(torch.ones(5), size)


def test_more_fixed_ids_than_room_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 ids"):
        vocab.choose(torch.ones(5), 2, always=[0, 1, 4])


@pytest.mark.parametrize("missing", ["d2t", "t2d"])
def test_a_reduced_vocabulary_without_its_maps_is_refused(tmp_path: Path, missing: str) -> None:
    """D18: nobody guesses that the draft's tokens are the first ones of the target."""
    state = {name: tensor for name, tensor in draft(dtype=torch.float32).state_dict().items() if name != missing}
    checkpoint.save(tmp_path / "draft", state, draft_config())
    with pytest.raises(CheckpointError, match=missing):
        Eagle3().load(tmp_path / "draft")


@settings(deadline=None)
@given(data=st.data(), counts=st.lists(st.integers(0, 5), min_size=2, max_size=25))
def test_an_exchange_leaves_the_most_used_tokens(data: st.DataObject, counts: list[int]) -> None:
    """Whatever order the draft's tokens are in; a token moves only where that is a gain."""
    kept = data.draw(st.lists(st.integers(0, len(counts) - 1), min_size=1, unique=True))
    rows, ids = (part.tolist() for part in vocab.exchange(torch.tensor(kept), torch.tensor(counts)))
    assert len(set(rows)) == len(rows) == len(set(ids)) == len(ids)
    assert not set(ids) & set(kept)
    assert all(counts[new] > counts[kept[row]] for row, new in zip(rows, ids, strict=True))
    after = list(kept)
    for row, new in zip(rows, ids, strict=True):
        after[row] = new
    assert sum(counts[token] for token in after) == sum(sorted(counts, reverse=True)[: len(kept)])


def test_an_adapted_draft_proposes_the_new_tokens_with_the_target_s_head() -> None:
    """D17: after an exchange the maps hold offsets still, rows no longer ascend, and only what moved has changed."""
    model, target = draft(kept=(1, 4, 5, 9)), frozen_target()
    head = model.lm_head.weight.detach().clone()
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    counts[torch.tensor([4, 7, 22, 3])] = torch.tensor([9, 8, 7, 6])
    changed = Eagle3().adapt_vocabulary(model, target, counts)
    assert model.kept().tolist() == [3, 4, 22, 7]
    assert model.t2d.nonzero().squeeze(1).tolist() == [3, 4, 7, 22]
    assert model.d2t.tolist() == [3, 3, 20, 4]
    assert {name: sorted(rows.tolist()) for name, rows in changed.items()} == {"lm_head.weight": [0, 2, 3]}
    assert torch.equal(model.lm_head.weight[[0, 2, 3]], target.head[[3, 22, 7]])
    assert torch.equal(model.lm_head.weight[1], head[1])
    assert Eagle3().adapt_vocabulary(model, target, counts) == {}


def test_an_objective_follows_an_adapted_vocabulary() -> None:
    """Told of the change it teaches what one made afterwards teaches: teacher columns and proposals are the new tokens'."""
    model, target = draft(), frozen_target()
    objective = Eagle3().objective(model, target, passes=2)
    batch = pack([sample("..AAAAA", seed=1)], 2)
    batch = dataclasses.replace(batch, taps=batch.taps.double(), final=batch.final.double())

    def loss_of(trained: Objective) -> float:
        for _ in trained.pieces(batch, batch.label_counts()):
            pass
        return trained.take_loss()

    before = loss_of(objective)
    counts = torch.arange(VOCAB)
    assert Eagle3().adapt_vocabulary(model, target, counts)
    assert loss_of(objective) not in (before, loss_of(Eagle3().objective(model, target, passes=2)))
    objective.vocabulary_changed()
    fresh = Eagle3().objective(model, target, passes=2)
    assert loss_of(objective) == loss_of(fresh)
    assert objective.measure(batch).accepted_sum.tolist() == fresh.measure(batch).accepted_sum.tolist()


def test_maps_that_were_never_written_are_refused() -> None:
    """D18: a model whose vocabulary was not set has all-zero maps; using it raises instead of taking the first ids."""
    model = Eagle3().build(draft_config())
    assert model.t2d.shape == (VOCAB,)
    with pytest.raises(CheckpointError):
        model.kept()
