"""Catches a replay that outgrows its bound, trains on what decides about publishing, or loses samples without a word."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import VOCAB, sample
from trainer_bridge.taps import TapSample
from vllm_specdraft.replay import Replay

BYTES = sample("..AAA").nbytes
"""Size of the samples that most tests use."""


def replay(*, limit_bytes: int = 1 << 20, held_out_share: float = 0.25, seed: int = 0) -> Replay:
    return Replay(limit_bytes=limit_bytes, held_out_share=held_out_share, seed=seed)


def groups(held_out: bool, *, share: float = 0.25) -> list[str]:
    """Some group ids of one side of the split."""
    side = replay(held_out_share=share)
    return [name for name in (f"group {i}" for i in range(400)) if side.is_held_out(name) is held_out][:40]


TRAIN, HELD_OUT = groups(held_out=False), groups(held_out=True)


def on_side(group: str, index: int, mask: str = "..AAA") -> TapSample:
    return sample(mask, seed=index, request_id=f"r{index}", group_id=group)


def training(count: int, mask: str = "..AAA") -> list[TapSample]:
    return [on_side(TRAIN[i % len(TRAIN)], i, mask) for i in range(count)]


# The bound.


@settings(deadline=None)
@given(
    limit=st.integers(1, 20 * BYTES),
    share=st.floats(0.01, 0.99),
    lengths=st.lists(st.tuples(st.integers(3, 12), st.integers(0, 9)), max_size=30),
)
def test_the_bound_holds_whatever_is_added(limit: int, share: float, lengths: list[tuple[int, int]]) -> None:
    """In all and per side; and the books are right: what is held is what was added and not evicted, bytes and all."""
    store = replay(limit_bytes=limit, held_out_share=share)
    accepted = 0
    for index, (length, group) in enumerate(lengths):
        accepted += store.add(sample("A" * length, seed=index, request_id=f"r{index}", group_id=f"g{group}"))
        assert store.nbytes <= limit
        held = store.held_out(100)
        assert sum(s.nbytes for s in held) <= share * limit
        # Twice as many draws reach every sample, however far the round under way has come.
        train = {s.request_id: s for s in store.draw(2 * store.num_train)}.values()
        assert (len(train), len(held)) == (store.num_train, store.num_held_out)
        assert sum(s.nbytes for s in train) + sum(s.nbytes for s in held) == store.nbytes
        assert store.num_train + store.num_held_out == accepted - store.dropped["evicted"]
    assert store.added == accepted
    assert accepted + store.dropped["too_large"] == len(lengths)


def test_nbytes_counts_every_sample_that_is_held_and_no_other() -> None:
    store = replay(limit_bytes=int(4.5 * BYTES / 0.75))
    for one in training(7):
        store.add(one)
    assert store.num_train == 4
    assert store.nbytes == 4 * BYTES
    store.add(on_side(HELD_OUT[0], 100))
    assert store.nbytes == 5 * BYTES


def test_the_oldest_go_first_and_are_counted() -> None:
    store = replay(limit_bytes=int(3.5 * BYTES / 0.75))
    for one in training(5):
        assert store.add(one)
    assert {s.request_id for s in store.draw(3)} == {"r2", "r3", "r4"}
    assert store.dropped == Counter(evicted=2)
    assert store.added == 5


def test_one_large_sample_evicts_as_many_as_it_needs() -> None:
    store = replay(limit_bytes=int(3.5 * BYTES / 0.75))
    for one in training(3):
        store.add(one)
    large = on_side(TRAIN[0], 9, "." * 5 + "A" * 7)
    assert 2.5 * BYTES < large.nbytes < 3.5 * BYTES
    assert store.add(large)
    assert store.dropped == Counter(evicted=3)
    assert store.draw(1) == [large]


def test_training_samples_do_not_evict_held_out_ones() -> None:
    store = replay(limit_bytes=int(6 * BYTES))
    store.add(on_side(HELD_OUT[0], 1000))
    for one in training(30):
        store.add(one)
    assert [s.request_id for s in store.held_out(9)] == ["r1000"]


# What is refused.


def test_refusals_are_counted_by_reason_and_change_nothing() -> None:
    store = replay(limit_bytes=int(2.5 * BYTES / 0.75))
    first = on_side(TRAIN[0], 0)
    assert store.add(first)
    refused = {
        "invalid": dataclasses.replace(on_side(TRAIN[1], 1), final_is_normed=False),
        "duplicate_id": dataclasses.replace(first, token_ids=first.token_ids.roll(1)),
        "too_large": on_side(TRAIN[2], 2, "A" * 30),
        "nothing_to_draft": on_side(TRAIN[3], 3, "....A"),
    }
    for count, (reason, one) in enumerate(refused.items(), 1):
        assert not store.add(one)
        assert store.dropped[reason] == 1
        assert store.dropped.total() == count
    assert (store.num_train, store.num_held_out, store.added, store.nbytes) == (1, 0, 1, BYTES)
    assert store.draw(1)[0] is first


def test_states_that_are_not_finite_are_never_held() -> None:
    bad = on_side(TRAIN[0], 0)
    bad.final[1, 2] = float("nan")
    store = replay()
    assert not store.add(bad)
    assert (store.num_train, store.dropped) == (0, Counter(invalid=1))


@pytest.mark.parametrize(("mask", "useful"), [("..A", False), ("A.A.A", False), ("AA", False), ("A.AA", True), (".AA", True)])
def test_only_answers_that_hold_something_to_draft_for_are_taken(mask: str, useful: bool) -> None:
    """The first answer token comes from the prompt's own step; drafting starts after it, inside the answer."""
    assert replay().add(on_side(TRAIN[0], 0, mask)) is useful


