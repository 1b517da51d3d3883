"""Catches taps that are read before they are whole, after they were overwritten, or for another microbatch; a fault of the schedule
that shows only when the deadline is over; a peer that died and is waited for all the same."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trainer_bridge.errors import TapDeadlineError, TapError, TapOrderError, TapOverrunError, TapPeerError, TapShapeError
from trainer_bridge.taps.ring import MAX_PARTS, Shape, TapRing, format_memory, memory_bytes
from trainer_bridge.taps.schedules import Schedule, forward_only, interleaved, one_f_one_b

SHAPE = Shape(rows=3, widths=(4, 2), dtype=torch.float32)


def pair(slots: int = 2, slot_bytes: int = SHAPE.nbytes, **options: Any) -> tuple[TapRing, TapRing]:
    """Writer and reader of new slots."""
    memory = np.zeros(memory_bytes(slots, slot_bytes), np.uint8)
    format_memory(memory, slots=slots, slot_bytes=slot_bytes)
    return TapRing(memory, name="chunk 0", writes=True, **options), TapRing(memory, name="chunk 0", writes=False, **options)


def pattern(step: int, microbatch: int, shape: Shape = SHAPE) -> list[torch.Tensor]:
    """Values that only these taps have."""
    return [
        (torch.arange(shape.rows * width).view(shape.rows, width) + 1000 * part + 10_000 * microbatch + 1_000_000 * step).to(
            shape.dtype
        )
        for part, width in enumerate(shape.widths)
    ]


def put(ring: TapRing, step: int, microbatch: int, shape: Shape = SHAPE, timeout_s: float = 5.0) -> None:
    writing = ring.begin(step, microbatch, shape, timeout_s=timeout_s)
    for part, tensor in enumerate(pattern(step, microbatch, shape)):
        writing.write(part, tensor)
    writing.commit()


def take(ring: TapRing, step: int, microbatch: int, shape: Shape = SHAPE, timeout_s: float = 5.0) -> None:
    reading = ring.get(step, microbatch, shape, timeout_s=timeout_s)
    for found, wanted in zip(reading.parts, pattern(step, microbatch, shape), strict=True):
        assert torch.equal(found, wanted)
    reading.release()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_what_is_put_is_got_whatever_the_order(dtype: torch.dtype) -> None:
    shape = Shape(rows=5, widths=(3, 1, 2), dtype=dtype)
    writer, reader = pair(3, shape.nbytes)
    for step in range(3):
        for microbatch in (0, 1, 2):
            writing = writer.begin(step, microbatch, shape, timeout_s=1)
            for part, tensor in enumerate(pattern(step, microbatch, shape)):
                writing.write(part, tensor)
            writing.commit()
        for microbatch in (2, 0, 1):
            reading = reader.get(step, microbatch, shape, timeout_s=1)
            for found, wanted in zip(reading.parts, pattern(step, microbatch, shape), strict=True):
                assert torch.equal(found, wanted)
            reading.release()
    assert (writer.high_water, reader.high_water) == (3, 3)


def test_a_tap_of_another_dtype_is_cast_and_carries_no_gradient() -> None:
    """Case D20."""
    writer, reader = pair()
    source = torch.ones(3, 4, dtype=torch.bfloat16, requires_grad=True)
    writing = writer.begin(0, 0, SHAPE, timeout_s=1)
    writing.write(0, source)
    writing.write(1, torch.zeros(3, 2))
    writing.commit()
    found = reader.get(0, 0, SHAPE, timeout_s=1).parts[0]
    assert found.dtype == torch.float32 and not found.requires_grad and float(found.sum()) == 12


def test_half_written_taps_are_not_read_and_dropped_ones_never_come() -> None:
    writer, reader = pair()
    writing = writer.begin(0, 0, SHAPE, timeout_s=1)
    with pytest.raises(TapDeadlineError, match=r"microbatch 0 of step 0 \(being written\)"):
        reader.get(0, 0, SHAPE, timeout_s=0.05)
    writing.drop()
    put(writer, 0, 0)
    take(reader, 0, 0)


LONG, SHORT, ONE = (Shape(rows=rows, widths=widths, dtype=torch.float32) for rows, widths in ((4, (4, 2)), (2, (4, 2)), (3, (4,))))
NARROW = Shape(rows=3, widths=(4, 2), dtype=torch.bfloat16)
MANY = Shape(rows=1, widths=(0,) * (MAX_PARTS + 1), dtype=torch.float32)
Act = Callable[[TapRing, TapRing], object]
FAULTS: dict[str, tuple[Act, type[TapError], str]] = {
    "lost": (
        lambda w, r: (put(w, 0, 1), take(r, 0, 0, timeout_s=0.05)),
        TapDeadlineError,
        r"microbatch 0 of step 0 did not come .* microbatch 1",
    ),
    "a full channel": (
        lambda w, r: (put(w, 0, 0), put(w, 0, 1), put(w, 0, 2, timeout_s=0.05)),
        TapDeadlineError,
        r"a free slot for microbatch 2 .*of 2 slots 2 are in use",
    ),
    "put twice": (lambda w, r: (put(w, 0, 0), put(w, 0, 0)), TapOrderError, "are there already: put twice"),
    "left from the step before": (lambda w, r: (put(w, 0, 1), take(r, 1, 0)), TapOrderError, "was put and never taken"),
    "too large": (lambda w, r: put(w, 0, 0, LONG), TapOverrunError, "allocate for the longest"),
    "more rows": (lambda w, r: (put(w, 0, 0), take(r, 0, 0, SHORT)), TapShapeError, r"rows=3.*the draft expects .*rows=2"),
    "other layers": (lambda w, r: (put(w, 0, 0), take(r, 0, 0, ONE)), TapShapeError, "the draft expects"),
    "another dtype": (lambda w, r: (put(w, 0, 0), take(r, 0, 0, NARROW)), TapShapeError, "float32.*bfloat16"),
    "a part of another shape": (
        lambda w, r: w.begin(0, 0, SHAPE, timeout_s=1).write(1, torch.zeros(3, 4)),
        TapShapeError,
        r"part 1 has shape \(3, 4\)",
    ),
    "too many layers": (lambda w, r: w.begin(0, 0, MANY, timeout_s=1), TapShapeError, "tap layers in one chunk"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_has_a_name(fault: str) -> None:
    act, kind, message = FAULTS[fault]
    with pytest.raises(kind, match=message):
        act(*pair())


def test_a_slot_that_is_written_while_it_is_read_is_noticed() -> None:
    writer, reader = pair(1)
    put(writer, 0, 0)
    reading = reader.get(0, 0, SHAPE, timeout_s=1)
    reading.release()
    with pytest.raises(TapOverrunError, match="released twice"):
        reading.release()
    put(writer, 0, 1)
    reading = reader.get(0, 1, SHAPE, timeout_s=1)
    # A second writer, which took the slot for free.
    writer._stamps[0, 0] = 0
    put(writer, 0, 2)
    with pytest.raises(TapOverrunError, match="two writers"):
        reading.release()


def test_memory_that_holds_something_else_is_refused() -> None:
    with pytest.raises(TapOrderError, match="no tap slots of this version"):
        TapRing(np.zeros(10_000, np.uint8), name="chunk 0", writes=True)
    with pytest.raises(TapOverrunError, match="need"):
        format_memory(np.zeros(100, np.uint8), slots=2, slot_bytes=64)


def test_a_dead_peer_is_noticed_long_before_the_deadline() -> None:
    writer, reader = pair(1, alive=lambda pid: False)
    began = time.monotonic()
    with pytest.raises(TapPeerError, match=f"process {os.getpid()} at the other end is gone"):
        reader.get(0, 0, SHAPE, timeout_s=60)
    put(writer, 0, 0)
    with pytest.raises(TapPeerError, match="waiting for a free slot"):
        writer.begin(0, 1, SHAPE, timeout_s=60)
    assert time.monotonic() - began < 10


def test_a_killed_process_counts_as_dead_also_before_anybody_waited_for_it() -> None:
    from trainer_bridge.taps.ring import _lives

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert _lives(child.pid)
    child.kill()
    deadline = time.monotonic() + 10
    while _lives(child.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.wait()
    assert not _lives(child.pid)


class _Pipeline:
    """A schedule's ranks as threads that wait for each other as a pipeline does, with taps in rings of just enough slots."""

    def __init__(self, schedule: Schedule, *, defer: int, seed: int, killed: int | None) -> None:
        self._schedule, self._defer, self._random = schedule, defer, random.Random(seed)
        self._killed, self._dead = killed, threading.Event()
        self._done = {op: threading.Event() for ops in schedule.with_draft(defer) for op in ops}
        self._last = schedule.chunks - 1
        draft_rank = schedule.rank_of(self._last)
        shapes = [self._shape() for _ in range(schedule.chunks)]
        # Some chunks hold no tap layer; those of the draft's own rank need no channel.
        self._rings = {
            chunk: (shapes[chunk], *pair(slots, shapes[chunk].nbytes, alive=lambda pid: not self._dead.is_set()))
            for chunk, slots in schedule.slots(defer).items()
            if schedule.rank_of(chunk) != draft_rank and self._random.random() < 0.8
        }
        self.errors: list[Exception] = []
        self.taken = 0

    def _shape(self) -> Shape:
        widths = self._random.choices((1, 2, 3), k=self._random.randint(1, 3))
        return Shape(rows=self._random.randint(1, 4), widths=tuple(widths), dtype=torch.float32)

    def run(self, steps: int) -> None:
        for step in range(steps):
            for event in self._done.values():
                event.clear()
            threads = [
                threading.Thread(target=self._rank, args=(step, rank), daemon=True) for rank in range(len(self._schedule.ranks))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive(), "a rank hangs"
            if self.errors or self._dead.is_set():
                return

    def _rank(self, step: int, rank: int) -> None:
        delays = random.Random(self._random.random())
        try:
            for place, op in enumerate(self._schedule.with_draft(self._defer)[rank]):
                if self._killed == rank and place >= 2:
                    self._dead.set()
                    return
                for other in self._schedule._before(self._schedule.with_draft(self._defer))[op]:
                    while not self._done[other].wait(0.02):
                        if self._dead.is_set() or self.errors:
                            return
                if delays.random() < 0.1:
                    time.sleep(delays.random() * 2e-3)
                if op.kind == "F" and op.chunk in self._rings:
                    shape, writer, _ = self._rings[op.chunk]
                    put(writer, step, op.microbatch, shape)
                if op.kind == "D":
                    for shape, _, reader in self._rings.values():
                        take(reader, step, op.microbatch, shape)
                        self.taken += 1
                self._done[op].set()
        except Exception as error:  # noqa: BLE001 - what is raised is what the test looks at
            self.errors.append(error)


def _random_schedule(choose: random.Random) -> Schedule:
    stages = choose.choice((2, 2, 3, 4))
    kind = choose.choice((one_f_one_b, interleaved, forward_only))
    if kind is interleaved:
        return interleaved(stages, choose.choice((2, 3)), stages * choose.randint(1, 2))
    return kind(stages, choose.randint(1, 8))


def test_random_runs_of_random_schedules_give_the_right_taps_or_a_named_error() -> None:
    """1,000 runs: stages, microbatches, shapes, delays at random; in some of them a stage dies."""
    choose, died, whole = random.Random(7), 0, 0
    for seed in range(1000):
        schedule = _random_schedule(choose)
        killed = choose.randrange(len(schedule.ranks)) if seed % 10 == 0 else None
        pipeline = _Pipeline(schedule, defer=choose.choice((0, 0, 1, 9)), seed=seed, killed=killed)
        pipeline.run(steps=choose.choice((1, 2)))
        if killed is None:
            assert not pipeline.errors, pipeline.errors
            whole += 1
        else:
            assert all(isinstance(error, TapPeerError) for error in pipeline.errors), pipeline.errors
            died += 1
    assert whole == 900 and died == 100
