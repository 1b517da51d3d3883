"""Catches a benchmark of faults that would call anything right: prompts that tell nothing, a judge that does not look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.sync import frames
from benchmarks.sync.subject import Seen, Subject, Variant, chosen
from benchmarks.sync.trainer import A, B
from vllm_specdraft.demo.session import SessionError

ANSWERS = {A: [[1, 2], [3, 4]], B: [[1, 2], [3, 5]]}


def subject() -> Subject:
    here = Path()
    variants = {
        which: Variant(target=here, draft=here, weights={}, draft_weights={}, draft_digest=f"draft {which}") for which in (A, B)
    }
    return Subject(variants, [[7], [8]], ANSWERS)


def seen(version: int, answers: list[list[int]], draft: str, updates: list[dict[str, Any]] | None = None) -> Seen:
    return Seen(status={"policy_version": version, "draft_digest": f"draft {draft}", "updates": updates or []}, answers=answers)


def test_one_version_is_its_answers_and_its_draft() -> None:
    judge = subject()
    assert judge.next(0) == (1, B)
    assert judge.is_whole(seen(0, ANSWERS[A], A))
    assert judge.is_whole(seen(1, ANSWERS[B], B))
    assert not judge.is_whole(seen(1, ANSWERS[A], B)), "the old target under the new version"
    assert not judge.is_whole(seen(1, ANSWERS[B], A)), "the old draft under the new version"
    assert not judge.is_whole(seen(0, [ANSWERS[A][0], [3, 9]], A)), "a token that neither says"
    assert not judge.is_whole(seen(2, ANSWERS[A], A)), "a version that nobody sent"


def test_an_update_is_named_by_its_whole_id_and_its_version() -> None:
    record = {"origin": "update faults-3-ab12 of job faults", "policy_version": 3}
    assert seen(3, [], A, [record]).names("faults-3-ab12")
    assert not seen(3, [], A, [record]).names("faults-3-ab1")
    assert not seen(4, [], A, [record]).names("faults-3-ab12")


def test_prompts_are_those_that_only_the_weights_decide() -> None:
    found = {
        A: [([1], 0.5), ([2], 1e-5), ([3], 0.5), ([4], 0.5)],
        B: [([1], 0.5), ([9], 0.5), ([9], 0.5), ([9], 0.5)],
    }
    assert chosen(found, 2) == [0, 2]
    with pytest.raises(SessionError, match="3 of 4 prompts have answers without ties, 4 are needed"):
        chosen(found, 4)
    with pytest.raises(SessionError, match="neither could be told from the other"):
        chosen(found, 1)


class Wire:
    """Notes what would be sent."""

    def __init__(self) -> None:
        self.sent: list[list[Any]] = []

    def send(self, message: list[Any]) -> None:
        self.sent.append(message)

    def reach(self, update: str, states: frozenset[str]) -> str:
        return "VERIFIED"


@pytest.mark.parametrize("variant", range(frames.VARIANTS))
@pytest.mark.parametrize("fault", frames.FAULTS)
def test_each_script_has_one_fault(fault: str, variant: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_HELD_S", 0.0)
    data: list[list[Any]] = [[b"head %d" % index, np.full(8, index, np.uint8)] for index in range(4)]
    finish, commit = [b"finish"], [b"commit"]
    wire: Any = Wire()
    for step in frames.script(fault, variant, "u", data, finish, commit, 1):
        step(wire)
    right, sent = [*data, finish, commit], wire.sent
    same = [any(message is other for other in right) for message in sent]
    if fault == frames.TRUNCATED:
        assert same == [True, False, True, True, True, True]
        assert sum(len(part) for part in sent[1]) < sum(len(part) for part in data[1])
    elif fault == frames.REORDERED:
        assert all(same)
        assert len(sent) == len(right)
        assert any(one is not other for one, other in zip(sent, right, strict=True))
    else:
        # One more than there should be, or one that waits in its place.
        assert all(same)
        assert len(sent) == len(right) + (0 if (fault, variant) == (frames.DELAYED, 0) else 1)
