"""Catches evaluation on what the draft learned from: the two sets must be disjoint by text, and the same in every run."""

from __future__ import annotations

from vllm_specdraft.demo.prompts import PromptSource, normalised


def test_training_never_meets_an_evaluation_question_and_never_repeats() -> None:
    source = PromptSource(evaluation=200)
    training = source.take(1500) + source.take(500)
    keys = [normalised(prompt.question) for prompt in training]
    assert len(set(keys)) == 2000
    assert not set(keys) & {normalised(prompt.question) for prompt in source.evaluation}


def test_the_sets_are_decided_by_the_seed() -> None:
    one, same, other = PromptSource(evaluation=5, seed=3), PromptSource(evaluation=5, seed=3), PromptSource(evaluation=5, seed=4)
    assert one.evaluation == same.evaluation
    assert one.take(7) == same.take(7)
    assert one.evaluation != other.evaluation


def test_names_go_on_where_the_last_draw_ended() -> None:
    source = PromptSource(evaluation=2)
    names = [prompt.name for prompt in [*source.evaluation, *source.take(2), *source.take(1)]]
    assert names == ["evaluation-0", "evaluation-1", "training-0", "training-1", "training-2"]


def test_questions_that_differ_in_case_and_spaces_only_are_the_same() -> None:
    assert normalised("How  many\napples?") == normalised("how many apples? ")
