"""Catches a comparison that flatters: ratios across pairs, a fixed order, a token difference that is hidden or excused."""

from __future__ import annotations

import pytest

from vllm_specdraft.demo.compare import (
    ARMS,
    FIRST,
    LIVE,
    NONE,
    Measurement,
    complete_pairs,
    differences,
    first_difference,
    is_tie,
    order_of,
    paired_ratios,
    summarise,
)


def turn(arm: str, pair: int, wall_s: float, *, ids: tuple[int, ...] = (1, 2, 3, 4, 5), steps: int | None = None) -> Measurement:
    """One turn of one prompt; `steps` draft steps that accepted what the answer's length implies."""
    return Measurement(
        arm=arm,
        pair=pair,
        names=(f"prompt-{pair}",),
        prompt_ids=((90, 91),),
        token_ids=(ids,),
        wall_s=wall_s,
        decode_s=wall_s / 2,
        draft_steps=steps,
        accepted_tokens=None if steps is None else len(ids) - 1 - steps,
    )


def test_each_arm_takes_each_place_equally_often() -> None:
    orders = [order_of(pair) for pair in range(6)]
    for arm in ARMS:
        assert sorted(order.index(arm) for order in orders) == [0, 0, 1, 1, 2, 2]


def test_ratios_are_taken_within_a_pair_not_between_medians() -> None:
    # The machine slows down threefold after the first pair: only ratios within a pair show that live is always twice as fast.
    turns = [turn(NONE, 0, 1.0), turn(LIVE, 0, 0.5), turn(NONE, 1, 3.0), turn(LIVE, 1, 1.5)]
    assert paired_ratios(turns, LIVE) == pytest.approx([2.0, 2.0])


def test_ratio_compares_speeds_when_the_answers_have_different_lengths() -> None:
    turns = [turn(NONE, 0, 1.0, ids=(1,) * 10), turn(LIVE, 0, 1.0, ids=(1,) * 5)]
    assert paired_ratios(turns, LIVE) == pytest.approx([0.5])


def test_a_pair_that_lacks_an_arm_is_left_out() -> None:
    turns = [turn(NONE, 0, 1.0), turn(FIRST, 0, 1.0), turn(LIVE, 0, 1.0), turn(NONE, 1, 9.0), turn(LIVE, 1, 1.0)]
    assert list(complete_pairs(turns)) == [0]
    assert [summary.ratio for summary in summarise(turns)] == [1.0, 1.0, 1.0]
    assert summarise(turns[3:]) == []


def test_summary_counts_the_bonus_token_and_times_steps_not_tokens() -> None:
    turns = [
        turn(NONE, 0, 1.0),
        turn(FIRST, 0, 1.0, steps=4),
        turn(LIVE, 0, 0.5, steps=2),
    ]
    none, first, live = summarise(turns)
    assert (none.accepted_length, first.accepted_length, live.accepted_length) == (1.0, 1.0, 2.0)
    # Five tokens: the first comes from the prefill, the other four take four plain steps, or two that yield two each.
    assert none.step_ms == pytest.approx(1000 * 0.5 / 4)
    assert live.step_ms == pytest.approx(1000 * 0.25 / 2)
    assert live.ratio == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("left", "right", "position"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([], [1], 0),
        ([], [], None),
    ],
)
def test_first_difference(left: list[int], right: list[int], position: int | None) -> None:
    assert first_difference(left, right) == position


def test_differences_name_the_prompt_the_place_and_what_both_arms_had_seen() -> None:
    turns = [turn(NONE, 0, 1.0), turn(FIRST, 0, 1.0), turn(LIVE, 0, 1.0, ids=(1, 2, 8, 4, 5))]
    (found,) = differences(turns)
    assert (found.arm, found.prompt, found.position) == (LIVE, "prompt-0", 2)
    assert found.context_ids == (90, 91, 1, 2)
    assert (found.none_token, found.arm_token) == (3, 8)


def test_an_answer_that_ends_early_is_a_difference() -> None:
    turns = [turn(NONE, 0, 1.0), turn(FIRST, 0, 1.0), turn(LIVE, 0, 1.0, ids=(1, 2, 3))]
    (found,) = differences(turns)
    assert (found.position, found.none_token, found.arm_token) == (3, 4, None)


def test_only_the_two_best_tokens_within_rounding_count_as_a_tie() -> None:
    turns = [turn(NONE, 0, 1.0), turn(FIRST, 0, 1.0), turn(LIVE, 0, 1.0, ids=(1, 2, 8, 4, 5))]
    (found,) = differences(turns)
    assert is_tie(found, {3: -1.0, 8: -1.00005})
    assert not is_tie(found, {3: -1.0, 8: -1.01})
    # Two other tokens tie, but the arm took neither.
    assert not is_tie(found, {3: -1.0, 7: -1.0})
    assert not is_tie(found, {3: -1.0, 7: -1.00001, 8: -1.00005})
