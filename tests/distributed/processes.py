"""Starts a few gloo processes on this machine, with a deadline, and brings back what each returns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_COLLECTIVE_S = 60


def _run(rank: int, function: Callable[[Path], Any], directory: Path, world: int, port: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_COLLECTIVE_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=_COLLECTIVE_S))
    try:
        torch.save(function(directory), directory / f"rank{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def on_ranks(function: Callable[[Path], Any], world: int, directory: Path, *, deadline_s: float = 180) -> list[Any]:
    """What ``function(directory)`` returned on each rank: tensors, and containers of them.

    Args:
        function: of a module's top level, so that the spawned processes find it; the default process group is there.
        directory: an empty folder; all ranks see it.
        deadline_s: processes that are not done by then are ended, and the test fails.
    """
    # The system picks a port, and the store holds it from then on: nobody else can take it in between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    running = mp.spawn(_run, (function, directory, world, store.port), nprocs=world, join=False)
    give_up = time.monotonic() + deadline_s
    try:
        while not running.join(timeout=1):
            if time.monotonic() > give_up:
                pytest.fail(f"{world} processes were not done after {deadline_s} s: one waits for another")
    finally:
        for process in running.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [torch.load(directory / f"rank{rank}.pt", weights_only=True) for rank in range(world)]
