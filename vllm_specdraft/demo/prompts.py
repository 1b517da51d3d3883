"""Word problems of one verifiable domain: an endless stream to learn from, and a fixed set that is never learned from.

The problems come from reasoning-gym's ``gsm_symbolic``, which fills templates with numbers and names drawn from a seed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass

DATASET = "gsm_symbolic"
# The generator makes each item when it is asked for: the size only has to be larger than any run needs.
_ENDLESS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One problem, sent as the only user message of a chat."""

    name: str
    """Which set and which place in it: ``evaluation-3``."""
    question: str
    """The text of the user message."""
    answer: str
    """The right answer, as the data set gives it."""


def normalised(question: str) -> str:
    """The text by which two questions count as the same: case and white space do not matter."""
    return " ".join(question.split()).casefold()


class PromptSource:
    """Two disjoint sets of problems, both decided by the seed alone.

    The evaluation set depends only on `seed` and its size; training prompts are drawn afterwards and skip every question
    that is in the evaluation set or was already drawn.
    """

    def __init__(self, *, evaluation: int, seed: int = 0) -> None:
        """`evaluation`: number of held-out prompts. Raises `ValueError` when it is negative."""
        if evaluation < 0:
            raise ValueError(f"evaluation={evaluation}: the number of held-out prompts cannot be negative")
        self._seen: set[str] = set()
        # Distant seeds: the generator derives an item's own seed from seed + index.
        self.evaluation = tuple(self._draw("evaluation", evaluation, _stream(10 * _ENDLESS * (2 * seed + 1))))
        self._seed = seed
        self.rewind()

    def rewind(self) -> None:
        """Begin the training prompts anew: the same ones come again."""
        self._seen = {normalised(prompt.question) for prompt in self.evaluation}
        self._training = _stream(10 * _ENDLESS * (2 * self._seed + 2))
        self._drawn = 0

    def take(self, count: int) -> list[Prompt]:
        """The next `count` training prompts; no question comes twice."""
        prompts = list(self._draw("training", count, self._training, first=self._drawn))
        self._drawn += count
        return prompts

    def _draw(self, name: str, count: int, items: Iterator[dict], *, first: int = 0) -> Iterator[Prompt]:
        drawn = 0
        while drawn < count:
            item = next(items)
            key = normalised(item["question"])
            if key in self._seen:
                continue
            self._seen.add(key)
            yield Prompt(name=f"{name}-{first + drawn}", question=item["question"], answer=str(item["answer"]))
            drawn += 1


def _stream(seed: int) -> Iterator[dict]:
    """Items of the data set in order."""
    return iter(reasoning_gym().create_dataset(DATASET, size=_ENDLESS, seed=seed))


def reasoning_gym() -> types.ModuleType:
    """The module of that name. Raises `ImportError` with the command to run when it is absent."""
    if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
        # A SAT solver that has to be compiled. reasoning-gym imports it for puzzles that are not used here.
        sys.modules["pycosat"] = types.ModuleType("pycosat")
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError:
        raise ImportError(
            "the demo's prompts come from reasoning-gym, which is not installed: run `pip install 'vllm-specdraft[demo]'`"
        ) from None
