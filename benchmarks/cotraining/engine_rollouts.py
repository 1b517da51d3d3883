"""A policy's own answers as a trainer's microbatches: rewards, advantages, and ragged documents padded to rows of one length."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from trainer_bridge.cotrain.microbatch import Microbatch

BREVITY = 0.1
"""Reward of an empty answer, falling to 0 for one of full length: answers to one prompt differ even if all are wrong."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_PADDING = 0


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One answer of the policy to a prompt."""

    prompt: str
    """Its name, which siblings share."""
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """What was generated, an end token included."""
    reward: float

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt_ids) + len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Documents of one microbatch, padded behind to one length."""

    token_ids: torch.Tensor
    """``[documents, length]`` int64."""
    generated: torch.Tensor
    """``[documents, length]`` bool: tokens of answers."""
    weights: torch.Tensor
    """``[documents, length]``: of the NEXT token's negative log-likelihood in the loss; 0 where that token is no answer's."""

    @property
    def labels(self) -> torch.Tensor:
        """``[documents, length]``: the next token; what comes behind the last one has weight 0."""
        return self.token_ids.roll(-1, 1)

    @property
    def microbatch(self) -> Microbatch:
        """The same for the draft."""
        return Microbatch.of_rows(self.token_ids, self.generated)


Step: TypeAlias = list[Rows]
"""Microbatches of one step of the optimizer, all of one shape."""


def reward_of(text: str, right: str, *, tokens: int, max_tokens: int) -> float:
    """1 where the last number of an answer is the right one, and a little for a short answer.

    >>> reward_of("So she has 1,200 of them.", "1200", tokens=50, max_tokens=100)
    1.05
    """
    numbers = [number.replace(",", "") for number in _NUMBER.findall(text)]
    hit = bool(numbers) and float(numbers[-1]) == float(right.replace(",", ""))
    return float(hit) + BREVITY * (1.0 - tokens / max_tokens)


def advantages(rollouts: Sequence[Rollout]) -> list[float]:
    """By how much each reward is above the mean of those to the same prompt."""
    found: dict[str, list[float]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.prompt, []).append(rollout.reward)
    means = {prompt: sum(rewards) / len(rewards) for prompt, rewards in found.items()}
    return [rollout.reward - means[rollout.prompt] for rollout in rollouts]


def rows_of(rollouts: Sequence[Rollout], weights: Sequence[float], *, length: int) -> Rows:
    """Pad documents behind to `length`; causal attention never looks there.

    Args:
        weights: of each document's answer tokens in the loss.

    >>> one = Rollout(prompt="p", prompt_ids=(5, 6), token_ids=(7, 8), reward=1.0)
    >>> rows = rows_of([one], [0.5], length=6)
    >>> rows.token_ids.tolist(), rows.generated.int().tolist(), rows.weights.tolist()
    ([[5, 6, 7, 8, 0, 0]], [[0, 0, 1, 1, 0, 0]], [[0.0, 0.5, 0.5, 0.0, 0.0, 0.0]])
    """
    shape = (len(rollouts), length)
    ids, generated = torch.full(shape, _PADDING, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    of_next = torch.zeros(shape)
    for row, (rollout, weight) in enumerate(zip(rollouts, weights, strict=True)):
        begin, end = len(rollout.prompt_ids), rollout.length
        ids[row, :end] = torch.tensor([*rollout.prompt_ids, *rollout.token_ids])
        generated[row, begin:end] = True
        of_next[row, begin - 1 : end - 1] = weight
    return Rows(token_ids=ids, generated=generated, weights=of_next)


def steps_of(rollouts: Sequence[Rollout], *, documents: int, microbatches: int, epochs: int, seed: int = 0) -> list[Step]:
    """Every rollout once per epoch, those of like length in one step, the steps in an order drawn anew for each epoch.

    Weights in a step are advantages over its number of answer tokens: the loss is the policy gradient's, a mean over tokens.

    Raises `ValueError` when rollouts do not divide into steps.
    """
    size = documents * microbatches
    if not rollouts or len(rollouts) % size:
        raise ValueError(f"{len(rollouts)} rollouts do not make steps of {microbatches} microbatches of {documents} documents")
    weighted = sorted(zip(rollouts, advantages(rollouts), strict=True), key=lambda item: (item[0].length, item[0].prompt))
    steps = []
    for begin in range(0, len(weighted), size):
        chosen = weighted[begin : begin + size]
        length, tokens = max(item.length for item, _ in chosen), sum(len(item.token_ids) for item, _ in chosen)
        parts = [chosen[index : index + documents] for index in range(0, size, documents)]
        steps.append([rows_of([i for i, _ in part], [w / tokens for _, w in part], length=length) for part in parts])
    order = random.Random(seed)
    return [step for _ in range(epochs) for step in order.sample(steps, len(steps))]
