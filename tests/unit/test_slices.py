"""Catches a comparison in which both servers run at once, one stays stopped, or an arm is measured with another's setting."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from benchmarks.governing.ratios import GOVERNED, NONE, Load, fixed
from benchmarks.governing.slices import Side, Slices
from vllm_specdraft.demo.client import Answer, Client, RequestError, Sampling
from vllm_specdraft.demo.prompts import Prompt

LOAD = Load(name="two", lengths=(6, 3), running=2)
STEADY = Load(name="two of three", lengths=(4, 40, 8), running=2)
PROMPTS = [Prompt(name=str(i), question=f"question {i}", answer="") for i in range(3)]
TOKEN_S = 0.004


class FakeServer(Client):
    """Gives a token in a while, but only when its processes run and its engine is not paused."""

    def __init__(self, machine: Machine, *, fails: bool = False) -> None:
        super().__init__("http://nowhere", log_path=Path("no.log"))
        self.machine, self.fails = machine, fails
        self.frozen = self.paused = False
        self.salts: list[str | None] = []
        self.arms: list[int | None] = []
        self.generated = 0

    @property
    def runs(self) -> bool:
        return not self.frozen and not self.paused

    def start(self) -> None: ...
    def wait_ready(self, timeout_s: float) -> None: ...
    def stop(self) -> None: ...

    def rss_bytes(self) -> int:
        return 0

    def freeze(self) -> None:
        assert self.paused, "stopped in the middle of a step"
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False

    async def call(self, method: str, path: str, body: dict | None = None) -> dict[str, Any]:
        assert not self.frozen, "a stopped server cannot answer"
        self.paused = path.startswith("/pause")
        assert path in ("/resume", "/pause?mode=keep&clear_cache=false")
        return {}

    async def speculate(self, tokens: int | None) -> dict[str, Any]:
        assert not self.frozen
        self.arms.append(tokens)
        return {}

    async def generated_tokens(self) -> float:
        assert not self.frozen
        return float(self.generated)

    async def chat(self, question: str, sampling: Sampling, *, salt: str | None = None) -> Answer:
        self.salts.append(salt)
        tokens = 0
        while tokens < sampling.max_tokens:
            await asyncio.sleep(TOKEN_S)
            if self.fails:
                raise RequestError("gone")
            if self.runs:
                assert sum(server.runs for server in self.machine.servers) == 1
                tokens += 1
                self.generated += 1
        return Answer(prompt_ids=(1,), token_ids=tuple(range(tokens)), text="", wall_s=1.0)


class Machine:
    def __init__(self, *, fails: bool = False) -> None:
        self.servers: list[FakeServer] = []
        self.none, self.governed = FakeServer(self), FakeServer(self, fails=fails)
        self.servers += [self.none, self.governed]
        sides = [Side(client=server, server=server) for server in self.servers]
        self.slices = Slices(none=sides[0], governed=sides[1], length_s=3 * TOKEN_S)


@pytest.mark.parametrize("first", [False, True])
def test_one_runs_at_a_time_and_both_afterwards(first: bool) -> None:
    machine = Machine()

    async def play() -> None:
        async with machine.slices as slices:
            assert not any(server.runs for server in machine.servers)
            await slices.alone(GOVERNED, LOAD, PROMPTS[:2])
            await slices.alone(NONE, LOAD, PROMPTS[:2])
            assert await slices.ratio(fixed(2), LOAD, PROMPTS[:2], first=first) > 0
            assert await slices.ratio(GOVERNED, LOAD, PROMPTS[:2], first=first) > 0
            assert not any(server.runs for server in machine.servers)
        assert all(server.runs for server in machine.servers)

    asyncio.run(play())
    assert machine.governed.arms == [2, None], "told once for each change"
    for server in machine.servers:
        assert len(set(server.salts)) == len(server.salts) == 3 * 2, "no prompt is found in the cache"


def test_a_batch_that_fails_leaves_nothing_stopped() -> None:
    machine = Machine(fails=True)

    async def play() -> None:
        async with machine.slices as slices:
            await slices.ratio(fixed(1), LOAD, PROMPTS[:2], first=False)

    with pytest.raises(RequestError, match="gone"):
        asyncio.run(play())
    assert all(server.runs for server in machine.servers)
    assert machine.governed.arms == [1, None]


def test_a_steady_batch_ends_when_fewer_would_run() -> None:
    """The second of three is cut short, and its tokens until then count."""
    machine = Machine()

    async def play() -> tuple[float, list[float]]:
        async with machine.slices as slices:
            ratio = await slices.ratio(fixed(0), STEADY, PROMPTS, first=True)
            return ratio, [side.tokens for side in (slices.governed, slices.none)]

    ratio, tokens = asyncio.run(play())
    assert 0.5 < ratio < 2.0
    for count in tokens:
        # The first and the third one's 12, and as many of the one beside them.
        assert 20 <= count <= 28
    assert all(server.generated < sum(STEADY.lengths) for server in machine.servers)
