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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

from benchmarks.governing.ratios import GOVERNED, NONE, Load
from vllm_specdraft.demo.client import Answer, Client, RequestError, Sampling
from vllm_specdraft.demo.prompts import Prompt
from vllm_specdraft.demo.session import ServerLike

SLICE_S = 0.4
"""Of it about 25 ms are the way of the two calls, with either server: a ratio is by so much nearer to 1."""
_LOOK_S, _QUIET_S = 0.05, 0.25
"""Between two looks at whether all requests of a batch run. Nothing runs any more when no token came for so long."""
DEVELOPER = {"VLLM_SERVER_DEV_MODE": "1"}
"""Environment of a server that can be paused."""


@dataclass(kw_only=True)
class Side:
    """One of the two."""

    client: Client
    server: ServerLike
    spent_s: float = 0.0
    tokens: float = 0.0
    """Of this batch, in the time that counts, once it is over."""
    work: asyncio.Future[None] | None = field(default=None, repr=False)
    runs: bool = True
    _generated: float = 0.0
    """Tokens from the server's start to when this batch's time began to count."""
    _tasks: list[asyncio.Task[Answer]] = field(default_factory=list, repr=False)

    async def go(self) -> None:
        """Processes, then the engine."""
        if not self.runs:
            self.server.thaw()
            await self.client.call("POST", "/resume")
            self.runs = True

    async def halt(self, *, mark: bool = False) -> None:
        """The engine after the step that it is in, then the processes. `mark`: tokens count from here on."""
        if self.runs:
            await self.client.call("POST", "/pause?mode=keep&clear_cache=false")
            if mark:
                self._generated = await self.client.generated_tokens()
            self.server.freeze()
            self.runs = False

    def send(self, load: Load, prompts: Sequence[Prompt], *, salt: str) -> None:
        """The whole batch, to a server that runs. Each prompt is computed anew (`salt`), by either server alike."""
        self._tasks = [
            asyncio.ensure_future(self.client.chat(prompt.question, Sampling(max_tokens=length), salt=f"{salt}-{index}"))
            for index, (prompt, length) in enumerate(zip(prompts, load.lengths, strict=True))
        ]
        self.work = asyncio.ensure_future(self._until_over(load))

    async def _until_over(self, load: Load) -> None:
        when = asyncio.ALL_COMPLETED if load.drains else asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait(self._tasks, return_when=when)
        for task in done:
            task.result()
        self.tokens = await self.client.generated_tokens() - self._generated

    async def fill(self, load: Load, prompts: Sequence[Prompt], *, salt: str) -> None:
        """Before a steady batch's time counts: until every request has its first token. When requests come one after the other, a
        prompt more or less beside the last answer would weigh more than what is compared."""
        await self.go()
        started = await self.client.first_tokens()
        self.send(load, prompts, salt=salt)
        assert self.work is not None
        while not self.work.done() and await self.client.first_tokens() < started + len(prompts):
            await asyncio.sleep(_LOOK_S)
        if self.work.done():
            self.work.result()
            raise RequestError(
                f"{load.name}: an answer ended before every request had its first token; the prompts need longer answers"
            )
        await self.halt(mark=True)

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
        await self.halt(mark=True)

    async def slice(self, length_s: float, batch: Callable[[], None]) -> bool:
        """Run for one slice; whether the batch is over. `batch` sends it, if that was not done."""
        began = time.perf_counter()
        await self.go()
        if self.work is None:
            batch()
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
        side.send(load, prompts, salt=f"{next(self._batches)}")
        assert side.work is not None
        await side.work
        await side.end()

    async def ratio(self, arm: str, load: Load, prompts: Sequence[Prompt], *, first: bool) -> float:
        """The speed of `arm` over none's in one batch, which both answer; `first`: `arm` has the first slice."""
        side, none = await self._side_of(arm), self.none
        order, salt = [side, none] if first else [none, side], f"{next(self._batches)}"
        for one in order:
            one.spent_s = 0.0
            if not load.drains:
                await one.fill(load, prompts, salt=salt)
        left = list(order)
        while left:
            for one in list(left):
                if await one.slice(self._length_s, partial(one.send, load, prompts, salt=salt)):
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
