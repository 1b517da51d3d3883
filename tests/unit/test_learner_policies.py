"""Catches a sample that meets another policy's teacher, and a draft of an update that the learner does not go on from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.builders import draft_config, frozen_target
from tests.unit.test_learner import CYCLE, TARGET, answer, make, run, served_state
from trainer_bridge.draft import checkpoint
from trainer_bridge.draft.interface import FrozenTarget
from trainer_bridge.errors import CheckpointError, SampleError
from vllm_specdraft.learner import Learner
from vllm_specdraft.teachers import Teachers

OTHER: FrozenTarget = frozen_target(seed=5, dtype=torch.float32)
"""Another policy: another embedding and head."""


def of_policy(version: int, target: FrozenTarget, first: int) -> list:
    """Answers whose final states point at the next token under this policy's head."""
    made = []
    for index in range(first, first + 24):
        one = answer(index)
        made.append(
            replace(one, policy_version=version, request_id=f"v{version}-{index}", final=4 * target.head[one.token_ids[1:]])
        )
    return made


def test_teachers_are_kept_by_version_and_a_reused_number_voids_the_others() -> None:
    first, second, third = (frozen_target(seed=i) for i in range(3))
    teachers = Teachers(3, first)
    teachers.add(4, second, keep=2)
    assert (teachers.versions, teachers.newest, teachers.oldest) == ([3, 4], second, 3)
    teachers.add(6, third, keep=2)
    assert (teachers.versions, teachers.of(4), teachers.knows(3)) == ([4, 6], second, False)
    teachers.add(5, first, keep=2)
    assert (teachers.versions, teachers.newest) == ([5], first)


def test_a_new_policy_drops_samples_that_are_too_old_and_the_candidate() -> None:
    learner = make()
    learner.target_changed(4, OTHER, keep=2)
    assert learner.replay.num_train + learner.replay.num_held_out == 24
    for one in of_policy(4, OTHER, 100):
        assert learner.replay.add(one)
    learner.target_changed(5, TARGET, keep=2)
    assert learner.replay.dropped["aged"] == 24
    assert {one.policy_version for one in learner.replay.samples()} == {4}
    assert learner.candidate is None


def losses(learner: Learner, steps: int) -> float:
    run(learner, steps)
    assert learner.progress.loss is not None
    assert learner.progress.skipped_steps == 0
    return learner.progress.loss


def test_each_sample_is_taught_by_its_own_policy() -> None:
    """With the teachers mixed up, what two policies say of the same tokens could not both be learned to the end."""
    learner = make()
    learner.target_changed(4, OTHER, keep=2)
    for one in of_policy(4, OTHER, 100):
        assert learner.replay.add(one)
    right = losses(learner, 60)
    mixed = make()
    mixed.target_changed(4, TARGET, keep=2)
    for one in of_policy(4, OTHER, 100):
        assert mixed.replay.add(one)
    wrong = losses(mixed, 60)
    assert right < 0.7 * wrong, f"with their own teachers {right}, mixed up {wrong}"


def test_the_draft_of_an_update_is_what_is_trained_from_then_on() -> None:
    learner = make()
    run(learner, 5)
    new = served_state(seed=9)
    learner.replace_master(new)
    assert checkpoint.digest_of(learner.state()) == checkpoint.digest_of(new)
    assert not learner._optimizer.state
    # And it warms up again.
    run(learner, 1)
    assert learner._optimizer.param_groups[0]["lr"] == pytest.approx(0.02 / 4)
    assert checkpoint.digest_of(learner.state()) != checkpoint.digest_of(new)


def test_a_sample_from_outside_is_checked_before_it_is_taken() -> None:
    learner = make()
    good = answer(500)
    learner.check_sample(good)
    for bad, message in (
        (replace(good, policy_version=9), r"of policy 9, whose head is not here; those of \[3\] are"),
        (replace(good, tap_layers=(0, 1, 2)), r"taps of layers \(0, 1, 2\)"),
        (replace(good, token_ids=good.token_ids + 100), "token ids beyond the vocabulary"),
    ):
        with pytest.raises(SampleError, match=message):
            learner.check_sample(bad)
    assert draft_config()["draft_vocab_size"] > len(CYCLE)


def test_a_draft_whose_vocabulary_contradicts_itself_is_never_prepared() -> None:
    """Case D17: served, it would end the engine."""
    state = served_state()
    state["d2t"][3] += 1
    with pytest.raises(CheckpointError, match="d2t"):
        make().prepare_served(state)
