"""Every monkey patch of vLLM, one function each: why, and when it can go. All are idempotent."""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)

_MARK = "_specdraft_patched"


def install() -> None:
    """Install all patches in this process."""
    worker_learns_between_messages()
    engine_core_swaps_at_a_boundary()


def worker_learns_between_messages() -> None:
    """Let a worker train the draft while no message waits for it.

    Why: vLLM has no idle hook. The worker's own loop is the one place that knows of a request at once and that costs the
    engine core nothing (a call from the core would spin there until the reply comes).
    Remove when: vLLM offers an idle callback in the worker.
    """
    from vllm.v1.executor.multiproc_executor import WorkerProc

    original = WorkerProc.worker_busy_loop
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def worker_busy_loop(self: Any) -> None:
        start = getattr(self.worker.worker, "specdraft_start", None)
        if start is None or self.rpc_broadcast_mq is None:
            return original(self)
        agent = start()
        queue = self.rpc_broadcast_mq
        while True:
            wait_s = agent.wait_s()
            try:
                message = queue.dequeue(timeout=wait_s, indefinite=wait_s is None)
            except TimeoutError:
                agent.window_open()
                continue
            self._execute_worker_rpc(message)

    setattr(worker_busy_loop, _MARK, True)
    WorkerProc.worker_busy_loop = worker_busy_loop


def engine_core_swaps_at_a_boundary() -> None:
    """Give the engine core one call that swaps the draft in all workers and drops the KV cache the old draft wrote.

    Why: both must happen between the same two steps. vLLM's own prefix-cache reset refuses while a request runs.
    Remove when: vLLM salts prefix-cache entries with the draft's version.
    """
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore, "specdraft_swap"):
        return

    def specdraft_swap(self: Any, request: dict[str, Any]) -> dict[str, Any]:
        record = self.collective_rpc("specdraft_swap", args=(request,))[0]
        record["prefix_blocks_dropped"] = drop_prefix_cache(self.scheduler, f"draft-{record['draft_version']}")
        return record

    EngineCore.specdraft_swap = specdraft_swap


def drop_prefix_cache(scheduler: Any, salt: str) -> int:
    """Make every cached block unreachable for later requests; running requests keep their blocks. The number dropped.

    Running requests go on with blocks whose draft KV is the old draft's: right in its outputs, merely less well accepted.
    What they cache from now on is salted, so no later request can reach it.
    """
    from vllm.v1.core.block_pool import BlockHashToBlockMap

    pool = scheduler.kv_cache_manager.block_pool
    dropped = 0
    for block in pool.blocks:
        if block.block_hash is not None:
            dropped += 1
            block.reset_hash()
    pool.cached_block_hash_to_block = BlockHashToBlockMap()
    pool.cached_block_hashes_by_block.clear()
    prefix = salt.encode()
    for request in scheduler.requests.values():
        request.cache_salt = f"{request.cache_salt or ''}{salt}"
        request.block_hashes = [type(value)(prefix + value) for value in request.block_hashes]
    return dropped
