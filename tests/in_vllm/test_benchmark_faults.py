"""Catches an update that a kill in any state leaves half-done, in a real engine, and a benchmark of that which does not see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import plan_of_kills
from benchmarks.sync.faults_trainer import CARRIERS, MOMENTS
from benchmarks.sync.frames import FAULTS, VARIANTS
from tests.in_vllm import tiny

REPOSITORY = Path(__file__).resolve().parents[2]
KILLS = len(MOMENTS)


def test_kills_cover_every_state_over_every_carrier() -> None:
    pairs = len(MOMENTS) * len(CARRIERS)
    assert len(set(plan_of_kills(pairs))) == pairs
    assert [moment for moment, _ in plan_of_kills(KILLS)] == list(MOMENTS)


def test_a_trainer_killed_in_each_state_leaves_one_whole_version_and_nothing_else(tmp_path: Path) -> None:
    """Cases C1, C2, C4, C6, C16: real kills, a real engine, answers compared with the stock engine's."""
    target = tiny.save_target(tmp_path / "target", "llama", tied=True, seed=31)
    command = [
        sys.executable, "-m", "benchmarks.faults", "--json", "--kills", str(KILLS), "--target", str(target),
        "--out", str(tmp_path / "runs"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {
        "kills": KILLS,
        "engine_alive": KILLS,
        "version_consistent": KILLS,
        "next_update_succeeded": KILLS,
        "leftovers": 0,
        "engine_kills": 4,
        "engine_kills_recovered": 4,
        "frames": {fault: {"sent": VARIANTS, "served_whole_versions": VARIANTS} for fault in FAULTS},
    }, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kills = [event for event in events if event["kind"] == "kill"]
    assert [(kill["moment"], kill["carrier"]) for kill in kills] == plan_of_kills(KILLS)
    # Killed at its end, the update serves; killed before anybody said `Commit`, it never does.
    assert kills[-1]["served"] == kills[-1]["before"] + 1
    assert [kill["served"] - kill["before"] for kill in kills[:4]] == [0, 0, 0, 0]
    assert not list(run.glob("weights-*")), "gigabytes of weights were left in the run's folder"


def test_nothing_is_left_when_it_cannot_start(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", "--target", str(tmp_path / "nowhere"), "--out", str(tmp_path / "runs")],
        capture_output=True, text=True, timeout=120, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("kills", ["0", "-3"])
def test_no_kills_are_no_benchmark(kills: str) -> None:
    command = [sys.executable, "-m", "benchmarks.faults", "--kills", kills]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)
    assert done.returncode == 2
    assert "at least 1" in done.stderr
