"""The API server's side of weight sync: starts the receiver's process, and carries its wishes to the engine."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from vllm_specdraft.sync_process import LENGTH

logger = logging.getLogger(__name__)

_RESTART_S, _LONGEST_RESTART_S = 1.0, 60.0
Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class SyncLink:
    """One receiver process, started again when it dies. A failed receiver costs updates, never the engine."""

    def __init__(self, settings: dict[str, Any], *, commit: Handler, sample: Handler) -> None:
        """Args: settings: arguments of `vllm_specdraft.sync_process`; `commit` and `sample` answer its wishes."""
        self.settings = settings
        self.endpoint: str | None = None
        """Where trainers connect; None while no receiver runs."""
        self.carriers: list[str] = []
        self.error: str | None = None
        self.counters: dict[str, int] = {}
        self.starts = 0
        self._handlers = {"commit": commit, "sample": sample}
        self._process: asyncio.subprocess.Process | None = None
        self._work: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Keep a receiver running. Ends with the server."""
        wait_s = _RESTART_S
        try:
            while True:
                await self._serve()
                # One that did not even start will hardly do so a second later.
                wait_s = _RESTART_S if self.error is None else min(2 * wait_s, _LONGEST_RESTART_S)
                await asyncio.sleep(wait_s)
        finally:
            self._kill()

    def versions(self, policy: int, draft: int) -> None:
        """The engine serves these versions now."""
        self.settings |= {"policy_version": policy, "draft_version": draft}
        self._write({"policy_version": policy, "draft_version": draft})

    def report(self) -> dict[str, Any]:
        """For the status."""
        return {
            "endpoint": self.endpoint,
            "carriers": self.carriers,
            "encrypted": self.settings["keys"] is not None,
            "counters": self.counters,
            "error": self.error,
        }

    async def _serve(self) -> None:
        """One receiver's life."""
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "vllm_specdraft.sync_process", json.dumps(self.settings),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 26,
        )  # fmt: skip
        self.starts += 1
        assert process.stdout is not None
        try:
            while True:
                length = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))[0]
                self._heard(msgspec.msgpack.decode(await process.stdout.readexactly(length)))
        except asyncio.IncompleteReadError:
            self.endpoint = None
            code = await process.wait()
            # With 0 it was told to end, as a rule together with all of the server.
            logger.log(
                logging.ERROR if code else logging.INFO,
                "the receiver of weights ended with code %s%s; it is started again",
                code, f": {self.error}" if self.error else "",
            )  # fmt: skip

    def _heard(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.endpoint, self.carriers, self.error = message["ready"], message["carriers"], None
            # A port that the system chose is kept, so that trainers find a receiver that was started again.
            self.settings["bind"] = self.endpoint
            logger.info("weights are taken at %s", self.endpoint)
        elif "failed" in message:
            self.error = message["failed"]
        elif "counters" in message:
            self.counters = message["counters"]
        else:
            task = asyncio.ensure_future(self._answer(message))
            self._work.add(task)
            task.add_done_callback(self._work.discard)

    async def _answer(self, message: dict[str, Any]) -> None:
        """Do what the receiver wants done, and tell it what came of it: it must always hear."""
        asked_by = self.starts
        try:
            answer = await self._handlers[message["op"]](message)
        except Exception as error:  # noqa: BLE001 - whatever the engine raised: it serves what it served, and the trainer is told
            logger.error("weight sync: %s failed: %s", message["op"], error)
            answer = {"error": str(error) or type(error).__name__, "taken": False, "reason": str(error)}
        if self.starts != asked_by:
            # It died meanwhile; the next one knows the versions, and numbers its wishes anew.
            return
        self._write({"id": message["id"], "answer": answer, **{k: v for k, v in self.settings.items() if k.endswith("_version")}})
        self._write({"id": -1, "counters": True})

    def _write(self, message: dict[str, Any]) -> None:
        process = self._process
        if process is None or process.stdin is None or process.stdin.is_closing():
            return
        frame = msgspec.msgpack.encode(message)
        process.stdin.write(LENGTH.pack(len(frame)) + frame)

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
