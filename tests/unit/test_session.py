"""Catches a way through the state machine that is none: a commit of what was not verified, two ends of one update, an abort that
comes after the engine began to swap."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_bridge.errors import UpdateError
from trainer_bridge.session import FINAL, UpdateSession, UpdateState


def session(**changes: Any) -> UpdateSession:
    fields: dict[str, Any] = {"update": "u", "version": 3, "world": 2, "deadline": 100.0, "silence_s": 5.0}
    return UpdateSession(**{**fields, **changes})


def test_the_way_to_a_commit() -> None:
    update = session()
    update.join(0, "a", 0.0)
    update.join(1, "b", 0.0)
    assert update.state is UpdateState.OFFERED
    update.began()
    assert not update.finished(1, "b", 4)
    assert update.finished(0, "a", 5)
    update.verified()
    update.commit_begins()
    update.committed()
    assert (update.state, update.sent) == (UpdateState.COMMITTED, {1: 4, 0: 5})


def test_a_retry_of_each_step_is_harmless() -> None:
    update = session(world=1)
    for _ in range(2):
        update.join(0, "a", 0.0)
        update.began()
        assert update.finished(0, "a", 3)
    with pytest.raises(UpdateError, match="finished twice, with 3 and with 4"):
        update.finished(0, "a", 4)


def test_ranks_are_who_they_say_and_in_range() -> None:
    update = session()
    update.join(0, "a", 0.0)
    with pytest.raises(UpdateError, match="two processes say they are rank 0"):
        update.join(0, "b", 0.0)
    with pytest.raises(UpdateError, match="rank 2 of an update for 2 ranks"):
        update.join(2, "c", 0.0)
    with pytest.raises(UpdateError, match="rank 1 did not join"):
        update.finished(1, "b", 1)


def test_no_commit_before_verification_and_no_abort_while_it_swaps() -> None:
    update = session(world=1)
    update.join(0, "a", 0.0)
    with pytest.raises(UpdateError, match="u is OFFERED, needs to be VERIFIED"):
        update.commit_begins()
    update.finished(0, "a", 1)
    update.verified()
    update.commit_begins()
    with pytest.raises(UpdateError, match="being committed: it can no longer be aborted"):
        update.abort("changed my mind")
    assert update.overdue(1e9) is None
    update.commit_failed("no room")
    assert (update.state, update.reason) == (UpdateState.ABORTED, "no room")
    with pytest.raises(UpdateError, match=r"u is ABORTED \(no room\)"):
        update.abort("again")


def test_deadline_and_silence_are_told_apart() -> None:
    update = session(world=1)
    assert update.overdue(99.0) is None
    assert update.overdue(100.0) == "its deadline passed in state OFFERED"
    update.join(0, "a", 10.0)
    assert update.overdue(15.0) is None
    assert update.overdue(15.1) == "rank 0 was silent for 5 s (killed, or cut off)"
    update.alive("a", 15.0)
    update.alive("stranger", 99.0)
    assert update.overdue(20.0) is None


STEPS = st.lists(
    st.sampled_from(["join0", "join1", "began", "finish0", "finish1", "verified", "begin", "committed", "failed", "abort"]),
    max_size=14,
)


@settings(max_examples=500, deadline=None)
@given(steps=STEPS)
def test_whatever_is_tried_a_final_state_stays_and_a_commit_was_verified(steps: list[str]) -> None:
    update, seen = session(), [UpdateState.OFFERED]
    actions = {
        "join0": lambda: update.join(0, "a", 0.0), "join1": lambda: update.join(1, "b", 0.0), "began": update.began,
        "finish0": lambda: update.finished(0, "a", 1), "finish1": lambda: update.finished(1, "b", 1),
        "verified": update.verified, "begin": update.commit_begins, "committed": update.committed,
        "failed": lambda: update.commit_failed("x"), "abort": lambda: update.abort("y"),
    }  # fmt: skip
    for step in steps:
        try:
            actions[step]()
        except UpdateError:
            assert update.state is seen[-1]
        seen.append(update.state)
    finals = [state for state in seen if state in FINAL]
    assert len(set(finals)) <= 1
    assert finals == seen[len(seen) - len(finals) :]
    if UpdateState.COMMITTED in seen:
        assert UpdateState.VERIFIED in seen
