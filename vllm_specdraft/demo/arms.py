"""Arms of a comparison on two or more servers: switching between them, timing a turn of each, and asking why a token differs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specdraft.demo.client import Client, RequestError, Sampling, gather_or_cancel
from vllm_specdraft.demo.compare import NONE, Difference, Measurement, is_tie, order_of
from vllm_specdraft.demo.prompts import Prompt

# A vLLM worker spins for a second after its last step and would take a core from the other server's.
SETTLE_S = 1.2
_METRICS_WAIT_S = 1.0
_METRICS_POLL_S = 0.05
_METRICS_REST_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A difference, judged."""

    difference: Difference
    """Where and what."""
    tie: bool
    """Whether the two tokens tie within rounding: then it does not count."""
    logprobs: dict[int, float]
    """The plain engine's best tokens there, by token id."""

    def __str__(self) -> str:
        gap = self.difference
        reason = "their logprobs tie within rounding" if self.tie else f"no tie, logprobs {self.logprobs}"
        return f"{gap.arm} differs on {gap.prompt} at token {gap.position}: {gap.none_token} -> {gap.arm_token} ({reason})"


class DecodeMeter:
    """Reads a server's decode time so that exactly the requests sent through it are counted.

    The server books a request a moment after its answer left: a reading taken at once would miss it, and the next one
    would find it in the wrong turn. So requests are counted here too, and a reading waits until the numbers agree.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._expected: float | None = None

    async def begin(self) -> None:
        """Start counting, once; requests that finished before must have had a moment to be booked."""
        if self._expected is None:
            await asyncio.sleep(_METRICS_REST_S)
            now = await self._client.decode_time()
            self._expected = now.requests if now is not None else None

    def sent(self, requests: int) -> None:
        """So many more requests were answered."""
        if self._expected is not None:
            self._expected += requests

    async def read_s(self) -> float | None:
        """Decode time of all booked requests; None when the server keeps none or the numbers do not come to agree."""
        if self._expected is None:
            return None
        ends = time.monotonic() + _METRICS_WAIT_S
        while True:
            now = await self._client.decode_time()
            if now is not None and now.requests == self._expected:
                return now.seconds
            if now is None or time.monotonic() >= ends:
                # Somebody else uses the server: count anew from here.
                self._expected = now.requests if now is not None else None
                return None
            await asyncio.sleep(_METRICS_POLL_S)


class Arms:
    """Answers prompts with the stock engine or one of several drafts, one arm at a time.

    Arms may share an engine process: an arm's draft is swapped in before its turn.
    """

    def __init__(
        self,
        *,
        clients: Mapping[str, Client],
        drafts: Mapping[str, Path] | None = None,
        settle_s: float = SETTLE_S,
        warm_tokens: int = 8,
    ) -> None:
        """`clients`: each arm's server, the stock engine's under `NONE`. `drafts`: checkpoint of each arm that has one: a
        draft that the gate let through may be taken back meanwhile, one that was published by hand stays.

        `settle_s`: wait when the server changes.

        `warm_tokens`: length of an untimed request before each turn, so that what a swap or a rest left cold is not part
        of the timing; 0 for none.
        """
        self._clients = dict(clients)
        self.names = tuple(self._clients)
        """The arms, in the order of the table."""
        self._meters = {client: DecodeMeter(client) for client in self._clients.values()}
        self._drafts = dict(drafts or {})
        self._settle_s = settle_s
        self._warm_tokens = warm_tokens
        self._served: dict[Client, str] = {}
        self._versions: dict[Client, int] = {}
        self._last: Client | None = None
        self._requests = 0

    async def warm_up(self, prompt: Prompt, sampling: Sampling) -> None:
        """One whole untimed answer of every arm."""
        for arm in self.names:
            await self.measure(arm, -1, [prompt], sampling)

    async def run_pair(
        self, pair: int, prompts: Sequence[Prompt], sampling: Sampling, *, on_turn: Callable[[Measurement], None]
    ) -> None:
        """Every arm answers `prompts`, all at once, in the pair's order."""
        for arm in order_of(pair, self.names):
            on_turn(await self.measure(arm, pair, prompts, sampling))

    async def measure(self, arm: str, pair: int, prompts: Sequence[Prompt], sampling: Sampling) -> Measurement:
        """One timed turn of one arm. Raises `RequestError`."""
        client = await self._switch(arm)
        meter = self._meters[client]
        await meter.begin()
        if self._warm_tokens:
            warm = Sampling(max_tokens=self._warm_tokens, temperature=sampling.temperature, seed=sampling.seed)
            await client.chat(prompts[0].question, warm, salt=self._salt())
            meter.sent(1)
        before = await self._counters(arm)
        decode_before_s = await meter.read_s()
        salts = [self._salt() for _ in prompts]
        started = time.perf_counter()
        answers = await gather_or_cancel(
            [client.chat(prompt.question, sampling, salt=salt) for prompt, salt in zip(prompts, salts, strict=True)]
        )
        wall_s = time.perf_counter() - started
        meter.sent(len(prompts))
        decode_after_s = await meter.read_s()
        after = await self._counters(arm)
        return Measurement(
            arm=arm,
            pair=pair,
            names=tuple(prompt.name for prompt in prompts),
            prompt_ids=tuple(answer.prompt_ids for answer in answers),
            token_ids=tuple(answer.token_ids for answer in answers),
            wall_s=wall_s,
            decode_s=None if decode_before_s is None or decode_after_s is None else decode_after_s - decode_before_s,
            draft_steps=after["draft_steps"] - before["draft_steps"] if before and after else None,
            accepted_tokens=after["accepted_tokens"] - before["accepted_tokens"] if before and after else None,
            accepted_per_position=(
                tuple(b - a for a, b in zip(before["per_position"], after["per_position"], strict=True))
                if before and after
                else None
            ),
        )

    async def judge(self, difference: Difference) -> Verdict:
        """Ask the plain engine whether the two tokens of a difference tie."""
        if difference.none_token is None or difference.arm_token is None:
            return Verdict(difference=difference, tie=False, logprobs={})
        await self._switch(NONE)
        logprobs = await self._clients[NONE].next_token_logprobs(difference.context_ids)
        self._meters[self._clients[NONE]].sent(1)
        return Verdict(difference=difference, tie=is_tie(difference, logprobs), logprobs=logprobs)

    async def _switch(self, arm: str) -> Client:
        client = self._clients[arm]
        if arm in self._drafts and self._served.get(client) != arm:
            record = await client.publish(self._drafts[arm])
            if record.get("draft_version") is None:
                raise RequestError(f"the server did not swap in {self._drafts[arm]}: it answered {record}")
            self._served[client], self._versions[client] = arm, record["draft_version"]
        if self._last is not None and self._last is not client:
            await asyncio.sleep(self._settle_s)
        self._last = client
        return client

    async def _counters(self, arm: str) -> dict[str, Any] | None:
        if arm == NONE:
            return None
        client = self._clients[arm]
        status = await client.status(fresh=True)
        # A draft published behind our back would be measured under the wrong name.
        known = self._versions.setdefault(client, status["draft_version"])
        if status["draft_version"] != known:
            raise RequestError(f"draft {status['draft_version']} is served, {arm} is draft {known}: pause learning first")
        return {**status["counters"], "per_position": status["accepted_per_position"]}

    def _salt(self) -> str:
        self._requests += 1
        return f"turn-{self._requests}"
