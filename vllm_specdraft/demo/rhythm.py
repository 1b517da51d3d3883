"""The RL-like rhythm: a burst of concurrent rollouts, then a pause for the trainer, in which the draft learns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_specdraft.demo.client import Answer, Client, Sampling, gather_or_cancel
from vllm_specdraft.demo.prompts import Prompt


@dataclass(frozen=True, kw_only=True)
class RhythmConfig:
    """The shape of one round."""

    rollouts: int = 48
    """Rollouts in a burst."""
    concurrency: int = 24
    """Rollouts in flight at once."""
    max_tokens: int = 160
    """Longest rollout; it may end earlier by itself."""
    temperature: float = 1.0
    """Temperature of the sampled rollouts; 1.0 is what policy gradients need."""
    validation: int = 3
    """Prompts answered greedily one at a time after the sampled rollouts, as an RL run's validation is: what a long tail feels."""
    greedy_every: int = 4
    """Every n-th rollout is greedy, as the validation inside an RL run is; 0 for none."""
    pause_s: float = 60.0
    """The trainer's time after a burst, in which the server has nothing to generate."""
    poll_s: float = 5.0
    """How often the status is read during a pause. Each reading costs the learner a moment."""

    def __post_init__(self) -> None:
        for name in ("rollouts", "concurrency", "max_tokens", "validation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")
        for name in ("temperature", "greedy_every", "pause_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: it cannot be negative")
        if self.poll_s <= 0:
            raise ValueError(f"poll_s={self.poll_s}: it must be positive")

    @property
    def prompts(self) -> int:
        """Prompts that one burst takes."""
        return self.rollouts + self.validation


@dataclass(frozen=True, kw_only=True)
class Burst:
    """What one burst came to."""

    rollouts: int
    """Answers received."""
    tokens: int
    """Tokens generated."""
    wall_s: float
    """From the first request to the last answer."""
    single_tokens_per_s: float
    """Speed of the validation's answers, one at a time, in tokens per second; their tokens are not in `tokens`."""
    accepted_length: float | None
    """Of the validation: tokens per target step, bonus included; None for the plain engine or when nothing was drafted."""
    draft_version: int | None
    """The draft that served the burst's end; None for the plain engine."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of wall time, all sampled rollouts together."""
        return self.tokens / self.wall_s


def accepted_length(before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    """Accepted length between two status readings, bonus included; None when no draft step lies between them."""
    steps = after["counters"]["draft_steps"] - before["counters"]["draft_steps"]
    accepted = after["counters"]["accepted_tokens"] - before["counters"]["accepted_tokens"]
    return 1.0 + accepted / steps if steps > 0 else None


def samplings(config: RhythmConfig) -> list[Sampling]:
    """How each rollout of a burst is sampled: every `greedy_every`-th greedy.

    Without seeds: a seeded request whose prefill is cut in two ends a stock vLLM 0.32 on a CPU.
    """
    chosen = []
    for index in range(config.rollouts):
        greedy = config.greedy_every > 0 and index % config.greedy_every == config.greedy_every - 1
        chosen.append(
            Sampling(
                max_tokens=config.max_tokens,
                temperature=0.0 if greedy else config.temperature,
            )
        )
    return chosen


async def burst(
    client: Client,
    prompts: Sequence[Prompt],
    config: RhythmConfig,
    *,
    plain: bool = False,
    on_answer: Callable[[int], None] = lambda finished: None,
) -> Burst:
    """Play one burst, one rollout per prompt; the last `config.validation` prompts are the validation's.

    `plain`: the server is the stock engine and has no status. `on_answer` is told how many answers are there.
    Raises `RequestError` when a rollout fails; the others are then given up.
    """
    slots = asyncio.Semaphore(config.concurrency)
    finished = 0

    async def rollout(prompt: Prompt, sampling: Sampling) -> Answer:
        nonlocal finished
        async with slots:
            answer = await client.chat(prompt.question, sampling)
        finished += 1
        on_answer(finished)
        return answer

    sampled, validation = prompts[: config.rollouts], prompts[config.rollouts :]
    started = time.perf_counter()
    plan = zip(sampled, samplings(config), strict=True)
    answers = await gather_or_cancel([rollout(prompt, sampling) for prompt, sampling in plan])
    wall_s = time.perf_counter() - started
    before = None if plain else await client.status(fresh=True)
    started = time.perf_counter()
    greedy = Sampling(max_tokens=config.max_tokens)
    single = [await client.chat(prompt.question, greedy) for prompt in validation]
    single_s = time.perf_counter() - started
    after = None if plain else await client.status(fresh=True)
    return Burst(
        rollouts=len(answers),
        tokens=sum(len(answer.token_ids) for answer in answers),
        wall_s=wall_s,
        single_tokens_per_s=sum(len(answer.token_ids) for answer in single) / single_s,
        accepted_length=accepted_length(before, after) if before and after else None,
        draft_version=after["draft_version"] if after else None,
    )


async def pause(
    client: Client,
    config: RhythmConfig,
    *,
    on_status: Callable[[dict[str, Any], float], None] = lambda status, left_s: None,
    enough: Callable[[dict[str, Any]], bool] = lambda status: False,
) -> dict[str, Any]:
    """Leave the server alone for `config.pause_s`, reading its status now and then; return the last status.

    `on_status` gets each status and the seconds left. The pause ends early when `enough` says so.
    """
    ends = time.monotonic() + config.pause_s
    while True:
        left_s = ends - time.monotonic()
        await asyncio.sleep(max(0.0, min(config.poll_s, left_s)))
        status = await client.status()
        left_s = max(0.0, ends - time.monotonic())
        on_status(status, left_s)
        if left_s <= 0 or enough(status):
            return status
