"""Catches a check of the GPU that would pass whatever the kernels do, and, where there is a GPU, kernels that fail it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import Case, check

REPOSITORY = Path(__file__).resolve().parents[2]


def run(*options: str, timeout_s: float = 120.0) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--json", *options],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=REPOSITORY,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_small_shapes_pass_in_the_interpreter() -> None:
    code, out, said = run("--interpret")
    assert code == 0, said
    found = json.loads(out.splitlines()[-1])
    assert found["passed"] and 0 < found["largest_errors"]["triton, float32"] < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    code, out, said = run()
    assert (code, out) == (1, "") and said.startswith("error: no CUDA device here") and said.count("\n") == 1


@pytest.mark.parametrize("fault", ["off", "nan", "shape"])
def test_a_wrong_result_is_named(fault: str) -> None:
    def results(backend: str) -> list[torch.Tensor]:
        right = torch.arange(6.0).double()
        if backend == "naive":
            return [right, right]
        return [right, {"off": right + 0.1, "nan": right * float("nan"), "shape": right[:5]}[fault]]

    said: list[str] = []
    worst = check([Case(name="a call", dtype="float32", run=results)], ["triton"], said.append)
    assert not worst["triton, float32"] <= 1e-4
    assert len(said) == 1 and "a call" in said[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_kernel_passes_on_the_gpu() -> None:
    code, out, said = run(timeout_s=480.0)
    assert code == 0, said
    assert json.loads(out.splitlines()[-1])["ms"]
