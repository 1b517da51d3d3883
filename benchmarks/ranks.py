"""Starts gloo processes on this machine and brings back what each returns."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(function: Callable[[], Any], ranks: int) -> list[Any]:
    """What ``function()``, of a module's top level, returned on each of `ranks` gloo processes of one thread each."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (function, ranks, store.port, folder), nprocs=ranks)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


def _run(rank: int, function: Callable[[], Any], ranks: int, port: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    torch.save(function(), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
