"""Catches a tap that no stage ships, that two ship, or that the wrong one ships; slots that are not those of the schedule; a layout
that cannot be and is found out only when a rank waits for ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from trainer_bridge.errors import ConfigError
from trainer_bridge.taps.schedules import Op, Schedule, forward_only, interleaved, one_f_one_b
from trainer_bridge.taps.tap_plan import Source, TapPlan, resolve


def plan(taps: tuple[int, ...], bounds: tuple[int, ...], schedule: Schedule | None = None, **changes: Any) -> TapPlan:
    """Chunks from one bound to the next, on the ranks of the schedule."""
    parts = tuple(range(start, stop) for start, stop in itertools.pairwise(bounds))
    schedule = schedule or one_f_one_b(len(parts), 4)
    ranks = tuple(chunk % len(schedule.ranks) for chunk in range(len(parts)))
    return TapPlan(**{"tap_layers": taps, "layers": parts, "ranks": ranks, "schedule": schedule, **changes})


def shipped(found: TapPlan) -> list[tuple[int, ...]]:
    return [found.of_chunk(chunk) for chunk in range(len(found.layers))]


@pytest.mark.parametrize(
    ("taps", "bounds", "expected"),
    [
        pytest.param((1, 2, 5), (0, 3, 6), [(1, 2), (5,)], id="even stages"),
        pytest.param((1, 3, 4), (0, 3, 6), [(1,), (3, 4)], id="the first layer of a stage is that stage's own"),
        pytest.param((2, 3), (0, 3, 6), [(2,), (3,)], id="last and first layer of neighbours"),
        pytest.param((1, 2, 4, 6), (0, 5, 6, 8), [(1, 2, 4), (), (6,)], id="uneven stages, one without a tap"),
        pytest.param((7,), (0, 3, 6, 8), [(), (), (7,)], id="all on the last stage"),
        pytest.param((1, 3), (0, 0, 2, 4, 4), [(), (1,), (3,), ()], id="stages of the embedding and of the head alone"),
        pytest.param((1,), (0, 4), [(1,)], id="one stage"),
    ],
)
def test_the_stage_that_runs_a_layer_ships_its_input(
    taps: tuple[int, ...], bounds: tuple[int, ...], expected: list[tuple[int, ...]]
) -> None:
    found = plan(taps, bounds)
    assert shipped(found) == expected
    assert sorted(layer for part in shipped(found) for layer in part) == list(taps)
    last = len(bounds) - 2
    assert found.draft_rank == last
    assert [source.chunk for source in found.sources()] == [c for c, part in enumerate(expected) if part and c != last]


def test_interleaved_chunks_ship_from_their_own_rank_but_not_to_themselves() -> None:
    """Chunks 1 and 3 lie on the draft's rank: what they tap stays there."""
    schedule = interleaved(2, 2, 4)
    found = plan((1, 2, 3, 5, 7), (0, 2, 4, 6, 8), schedule)
    assert shipped(found) == [(1,), (2, 3), (5,), (7,)]
    slots = schedule.slots()
    assert found.sources() == [
        Source(chunk=0, rank=0, layers=(1,), slots=slots[0]),
        Source(chunk=2, rank=0, layers=(5,), slots=slots[2]),
    ]


@pytest.mark.parametrize("defer", [0, 1, 3, None])
@pytest.mark.parametrize("schedule", [one_f_one_b(3, 6), interleaved(3, 2, 6), forward_only(3, 5)], ids=lambda one: one.name)
def test_sources_have_the_slots_of_the_schedule(schedule: Schedule, defer: int | None) -> None:
    bounds = tuple(2 * chunk for chunk in range(schedule.chunks + 1))
    found = plan(tuple(range(1, bounds[-1])), bounds, schedule, defer=defer)
    slots = schedule.slots(schedule.microbatches if defer is None else defer)
    away = [chunk for chunk in range(schedule.chunks) if schedule.rank_of(chunk) != found.draft_rank]
    assert {source.chunk: source.slots for source in found.sources()} == {chunk: slots[chunk] for chunk in away}
    assert len(away) >= 2


