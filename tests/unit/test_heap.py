"""Catches an allocator that is asked for nothing, or asked where there is none of its kind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vllm_specdraft import cpu

CODE = """
import resource
from pathlib import Path
import numpy as np
from vllm_specdraft.heap import Heap

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

heap = Heap()
arrays = [np.ones(1 << 17) for _ in range(256)]
full = resident()
del arrays
kept = heap.free_bytes()
while heap.give_back(32 << 20):
    pass
print(full - resident(), kept, heap.free_bytes())
"""


def run(environment: dict[str, str]) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_what_nobody_uses_goes_back() -> None:
    preload = cpu.choose({}, kv_gib=1, ranks=1).environment.get("LD_PRELOAD", "")
    if "tcmalloc" not in preload:
        pytest.skip("no tcmalloc on this machine")
    given, kept, left = run({"LD_PRELOAD": preload})
    assert kept > 200 << 20
    assert given > 150 << 20
    assert left < 32 << 20


def test_another_allocator_is_left_alone() -> None:
    assert run({"LD_PRELOAD": ""})[1:] == [0, 0]
