"""What tapping and learning cost the requests of a running server: both switched on and off, in turns, under the same load."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import monotonic, perf_counter
from typing import Any

from vllm_specdraft.demo.client import Client, RequestError, Sampling, StreamTimes, gather_or_cancel
from vllm_specdraft.demo.prompts import Prompt, PromptSource

TOKENS = 96
"""Tokens of each answer when taps are timed."""
SHORT_TOKENS = 24
LARGEST_BURST = 4
ARRIVALS_S = 0.15
"""Arrivals of one burst spread over this time."""
KV_TOKENS_PER_GIB = 40_000
"""More tokens than 1 GiB of KV cache holds, for the default model."""
WINDOW_WAIT_S = 20.0
"""Longest wait for a window in which the draft really learns."""

Progress = Callable[[str], None]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all are not above.

    >>> percentile([5.0, 1.0, 3.0, 2.0], 0.5)
    2.0
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


async def fill_kv_cache(client: Client, prompts: PromptSource, *, tokens: int, progress: Progress) -> None:
    """Prefill so many tokens of new prompts: until every page of the KV cache was touched once, memory grows by itself."""
    filled = 0
    while filled < tokens:
        progress(f"filling the KV cache: {filled} of {tokens} tokens")
        question = " ".join(prompt.question for prompt in prompts.take(30))
        filled += len((await client.chat(question, Sampling(max_tokens=1))).prompt_ids)


async def tap_overhead(client: Client, prompts: Sequence[Prompt], *, pairs: int, batch: int, progress: Progress) -> float:
    """Wall time of the same answers with taps over that without, the median of `pairs` interleaved pairs.

    Answers have one length and are greedy, so both sides do the same steps; learning is paused.
    """
    await client.call("POST", "/specdraft/train", {"action": "pause"})
    sampling = Sampling(max_tokens=TOKENS, ignore_end=True)
    ratios = []
    for pair in range(pairs):
        progress(f"taps, batch {batch}: pair {pair + 1} of {pairs}")
        chosen = [prompts[(pair * batch + index) % len(prompts)] for index in range(batch)]
        seconds: dict[bool, float] = {}
        for enabled in (True, False) if pair % 2 else (False, True):
            await client.taps(enabled)
            salts = [f"taps-{batch}-{pair}-{enabled}-{index}" for index in range(batch)]
            # What a rest left cold is not part of the timing.
            await client.chat(chosen[0].question, Sampling(max_tokens=8), salt=f"{salts[0]}-warm")
            began = perf_counter()
            await gather_or_cancel(
                [client.chat(prompt.question, sampling, salt=salt) for prompt, salt in zip(chosen, salts, strict=True)]
            )
            seconds[enabled] = perf_counter() - began
        ratios.append(seconds[True] / seconds[False])
    await client.taps(True)
    return median(ratios)


@dataclass(kw_only=True)
class Latencies:
    """What the requests of one arm saw."""

    ttft_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)

    def add(self, times: StreamTimes) -> None:
        """One more answer."""
        self.ttft_ms.append(1e3 * times.ttft_s)
        self.gap_ms += [1e3 * gap for gap in times.gaps_s]


@dataclass(frozen=True, kw_only=True)
class Interference:
    """Requests that arrive while the draft learns, against the same requests while it rests."""

    ttft_added_p95_ms: float
    """95th percentile of the time to the first token, learning minus resting."""
    itl_p95_ratio: float
    """95th percentile of the time between two parts of an answer, learning over resting."""
    slice_ms_p95: float
    """95th percentile of the learner's slices, by its own account."""
    requests: int
    """Requests per arm."""


async def interference(
    client: Client, prompts: Sequence[Prompt], *, bursts: int, seed: int = 0, progress: Progress
) -> Interference:
    """Bursts of one to four requests at random moments inside open windows; every burst is sent to both arms."""
    draw = random.Random(seed)
    arms = {True: Latencies(), False: Latencies()}
    status: dict[str, Any] = {}
    for burst in range(bursts):
        progress(f"interference: burst {burst + 1} of {bursts}")
        size, rest_s = draw.randint(1, LARGEST_BURST), draw.uniform(0.2, 1.0)
        delays = sorted(draw.uniform(0.0, ARRIVALS_S) for _ in range(size))
        for learning in (True, False) if burst % 2 else (False, True):
            await client.train("resume" if learning else "pause")
            if learning:
                await _learning_runs(client)
            await asyncio.sleep(rest_s)
            chosen = [prompts[(burst + index) % len(prompts)] for index in range(size)]
            work = [
                _later(delay, client, prompt, f"burst-{burst}-{learning}-{index}")
                for index, (delay, prompt) in enumerate(zip(delays, chosen, strict=True))
            ]
            for times in await gather_or_cancel(work):
                arms[learning].add(times)
        status = await client.status()
    await client.train("pause")
    on, off = arms[True], arms[False]
    return Interference(
        ttft_added_p95_ms=percentile(on.ttft_ms, 0.95) - percentile(off.ttft_ms, 0.95),
        itl_p95_ratio=percentile(on.gap_ms, 0.95) / percentile(off.gap_ms, 0.95),
        slice_ms_p95=status["learning"]["slice_ms_p95"],
        requests=len(on.ttft_ms),
    )


async def _later(delay_s: float, client: Client, prompt: Prompt, salt: str) -> StreamTimes:
    await asyncio.sleep(delay_s)
    return await client.stream(prompt.question, Sampling(max_tokens=SHORT_TOKENS), salt=salt)


async def _learning_runs(client: Client) -> None:
    """Wait until the learner is seen at work. Raises `RequestError` when it never is: the comparison would be of nothing."""
    seconds = (await client.status(fresh=True))["learning"]["seconds"]
    ends = monotonic() + WINDOW_WAIT_S
    while True:
        status = await client.status(fresh=True)
        if status["learning"]["seconds"] > seconds and status["idle_state"] == "OPEN":
            return
        if monotonic() > ends:
            raise RequestError(f"the draft does not learn: {status['learning']['waiting_for']}, last error {status['last_error']}")
        await asyncio.sleep(0.1)
