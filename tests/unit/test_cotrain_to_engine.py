"""Catches answers that reach a trainer with a token, a mask or a weight in the wrong place."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest
import torch

from benchmarks import cotrain_to_engine
from benchmarks.cotraining import engine_rank, engine_rollouts
from benchmarks.cotraining.engine_rollouts import Rollout, Rows, advantages, reward_of, rows_of, steps_of


def rollout(prompt: str, asked: int, answered: int, reward: float = 0.0) -> Rollout:
    """Prompt tokens from 10 on, answer tokens from 50 on."""
    return Rollout(
        prompt=prompt, prompt_ids=tuple(range(10, 10 + asked)), token_ids=tuple(range(50, 50 + answered)), reward=reward
    )  # fmt: skip


def unpadded(rows: Rows, row: int) -> tuple[list[int], list[int]]:
    """The document's tokens up to its last generated one, and which of them are generated."""
    end = int(rows.generated[row].nonzero().max()) + 1
    return rows.token_ids[row, :end].tolist(), rows.generated[row, :end].int().tolist()


def test_ragged_documents_are_padded_behind_and_only_answers_are_marked() -> None:
    ragged = [rollout("a", 3, 2), rollout("b", 1, 4), rollout("c", 2, 1)]
    rows = rows_of(ragged, [1.0, 1.0, 1.0], length=6)
    assert rows.token_ids.shape == rows.generated.shape == rows.weights.shape == (3, 6)
    for row, one in enumerate(ragged):
        ids, generated = unpadded(rows, row)
        assert ids == [*one.prompt_ids, *one.token_ids]
        assert generated == [0] * len(one.prompt_ids) + [1] * len(one.token_ids)


def test_a_weight_lies_where_the_next_token_is_an_answers() -> None:
    rows = rows_of([rollout("a", 3, 2), rollout("b", 1, 5)], [0.5, -2.0], length=6)
    for row, weight in enumerate((0.5, -2.0)):
        chosen = rows.weights[row] != 0
        assert rows.weights[row][chosen].unique().tolist() == [weight]
        assert rows.labels[row][chosen].tolist() == rows.token_ids[row][rows.generated[row]].tolist()


def test_the_drafts_microbatch_has_the_same_documents() -> None:
    rows = rows_of([rollout("a", 3, 2), rollout("b", 1, 5)], [1.0, 1.0], length=7)
    microbatch = rows.microbatch
    assert microbatch.lengths == (7, 7)
    assert torch.equal(microbatch.token_ids.reshape(2, 7), rows.token_ids)
    assert torch.equal(microbatch.loss_mask.reshape(2, 7), rows.generated)


def test_every_rollout_comes_once_an_epoch_and_a_step_has_one_shape() -> None:
    ragged = [rollout(f"p{index % 4}", 2 + index % 3, 1 + index) for index in range(8)]
    steps = steps_of(ragged, documents=2, microbatches=2, epochs=3)
    assert len(steps) == 6
    for epoch in range(3):
        documents = [
            tuple(unpadded(rows, row)[0]) for step in steps[2 * epoch : 2 * epoch + 2] for rows in step for row in range(2)
        ]  # fmt: skip
        assert sorted(documents) == sorted((*one.prompt_ids, *one.token_ids) for one in ragged)
    for step in steps:
        assert len(step) == 2
        longest = max(int(rows.generated.nonzero()[:, 1].max()) + 1 for rows in step)
        assert {tuple(rows.token_ids.shape) for rows in step} == {(2, longest)}


def test_weights_are_advantages_over_the_answer_tokens_of_the_step() -> None:
    ragged = [rollout("a", 2, 3, 1.0), rollout("a", 2, 2, 0.0), rollout("b", 2, 4, 0.5), rollout("b", 2, 1, 0.5)]
    (step,) = steps_of(ragged, documents=2, microbatches=2, epochs=1)
    tokens = sum(int(rows.generated.sum()) for rows in step)
    assert tokens == 10
    sums = sorted(round(float(rows.weights[row].sum()), 6) for rows in step for row in range(2))
    assert sums == [-0.1, 0.0, 0.0, 0.15]


def test_rollouts_that_make_no_whole_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rollouts do not make steps of 2 microbatches of 1"):
        steps_of([rollout("a", 1, 1)] * 3, documents=1, microbatches=2, epochs=1)


def test_advantages_are_taken_among_siblings() -> None:
    assert advantages([rollout("a", 1, 1, 1.0), rollout("b", 1, 1, 5.0), rollout("a", 1, 1, 0.0)]) == [0.5, 0.0, -0.5]


@pytest.mark.parametrize(
    ("text", "right", "hit"),
    [("3 and 4 make 7.", "7", True), ("7 is not 8", "7", False), ("no number", "7", False), ("it is -2.50", "-2.5", True)],
)
def test_an_answer_is_right_where_its_last_number_is(text: str, right: str, hit: bool) -> None:
    assert reward_of(text, right, tokens=10, max_tokens=10) == float(hit)


@pytest.mark.parametrize("module", [engine_rollouts, engine_rank])
def test_examples(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


def test_options_that_make_no_whole_steps_are_refused_before_anything_starts() -> None:
    options = cotrain_to_engine.parser().parse_args(["--prompts", "3", "--samples", "2", "--documents", "1", "--microbatches", "4"])
    assert "multiple" in (cotrain_to_engine.refusal(options) or "")
    assert cotrain_to_engine.refusal(cotrain_to_engine.parser().parse_args([])) is None
