"""Prometheus metrics, read from the status file when they are scraped: the engine is not asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vllm_specdraft import status

_Read = Callable[[dict[str, Any]], float | None]

GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("specdraft_draft_version", "Version of the served draft; grows by one with every swap.", lambda s: s["draft_version"]),
    ("specdraft_policy_version", "Version of the served policy.", lambda s: s["policy_version"]),
    (
        "specdraft_accepted_length",
        "Recent accepted length: tokens per target step that verified drafts, bonus token included.",
        lambda s: s["accepted_length"],
    ),
    ("specdraft_idle_open", "1 while the draft may learn, else 0.", lambda s: float(s["idle_state"] == "OPEN")),
    ("specdraft_learning_paused", "1 while learning is paused over HTTP.", lambda s: float(s["learning"]["paused"])),
    (
        "specdraft_held_out_accepted_length_served",
        "Expected accepted length of the served draft on held-out samples.",
        lambda s: s["learning"]["held_out_served"],
    ),
    (
        "specdraft_held_out_accepted_length_candidate",
        "Expected accepted length of the draft in training on held-out samples.",
        lambda s: s["learning"]["held_out_candidate"],
    ),
    (
        "specdraft_slice_p95_milliseconds",
        "95th percentile of recent learning slices, in ms: what an arriving request may wait.",
        lambda s: s["learning"]["slice_ms_p95"],
    ),
    ("specdraft_replay_bytes", "Bytes of samples held.", lambda s: s["replay"]["bytes"]),
    ("specdraft_replay_samples", "Training samples held.", lambda s: s["replay"]["samples"]),
)

COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    ("specdraft_draft_steps", "Target steps that verified drafts, per request.", lambda s: s["counters"]["draft_steps"]),
    ("specdraft_drafted_tokens", "Draft tokens verified.", lambda s: s["counters"]["drafted_tokens"]),
    ("specdraft_accepted_tokens", "Draft tokens accepted.", lambda s: s["counters"]["accepted_tokens"]),
    ("specdraft_learning_seconds", "Time spent learning, in seconds.", lambda s: s["learning"]["seconds"]),
    ("specdraft_learning_tokens", "Anchors trained.", lambda s: s["learning"]["tokens"]),
    ("specdraft_learning_steps", "Optimizer steps.", lambda s: s["learning"]["steps"]),
)


class StatusCollector(Collector):
    """Turns the last status into metrics."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir

    def describe(self) -> list[Metric]:
        """Nothing ahead of time: registering must not read the file."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of the last status; none before the first."""
        found = status.read(self._state_dir)
        if found is None:
            return
        for name, text, read in GAUGES:
            if (value := read(found)) is not None:
                yield GaugeMetricFamily(name, text, value=float(value))
        for name, text, read in COUNTERS:
            yield CounterMetricFamily(name, text, value=float(read(found) or 0.0))
        dropped = CounterMetricFamily("specdraft_samples_dropped", "Samples not learned from, by reason.", labels=["reason"])
        for reason, count in found["replay"]["dropped"].items():
            dropped.add_metric([reason], count)
        yield dropped


def register(state_dir: Path) -> None:
    """Add the collector to the process's registry, once."""
    if not any(isinstance(c, StatusCollector) for c in list(REGISTRY._collector_to_names)):
        REGISTRY.register(StatusCollector(state_dir))
