"""Catches a benchmark of weight sync that does not run, or whose result lacks a number; the numbers themselves are a machine's."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.sync.stalls import Stall, stall_of
from benchmarks.sync.transports import PAIRS, SHARES, WAYS, ModelResult, worst
from benchmarks.sync.weights import change, nbytes_of, perturbed, synthetic
from benchmarks.weight_sync import KEYS
from tests.distributed.stand import staging_files
from tests.in_vllm import tiny
from vllm_specdraft.demo.session import SessionError

REPOSITORY = Path(__file__).resolve().parents[2]
ENGINE_KEYS = {"stall_ms", "stall_steps", "memory_growth_100_updates_bytes"}


def test_the_transports_of_small_models_give_every_number(tmp_path: Path) -> None:
    """The real receiver process, every carrier and every plain way; the benchmark itself compares all bytes."""
    target = tiny.save_target(tmp_path / "target", "llama", tied=True, seed=3)
    before = staging_files()
    command = [
        sys.executable, "-m", "benchmarks.weight_sync", "--json", "--skip-engine", "--rounds", "2", "--synthetic-mb", "12",
        "--bucket-mb", "0.5", "--target", str(target), "--out", str(tmp_path / "runs"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert tuple(result) == KEYS
    for key, value in result.items():
        if key in ENGINE_KEYS:
            assert value is None
        else:
            assert math.isfinite(value), key
            assert value > 0, key
    # Two bytes of a value and about one of a gap for one element in a hundred, and headers: known, whatever the machine.
    assert 45 < result["delta_bytes_ratio_1pct"] < 66
    assert 18 < result["delta_bytes_ratio_3pct"] < 23
    assert staging_files() <= before, "shared memory was left behind"
    (run,) = (tmp_path / "runs").iterdir()
    record = json.loads((run / "run.json").read_text())
    assert record["state"] == "complete"
    assert record["results"] == result
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [len(event["seconds"][way]) for event in events if event["kind"] == "transport" for way in WAYS] == [2] * 2 * len(WAYS)


def result_of(**seconds: float) -> ModelResult:
    return ModelResult(
        model="m", nbytes=1, tensors=1, seconds={way: [seconds.get(way, 1.0)] * 3 for way in WAYS},
        delta_ratios=dict.fromkeys(SHARES, 5.0),
    )  # fmt: skip


def test_the_worse_model_decides_each_ratio_by_itself() -> None:
    one, two = result_of(**{"memcpy": 0.5, "checkpoint": 9.0}), result_of(gloo=0.25)
    found = worst([one, two])
    assert found.keys() == PAIRS.keys() | SHARES.keys()
    assert found["shm_vs_memcpy"] == 0.5
    assert found["speedup_vs_checkpoint"] == 1.0
    assert found["speedup_vs_gloo_broadcast"] == 0.25


def test_ratios_are_those_of_one_round_and_not_of_medians() -> None:
    """A machine that is slow in one round is slow for both."""
    seconds: dict[str, Any] = {way: [1.0, 10.0, 3.0] for way in WAYS} | {"sync shm": [2.0, 20.0, 4.0]}
    result = ModelResult(model="m", nbytes=1, tensors=1, seconds=seconds, delta_ratios={})
    assert result.ratios()["shm_vs_memcpy"] == 0.5


def test_a_stall_is_the_largest_gap_until_a_second_after_the_update() -> None:
    steady = [0.1 * index for index in range(60)]
    assert stall_of(steady, began_s=2.05, ended_s=3.0) == Stall(normal_ms=100.0, stall_ms=0.0, lost_ms=0.0, update_ms=950.0)
    late = [time if time < 3.95 else time + 0.5 for time in steady]
    assert stall_of(late, began_s=2.05, ended_s=3.0).stall_ms == pytest.approx(500.0)
    # Too late to be the update's.
    assert stall_of(late, began_s=1.05, ended_s=2.0).stall_ms == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(SessionError, match="a longer one is needed"):
        stall_of(steady, began_s=2.05, ended_s=5.5)


def test_made_up_weights_have_the_size_asked_for_and_changes_are_as_many_as_asked_for() -> None:
    import numpy as np

    weights = synthetic(4_000_000)
    assert nbytes_of(weights) == pytest.approx(4e6, rel=0.1)
    assert len({tensor.ndim for tensor in weights.values()}) == 3
    before = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    share = change(weights, 0.03, np.random.default_rng(0))
    differ = sum(int((tensor.to(torch.bfloat16) != before[name]).sum()) for name, tensor in weights.items())
    assert share == pytest.approx(0.03, rel=0.05)
    assert differ == round(share * sum(tensor.numel() for tensor in weights.values()))


def test_perturbed_weights_are_the_same_ones_again_and_integers_stay() -> None:
    weights = {"b": torch.ones(100), "a": torch.arange(5)}
    once, twice = perturbed(weights), perturbed(dict(reversed(weights.items())))
    assert torch.equal(once["b"], twice["b"])
    assert not torch.equal(once["b"], weights["b"])
    assert torch.equal(once["a"], weights["a"])
