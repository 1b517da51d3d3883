"""Prometheus metrics, read from the status file when they are scraped: the engine is not asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from vllm_specdraft import status

_Read = Callable[[dict[str, Any]], float | None]


def _at(*keys: str) -> _Read:
    """Reads ``status[key][key]...``; None where a part is not there: it is not known yet, or of another version."""

    def read(found: Any) -> float | None:
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return None if found is None else float(found)

    return read


def _last(records: str, *keys: str) -> _Read:
    """Reads a number of the newest record of a kind (``publishes``, ``updates``); None before the first."""

    def read(found: dict[str, Any]) -> float | None:
        return _at(*keys)(found[records][-1]) if found.get(records) else None

    return read


GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("specdraft_draft_version", "Version of the served draft; grows by one with every swap.", _at("draft_version")),
    ("specdraft_policy_version", "Version of the served policy.", _at("policy_version")),
    (
        "specdraft_draft_is_behind",
        "1 while the served draft was made for an older policy than the served one, else 0.",
        _at("draft_is_behind"),
    ),
    (
        "specdraft_last_update_milliseconds",
        "Time that the last update of the policy took to swap, in ms.",
        _last("updates", "report", "swap_ms"),
    ),
    (
        "specdraft_last_update_timestamp_seconds",
        "When the policy was last updated, in Unix time, in seconds.",
        _last("updates", "unix_time_s"),
    ),
    (
        "specdraft_accepted_length",
        "Recent accepted length: tokens per target step that verified drafts, bonus token included.",
        _at("accepted_length"),
    ),
    (
        "specdraft_measured_accepted_length_served",
        "Accepted length of the served draft since it serves, in tokens per target step, on traffic.",
        _at("measured", "served", "length"),
    ),
    (
        "specdraft_measured_accepted_length_before",
        "Accepted length of the draft before the served one, in tokens per target step, on traffic.",
        _at("measured", "before", "length"),
    ),
    (
        "specdraft_acceptance_collapsed",
        "1 while far fewer draft tokens are accepted than usual, else 0.",
        _at("governor", "acceptance_collapsed"),
    ),
    ("specdraft_idle_open", "1 while the draft may learn, else 0.", lambda s: float(s["idle_state"] == "OPEN")),
    ("specdraft_taps_enabled", "1 while requests that start are tapped, else 0.", _at("taps_enabled")),
    ("specdraft_learning_enabled", "1 when this server trains its draft, else 0.", _at("learning", "enabled")),
    ("specdraft_learning_paused", "1 while learning is paused over HTTP.", _at("learning", "paused")),
    (
        "specdraft_held_out_accepted_length_served",
        "Expected accepted length of the served draft on held-out samples.",
        _at("learning", "held_out_served"),
    ),
    (
        "specdraft_held_out_accepted_length_candidate",
        "Expected accepted length of the draft in training on held-out samples.",
        _at("learning", "held_out_candidate"),
    ),
    ("specdraft_learning_loss", "Loss of the last optimizer step, in nats per label, passes summed.", _at("learning", "loss")),
    ("specdraft_gradient_norm", "Norm of the draft's gradient before it was clipped, last step.", _at("learning", "gradient_norm")),
    (
        "specdraft_slice_p95_milliseconds",
        "95th percentile of recent learning slices, in ms: what an arriving request may wait.",
        _at("learning", "slice_ms_p95"),
    ),
    ("specdraft_slice_max_milliseconds", "Longest of the recent learning slices, in ms.", _at("learning", "slice_ms_max")),
    (
        "specdraft_checkpoint_timestamp_seconds",
        "When the learner's state was last written, in Unix time, in seconds.",
        _at("learning", "checkpoint_unix_time_s"),
    ),
    ("specdraft_replay_bytes", "Bytes of samples held.", _at("replay", "bytes")),
    ("specdraft_replay_limit_bytes", "Bound of the samples held, in bytes.", _at("replay", "limit_bytes")),
    ("specdraft_replay_samples", "Training samples held.", _at("replay", "samples")),
    ("specdraft_replay_held_out_samples", "Samples held that are never trained on.", _at("replay", "held_out_samples")),
    ("specdraft_last_swap_milliseconds", "Time that the last swap of drafts took, in ms.", _last("publishes", "swap_ms")),
    (
        "specdraft_last_swap_timestamp_seconds",
        "When drafts were last swapped, in Unix time, in seconds.",
        _last("publishes", "unix_time_s"),
    ),
    (
        "specdraft_error",
        "1 when there is a last error; `specdraft status` shows it.",
        lambda s: float(s["last_error"] is not None) if "last_error" in s else None,
    ),
    (
        "specdraft_status_timestamp_seconds",
        "When the worker last wrote its status, in Unix time, in seconds: an old one means a worker that hangs.",
        _at("unix_time_s"),
    ),
)

COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    ("specdraft_engine_steps", "Steps of the engine.", _at("counters", "engine_steps")),
    ("specdraft_engine_step_seconds", "Time spent in steps of the engine, in seconds.", _at("counters", "engine_step_seconds")),
    ("specdraft_generated_tokens", "Tokens of answers that the taps saw.", _at("counters", "generated_tokens")),
    ("specdraft_draft_steps", "Target steps that verified drafts, per request.", _at("counters", "draft_steps")),
    ("specdraft_drafted_tokens", "Draft tokens verified.", _at("counters", "drafted_tokens")),
    ("specdraft_accepted_tokens", "Draft tokens accepted.", _at("counters", "accepted_tokens")),
    ("specdraft_learning_seconds", "Time spent learning, in seconds.", _at("learning", "seconds")),
    ("specdraft_learning_tokens", "Anchors trained.", _at("learning", "tokens")),
    ("specdraft_learning_steps", "Optimizer steps.", _at("learning", "steps")),
    ("specdraft_learning_slices", "Pieces of training between two looks at the request queue.", _at("learning", "slices")),
    (
        "specdraft_learning_skipped_steps",
        "Optimizer steps left out for a gradient that was not finite.",
        _at("learning", "skipped_steps"),
    ),
    ("specdraft_evaluations", "Measurements on held-out samples.", _at("learning", "evaluations")),
    ("specdraft_vocabulary_changes", "Draft tokens given to other target tokens.", _at("learning", "vocabulary_changes")),
    ("specdraft_samples_added", "Samples that the replay took.", _at("replay", "added")),
    ("specdraft_filled_rows", "Prompt rows filled from an earlier request with the same prefix.", _at("replay", "filled_rows")),
    ("specdraft_speculation_trials", "Trials of another number of draft tokens.", _at("governor", "trials")),
    ("specdraft_speculation_switches", "Changes of the number of draft tokens.", _at("governor", "switches")),
    (
        "specdraft_steps_without_draft",
        "Engine steps that the draft was left out of.",
        _at("governor", "gaps", "steps_without_draft"),
    ),
    (
        "specdraft_draft_gap_rows_filled",
        "Rows of the draft's KV cache made up for after steps without it.",
        _at("governor", "gaps", "filled_rows"),
    ),
    ("specdraft_draft_gap_seconds", "Time that took, in seconds.", _at("governor", "gaps", "fill_s")),
    ("specdraft_rollbacks", "Published drafts that were taken back.", _at("rollbacks")),
)


class StatusCollector(Collector):
    """Turns the last status into metrics."""

    def __init__(self, state_dir: Path, sync: Callable[[], Mapping[str, int]] | None = None) -> None:
        """`sync`: what the receiver of weights counted, by event; None where no weights are taken."""
        self._state_dir, self._sync = state_dir, sync

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
                yield GaugeMetricFamily(name, text, value=value)
        for name, text, read in COUNTERS:
            if (value := read(found)) is not None:
                yield CounterMetricFamily(name, text, value=value)
        yield from _labelled(found)
        if self._sync is not None:
            events = CounterMetricFamily(
                "specdraft_sync_events",
                "Updates and frames that the receiver of weights saw, by what became of them.",
                labels=["event"],
            )
            for event, count in self._sync().items():
                events.add_metric([event], count)
            yield events


def _labelled(found: dict[str, Any]) -> Iterator[Metric]:
    """The metrics with one value for each of several things."""
    dropped = CounterMetricFamily("specdraft_samples_dropped", "Samples not learned from, by reason.", labels=["reason"])
    for reason, count in found["replay"]["dropped"].items():
        dropped.add_metric([reason], count)
    yield dropped
    if positions := found.get("accepted_per_position"):
        accepted = CounterMetricFamily(
            "specdraft_accepted_tokens_by_position",
            "Draft tokens accepted, by their place in the draft, from 0.",
            labels=["position"],
        )
        for position, count in enumerate(positions):
            accepted.add_metric([str(position)], count)
        yield accepted
    yield from _governed((found.get("governor") or {}).get("batches", {}))
    digests: dict[str, str] = {key: str(found[key]) for key in ("draft_type", "draft_digest", "target_digest") if key in found}
    if digests:
        yield InfoMetricFamily("specdraft_served", "Type and digests of what is served.", value=digests)


def _governed(batches: dict[str, Any]) -> Iterator[Metric]:
    """What was decided per batch size, and the numbers that were compared."""
    if not batches:
        return
    chosen = GaugeMetricFamily(
        "specdraft_speculation_chosen",
        "1 for what was chosen for a batch size: a number of draft tokens per step, or drafts from the text (ngram).",
        labels=["batch", "tokens"],
    )
    cost = GaugeMetricFamily(
        "specdraft_relative_time_per_token",
        "Time per token with so many draft tokens over that without, as measured.",
        labels=["batch", "tokens"],
    )
    for batch, found in batches.items():
        chosen.add_metric([batch, found["chosen"]], 1)
        for tokens, one in found["compared"].items():
            if one["known"]:
                cost.add_metric([batch, tokens], one["time_per_token"])
    yield chosen
    yield cost


def register(state_dir: Path, sync: Callable[[], Mapping[str, int]] | None = None) -> None:
    """Add the collector to the process's registry, once."""
    if not any(isinstance(c, StatusCollector) for c in list(REGISTRY._collector_to_names)):
        REGISTRY.register(StatusCollector(state_dir, sync))
