"""What it costs: a step with and without taps, taps against staging through the host, the draft's work at once and deferred."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cotraining.policy import Shape
from benchmarks.cotraining.run import Layout, Runner, microbatches
from trainer_bridge.cotrain.microbatch import Microbatch
from trainer_bridge.cotrain.options import CoTrainOptions
from trainer_bridge.draft.interface import FrozenTarget
from trainer_bridge.taps.channel import Slot, TapChannel
from trainer_bridge.taps.schedules import forward_only
from trainer_bridge.taps.tap_plan import TapPlan

SHAPE = Shape(layers=8, hidden=512, heads=8, kv_heads=2, vocab=2048, dtype=torch.float32)
LENGTHS = (100, 31, 75, 50)
MICROBATCHES, PASSES = 4, 3
STAGED_ROWS = 4096


class _TapsOnly:
    """In the draft's place: takes what arrives and does nothing with it."""

    def vocabulary(self) -> torch.Tensor | None:
        return None

    def begin_step(self, microbatches: Sequence[Microbatch], target: FrozenTarget) -> list[int]:
        return [sum(one.lengths) for one in microbatches]

    def add(self, index: int, taps: torch.Tensor, final: torch.Tensor) -> None:
        pass

    def finish_step(self) -> None:
        pass

    def abort_step(self) -> None:
        pass


def _runner(kind: str | None, *, defer: int | None = None, taps_only: bool = False) -> Runner:
    batches = microbatches(SHAPE, MICROBATCHES, LENGTHS)
    options = CoTrainOptions(passes=PASSES, vocabulary_every_steps=0)
    layout = Layout(pipeline=2, microbatches=MICROBATCHES)
    return Runner(
        layout, SHAPE, batches, kind=kind, side=(lambda groups: _TapsOnly()) if taps_only else None, options=options, defer=defer
    )


def _seconds(runner: Runner) -> tuple[float, float]:
    """Of one step: until this rank is through, and until all are."""
    runner.zero_grad()
    dist.barrier()
    began = time.perf_counter()
    runner.step()
    mine = time.perf_counter() - began
    dist.barrier()
    return mine, time.perf_counter() - began


def steps(rounds: int) -> dict[str, Any]:
    """On one rank: seconds of a step of each arm, interleaved, by the rank itself and by the whole pipeline."""
    arms = {
        "none": _runner(None),
        "taps": _runner(None, defer=0, taps_only=True),
        "draft at once": _runner("eagle3", defer=0),
        "draft deferred": _runner("eagle3", defer=None),
    }
    for runner in arms.values():
        _seconds(runner)
    found: dict[str, list[list[float]]] = {name: [] for name in arms}
    for turn in range(rounds):
        # Each first as often as last.
        names = list(arms) if turn % 2 == 0 else list(reversed(arms))
        for name in names:
            found[name].append(list(_seconds(arms[name])))
    taps = arms["taps"].co
    assert taps is not None
    return {"seconds": found, "rings": taps.channel.report(), "formula": taps.channel.nbytes}


def ratio(ranks: list[dict[str, Any]], arm: str, *, whole: int) -> float:
    """Median of an arm's seconds over those without a draft in the same round, on the worst rank; `whole`: 1 for the pipeline's."""
    found = []
    for one in ranks:
        pairs = zip(one["seconds"][arm], one["seconds"]["none"], strict=True)
        found.append(statistics.median(mine[whole] / none[whole] for mine, none in pairs))
    return max(found)


def ring_bytes(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the slots take on the draft's rank, and what the formula says."""
    rings = ranks[-1]["rings"].values()
    return {
        "measured": int(sum(ring["bytes"] for ring in rings)),
        "formula": int(ranks[-1]["formula"]),
        "slots": int(sum(ring["slots"] for ring in rings)),
        "high_water": int(max(ring["high_water"] for ring in rings)),
    }


def transports(rounds: int) -> dict[str, list[float]]:
    """On one of two ranks: when one microbatch's taps began on the one and were there on the other, both ways in turns.

    Clocks of one host agree, so the seconds of a turn are the second rank's time less the first one's.
    """
    plan = TapPlan(tap_layers=(1, 2), layers=(range(4), range(4, 8)), ranks=(0, 1), schedule=forward_only(2, 4))
    rows, width, layers = STAGED_ROWS, SHAPE.hidden, len(plan.tap_layers)
    channel = TapChannel(plan, Slot(rows=rows, width=width, dtype=SHAPE.dtype), pipeline=dist.group.WORLD, timeout_s=30.0)
    hidden = [torch.randn(rows, width) for _ in range(layers)]
    staging = torch.empty(rows, layers * width)
    out = torch.empty_like(staging)
    writes, found = dist.get_rank() == 0, {"channel": list[float](), "staged": list[float]()}

    def by_channel(turn: int) -> None:
        if writes:
            writing = channel.put(0, turn, 0, rows)
            for place, one in enumerate(hidden):
                writing.write(place, one)
            writing.commit()
        else:
            reading = channel.get(0, turn, 0, rows)
            torch.cat(reading.parts, 1, out=out)
            reading.release()

    def staged(turn: int) -> None:
        """The way of trainers without a channel: into a host buffer, over the process group, out of a host buffer."""
        if writes:
            for place, one in enumerate(hidden):
                staging[:, place * width : (place + 1) * width] = one
            dist.send(staging, 1)
        else:
            dist.recv(staging, 0)
            out.copy_(staging)

    for turn in range(rounds):
        for name, way in (("channel", by_channel), ("staged", staged)):
            dist.barrier()
            began = time.monotonic()
            way(turn)
            found[name].append(began if writes else time.monotonic())
    return found


def median_seconds(ranks: Sequence[dict[str, list[float]]], way: str) -> float:
    """Of one of the ways of `transports`, after a first turn."""
    return statistics.median(there - began for began, there in list(zip(ranks[0][way], ranks[1][way], strict=True))[1:])
