"""Catches a comparison in which both servers run at once, one stays stopped, or an arm is measured with another's setting."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from benchmarks.governing import slices
from benchmarks.governing.ratios import GOVERNED, NONE, Load, fixed
from benchmarks.governing.slices import Side, Slices
from vllm_specdraft.demo.client import Answer, Client, RequestError, Sampling
from vllm_specdraft.demo.prompts import Prompt

LOAD = Load(name="draining", lengths=(6, 3), drains=True)
STEADY = Load(name="steady", lengths=(9, 40))
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
        self.generated = self.first = 0

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

    async def first_tokens(self) -> float:
        assert not self.frozen
        return float(self.first)

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
                self.first += tokens == 1
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
        async with machine.slices as turns:
            assert not any(server.runs for server in machine.servers)
            await turns.alone(GOVERNED, LOAD, PROMPTS[:2])
            await turns.alone(NONE, LOAD, PROMPTS[:2])
            assert await turns.ratio(fixed(2), LOAD, PROMPTS[:2], first=first) > 0
            assert await turns.ratio(GOVERNED, LOAD, PROMPTS[:2], first=first) > 0
            assert not any(server.runs for server in machine.servers)
        assert all(server.runs for server in machine.servers)

    asyncio.run(play())
    assert machine.governed.arms == [2, None], "told once for each change"
    for server in machine.servers:
        assert len(set(server.salts)) == len(server.salts) == 3 * 2, "no prompt is found in the cache"


def test_a_batch_that_fails_leaves_nothing_stopped() -> None:
    machine = Machine(fails=True)

    async def play() -> None:
        async with machine.slices as turns:
            await turns.ratio(fixed(1), LOAD, PROMPTS[:2], first=False)

    with pytest.raises(RequestError, match="gone"):
        asyncio.run(play())
    assert all(server.runs for server in machine.servers)
    assert machine.governed.arms == [1, None]


def test_a_steady_batch_counts_while_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first token of each to the end of the first: one of its tokens and what came beside it do not count."""
    monkeypatch.setattr(slices, "_LOOK_S", TOKEN_S / 4)
    machine = Machine()

    async def play() -> tuple[float, list[float]]:
        async with machine.slices as turns:
            ratio = await turns.ratio(fixed(0), STEADY, PROMPTS[:2], first=True)
            return ratio, [side.tokens for side in (turns.governed, turns.none)]

    ratio, tokens = asyncio.run(play())
    assert 0.5 < ratio < 2.0
    for count in tokens:
        # Eight of the first one's nine at most, and as many of the one beside it.
        assert 10 <= count <= 17
    assert all(server.generated < sum(STEADY.lengths) for server in machine.servers)


def test_a_steady_batch_of_short_answers_is_refused() -> None:
    machine = Machine()

    async def play() -> None:
        async with machine.slices as turns:
            await turns.ratio(GOVERNED, Load(name="short", lengths=(1, 40)), PROMPTS[:2], first=True)

    with pytest.raises(RequestError, match="short: an answer ended before every request"):
        asyncio.run(play())
