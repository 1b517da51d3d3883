"""The API server's way to the workers: drafts, updates, samples and everything else that happens between two steps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Any

from vllm_specdraft import status
from vllm_specdraft.sync_link import SyncLink

logger = logging.getLogger(__name__)


class Link:
    """Calls into the engine. Swaps and updates wait for each other; everything else does not."""

    def __init__(self, engine_client: Any, state_dir: Path, *, policy_version: int = 0, draft_version: int = 0) -> None:
        self._client, self._state_dir = engine_client, state_dir
        self.policy_version, self.draft_version = policy_version, draft_version
        """Served at present, as far as the engine has told."""
        self.sync: SyncLink | None = None
        """Where weights come from; None when none are taken."""
        self._swapping = asyncio.Lock()

    def read_status(self) -> dict[str, Any] | None:
        """What the worker wrote last, and what is known here."""
        found = status.read(self._state_dir)
        if found is not None:
            found["sync"] = self.sync.report() if self.sync is not None else None
        return found

    def sync_counters(self) -> dict[str, int]:
        """What the receiver of weights counted; empty where there is none."""
        return self.sync.counters if self.sync is not None else {}

    async def swap(self, request: dict[str, Any]) -> dict[str, Any]:
        """Swap a draft in between two steps; the publish record."""
        async with self._swapping:
            record = await self._utility("specdraft_swap", request)
            self._served(record)
            return record

    async def control(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one action on the workers; the first worker's status."""
        return await self._utility("specdraft_control", request)

    async def govern(self, request: dict[str, Any]) -> dict[str, Any]:
        """``{"tokens": N | None}`` for the governor; its report."""
        return await self._utility("specdraft_govern", request)

    async def sample(self, message: dict[str, Any]) -> dict[str, Any]:
        """Put a trainer's sample into the replay: ``{"taken": bool, "reason": str}``."""
        return await self._utility("specdraft_sync", {"op": "sample", "header": message["header"], "payload": message["payload"]})

    async def commit(self, message: dict[str, Any]) -> dict[str, Any]:
        """Serve a verified update: build it aside between steps, then put it in between two of them; its record.

        Raises whatever went wrong; then the version before serves on.
        """
        manifest = message["manifest"]
        async with self._swapping:
            began = time.monotonic()
            try:
                await self._utility("specdraft_sync", {"op": "open", "manifest": manifest})
                while not (await self._utility("specdraft_sync", {"op": "build"}))["built"]:
                    pass
                build_ms = 1e3 * (time.monotonic() - began)
                # Another draft changes no token: running requests need not know.
                running = manifest["running"] if manifest["target"] else "keep"
                record = await self._put_in({"running": running}, manifest["drain_timeout_s"])
            except BaseException:
                with contextlib.suppress(Exception):
                    await self._utility("specdraft_sync", {"op": "discard"})
                raise
            record["report"] |= {"build_ms": round(build_ms, 1)}
            logger.info("policy %d serves (%s)", record["policy_version"], record["origin"])
            return record

    async def abort(self) -> None:
        """Drop an update that was opened through vLLM's own weight transfer and never finished."""
        async with self._swapping:
            await self._utility("specdraft_sync", {"op": "discard"})

    async def roll_back(self) -> dict[str, Any]:
        """Serve the version before the last update again; its record."""
        async with self._swapping:
            return await self._put_in({"running": "recompute", "rollback": True}, 1.0)

    async def _put_in(self, request: dict[str, Any], drain_timeout_s: float) -> dict[str, Any]:
        """Commit with the running requests out of the way, as far as they are asked to be."""
        running = request["running"]
        paused = running in ("drain", "abort") and not await self._client.is_paused()
        if paused:
            pause = self._client.pause_generation(mode="wait" if running == "drain" else "abort", clear_cache=False)
            try:
                await asyncio.wait_for(pause, drain_timeout_s)
            except TimeoutError:
                await self._client.resume_generation()
                raise TimeoutError(
                    f"requests still ran after {drain_timeout_s:g} s: raise drain_timeout_s, or choose running='recompute'"
                ) from None
        try:
            began = time.perf_counter()
            record = await self._utility("specdraft_commit", request)
            record["report"]["commit_ms"] = round(1e3 * (time.perf_counter() - began), 1)
        finally:
            if paused:
                await self._client.resume_generation()
        self._served(record)
        return record

    def follow(self, found: dict[str, Any] | None) -> None:
        """Take over versions that came another way (vLLM's own weight transfer), from a status."""
        if found is None or self._swapping.locked():
            return
        if (found["policy_version"], found["draft_version"]) != (self.policy_version, self.draft_version):
            self._served(found)

    def _served(self, record: dict[str, Any]) -> None:
        self.policy_version, self.draft_version = record["policy_version"], record["draft_version"]
        if self.sync is not None:
            self.sync.versions(self.policy_version, self.draft_version)

    async def _utility(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        return await self._client.engine_core.call_utility_async(name, request)
