"""Catches a channel that gives taps of another chunk, microbatch or step, that loses some when a stage is slow, that stops its
schedule, that waits for ever for a stage that was killed, or that leaves memory behind; ranks that do not agree on what is tapped.

Gloo processes. The schedule has a group of its own, and the channel another, as in a trainer. Processes are forked from one that
has loaded everything, so that the death of one costs no other test anything.
"""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import pickle
import random
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from tests.builders import generator
from trainer_bridge.errors import BridgeError, ConfigError, TapDeadlineError, TapOrderError, TapOverrunError, TapPeerError
from trainer_bridge.errors import TapShapeError as ShapeError
from trainer_bridge.taps import channel as channel_module
from trainer_bridge.taps.channel import PREFIX, SHARED_MEMORY, Carrier, Slot, TapChannel
from trainer_bridge.taps.schedules import Schedule, forward_only, interleaved, one_f_one_b
from trainer_bridge.taps.tap_plan import TapPlan, resolve

CARRIERS: tuple[Carrier, ...] = ("shm", "group", "p2p")
RUNS, KILLS, STEPS, WORLD = 40, 20, 2, 4
DEADLINE_S = 120.0
KILLED = -signal.SIGKILL


# -- processes that may die --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Failed:
    text: str


def _process(
    function: Callable[..., Any], rank: int, world: int, port: int, directory: Path, together: bool, arguments: tuple[Any, ...]
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    try:
        found = function(*arguments)
    except BaseException:  # noqa: BLE001 - the test raises it
        found = _Failed(traceback.format_exc())
    (directory / f"{rank}.part").write_bytes(pickle.dumps(found))
    (directory / f"{rank}.part").rename(directory / f"{rank}")
    if together:
        # Nobody goes while another one waits for what it has said.
        store.set(f"over {rank}", "")
        store.wait([f"over {other}" for other in range(world)], limit)
    # At once, as a process that fails.
    os._exit(0)


def on_processes(function: Callable[..., Any], world: int, directory: Path, *arguments: Any, together: bool = False) -> list[Any]:
    """What ``function(*arguments)`` returned on each rank; its exit code where it was killed. `together`: all go at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    directory.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_process, args=(function, rank, world, store.port, directory, together, arguments))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    give_up = time.monotonic() + DEADLINE_S
    for process in processes:
        process.join(max(0.0, give_up - time.monotonic()))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not hung, f"ranks {hung} of {world} hang"
    found = [
        pickle.loads((directory / f"{rank}").read_bytes()) if (directory / f"{rank}").exists() else process.exitcode
        for rank, process in enumerate(processes)
    ]
    failed = [f"rank {rank}: {said.text}" for rank, said in enumerate(found) if isinstance(said, _Failed)]
    assert not failed, "\n".join(failed)
    return found


# -- a run: schedule, tap layers, shapes, all from a seed ----------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Drawn alike on all ranks."""

    number: int
    schedule: Schedule
    layers: tuple[range, ...]
    taps: tuple[int, ...]
    defer: int | None
    slot: Slot
    rows: tuple[int, ...]
    """Per microbatch."""
    carrier: Carrier

    @property
    def world(self) -> int:
        return len(self.schedule.ranks)

    def own(self, rank: int) -> dict[int, range]:
        """Layers of a rank's chunks."""
        return {chunk: part for chunk, part in enumerate(self.layers) if self.schedule.rank_of(chunk) == rank}

    def tap(self, layer: int, step: int, microbatch: int) -> torch.Tensor:
        """Values that no other tap has."""
        numbers = generator(((self.number * 50 + layer) * 50 + step) * 50 + microbatch)
        return torch.randn(self.rows[microbatch], self.slot.width, generator=numbers).to(self.slot.dtype)


def drawn(number: int, *, everywhere: bool = False) -> Run:
    """`everywhere`: each chunk has a tap layer, so that no rank is without a part in it."""
    choose = random.Random(number)
    stages = choose.choice((2, 2, 3, 4))
    kind = (one_f_one_b, interleaved, forward_only)[number % 3]
    count = choose.randint(1, 2) * stages if kind is interleaved else choose.randint(1, 6)
    schedule = interleaved(stages, 2, count) if kind is interleaved else kind(stages, count)
    bounds, taps = [0], list[int]()
    for chunk in range(schedule.chunks):
        bounds.append(bounds[-1] + choose.randint(2, 4))
        own = range(max(1, bounds[-2]), bounds[-1])
        if everywhere or chunk == 0 or choose.random() < 0.7:
            taps += choose.sample(own, choose.randint(1, len(own)))
    return Run(
        number=number, schedule=schedule, layers=tuple(range(a, b) for a, b in itertools.pairwise(bounds)),
        taps=tuple(sorted(taps)), defer=choose.choice((0, 0, 1, None)),
        slot=Slot(rows=5, width=choose.randint(1, 4), dtype=choose.choice((torch.float32, torch.bfloat16, torch.float64))),
        rows=tuple(choose.randint(0 if choose.random() < 0.1 else 1, 5) for _ in range(schedule.microbatches)),
        carrier=CARRIERS[number // 3 % len(CARRIERS)],
    )  # fmt: skip


class Stage:
    """One rank of a pipeline: runs its operations in their order, waits for its neighbours on their own group, and is slow now and
    then."""

    def __init__(
        self,
        run: Run,
        group: dist.ProcessGroup,
        pipeline: dist.ProcessGroup | None,
        *,
        dies_at: int | None = None,
        timeout_s: float,
    ) -> None:
        """`group`: the channel's; `pipeline`: the schedule's, without which a rank waits for taps alone."""
        self.run, self._pipeline, self._rank = run, pipeline, dist.get_rank(group)
        plan = resolve(run.own(self._rank), run.taps, run.schedule, pipeline=group, defer=run.defer)
        self.channel = TapChannel(plan, run.slot, pipeline=group, carrier=run.carrier, timeout_s=timeout_s)
        self.plan = plan
        defer = run.schedule.microbatches if run.defer is None else run.defer
        self._ops = run.schedule.with_draft(defer)[self._rank]
        self._kinds = {(op.kind, op.chunk) for ops in run.schedule.ranks for op in ops}
        self._random = random.Random(1000 * run.number + self._rank)
        self._dies_at, self._count = dies_at, 0
        self._sent: list[Any] = []
        self.taken = 0

    def step(self, step: int) -> None:
        for op in self._ops:
            if op.kind == "F":
                self._receive("F", op.chunk - 1, op.chunk, op.microbatch)
                if self.channel.ships(op.chunk):
                    self._put(op.chunk, step, op.microbatch)
                self._send("F", op.chunk, op.chunk + 1, op.microbatch)
            elif op.kind == "B":
                self._receive("B", op.chunk + 1, op.chunk, op.microbatch)
                self._send("B", op.chunk, op.chunk - 1, op.microbatch)
            elif op.kind == "D":
                self._take(step, op.microbatch)
        while self._sent:
            self._sent.pop()[0].wait()

    def _put(self, chunk: int, step: int, microbatch: int) -> None:
        self._is_slow()
        writing = self.channel.put(chunk, step, microbatch, self.run.rows[microbatch])
        for place, layer in enumerate(self.plan.of_chunk(chunk)):
            writing.write(place, self.run.tap(layer, step, microbatch))
            self._is_slow()
        writing.commit()

    def _take(self, step: int, microbatch: int) -> None:
        readings = []
        for source in self.channel.sources:
            self._is_slow()
            readings.append((source, self.channel.get(source.chunk, step, microbatch, self.run.rows[microbatch])))
        for source, reading in readings:
            self._is_slow()
            for layer, part in zip(source.layers, reading.parts, strict=True):
                assert torch.equal(part, self.run.tap(layer, step, microbatch)), (source, step, microbatch)
                self.taken += 1
            reading.release()

    def _is_slow(self) -> None:
        self._count += 1
        if self._count == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._random.random() < 0.15:
            time.sleep(self._random.random() * 2e-3)

    def _peer(self, kind: Literal["F", "B"], chunk: int, other: int) -> int | None:
        """The rank of a neighbour's part in an operation; None where there is none, or it is this rank's."""
        if self._pipeline is None or (kind, chunk) not in self._kinds or (kind, other) not in self._kinds:
            return None
        rank = self.run.schedule.rank_of(other)
        return None if rank == self._rank else rank

    def _send(self, kind: Literal["F", "B"], chunk: int, to: int, microbatch: int) -> None:
        if (peer := self._peer(kind, chunk, to)) is not None:
            message = torch.tensor([chunk, microbatch])
            tag = 1000 * (kind == "B") + 100 * chunk + microbatch
            self._sent.append((dist.isend(message, group=self._pipeline, group_dst=peer, tag=tag), message))

    def _receive(self, kind: Literal["F", "B"], of: int, chunk: int, microbatch: int) -> None:
        if (peer := self._peer(kind, chunk, of)) is not None:
            message = torch.zeros(2, dtype=torch.int64)
            dist.recv(message, group=self._pipeline, group_src=peer, tag=1000 * (kind == "B") + 100 * of + microbatch)
            assert message.tolist() == [of, microbatch]


# -- what the processes do -----------------------------------------------------------------------------------------------------


def raised(act: Callable[[], object]) -> tuple[str, str]:
    """Kind and text of what it raises."""
    try:
        act()
    except BridgeError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def disagreements(rank: int, ranks: int, group: dist.ProcessGroup) -> dict[str, tuple[str, str]]:
    """What each rank hears when the last one says something else than the others."""
    odd = rank == ranks - 1
    own, schedule, width = {rank: range(4 * rank, 4 * rank + 4)}, one_f_one_b(ranks, 4), 3

    def resolved(
        taps: tuple[int, ...] = (1, 2), chunks: Mapping[int, range] = own, count: int = 4, defer: int | None = 0
    ) -> TapPlan:
        return resolve(chunks, taps, one_f_one_b(ranks, count), pipeline=group, defer=defer)

    def opened(carrier: Carrier, **slot: Any) -> TapChannel:
        size = Slot(**{"rows": 4, "width": width, "dtype": torch.float32, **slot})
        return TapChannel(resolve(own, (1, 2), schedule, pipeline=group), size, pipeline=group, carrier=carrier, timeout_s=5)

    def without_room() -> None:
        full = OSError(errno.ENOSPC, "no space left")
        real, channel_module.os.posix_fallocate = os.posix_fallocate, lambda *_: (_ for _ in ()).throw(full)
        try:
            opened("shm")
        finally:
            channel_module.os.posix_fallocate = real

    def on_another_host() -> None:
        real = channel_module.SHARED_MEMORY
        channel_module.SHARED_MEMORY = Path("/nowhere") if rank == 0 else real
        try:
            opened("shm")
        finally:
            channel_module.SHARED_MEMORY = real

    return {
        "other layers": raised(lambda: resolved((1, 3) if odd else (1, 2))),
        "more layers": raised(lambda: resolved((1, 2, 3) if odd else (1, 2))),
        "fewer layers": raised(lambda: resolved((1,) if odd else (1, 2))),
        "other deferral": raised(lambda: resolved(defer=None if odd else 0)),
        "other microbatches": raised(lambda: resolved(count=5 if odd else 4)),
        "a chunk twice": raised(lambda: resolved(chunks={0: range(0, 4)} if odd else own)),
        "a chunk missing": raised(lambda: resolved(chunks={} if odd else own)),
        "a layer missing": raised(lambda: resolved(chunks={rank: range(4 * rank + 1, 4 * rank + 4)} if odd else own)),
        "other rows": raised(lambda: opened("shm", rows=5 if odd else 4)),
        "other rows in a group": raised(lambda: opened("group", rows=5 if odd else 4)),
        "another dtype": raised(lambda: opened("shm", dtype=torch.float64 if odd else torch.float32)),
        "another carrier": raised(lambda: opened("shm" if odd else "group")),
        "no room": raised(without_room),
        "another host": raised(on_another_host),
        "nothing": raised(lambda: opened("shm")),
    }


def faults(rank: int, carrier: Carrier, group: dist.ProcessGroup) -> dict[str, Any]:
    """On one channel: the first of two ranks puts what the second does not expect."""
    plan = resolve({rank: range(4 * rank, 4 * rank + 4)}, (1, 3), one_f_one_b(2, 4), pipeline=group, defer=None)
    channel = TapChannel(plan, Slot(rows=4, width=2, dtype=torch.float32), pipeline=group, carrier=carrier, timeout_s=60.0)
    found: dict[str, Any] = {}
    if rank == 0:
        found["too long"] = raised(lambda: channel.put(0, 0, 0, 5))
        for step, microbatch in ((0, 0), (0, 1)):
            writing = channel.put(0, step, microbatch, 3)
            for place in (0, 1):
                writing.write(place, torch.full((3, 2), 10.0 * microbatch + place))
            found["another part"] = raised(lambda writing=writing: writing.write(1, torch.zeros(3, 3)))
            writing.commit()
        # The slots go with the channel: all that lies in them must have left.
        channel.close()
    else:
        found["other rows"] = raised(lambda: channel.get(0, 0, 0, 2))
        # In another order than they were put.
        reading = channel.get(0, 0, 1, 3)
        found["second"] = [part.clone() for part in reading.parts]
        reading.release()
        found["released twice"] = raised(reading.release)
        found["a later step"] = raised(lambda: channel.get(0, 1, 0, 3))
        reading = channel.get(0, 0, 0, 3)
        found["first"] = [part.clone() for part in reading.parts]
        reading.release()
        channel.timeout_s = 0.1
        found["never put"] = raised(lambda: channel.get(0, 0, 2, 3))
    found["report"] = channel.report()
    return found


def everything() -> dict[str, Any]:
    """On each of four ranks, so that processes start once."""
    rank, found = dist.get_rank(), dict[str, Any]()
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in (2, 3, 4)}
    for number in range(RUNS):
        run = drawn(number)
        # One channel after the other on one group would receive what was posted by the one before it.
        own = dist.new_group(list(range(run.world)))
        if rank < run.world:
            stage = Stage(run, own, groups[run.world], timeout_s=60.0)
            for step in range(STEPS):
                stage.step(step)
            found[f"run {number}"] = {"taken": stage.taken, "report": stage.channel.report(), "nbytes": stage.channel.nbytes}
            stage.channel.close()
            dist.barrier(groups[run.world])
            dist.destroy_process_group(own)
    for ranks, group in groups.items():
        if rank < ranks:
            found[f"disagreements of {ranks}"] = disagreements(rank, ranks, group)
    for carrier in CARRIERS:
        own = dist.new_group([0, 1])
        if rank < 2:
            found[f"faults {carrier}"] = faults(rank, carrier, own)
    return found


def until_death(number: int, dead: int, dies_at: int) -> tuple[str, str, float, int]:
    """Steps without end; what this rank hears of another one's death, and how long it waited for that."""
    run = drawn(number, everywhere=True)
    stage = Stage(run, dist.group.WORLD, None, dies_at=dies_at if dist.get_rank() == dead else None, timeout_s=20.0)
    for step in itertools.count():
        began = time.monotonic()
        try:
            stage.step(step)
        except BridgeError as error:
            return type(error).__name__, str(error), time.monotonic() - began, step
    raise AssertionError


def first_goes(carrier: Carrier) -> Any:
    """Of two ranks the first puts one microbatch and is through, while the second still holds it."""
    rank = dist.get_rank()
    plan = resolve({rank: range(4 * rank, 4 * rank + 4)}, (1,), one_f_one_b(2, 4), pipeline=dist.group.WORLD, defer=None)
    slot = Slot(rows=2, width=2, dtype=torch.float32)
    channel = TapChannel(plan, slot, pipeline=dist.group.WORLD, carrier=carrier, timeout_s=30.0)
    if rank == 0:
        writing = channel.put(0, 0, 0, 2)
        writing.write(0, torch.ones(2, 2))
        writing.commit()
        # What was put must have left before this process does.
        dist.recv(torch.zeros(1), src=1)
        return None
    reading = channel.get(0, 0, 0, 2)
    dist.send(torch.zeros(1), dst=0)
    # Only when the other one has gone does this say so.
    early = raised(lambda: channel.get(0, 0, 1, 2))
    whole = bool((reading.parts[0] == 1).all())
    return early, whole, raised(reading.release), raised(lambda: channel.get(0, 0, 1, 2))


# -- tests ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def left_behind() -> Iterator[Callable[[], set[Path]]]:
    """Shared memory that was not there before."""
    before = set(SHARED_MEMORY.glob(f"{PREFIX}*"))
    yield lambda: set(SHARED_MEMORY.glob(f"{PREFIX}*")) - before


@pytest.fixture(scope="module")
def ran(left_behind: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks found."""
    found = on_processes(everything, WORLD, tmp_path_factory.mktemp("channel") / "ranks", together=True)
    assert not left_behind()
    return found


def test_random_schedules_give_exactly_the_right_taps(ran: list[dict[str, Any]]) -> None:
    taken = 0
    for number in range(RUNS):
        run = drawn(number)
        plan = resolved_alone(run)
        found = ran[plan.draft_rank][f"run {number}"]
        layers = sum(len(source.layers) for source in plan.sources())
        assert found["taken"] == STEPS * run.schedule.microbatches * layers
        taken += found["taken"]
    assert taken > 800
    runs = [drawn(number) for number in range(RUNS)]
    assert {run.world for run in runs} == {2, 3, 4} and {run.carrier for run in runs} == set(CARRIERS)
    assert {run.defer for run in runs} == {0, 1, None}
    assert any(not set(run.taps) & set(part) for run in runs for part in run.layers[:-1]), "no chunk without a tap"


def resolved_alone(run: Run) -> TapPlan:
    """The plan that all ranks together make."""
    ranks = tuple(run.schedule.rank_of(chunk) for chunk in range(run.schedule.chunks))
    return TapPlan(tap_layers=run.taps, layers=run.layers, ranks=ranks, schedule=run.schedule, defer=run.defer)


def test_slots_suffice_and_bytes_are_those_of_the_formula(ran: list[dict[str, Any]]) -> None:
    full = 0
    for number in range(RUNS):
        run = drawn(number)
        sources = resolved_alone(run).sources()
        each = {one.chunk: run.slot.rows * run.slot.width * len(one.layers) * run.slot.dtype.itemsize for one in sources}
        for rank in range(run.world):
            found = ran[rank][f"run {number}"]
            assert found["nbytes"] == sum(one.slots * each[one.chunk] for one in sources)
            mine = [one for one in sources if run.schedule.rank_of(run.schedule.chunks - 1) == rank or one.rank == rank]
            assert found["report"].keys() == {f"chunk {one.chunk}" for one in mine}
            for one in mine:
                end = found["report"][f"chunk {one.chunk}"]
                assert (end["slots"], end["bytes"]) == (one.slots, one.slots * each[one.chunk])
                assert 1 <= end["high_water"] <= one.slots and end["waited_s"] >= 0
                full += end["high_water"] == one.slots
    assert full > 10, "slots that are never needed"


DISAGREEMENTS = {
    "other layers": (ConfigError, r"has tap layers \[.*give all ranks the same"),
    "more layers": (ConfigError, r"has tap layers \[.*give all ranks the same"),
    "fewer layers": (ConfigError, r"has tap layers \[.*give all ranks the same"),
    "other deferral": (ConfigError, "deferral and microbatches"),
    "other microbatches": (ConfigError, "deferral and microbatches"),
    "a chunk twice": (ConfigError, r"chunk 0 lies on the pipeline ranks 0 and \d"),
    "a chunk missing": (ConfigError, r"schedule 1F1B has \d chunks, the model \d"),
    "a layer missing": (ConfigError, "each layer once, in order, from 0"),
    "other rows": (ConfigError, "slots of 4 to 5 rows"),
    "other rows in a group": (ConfigError, "slots of 4 to 5 rows"),
    "another dtype": (ConfigError, "columns of 4 to 8 bytes"),
    "another carrier": (ConfigError, "two carriers"),
    "no room": (ConfigError, r"has no room for \d+ bytes of tap slots"),
    "another host": (TapPeerError, r"1 of \d pipeline ranks do not see the draft's shared memory.*carrier='group'"),
    "nothing": (None, ""),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_that_disagree_all_hear_of_it(ran: list[dict[str, Any]], ranks: int, what: str) -> None:
    """Case D15."""
    kind, message = DISAGREEMENTS[what]
    for rank in range(ranks):
        name, text = ran[rank][f"disagreements of {ranks}"][what]
        assert name == ("nothing" if kind is None else kind.__name__), (rank, text)
        assert re.search(message, text), (rank, text)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_fault_of_the_schedule_has_a_name(ran: list[dict[str, Any]], carrier: Carrier) -> None:
    writer, reader = (ran[rank][f"faults {carrier}"] for rank in (0, 1))
    assert (writer["too long"][0], writer["another part"][0]) == (TapOverrunError.__name__, ShapeError.__name__)
    assert "allocate for the longest microbatch" in writer["too long"][1] and "chunk 0 (pipeline rank 0)" in writer["too long"][1]
    assert reader["other rows"][0] == ShapeError.__name__ and "the draft expects" in reader["other rows"][1]
    assert reader["released twice"][0] == TapOverrunError.__name__
    assert reader["a later step"][0] == TapOrderError.__name__
    assert "microbatch 0 of step 0 was put and never taken; step 1 has begun" in reader["a later step"][1]
    # A communicator of two ends with the first of them, which is heard before the deadline.
    assert reader["never put"][0] == (TapPeerError if carrier == "p2p" else TapDeadlineError).__name__
    assert "the taps of microbatch 2 of step 0" in reader["never put"][1]
    # What was refused is still there for who asks for the right thing.
    for microbatch, name in enumerate(("first", "second")):
        for place, part in enumerate(reader[name]):
            assert torch.equal(part, torch.full((3, 2), 10.0 * microbatch + place))


@pytest.mark.parametrize("number", range(KILLS))
def test_the_others_hear_of_a_killed_stage(number: int, left_behind: Any, tmp_path: Path) -> None:
    """At a random operation of a random rank; nobody waits out the deadline."""
    choose, run = random.Random(number), drawn(number, everywhere=True)
    dead, dies_at = choose.randrange(run.world), choose.randint(1, 25)
    found = on_processes(until_death, run.world, tmp_path / "ranks", number, dead, dies_at)
    assert found[dead] == KILLED
    for rank, said in enumerate(found):
        if rank != dead:
            kind, text, waited_s, _ = said
            assert kind == TapPeerError.__name__, (rank, said)
            assert "is gone" in text and "chunk" in text and waited_s < 15
    assert not left_behind()


def test_dying_runs_use_all_carriers_and_kill_both_ends() -> None:
    """Of the numbers above."""
    ends = set()
    for number in range(KILLS):
        run = drawn(number, everywhere=True)
        dead = random.Random(number).randrange(run.world)
        ends.add((run.carrier, dead == run.schedule.rank_of(run.schedule.chunks - 1)))
    assert len(ends) == 2 * len(CARRIERS)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_stage_that_is_through_may_go(carrier: Carrier, tmp_path: Path) -> None:
    """Before the draft has released its last taps: it is an error only for who expects more."""
    early, whole, released, late = on_processes(first_goes, 2, tmp_path / "ranks", carrier)[1]
    assert whole and released == ("nothing", "")
    assert early[0] == late[0] == TapPeerError.__name__ and "the taps of microbatch 1 of step 0" in late[1]
