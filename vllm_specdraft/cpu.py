"""Good settings for the CPU engine, chosen so that a newcomer gets the speed of someone who knows.

Each is used only where the user did not set it already.
"""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, kw_only=True)
class CpuSettings:
    """Environment of the engine's processes, and a word on each choice."""

    environment: dict[str, str]
    notes: dict[str, str]


def choose(environ: Mapping[str, str], *, kv_gib: int | None = None, ranks: int = 1) -> CpuSettings:
    """Settings for this machine. `kv_gib`: KV cache size, in GiB, when the user named one; `ranks`: tensor-parallel size."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    chosen: dict[str, str] = {}
    notes: dict[str, str] = {}

    def pick(name: str, value: str, why: str) -> None:
        if name in environ:
            notes[name] = f"{environ[name]} (yours)"
        else:
            chosen[name] = value
            notes[name] = f"{value} ({why})"

    # The automatic binding keeps a core for the other processes; on few cores that costs a quarter of the speed.
    if ranks == 1:
        pick("VLLM_CPU_OMP_THREADS_BIND", _ranges(cores), f"all {len(cores)} cores for the worker")
    elif ranks <= len(cores):
        share = len(cores) // ranks
        parts = [_ranges(cores[rank * share : (rank + 1) * share]) for rank in range(ranks)]
        pick("VLLM_CPU_OMP_THREADS_BIND", "|".join(parts), f"{share} of {len(cores)} cores for each of {ranks} workers")
    else:
        pick("VLLM_CPU_OMP_THREADS_BIND", "nobind", f"{ranks} workers on {len(cores)} cores")
    free_gib = psutil.virtual_memory().available / 2**30
    size = max(1, min(4, int(free_gib / 6)))
    if kv_gib is None:
        pick("VLLM_CPU_KVCACHE_SPACE", str(size), "GiB of KV cache")
    else:
        # Asked for on this very command line: stronger than a variable that was set some time before.
        chosen["VLLM_CPU_KVCACHE_SPACE"] = str(kv_gib)
        notes["VLLM_CPU_KVCACHE_SPACE"] = f"{kv_gib} (yours)"
    # Each is some hundred KB, and there is one per layer shape and batch size: with the default of 1024 memory grows for an hour.
    pick("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256", "batch sizes whose matrix kernels are kept")
    libraries = preloads()
    if any("tcmalloc" in library for library in libraries):
        # Left to itself, tcmalloc gives back a part of what was freed just now and is needed next (see `vllm_specdraft.heap`).
        pick("TCMALLOC_RELEASE_RATE", "0", "freed memory goes back when the engine rests")
    if libraries:
        value = ":".join([*libraries, *filter(None, [environ.get("LD_PRELOAD")])])
        chosen["LD_PRELOAD"] = value
        notes["LD_PRELOAD"] = ", ".join(Path(p).name for p in libraries)
    else:
        notes["LD_PRELOAD"] = "no OpenMP or allocator library found: slower; `pip install intel-openmp cmeel-mimalloc`"
    return CpuSettings(environment=chosen, notes=notes)


def preloads() -> list[str]:
    """Paths of an allocator and of Intel's OpenMP, as far as they are installed."""
    found = [_first(_allocators()), _first([Path(sys.prefix) / "lib" / "libiomp5.so"])]
    return [str(path) for path in found if path is not None]


def _allocators() -> list[Path]:
    paths = []
    for name in ("tcmalloc_minimal", "tcmalloc"):
        if library := ctypes.util.find_library(name):
            paths += [Path(root) / library for root in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/lib64")]
    site = Path(sys.prefix) / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    return [*paths, site / "cmeel.prefix" / "lib" / "libmimalloc.so.3"]


def _first(paths: list[Path]) -> Path | None:
    return next((path for path in paths if path.exists()), None)


def _ranges(cores: list[int]) -> str:
    """``[0, 1, 2, 5]`` to ``0-2,5``."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
