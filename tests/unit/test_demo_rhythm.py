"""Catches a burst of the wrong shape, an accepted length without its bonus token, and a budget that runs over."""

from __future__ import annotations

import pytest

from vllm_specdraft.demo.client import metric_total
from vllm_specdraft.demo.rhythm import RhythmConfig, accepted_length, samplings
from vllm_specdraft.demo.run import one_line, round_fits


def test_every_nth_rollout_is_greedy_and_none_is_seeded() -> None:
    chosen = samplings(RhythmConfig(rollouts=12, greedy_every=6))
    assert [item.temperature for item in chosen] == [1.0] * 5 + [0.0] + [1.0] * 5 + [0.0]
    assert all(item.seed is None for item in chosen)


def test_no_greedy_rollouts_when_none_are_asked_for() -> None:
    assert all(item.temperature == 1.0 for item in samplings(RhythmConfig(greedy_every=0)))


def test_a_rhythm_that_cannot_be_played_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="concurrency=0"):
        RhythmConfig(concurrency=0)
    with pytest.raises(ValueError, match="pause_s=-1"):
        RhythmConfig(pause_s=-1)


def test_accepted_length_is_over_the_interval_with_the_bonus_token() -> None:
    before = {"counters": {"draft_steps": 100, "accepted_tokens": 500}}
    after = {"counters": {"draft_steps": 120, "accepted_tokens": 510}}
    assert accepted_length(before, after) == pytest.approx(1.5)
    assert accepted_length(after, after) is None


def test_metric_total_adds_label_sets_and_takes_no_other_name() -> None:
    text = '# HELP a_sum x\na_sum{engine="0"} 1.5\na_sum{engine="1"} 2.5\na_sum_created{engine="0"} 9\nb_a_sum 7\n'
    assert metric_total(text, "a_sum") == 4.0
    assert metric_total(text, "c_sum") is None


def test_a_round_is_left_out_when_the_comparison_would_not_fit_any_more() -> None:
    assert round_fits(elapsed_s=500, round_s=100, closing_s=300, budget_s=900)
    assert not round_fits(elapsed_s=500, round_s=101, closing_s=300, budget_s=900)


def test_an_error_with_a_log_tail_becomes_one_line_with_its_cause() -> None:
    error = RuntimeError("the server ended; the end of none.log:\nTraceback\nOSError: port taken\nmore")
    assert one_line(error) == "the server ended; the end of none.log: OSError: port taken"
    assert one_line(RuntimeError()) == "RuntimeError"