def test_deferred_work_needs_a_slot_per_microbatch() -> None:
    """Deferral to the end of the step, whatever number says so."""
    for defer in (None, 6, 99):
        assert [source.slots for source in plan((1, 5), (0, 2, 4, 6), one_f_one_b(3, 6), defer=defer).sources()] == [6]
    assert [source.slots for source in plan((1, 5), (0, 2, 4, 6), one_f_one_b(3, 6)).sources()] < [6]


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "descending": (lambda: plan((3, 1), (0, 3, 6)), r"tap layers \(3, 1\): needs distinct ascending layers"),
    "twice": (lambda: plan((1, 1), (0, 3, 6)), r"tap layers \(1, 1\): needs distinct ascending"),
    "none": (lambda: plan((), (0, 3, 6)), r"tap layers \(\): needs distinct ascending"),
    "the embedding": (lambda: plan((0, 4), (0, 3, 6)), r"tap layers \[0\]: the model has the layers 0 to 5, and layer 0 reads emb"),
    "behind the last": (lambda: plan((1, 6, 9), (0, 3, 6)), r"tap layers \[6, 9\]: the model has the layers 0 to 5"),
    "negative": (lambda: plan((-1, 2), (0, 3, 6)), r"tap layers \[-1\]"),
    "a gap between chunks": (
        lambda: plan((1,), (0, 3, 6), layers=(range(0, 3), range(4, 6))),
        r"chunks run the layers \[\(0, 3\), \(4, 6\)\]: each layer once, in order, from 0",
    ),
    "a layer of two chunks": (lambda: plan((1,), (0, 3, 6), layers=(range(0, 3), range(2, 6))), "each layer once"),
    "chunks in another order": (lambda: plan((1,), (0, 3, 6), layers=(range(3, 6), range(0, 3))), "each layer once"),
    "layers from 1": (lambda: plan((2,), (0, 3, 6), layers=(range(1, 4), range(4, 6))), "from 0"),
    "another number of chunks": (
        lambda: plan((1,), (0, 2, 4, 6), one_f_one_b(2, 4)),
        r"schedule 1F1B has 2 chunks, the model 3",
    ),
    "a chunk on another rank": (
        lambda: plan((1,), (0, 3, 6), ranks=(1, 0)),
        r"chunk 0 lies on pipeline rank 1, schedule 1F1B runs it on 0",
    ),
    "a schedule that never ends": (
        lambda: Schedule(name="mine", ranks=((Op("B", 0, 0), Op("F", 0, 0)), (Op("F", 1, 0), Op("B", 1, 0)))),
        "schedule mine never ends",
    ),
    "chunks not counted from 0": (
        lambda: resolve({1: range(0, 4)}, (1,), one_f_one_b(1, 3)),
        r"the pipeline's chunks are \[1\]: they are counted over the whole model, from 0",
    ),
    "no chunk": (lambda: resolve({}, (1,), one_f_one_b(1, 3)), r"tap layers \[1\]: the model has the layers 0 to -1"),
    "one rank's plan of two stages": (lambda: resolve({0: range(0, 4)}, (1,), one_f_one_b(2, 3)), "has 2 chunks, the model 1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_is_named(what: str) -> None:
    act, message = WRONG[what]
    with pytest.raises(ConfigError, match=message):
        act()


def test_one_rank_resolves_by_itself() -> None:
    found = resolve({0: range(0, 6)}, (1, 3), one_f_one_b(1, 3), defer=None)
    assert found == TapPlan(tap_layers=(1, 3), layers=(range(0, 6),), ranks=(0,), schedule=one_f_one_b(1, 3), defer=None)
    assert found.sources() == [] and found.draft_rank == 0
    # Virtual stages of one rank.
    virtual = resolve({1: range(3, 6), 0: range(0, 3)}, (1, 3), interleaved(1, 2, 3))
    assert shipped(virtual) == [(1,), (3,)] and virtual.sources() == []
