"""Catches a draft that shows in the policy's gradients, and one that learns something else in another schedule: hooks that fire in
activation recomputation, taps of another microbatch, or of another stage.

In schedules that nobody here wrote: those of megatron-core and of torch.
"""

from __future__ import annotations

import pytest

from benchmarks.cotraining import correct
from tests.distributed.megatron_cpu import NEEDS_MEGATRON

SCHEDULES = tuple(label for label, task in correct.SCHEDULE_TASKS.items() if correct.ranks_of(task) == 2)
"""Of two processes; `benchmarks.cotrain` runs all."""


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict]]:
    """Steps of all schedules, without a draft and with one of each type."""
    return correct.run({label: correct.SCHEDULE_TASKS[label] for label in SCHEDULES}, (None, *correct.KINDS))


@NEEDS_MEGATRON
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_policys_gradients_are_bitwise_those_without_a_draft(found: dict[str, list[dict]], schedule: str) -> None:
    assert correct.policy_untouched(found[schedule])


@NEEDS_MEGATRON
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_draft_learns_the_same_in_every_schedule(found: dict[str, list[dict]], schedule: str) -> None:
    """Schedules of one library run the same policy on the same microbatches; an untied embedding is another policy."""
    library = correct.SCHEDULE_TASKS[schedule][0]
    first = next(label for label in SCHEDULES if correct.SCHEDULE_TASKS[label][0] == library)
    alone = next(rank for rank in found[first] if "draft" in rank["eagle3"])
    if "untied" in schedule:
        assert correct.off_by(found[schedule], alone) > correct.LARGEST_DIFFERENCE
    else:
        assert correct.off_by(found[schedule], alone) <= correct.LARGEST_DIFFERENCE


def test_every_layout_trains_the_draft_of_one_process() -> None:
    """Ragged documents over context-parallel ranks of a pipeline; `benchmarks.cotrain` runs all layouts."""
    tasks = {label: correct.LAYOUT_TASKS[label] for label in ("CP 1 x PP 1", "CP 2 x PP 2")}
    ranks = correct.run(tasks, correct.KINDS)
    assert correct.off_by(ranks["CP 2 x PP 2"], ranks["CP 1 x PP 1"][0]) <= correct.LARGEST_DIFFERENCE


@NEEDS_MEGATRON
def test_tensor_parallel_ranks_ship_their_columns() -> None:
    tasks = {label: correct.LAYOUT_TASKS[label] for label in ("TP 1 x PP 1", "TP 2 x PP 2")}
    ranks = correct.run(tasks, correct.KINDS)
    assert correct.off_by(ranks["TP 2 x PP 2"], ranks["TP 1 x PP 1"][0]) <= correct.LARGEST_DIFFERENCE