# The split.


def test_the_split_is_a_property_of_the_group_alone() -> None:
    """The same in every run and whatever came before: seeds, limits and other samples have no say."""
    names = [f"prompt {i}" for i in range(2000)]
    sides = [replay(seed=3).is_held_out(name) for name in names]
    used = replay(seed=4, limit_bytes=5)
    for one in training(5):
        used.add(one)
    assert sides == [used.is_held_out(name) for name in names]
    assert abs(sum(sides) / len(sides) - 0.25) < 0.04, "about the share that was asked for"
    # Known values: another process, or a hash that is salted per process, must not decide otherwise.
    assert "".join(name for name in "abcdefgh" if replay(held_out_share=0.5).is_held_out(name)) == "acefgh"


def test_siblings_of_one_prompt_are_on_one_side() -> None:
    store = replay()
    for index, (group, _) in enumerate(itertools.product([*TRAIN[:5], *HELD_OUT[:5]], range(4))):
        store.add(on_side(group, index))
    assert {s.group_id for s in store.draw(store.num_train)} == set(TRAIN[:5])
    assert {s.group_id for s in store.held_out(100)} == set(HELD_OUT[:5])
    assert (store.num_train, store.num_held_out) == (20, 20)


def test_held_out_gives_the_newest() -> None:
    store = replay()
    for index in range(6):
        store.add(on_side(HELD_OUT[index], index))
    assert [s.request_id for s in store.held_out(2)] == ["r4", "r5"]
    assert len(store.held_out(100)) == 6


# Drawing.


@settings(deadline=None)
@given(size=st.integers(1, 12), counts=st.lists(st.integers(1, 5), min_size=1, max_size=20))
def test_every_sample_is_drawn_before_any_is_drawn_again(size: int, counts: list[int]) -> None:
    store = replay()
    for one in training(size):
        store.add(one)
    drawn = []
    for count in counts:
        part = store.draw(count)
        assert len(part) == count
        drawn += [s.request_id for s in part]
    for start in range(0, len(drawn), size):
        one_round = drawn[start : start + size]
        assert len(set(one_round)) == len(one_round)


