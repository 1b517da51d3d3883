"""Two servers on one machine, measured against each other: they answer the same requests in turns of a fraction of a second.

The speed of a shared machine wanders by about 8% from one second to the next, and as much from one minute to the next: what lies
between two turns hardly matters, how many there are does. So neither server answers a whole batch at once. One runs for a slice,
is paused between two of its steps and stopped as a process, so that nothing of it waits in a loop; then the other one runs.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from benchmarks.governing.ratios import GOVERNED, NONE, Load
from vllm_specdraft.demo.client import Client, Sampling, gather_or_cancel
from vllm_specdraft.demo.prompts import Prompt
from vllm_specdraft.demo.session import ServerLike

SLICE_S = 0.4
"""Of it about 25 ms are the way of the two calls, with either server: a ratio is by so much nearer to 1."""
DEVELOPER = {"VLLM_SERVER_DEV_MODE": "1"}
"""Environment of a server that can be paused."""


@dataclass(kw_only=True)
class Side:
    """One of the two."""

    client: Client
    server: ServerLike
    spent_s: float = 0.0
    work: asyncio.Future[Any] | None = field(default=None, repr=False)
    runs: bool = True

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

    async def slice(self, work: Awaitable[Any] | None, length_s: float) -> bool:
        """Run for one slice; whether all answers are there. `work`: to begin with, in the first slice."""
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
            await self.halt()
        return bool(done)


class Slices:
    """As an asynchronous context manager: outside of it both servers run."""

    def __init__(self, *, none: Side, governed: Side, length_s: float = SLICE_S) -> None:
        self._sides = {NONE: none, GOVERNED: governed}
        self._length_s = length_s
        self._set: int | None = None
        self._requests = itertools.count()

    async def __aenter__(self) -> Slices:
        for side in self._sides.values():
            await side.halt()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for side in self._sides.values():
            if side.work is not None:
                side.work.cancel()
            side.server.thaw()
        await self._decide(None)
        for side in self._sides.values():
            await side.go()

    async def alone(self, arm: str, load: Load, prompts: Sequence[Prompt]) -> None:
        """One batch of one server, for warming up."""
        side = await self._side_of(arm)
        await side.go()
        await self._batch(side, load, prompts)
        await side.halt()

    async def ratio(self, arm: str, load: Load, prompts: Sequence[Prompt], *, first: bool) -> float:
        """The speed of `arm` over none's in one batch, which both answer; `first`: `arm` has the first slice."""
        side, none = await self._side_of(arm), self._sides[NONE]
        order = [side, none] if first else [none, side]
        for one in order:
            one.spent_s, one.work = 0.0, None
        left = list(order)
        while left:
            for one in list(left):
                work = self._batch(one, load, prompts) if one.work is None else None
                if await one.slice(work, self._length_s):
                    left.remove(one)
        tokens = {id(one): one.work.result() for one in order if one.work is not None}
        return tokens[id(side)] / side.spent_s / (tokens[id(none)] / none.spent_s)

    async def _side_of(self, arm: str) -> Side:
        if arm == NONE:
            return self._sides[NONE]
        await self._decide(None if arm == GOVERNED else int(arm.rpartition(" ")[2]))
        return self._sides[GOVERNED]

    async def _decide(self, tokens: int | None) -> None:
        """A paused engine hears it too, if its processes run."""
        if tokens != self._set:
            governed = self._sides[GOVERNED]
            governed.server.thaw()
            await governed.client.speculate(tokens)
            if not governed.runs:
                governed.server.freeze()
            self._set = tokens

    async def _batch(self, side: Side, load: Load, prompts: Sequence[Prompt]) -> int:
        """Tokens of all answers. Each prompt is computed anew: of what is cached, an engine with a draft finds one block less."""
        number = next(self._requests)
        work = [
            side.client.chat(prompt.question, Sampling(max_tokens=length), salt=f"{number}-{index}")
            for index, (prompt, length) in enumerate(zip(prompts, load.lengths, strict=True))
        ]
        return sum(len(answer.token_ids) for answer in await gather_or_cancel(work))
