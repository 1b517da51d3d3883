"""Functions that run inside the worker of an offline engine, sent there by name: where the time of each step goes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

PARTS = (
    "target layers",
    "target head",
    "sampling",
    "draft layers",
    "draft head",
    "draft rest",
    "worker rest",
    "outside the worker",
)
"""Of a step, in the order of the table. *rest*: Python, copies and bookkeeping around it."""


class StepClock:
    """Times of the running step, and of those before."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        """Per step seconds by part, ``worker`` and ``draft`` as wholes, ``rows`` verified, and ``began``."""
        self._now: dict[str, float] = {}
        self._drafting = False

    def begin(self, rows: int) -> None:
        """A step begins."""
        self._now = {"began": time.perf_counter(), "rows": rows}
        self.steps.append(self._now)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time booked under `part`."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._now[part] = self._now.get(part, 0.0) + time.perf_counter() - began

        return wrapped


def watch(worker: Any) -> None:
    """In the worker: time the parts of every step from now on."""
    runner, clock = worker.model_runner, StepClock()
    execute, drafter = runner.execute_model, getattr(runner, "drafter", None)

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        clock.begin(scheduler_output.total_num_scheduled_tokens)
        return clock.timed("worker", execute)(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model
    runner.sample_tokens = clock.timed("worker", runner.sample_tokens)
    runner._model_forward = clock.timed("target layers", runner._model_forward)
    runner.model.compute_logits = clock.timed("target head", runner.model.compute_logits)
    runner._sample = clock.timed("sampling", runner._sample)
    if drafter is not None:
        drafter.propose = clock.timed("draft", drafter.propose)
        drafter.model.forward = clock.timed("draft layers", drafter.model.forward)
        drafter.model.compute_logits = clock.timed("draft head", drafter.model.compute_logits)
        if hasattr(drafter.model, "precompute_and_store_context_kv"):
            drafter.model.precompute_and_store_context_kv = clock.timed(
                "draft layers", drafter.model.precompute_and_store_context_kv
            )
    worker.specdraft_step_clock = clock


def take(worker: Any) -> list[dict[str, float]]:
    """In the worker: the steps since the last call."""
    clock = worker.specdraft_step_clock
    steps, clock.steps = clock.steps, []
    return steps
