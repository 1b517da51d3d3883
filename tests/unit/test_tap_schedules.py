"""Catches a tap channel with too few slots for its schedule, which would stop it, and one with more than it can ever use."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from trainer_bridge.errors import ConfigError
from trainer_bridge.taps.schedules import Op, Schedule, forward_only, interleaved, of_pipelining, one_f_one_b


def most_under_way(schedule: Schedule, defer: int, seed: int, slots: dict[int, int] | None = None) -> dict[int, int]:
    """Runs the ranks step by step in a random order, some of them much faster than others; the most taps put and not released.

    With `slots`, a put waits for a free one. Raises when nobody can go on.
    """
    choose = random.Random(seed)
    ranks = schedule.with_draft(defer)
    eager = [choose.random() ** 3 + 1e-3 for _ in ranks]
    at, done = [0] * len(ranks), set()
    under_way, most = dict.fromkeys(range(schedule.chunks), 0), dict.fromkeys(range(schedule.chunks), 0)

    def may_run(rank: int) -> bool:
        if at[rank] == len(ranks[rank]):
            return False
        op = ranks[rank][at[rank]]
        if op.kind == "F" and slots is not None and under_way[op.chunk] >= slots[op.chunk]:
            return False
        if op.kind == "F":
            return op.chunk == 0 or Op("F", op.chunk - 1, op.microbatch) in done
        if op.kind == "B":
            return op.chunk == schedule.chunks - 1 or Op("B", op.chunk + 1, op.microbatch) in done
        return True

    while any(at[rank] < len(ranks[rank]) for rank in range(len(ranks))):
        able = [rank for rank in range(len(ranks)) if may_run(rank)]
        assert able, "nobody can go on"
        rank = choose.choices(able, [eager[r] for r in able])[0]
        op = ranks[rank][at[rank]]
        at[rank] += 1
        done.add(op)
        if op.kind == "F":
            under_way[op.chunk] += 1
            most[op.chunk] = max(most[op.chunk], under_way[op.chunk])
        if op.kind == "D":
            for chunk in under_way:
                under_way[chunk] -= 1
    return most


SCHEDULES = [
    one_f_one_b(1, 3), one_f_one_b(2, 3), one_f_one_b(2, 8), one_f_one_b(4, 2), one_f_one_b(4, 9),
    interleaved(2, 2, 4), interleaved(2, 2, 8), interleaved(2, 3, 6), interleaved(4, 2, 8), interleaved(4, 2, 4),
    forward_only(3, 5),
]  # fmt: skip


@pytest.mark.parametrize("defer", [0, 1, 100])
@pytest.mark.parametrize(
    "schedule", SCHEDULES, ids=lambda s: f"{s.name} {len(s.ranks)}x{s.chunks // len(s.ranks)} {s.microbatches}"
)
def test_no_run_needs_more_slots_and_some_run_needs_all_of_them(schedule: Schedule, defer: int) -> None:
    slots = schedule.slots(defer)
    reached = dict.fromkeys(slots, 0)
    for seed in range(300):
        for chunk, count in most_under_way(schedule, defer, seed).items():
            assert count <= slots[chunk], (seed, chunk)
            reached[chunk] = max(reached[chunk], count)
    assert reached == slots
    schedule.check_slots(slots, defer)


def test_plain_1f1b_needs_the_ranks_behind_and_itself() -> None:
    """Half of the 2 (P - s) that were published."""
    for stages in (1, 2, 3, 5):
        assert one_f_one_b(stages, 20).slots() == {rank: stages - rank for rank in range(stages)}


def test_draft_work_at_the_end_of_the_step_needs_a_slot_for_each_microbatch() -> None:
    assert one_f_one_b(2, 6).slots(defer=6) == {0: 6, 1: 6}
    assert forward_only(2, 6).slots() == {0: 6, 1: 1}


@pytest.mark.parametrize("defer", [0, 1])
@pytest.mark.parametrize(
    "schedule", SCHEDULES, ids=lambda s: f"{s.name} {len(s.ranks)}x{s.chunks // len(s.ranks)} {s.microbatches}"
)
def test_fewer_slots_are_refused_exactly_when_they_would_stop_the_run(schedule: Schedule, defer: int) -> None:
    for count in (1, 2, 3):
        slots = dict.fromkeys(range(schedule.chunks), count)
        stops = False
        for seed in range(20):
            try:
                most_under_way(schedule, defer, seed, slots)
            except AssertionError:
                stops = True
        if stops:
            with pytest.raises(ConfigError, match="never ends"):
                schedule.check_slots(slots, defer)
        else:
            schedule.check_slots(slots, defer)


def actions(*words: str) -> list[SimpleNamespace | None]:
    """``1F0``: stage 1, forward, microbatch 0."""
    made: list[SimpleNamespace | None] = []
    for word in words:
        stage, kind, microbatch = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)", word).groups()
        made.append(SimpleNamespace(stage_index=int(stage), computation_type=kind, microbatch_index=int(microbatch)))
    return made


def test_schedules_of_torch_are_read() -> None:
    """Actions that compute nothing, and empty places, do not count; zero bubble's two halves of a backward do."""
    order = {
        0: [*actions("0F0", "0SEND_F0"), None, *actions("0F1", "0I0", "0W0", "0I1", "0W1")],
        1: [None, *actions("1RECV_F0", "1F0", "1I0", "1F1", "1I1", "1W0", "1W1")],
    }
    schedule = of_pipelining(order, "zero bubble")
    assert schedule.ranks[0] == (Op("F", 0, 0), Op("F", 0, 1), Op("B", 0, 0), Op("W", 0, 0), Op("B", 0, 1), Op("W", 0, 1))
    assert schedule.slots() == {0: 2, 1: 1}


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[Op("F", 0, 0), Op("F", 0, 0)]], "runs something twice"),
        ([[Op("F", 1, 0)]], "which no rank runs"),
        ([[Op("B", 0, 0), Op("F", 0, 0)]], "never ends"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(ranks: Sequence[Sequence[Op]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schedule(name="mine", ranks=tuple(tuple(ops) for ops in ranks))


def test_microbatches_that_do_not_fit_an_interleaved_schedule_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs a multiple of 4 microbatches, not 6"):
        interleaved(4, 2, 6)
