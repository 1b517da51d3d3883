"""Catches comparisons that pair steps of different seeds, take longer answers for slower ones, or call chance a win; rewards that a
wrong answer gets; and a lower bound that is none."""

from __future__ import annotations

import math
import random
from itertools import islice
from typing import Any

import pytest

from benchmarks import rl_loop
from benchmarks.governing.ratios import Ratios
from recipes.tasks import TASKS, Problem, problems


def row(arm: str, seed: int, step: int, **values: Any) -> dict[str, Any]:
    found = {
        "rollout_s": 10.0, "learn_s": 0.0, "train_s": 20.0, "sync_s": 1.0, "step_s": 31.0, "reward": 0.5, "tokens": 1000,
        "accepted_length": None, "kl": 1e-6,
    }  # fmt: skip
    return {"arm": arm, "seed": seed, "step": step, **found, **values}


def rows_of(arm: str, lengths: list[float | None], **values: Any) -> list[dict[str, Any]]:
    """Of two seeds, in turn."""
    return [row(arm, index % 2, index // 2, accepted_length=length, **values) for index, length in enumerate(lengths)]


def test_speed_is_per_token_and_step_by_step() -> None:
    """Half the tokens in half the time are no gain; one arm's slow step is compared with the other's same step."""
    none = [row("none", 0, 0, rollout_s=10.0), row("none", 0, 1, rollout_s=40.0)]
    live = [row("live", 0, 1, rollout_s=20.0), row("live", 0, 0, rollout_s=5.0, tokens=500)]
    found = rl_loop.compared(none + live, ("none", "live"))
    assert found["rollout_speedup_live_vs_none"] == pytest.approx(math.sqrt(1.0 * 2.0), abs=1e-3)


@pytest.mark.parametrize(
    ("live", "frozen", "words"),
    [
        ([2.0, 2.1, 2.0, 2.1], [1.5, 1.6, 1.5, 1.6], "was better"),
        ([1.5, 1.6, 1.5, 1.6], [2.0, 2.1, 2.0, 2.1], "was worse"),
        ([2.0, 1.4, 2.0, 1.4], [1.6, 1.8, 1.6, 1.8], "frozen was enough"),
        ([None, None, 2.0, None], [1.5, 1.6, 1.5, 1.6], "too few"),
    ],
)
def test_the_verdict_is_said_in_words(live: list[float | None], frozen: list[float | None], words: str) -> None:
    rows = rows_of("live", live) + rows_of("frozen", frozen)
    assert words in rl_loop.compared(rows, ("frozen", "live"))["verdict"]


def test_without_both_drafts_there_is_no_verdict() -> None:
    assert "no verdict" in rl_loop.compared(rows_of("none", [None, None]), ("none",))["verdict"]


@pytest.mark.parametrize(("reward", "overlap"), [(0.5, True), (0.9, False)])
def test_rewards_overlap_or_not(reward: float, overlap: bool) -> None:
    rows = [row("none", 0, step, reward=0.5 + 0.02 * (step % 2)) for step in range(8)]
    rows += [row("live", 0, step, reward=reward + 0.02 * (step % 2)) for step in range(8)]
    assert rl_loop.compared(rows, ("none", "live"))["rewards_overlap"] is overlap


def test_a_bound_covers_the_mean_as_often_as_it_says() -> None:
    """Of 95% one-sided, over many series of ten pairs."""
    draw, below = random.Random(1), 0
    for _ in range(1000):
        ratios = Ratios()
        for _ in range(10):
            ratios.add(math.exp(draw.gauss(0.1, 0.05)))
        below += ratios.lower < math.exp(0.1)
    assert 920 <= below <= 975


def test_one_pair_bounds_nothing() -> None:
    ratios = Ratios()
    ratios.add(1.5)
    assert ratios.lower == 0.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("The answer is 42.", 1.0), ("12 + 30 = 42", 1.0), ("42 is what I thought, but it is 41", 0.0), ("", 0.0),
        ("It costs 42.00 dollars", 1.0), ("-42", 0.0), ("4,2", 1.0), ("no number", 0.0),
    ],
)  # fmt: skip
def test_the_last_number_is_the_answer(text: str, reward: float) -> None:
    assert Problem(question="", answer="42").reward(text) == reward


@pytest.mark.parametrize("task", TASKS)
def test_problems_are_the_same_for_a_seed_and_others_for_another(task: str) -> None:
    one, again, other = (list(islice(problems(task, seed), 5)) for seed in (3, 3, 4))
    assert one == again and one != other
    assert all(problem.reward(problem.answer) == 1.0 for problem in one)