def test_draws_follow_the_seed() -> None:
    def order(seed: int) -> list[str]:
        store = replay(seed=seed)
        for one in training(12):
            store.add(one)
        return [s.request_id for s in store.draw(12)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != [f"r{i}" for i in range(12)], "not in the order of arrival"


def test_what_was_evicted_is_not_drawn_and_what_is_new_is() -> None:
    """Also when the round that is under way was laid out before."""
    store = replay(limit_bytes=int(4.5 * BYTES / 0.75))
    samples = training(8)
    for one in samples[:4]:
        store.add(one)
    store.draw(1)
    for one in samples[4:]:
        store.add(one)
    assert {s.request_id for s in store.draw(4)} == {"r4", "r5", "r6", "r7"}


def test_nothing_is_drawn_from_nothing_and_held_out_samples_never() -> None:
    store = replay()
    assert store.draw(3) == []
    store.add(on_side(HELD_OUT[0], 0))
    assert store.draw(3) == []


# Token statistics.


def test_token_counts_are_those_of_training_answers() -> None:
    store = replay()
    store.add(sample("..AAA", request_id="a", group_id=TRAIN[0], tokens=[5, 5, 7, 7, 22]))
    store.add(sample(".A.AA", request_id="b", group_id=TRAIN[1], tokens=[9, 7, 9, 3, 3]))
    store.add(sample("..AAA", request_id="c", group_id=HELD_OUT[0], tokens=[1, 1, 1, 1, 1]))
    expected = torch.zeros(VOCAB, dtype=torch.int64)
    expected[torch.tensor([7, 22, 3])] = torch.tensor([3, 1, 2])
    counts = store.token_counts(VOCAB)
    assert counts.dtype == torch.int64
    assert counts.tolist() == expected.tolist()
    assert replay().token_counts(VOCAB).tolist() == [0] * VOCAB


# Rounds and the longest answers.


def round_of(store: Replay, start: int, lengths: list[int], **fields: int) -> list[str]:
    """One round: training samples of these answer lengths; their ids."""
    ids = []
    for index, length in enumerate(lengths, start):
        one = dataclasses.replace(on_side(TRAIN[index % len(TRAIN)], index, ".." + "A" * length), **fields)  # type: ignore[arg-type]
        assert store.add(one)
        ids.append(one.request_id)
    return ids


LENGTHS = [3, 9, 4, 3, 12, 3, 4, 5]


def quota_replay(**fields: float) -> Replay:
    return Replay(limit_bytes=1 << 20, held_out_share=0.25, seed=0, long_quota=fields.get("quota", 0.5))


def test_the_longest_of_the_last_round_have_their_share_of_every_draw() -> None:
    """Half of all draws, though they are two of forty samples."""
    store = quota_replay()
    ids = round_of(store, 0, LENGTHS)
    assert store.round_ended()
    longest = {ids[1], ids[4]}
    assert store.num_longest == 2
    round_of(store, 100, [3] * 32)
    drawn = [sample.request_id for sample in store.draw(200)]
    assert sum(one in longest for one in drawn) >= 100
    for one in longest:
        assert drawn.count(one) >= 50, "both of them, not one again and again"


def test_without_a_round_there_is_no_quota() -> None:
    store = quota_replay()
    round_of(store, 0, LENGTHS[:7])
    assert not store.round_ended(), "seven samples are a lull, no round"
    drawn = [sample.request_id for sample in store.draw(70)]
    assert all(drawn.count(one) == 10 for one in set(drawn))
    round_of(store, 50, [6])
    assert store.round_ended(), "what came before the lull counts"
    assert not store.round_ended()
    assert store.num_longest == 2, "a lull after a round leaves its longest in place"


def test_a_new_round_replaces_the_longest() -> None:
    store = quota_replay()
    round_of(store, 0, LENGTHS)
    store.round_ended()
    second = round_of(store, 100, [4] * 6 + [8, 7])
    store.round_ended()
    drawn = [sample.request_id for sample in store.draw(100)]
    assert sum(one in second[-2:] for one in drawn) >= 50


def test_the_longest_are_evicted_last_but_within_the_bound() -> None:
    store = Replay(limit_bytes=int(12 * BYTES / 0.75), held_out_share=0.25, seed=0, long_quota=0.5)
    first = round_of(store, 0, [3] * 7 + [6])
    store.round_ended()
    round_of(store, 100, [3] * 30)
    held = {sample.request_id for sample in store.draw(60)}
    assert held & set(first) == {first[0], first[-1]}, "a quarter of eight are two: the long one and the first of the short"
    assert store.nbytes <= store.limit_bytes
    huge = round_of(store, 200, [48])
    assert {sample.request_id for sample in store.draw(60)} == set(huge), "a newcomer that needs all the room gets it"
    assert store.num_longest == 0


def test_samples_of_older_policies_expire_and_are_counted() -> None:
    store = quota_replay()
    round_of(store, 0, LENGTHS, policy_version=3)
    store.round_ended()
    assert store.add(dataclasses.replace(on_side(HELD_OUT[0], 300), policy_version=3))
    new = round_of(store, 100, [3, 3], policy_version=4)
    assert store.expire(4) == len(LENGTHS) + 1
    assert store.dropped["aged"] == len(LENGTHS) + 1
    assert (store.num_held_out, store.num_longest) == (0, 0)
    assert {sample.request_id for sample in store.draw(20)} == set(new)
    assert store.nbytes == sum(sample.nbytes for sample in store._train.values())
    assert store.expire(4) == 0


def test_a_few_held_out_samples_find_room_however_large_they_are() -> None:
    """Their share of the bytes holds one sample; the gate needs six. They take the room from the training samples."""
    limit = 14 * BYTES
    store = Replay(limit_bytes=limit, held_out_share=0.1, seed=0, least_held_out=6)
    train, held = groups(held_out=False, share=0.1), groups(held_out=True, share=0.1)
    for index in range(30):
        assert store.add(on_side(train[index % len(train)], index))
        assert store.nbytes <= limit
    assert store.num_train == 12
    for index in range(9):
        assert store.add(on_side(held[index % len(held)], 100 + index))
        assert store.nbytes <= limit
    assert store.num_held_out == 6
    assert store.num_train == 8


def test_no_least_number_keeps_the_held_out_to_their_share() -> None:
    store = Replay(limit_bytes=20 * BYTES, held_out_share=0.1, seed=0)
    held = groups(held_out=True, share=0.1)
    for index in range(9):
        store.add(on_side(held[index % len(held)], index))
    assert store.num_held_out == 2
