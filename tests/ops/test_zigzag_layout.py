"""Catches a token that no rank holds, or two; a wrong owner; an interval of a shard that is not what a query sees of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdraft_kernels.zigzag_ring import ZigzagLayout, choose_form, held_bytes, sent_bytes

LENGTHS = st.lists(st.integers(0, 40), min_size=0, max_size=5)
RANKS = st.sampled_from([1, 2, 3, 4, 8])


def test_the_worked_example() -> None:
    layout = ZigzagLayout([7, 3], 2)
    assert layout.chunks == (2, 1) and layout.rows == 6
    assert layout.positions(0).tolist() == [0, 1, 6, 7, 0, 3]
    assert layout.positions(1).tolist() == [2, 3, 4, 5, 1, 2]
    assert layout.real(0).tolist() == [True, True, True, False, True, False]
    assert layout.ranges(1) == [(0, 2, 4), (0, 4, 6), (1, 1, 2), (1, 2, 3)]


@given(LENGTHS, RANKS)
@settings(max_examples=200, deadline=None)
def test_every_token_has_one_place(lengths: list[int], ranks: int) -> None:
    """D11: global positions are a permutation."""
    layout = ZigzagLayout(lengths, ranks)
    packed = torch.cat([layout.packed_rows(rank) for rank in range(ranks)])
    assert sorted(packed[packed >= 0].tolist()) == list(range(sum(lengths)))
    begin = 0
    for sequence, length in enumerate(lengths):
        for position in range(length):
            rank, row = layout.owner(sequence, position)
            assert layout.packed_rows(rank)[row] == begin + position
            assert layout.positions(rank)[row] == position and layout.sequences(rank)[row] == sequence
        begin += length
    assert all(layout.positions(rank).shape[0] == layout.rows for rank in range(ranks))


@given(LENGTHS, RANKS)
@settings(max_examples=100, deadline=None)
def test_join_undoes_split(lengths: list[int], ranks: int) -> None:
    layout = ZigzagLayout(lengths, ranks)
    packed = torch.randn(sum(lengths), 2)
    shards = [layout.split(packed, rank) for rank in range(ranks)]
    assert torch.equal(layout.join(shards), packed)
    assert all(not shard[~layout.real(rank)].any() for rank, shard in enumerate(shards))


@given(LENGTHS.filter(any), RANKS, st.data())
@settings(max_examples=200, deadline=None)
def test_what_lies_before_a_position_is_counted_row_by_row(lengths: list[int], ranks: int, data: st.DataObject) -> None:
    layout = ZigzagLayout(lengths, ranks)
    sequence = data.draw(st.sampled_from([s for s, length in enumerate(lengths) if length]))
    position = data.draw(st.integers(-3, lengths[sequence] + 3))
    rank = data.draw(st.integers(0, ranks - 1))
    found = int(layout.rows_below(torch.tensor([sequence]), torch.tensor([position]), rank)[0])
    sequences, positions = layout.sequences(rank), layout.positions(rank)
    before = (sequences < sequence) | ((sequences == sequence) & (positions < position))
    assert found == int(before.sum())
    # An interval of rows: those before are the first ones.
    assert bool(before[:found].all())


def test_what_does_not_fit_is_refused() -> None:
    layout = ZigzagLayout([7, 3], 2)
    with pytest.raises(ValueError, match="9 rows, but the sequences have 10 tokens"):
        layout.split(torch.zeros(9, 1), 0)
    with pytest.raises(ValueError, match="1 shards of 2 ranks"):
        layout.join([torch.zeros(6, 1)])
    with pytest.raises(IndexError, match="sequence 1 has 3 tokens: no position 3"):
        layout.owner(1, 3)
    with pytest.raises(ValueError, match="lengths are 0 or more"):
        ZigzagLayout([3, -1], 2)


def test_the_form_follows_the_passes_and_the_memory() -> None:
    layout = ZigzagLayout([100_000], 8)
    needed = held_bytes("gather", layout, 1024, 2)
    assert choose_form(layout, 1024, 2, passes=3, budget_bytes=needed) == "gather"
    assert choose_form(layout, 1024, 2, passes=3, budget_bytes=needed - 1) == "ring"
    assert choose_form(layout, 1024, 2, passes=1, budget_bytes=needed) == "ring"
    assert held_bytes("ring", layout, 1024, 2) < needed / 2
    # Three passes in bf16: 3 * (2 + 2 + 4) against 2 + 4.
    ratio = sent_bytes("gather", layout, 1024, 2, passes=3) / sent_bytes("ring", layout, 1024, 2, passes=3)
    assert ratio == pytest.approx(0.25)
