"""What updates cost a running engine: the gap they leave in a streamed answer, and memory that does not come back.

The request streams over HTTP, the update comes from another process through the bridge, and the engine is a real one; beside it the
stock engine reloads its checkpoint in the middle of the same kind of answer.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks.sync.servers import Servers
from benchmarks.sync.trainer import OTHER, A, B, Sent, Trainer
from benchmarks.sync.weights import prompt_ids
from vllm_specdraft.demo.arms import SETTLE_S
from vllm_specdraft.demo.client import MODEL, Client
from vllm_specdraft.demo.session import Session, SessionError

KEEP, RECOMPUTE, RELOAD = "keep", "recompute", "plain reload"
PIECES_BEFORE = 40
"""Pieces of the stream before the update begins: their median gap is the normal one."""
AFTER_S = 1.0
"""How long after the commit a gap still counts as the update's."""
WARM_UPDATES = 10
"""Updates until what is allocated once is allocated."""
_STREAM_TOKENS, _ANSWER_TOKENS = 4000, 32
_STREAM_S = 120.0
_READINGS, _READING_S = 5, 0.3


@dataclass(frozen=True, kw_only=True)
class Stall:
    """One answer that an update came in the middle of. All in ms."""

    normal_ms: float
    """Median gap between two pieces before the update."""
    stall_ms: float
    """Largest gap from the update's beginning to a second after its end, less the normal one."""
    lost_ms: float
    """By how much all gaps in that time were longer than normal ones."""
    update_ms: float
    """From the update's beginning to its end."""


def stall_of(times: Sequence[float], *, began_s: float, ended_s: float) -> Stall:
    """What an update did to a stream. Raises `SessionError` when the stream is too short to say.

    Args:
        times: when its pieces came, in seconds of the same clock as `began_s` and `ended_s`.

    >>> stall_of([0.0, 0.1, 0.2, 0.3, 0.7, 0.9, 1.0, 1.1, 2.5], began_s=0.35, ended_s=0.8)
    Stall(normal_ms=100.0, stall_ms=1300.0, lost_ms=1700.0, update_ms=450.0)
    """
    gaps = [(end, end - begin) for begin, end in itertools.pairwise(times)]
    before = [gap for end, gap in gaps if end <= began_s]
    # The last one reaches beyond the time that counts, and may be the longest.
    inside = [gap for end, gap in gaps if end > began_s and end - gap < ended_s + AFTER_S]
    if not before or not inside or times[-1] < ended_s + AFTER_S:
        raise SessionError("the answer ended before the update was over: a longer one is needed")
    normal = median(before)
    milliseconds = (normal, max(inside) - normal, sum(inside) - normal * len(inside), ended_s - began_s)
    normal_ms, stall_ms, lost_ms, update_ms = (round(1e3 * value, 3) for value in milliseconds)
    return Stall(normal_ms=normal_ms, stall_ms=stall_ms, lost_ms=lost_ms, update_ms=update_ms)


async def stream(url: str, prompt: Sequence[int], times: list[float], *, tokens: int) -> None:
    """Stream one greedy answer of `tokens` tokens and note in `times` when each piece came (`time.perf_counter`)."""
    body = {**_body(prompt, tokens), "ignore_eos": True, "stream": True}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_STREAM_S)) as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        response.raise_for_status()
        async for line in response.content:
            came = time.perf_counter()
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0].get("token_ids"):
                times.append(came)


def _body(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "return_token_ids": True}


