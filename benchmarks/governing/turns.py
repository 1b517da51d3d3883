"""Turns of the arms of the governor's benchmark: the same greedy answers, from the stock server or from ours."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_specdraft.demo.arms import SETTLE_S
from vllm_specdraft.demo.client import Client, Sampling, gather_or_cancel
from vllm_specdraft.demo.prompts import Prompt

NONE, GOVERNED = "none", "governed"
_T_95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.80, 1.78, 1.77, 1.76, 1.75, 1.75, 1.74, 1.73, 1.73)
"""One-sided 95% points of Student's t from one degree of freedom on."""
_T_MORE = 1.7


def fixed(tokens: int) -> str:
    """The arm that drafts so many tokens in every step."""
    return f"fixed {tokens}"


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests that are sent at once."""

    name: str
    lengths: tuple[int, ...]
    """Tokens of each one's answer at most; greedy answers end where they end, with every arm alike."""


@dataclass(kw_only=True)
class Ratios:
    """Paired ratios of two arms' speeds."""

    logs: list[float] = field(default_factory=list)

    def add(self, ratio: float) -> None:
        """One pair."""
        self.logs.append(math.log(ratio))

    @property
    def mean(self) -> float:
        """Geometric mean."""
        return math.exp(statistics.fmean(self.logs))

    @property
    def half_width(self) -> float:
        """Between the mean and its lower 95% bound, as a log; infinite for fewer than two pairs."""
        count = len(self.logs)
        if count < 2:
            return math.inf
        point = _T_95[count - 2] if count - 2 < len(_T_95) else _T_MORE
        return point * statistics.stdev(self.logs) / math.sqrt(count)

    @property
    def lower(self) -> float:
        """One-sided lower 95% bound of the mean."""
        return math.exp(statistics.fmean(self.logs) - self.half_width)


class Turns:
    """Measures turns; knows which server had the last one, and leaves the other's threads time to rest."""

    def __init__(self, *, none: Client, governed: Client) -> None:
        self._clients = {NONE: none}
        self._governed = governed
        self._last: Client | None = None
        self._set: int | None = None
        self._requests = 0

    async def take(self, arm: str, load: Load, prompts: Sequence[Prompt]) -> float:
        """Tokens per second of one turn: wall time from the first request to the last answer."""
        client = self._clients.get(arm, self._governed)
        if self._last is not None and self._last is not client:
            await asyncio.sleep(SETTLE_S)
        self._last = client
        if client is self._governed:
            await self._decide(None if arm == GOVERNED else int(arm.rpartition(" ")[2]))
        # Each prompt is computed anew: of what is cached, an engine with a draft finds one block less than one without.
        work = [
            client.chat(prompt.question, Sampling(max_tokens=length), salt=self._salt())
            for prompt, length in zip(prompts, load.lengths, strict=True)
        ]
        began = time.perf_counter()
        answers = await gather_or_cancel(work)
        return sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - began)

    def _salt(self) -> str:
        self._requests += 1
        return f"turn-{self._requests}"

    async def _decide(self, tokens: int | None) -> None:
        if tokens != self._set:
            await self._governed.speculate(tokens)
            self._set = tokens
