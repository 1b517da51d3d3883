"""Two servers on one machine, measured against each other: they answer the same requests in turns of a fraction of a second.

The speed of a shared machine wanders by about 8% from one second to the next, and as much from one minute to the next: what lies
between two turns hardly matters, how many there are does. So neither server answers a whole batch at once. One runs for a slice,
is paused between two of its steps and stopped as a process, so that nothing of it waits in a loop; then the other one runs.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from benchmarks.governing.ratios import GOVERNED, NONE, Load
from vllm_specdraft.demo.client import Client, Sampling
from vllm_specdraft.demo.prompts import Prompt
from vllm_specdraft.demo.session import ServerLike

SLICE_S = 0.4
"""Of it about 25 ms are the way of the two calls, with either server: a ratio is by so much nearer to 1."""
_QUIET_S = 0.25
"""Nothing runs any more when no token came for so long."""
DEVELOPER = {"VLLM_SERVER_DEV_MODE": "1"}
"""Environment of a server that can be paused."""


@dataclass(kw_only=True)
class Side:
    """One of the two."""

    client: Client
    server: ServerLike
    spent_s: float = 0.0
    tokens: float = 0.0
    """Of this batch, once it is over."""
    work: asyncio.Future[None] | None = field(default=None, repr=False)
    runs: bool = True
    _generated: float = 0.0
    """Tokens from the server's start to the end of the last batch."""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list, repr=False)

    async def go(self) -> None:
        """Processes, then the engine."""
        if not self.runs:
            self.server.thaw()
            await self.client.call("POST", "/resume")
            self.runs = True

    async def halt(self) -> None:
        """The engine after the step that it is in, then the processes."""
        if self.runs:
            await self.client.call("POST", "/pause?mode=keep&clear_cache=false")
            self.server.freeze()
            self.runs = False

    async def batch(self, load: Load, prompts: Sequence[Prompt], *, salt: str) -> None:
        """As many requests at once as the load says, until fewer would run. Each prompt is computed anew (`salt`): of what is
        cached, an engine with a draft finds one block less."""
        waiting = deque(enumerate(zip(prompts, load.lengths, strict=True)))

        async def one_after_the_other() -> None:
            while waiting:
                index, (prompt, length) = waiting.popleft()
                await self.client.chat(prompt.question, Sampling(max_tokens=length), salt=f"{salt}-{index}")

        self._tasks = [asyncio.ensure_future(one_after_the_other()) for _ in range(load.running)]
        when = asyncio.ALL_COMPLETED if load.drains else asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait(self._tasks, return_when=when)
        for task in done:
            task.result()
        self.tokens = await self.client.generated_tokens() - self._generated

    async def end(self) -> None:
        """Break off what still runs, and halt once nothing does."""
        for task in self._tasks:
            task.cancel()
        self._tasks, self.work = [], None
        await self.go()
        before = math.nan
        while (now := await self.client.generated_tokens()) != before:
            before = now
            await asyncio.sleep(_QUIET_S)
        self._generated = now
        await self.halt()

    async def slice(self, work: Coroutine[Any, Any, None] | None, length_s: float) -> bool:
        """Run for one slice; whether the batch is over. `work`: to begin with, in the first slice."""
        began = time.perf_counter()
        await self.go()
        if work is not None:
            self.work = asyncio.ensure_future(work)
        assert self.work is not None
        done, _ = await asyncio.wait([self.work], timeout=length_s)
        if not done:
            await self.halt()
        self.spent_s += time.perf_counter() - began
        if done:
            self.work.result()
            await self.halt()
        return bool(done)


class Slices:
    """As an asynchronous context manager: outside of it both servers run."""

    def __init__(self, *, none: Side, governed: Side, length_s: float = SLICE_S) -> None:
        self.none, self.governed = none, governed
        self._length_s = length_s
        self._set: int | None = None
        self._batches = itertools.count()

    async def __aenter__(self) -> Slices:
        for side in (self.none, self.governed):
            await side.end()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for side in (self.none, self.governed):
            if side.work is not None:
                side.work.cancel()
            side.server.thaw()
        await self._decide(None)
        for side in (self.none, self.governed):
            await side.end()
            await side.go()

    async def alone(self, arm: str, load: Load, prompts: Sequence[Prompt]) -> None:
        """One batch of one server, for warming up."""
        side = await self._side_of(arm)
        await side.go()
        await side.batch(load, prompts, salt=f"{next(self._batches)}")
        await side.end()

    async def ratio(self, arm: str, load: Load, prompts: Sequence[Prompt], *, first: bool) -> float:
        """The speed of `arm` over none's in one batch, which both answer; `first`: `arm` has the first slice."""
        side, none = await self._side_of(arm), self.none
        order, salt = [side, none] if first else [none, side], f"{next(self._batches)}"
        for one in order:
            one.spent_s = 0.0
        left = list(order)
        while left:
            for one in list(left):
                if await one.slice(one.batch(load, prompts, salt=salt) if one.work is None else None, self._length_s):
                    left.remove(one)
        for one in order:
            await one.end()
        return side.tokens / side.spent_s / (none.tokens / none.spent_s)

    async def _side_of(self, arm: str) -> Side:
        if arm == NONE:
            return self.none
        await self._decide(None if arm == GOVERNED else int(arm.rpartition(" ")[2]))
        return self.governed

    async def _decide(self, tokens: int | None) -> None:
        """A paused engine hears it too, if its processes run."""
        if tokens != self._set:
            self.governed.server.thaw()
            await self.governed.client.speculate(tokens)
            if not self.governed.runs:
                self.governed.server.freeze()
            self._set = tokens