class EngineCosts:
    """The engine part, on a session's two servers."""

    def __init__(self, *, session: Session, servers: Servers, stalls: int, others: int, updates: int) -> None:
        """`stalls`: updates in the middle of an answer that count; `others`: of each other way; `updates`: for memory."""
        self._session, self._servers = session, servers
        self._rounds = {KEEP: stalls, RECOMPUTE: others, RELOAD: others}
        self._updates = updates
        self._which, self._version = A, 0
        self._answers: dict[str, list[list[int]]] = {}
        self._digests: dict[str, str] = {}
        self._found: dict[str, list[Stall]] = {way: [] for way in self._rounds}

    async def measure(self, live: Client, plain: Client, trainer: Trainer, target: Path) -> dict[str, float | int]:
        """The results. Raises `SessionError` when an engine serves other tokens than it should."""
        self._live, self._plain, self._trainer = live, plain, trainer
        prompts = prompt_ids(target, self._session.prompts.evaluation)
        self._prompts, self._long = prompts[:-1], prompts[-1]
        longest = json.loads((target / "config.json").read_text())["max_position_embeddings"]
        self._tokens = min(_STREAM_TOKENS, longest - len(self._long) - 8)
        async with live, plain:
            await live.train("pause")
            await self._warm_up()
            for number in range(max(self._rounds.values())):
                ways = [way for way, rounds in self._rounds.items() if number < rounds]
                for way in ways if number % 2 else reversed(ways):
                    self._session.console.progress(f"updates in the middle of an answer: {way}, {number + 1}")
                    await self._stall(way)
            self._say_stalls()
            growth = await self._memory()
        keep = self._found[KEEP]
        stall_ms = median(stall.stall_ms for stall in keep)
        return {
            "stall_ms": round(stall_ms, 2),
            "stall_steps": round(stall_ms / median(stall.normal_ms for stall in keep), 3),
            "memory_growth_100_updates_bytes": growth,
        }

    # -- updates, and whether they are right -----------------------------------------------------------------------------

    async def _ask(self, client: Client, *, salt: str | None = None) -> list[list[int]]:
        """Greedy answers, one after the other. Without a `salt` they read what the prefix cache holds of these prompts."""
        salted = {"cache_salt": salt} if salt else {}
        bodies = [{**_body(prompt, _ANSWER_TOKENS), **salted} for prompt in self._prompts]
        replies = [await client.call("POST", "/v1/completions", body) for body in bodies]
        return [reply["choices"][0]["token_ids"] for reply in replies]

    async def _switch(self, **options: Any) -> Sent:
        """Bring the other weights; the engine must say so."""
        self._which, self._version = OTHER[self._which], self._version + 1
        sent = await asyncio.to_thread(self._trainer.update, self._which, self._version, **options)
        status = await self._live.status()
        found = (status["policy_version"], status["target_digest"])
        if found != (self._version, self._digests.setdefault(self._which, found[1])):
            raise SessionError(f"the engine was updated to version {self._version} and says it serves {found[0]}, {found[1]}")
        return sent

    async def _check(self) -> None:
        """The tokens must be those that these weights gave before."""
        found = await self._ask(self._live)
        if found != self._answers.setdefault(self._which, found):
            raise SessionError(f"at version {self._version} greedy answers differ from those of the same weights before")

    async def _warm_up(self) -> None:
        await self._check()
        for _ in range(2):
            await self._switch()
            await self._check()
        if self._answers[A] == self._answers[B]:
            raise SessionError("both sets of weights give the same answers: no update could be told from none")
        self._plain_answers = await self._ask(self._plain, salt="before")

    # -- stalls ----------------------------------------------------------------------------------------------------------

    async def _stall(self, way: str) -> None:
        # The other server's worker spins for a moment after its last step.
        await asyncio.sleep(SETTLE_S)
        if way == RELOAD:
            stall = await self._during(self._servers.plain.url, self._reload)
            # vLLM's reload leaves the prefix cache as it is.
            if await self._ask(self._plain, salt=f"reload-{len(self._found[way])}") != self._plain_answers:
                raise SessionError("after vLLM's own reload of the same checkpoint greedy answers differ")
        else:

            async def act() -> tuple[float, float]:
                sent = await self._switch(running=way)
                self._session.record.event("update", way=way, **asdict(sent))
                return sent.began_s, sent.committed_s

            stall = await self._during(self._servers.live.url, act)
            await self._check()
        self._found[way].append(stall)
        self._session.record.event("stall", way=way, **asdict(stall))

    async def _reload(self) -> tuple[float, float]:
        began = time.perf_counter()
        await self._plain.call("POST", "/collective_rpc", {"method": "reload_weights"})
        return began, time.perf_counter()

    async def _during(self, url: str, act: Callable[[], Awaitable[tuple[float, float]]]) -> Stall:
        """Do something in the middle of a streamed answer."""
        times: list[float] = []
        task = asyncio.ensure_future(stream(url, self._long, times, tokens=self._tokens))
        try:
            await _until(lambda: len(times) > PIECES_BEFORE, task)
            began_s, ended_s = await act()
            await _until(lambda: bool(times) and times[-1] > ended_s + AFTER_S, task)
        finally:
            task.cancel()
        return stall_of(times, began_s=began_s, ended_s=ended_s)

    def _say_stalls(self) -> None:
        console = self._session.console
        console.clear()
        console.line("updates in the middle of an answer:    stall ms   steps   lost ms   update ms   normal gap ms   n")
        for way, found in self._found.items():
            if found:
                values = {key: median(asdict(stall)[key] for stall in found) for key in asdict(found[0])}
                console.line(
                    f"  {way:35} {values['stall_ms']:9.1f} {values['stall_ms'] / values['normal_ms']:7.2f} "
                    f"{values['lost_ms']:9.1f} {values['update_ms']:11.0f} {values['normal_ms']:15.1f} {len(found):3}"
                )

    # -- memory ----------------------------------------------------------------------------------------------------------

    async def _memory(self) -> int:
        """Growth of the server's resident memory over so many updates, after some that do not count, in bytes.

        No request is answered between the two readings: the first use of a page of the KV cache would count as growth.
        """
        console = self._session.console
        before = 0
        for number in range(1, WARM_UPDATES + self._updates + 1):
            console.progress(f"memory: update {number} of {WARM_UPDATES + self._updates}")
            await self._switch()
            if number == WARM_UPDATES:
                before = await self._resident()
        growth = await self._resident() - before
        await self._check()
        await self._switch()
        await self._check()
        console.clear()
        console.line(f"resident after {WARM_UPDATES} updates: {before / 1e6:.1f} MB, {self._updates} later: {growth / 1e6:+.2f} MB")
        return growth

    async def _resident(self) -> int:
        readings = []
        for _ in range(_READINGS):
            await asyncio.sleep(_READING_S)
            readings.append(self._servers.live.rss_bytes())
        self._session.record.event("memory", version=self._version, readings=readings)
        return round(median(readings))


async def _until(reached: Callable[[], bool], task: asyncio.Task[None]) -> None:
    """Wait for a stream. Raises what ended it, or `SessionError` when it just ended."""
    while not reached():
        if task.done():
            task.result()
            raise SessionError("the answer ended before the update was over: a longer one is needed")
        await asyncio.sleep(0.02)
