"""megatron-core in gloo processes of a test: `on_megatron_ranks` starts them, `benchmarks.cotraining.megatron_cpu` has the rest:

    def on_a_rank(directory):
        with parallel(tensor=2, pipeline=1):
            chunks = build_chunks(Shape(tied=True), tensor=2, pipeline=1)
            ...

    results = on_megatron_ranks(on_a_rank, 2, tmp_path)

The process that collects the tests does without megatron-core. `NEEDS_MEGATRON` marks a test file that needs it (``pip install
--no-deps megatron-core``, numpy, packaging, einops; tried with 0.16.1).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cotraining.megatron_cpu import stand_in_for_cuda
from tests.distributed.processes import on_ranks

NEEDS_MEGATRON = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is missing: pip install --no-deps megatron-core"
)


def on_megatron_ranks(function: Callable[[Path], Any], world: int, directory: Path, **options: Any) -> list[Any]:
    """As `tests.distributed.processes.on_ranks`, with `stand_in_for_cuda` in every process."""
    return on_ranks(functools.partial(_without_cuda, function), world, directory, **options)


def _without_cuda(function: Callable[[Path], Any], directory: Path) -> Any:
    stand_in_for_cuda()
    return function(directory)
