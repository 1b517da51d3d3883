"""Verifiable problems from reasoning-gym that a small model sometimes solves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm_specdraft.demo.prompts import reasoning_gym

TASKS: dict[str, dict[str, Any]] = {
    "basic_arithmetic": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 1,
        "operators": ["+", "-"],
        "allow_parentheses": False,
    },
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "gsm_symbolic": {},
}
"""Data sets and what they are asked for."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_ENDLESS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One question."""

    question: str
    answer: str
    """The right number."""

    def reward(self, text: str) -> float:
        """1 when the last number of an answer is the right one, else 0."""
        numbers = _NUMBER.findall(text.replace(",", ""))
        return float(bool(numbers) and float(numbers[-1]) == float(self.answer))


def problems(task: str, seed: int) -> Iterator[Problem]:
    """An endless stream, the same for the same seed. Raises `ValueError` for an unknown task."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}, known: {', '.join(TASKS)}")
    for item in reasoning_gym().create_dataset(task, size=_ENDLESS, seed=seed, **TASKS[task]):
        answer = str(item["answer"]).replace(",", "")
        if _NUMBER.fullmatch(answer):
            yield Problem(question=f"{item['question']}\nThink step by step, then end with the number.", answer=answer)
