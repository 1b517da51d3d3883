"""Catches a metric that is named, typed or read wrongly, a scrape that fails before the first status, and a status that is
read half-written.
"""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm_specdraft import metrics, status
from vllm_specdraft.metrics import StatusCollector

STATUS: dict[str, Any] = {
    "unix_time_s": 1_800_000_001.5,
    "policy_version": 4,
    "draft_version": 7,
    "draft_type": "eagle3",
    "draft_digest": "d1",
    "target_digest": "t2",
    "accepted_length": 2.25,
    "accepted_per_position": [80, 33, 12],
    "measured": {"served": {"length": 2.375, "standard_error": 0.1}, "before": {"length": 1.75, "standard_error": None}},
    "idle_state": "OPEN",
    "taps_enabled": True,
    "counters": {
        "draft_steps": 100, "drafted_tokens": 300, "accepted_tokens": 125, "generated_tokens": 229, "engine_steps": 91,
        "engine_step_seconds": 3.125,
    },
    "governor": {
        "batches": {
            "2": {
                "chosen": "3",
                "compared": {"0": {"time_per_token": 1.0, "known": True}, "3": {"time_per_token": 0.875, "known": True}},
            },
            "16": {"chosen": "0", "compared": {"3": {"time_per_token": 1.5, "known": False}}},
        },
        "acceptance_collapsed": False,
        "trials": 17,
        "switches": 18,
        "gaps": {"steps_without_draft": 19, "filled_rows": 20, "fill_s": 0.375},
    },
    "learning": {
        "enabled": True,
        "paused": False,
        "seconds": 61.5,
        "tokens": 9000,
        "steps": 250,
        "slices": 2400,
        "skipped_steps": 2,
        "evaluations": 14,
        "vocabulary_changes": 37,
        "gradient_norm": 0.625,
        "loss": 5.5,
        "slice_ms_p95": 88.5,
        "slice_ms_max": 131.25,
        "held_out_served": 1.9,
        "held_out_candidate": 2.1,
        "checkpoint_unix_time_s": 1_800_000_000.25,
    },
    "replay": {
        "samples": 40, "held_out_samples": 6, "bytes": 123456, "limit_bytes": 999999, "added": 55, "filled_rows": 811,
        "dropped": {"hole": 3, "evicted": 5},
    },
    "publishes": [{"swap_ms": 1.0, "unix_time_s": 2.0}, {"swap_ms": 26.5, "unix_time_s": 1_799_999_999.0}],
    "rollbacks": 8,
    "last_error": "swap refused",
}  # fmt: skip
"""Every value is another one, so that two that are mixed up differ."""
EXPECTED = {
    "specdraft_draft_version": 7,
    "specdraft_policy_version": 4,
    "specdraft_accepted_length": 2.25,
    "specdraft_measured_accepted_length_served": 2.375,
    "specdraft_measured_accepted_length_before": 1.75,
    "specdraft_idle_open": 1,
    "specdraft_taps_enabled": 1,
    "specdraft_learning_enabled": 1,
    "specdraft_learning_paused": 0,
    "specdraft_held_out_accepted_length_served": 1.9,
    "specdraft_held_out_accepted_length_candidate": 2.1,
    "specdraft_learning_loss": 5.5,
    "specdraft_gradient_norm": 0.625,
    "specdraft_slice_p95_milliseconds": 88.5,
    "specdraft_slice_max_milliseconds": 131.25,
    "specdraft_checkpoint_timestamp_seconds": 1_800_000_000.25,
    "specdraft_replay_bytes": 123456,
    "specdraft_replay_limit_bytes": 999999,
    "specdraft_replay_samples": 40,
    "specdraft_replay_held_out_samples": 6,
    "specdraft_last_swap_milliseconds": 26.5,
    "specdraft_last_swap_timestamp_seconds": 1_799_999_999.0,
    "specdraft_error": 1,
    "specdraft_status_timestamp_seconds": 1_800_000_001.5,
    "specdraft_engine_steps_total": 91,
    "specdraft_engine_step_seconds_total": 3.125,
    "specdraft_generated_tokens_total": 229,
    "specdraft_draft_steps_total": 100,
    "specdraft_drafted_tokens_total": 300,
    "specdraft_accepted_tokens_total": 125,
    "specdraft_learning_seconds_total": 61.5,
    "specdraft_learning_tokens_total": 9000,
    "specdraft_learning_steps_total": 250,
    "specdraft_learning_slices_total": 2400,
    "specdraft_learning_skipped_steps_total": 2,
    "specdraft_evaluations_total": 14,
    "specdraft_vocabulary_changes_total": 37,
    "specdraft_samples_added_total": 55,
    "specdraft_filled_rows_total": 811,
    "specdraft_rollbacks_total": 8,
    "specdraft_acceptance_collapsed": 0,
    "specdraft_speculation_trials_total": 17,
    "specdraft_speculation_switches_total": 18,
    "specdraft_steps_without_draft_total": 19,
    "specdraft_draft_gap_rows_filled_total": 20,
    "specdraft_draft_gap_seconds_total": 0.375,
    'specdraft_speculation_chosen{"batch": "2", "tokens": "3"}': 1,
    'specdraft_speculation_chosen{"batch": "16", "tokens": "0"}': 1,
    'specdraft_relative_time_per_token{"batch": "2", "tokens": "0"}': 1.0,
    'specdraft_relative_time_per_token{"batch": "2", "tokens": "3"}': 0.875,
    'specdraft_samples_dropped_total{"reason": "hole"}': 3,
    'specdraft_samples_dropped_total{"reason": "evicted"}': 5,
    'specdraft_accepted_tokens_by_position_total{"position": "0"}': 80,
    'specdraft_accepted_tokens_by_position_total{"position": "1"}': 33,
    'specdraft_accepted_tokens_by_position_total{"position": "2"}': 12,
    'specdraft_served_info{"draft_digest": "d1", "draft_type": "eagle3", "target_digest": "t2"}': 1,
}


def changed(section: str | None = None, **values: Any) -> dict[str, Any]:
    found = copy.deepcopy(STATUS)
    (found[section] if section else found).update(values)
    return found


def scrape(state_dir: Path, found: dict[str, Any] | None = None) -> dict[str, float]:
    """Samples as a Prometheus server reads them."""
    if found is not None:
        status.write(state_dir, found)
    registry = CollectorRegistry()
    registry.register(StatusCollector(state_dir))
    samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            samples[sample.name + (json.dumps(sample.labels, sort_keys=True) if sample.labels else "")] = sample.value
    return samples


def test_every_value_of_the_status_has_its_metric(tmp_path: Path) -> None:
    assert scrape(tmp_path, STATUS) == EXPECTED


def test_names_types_and_help_texts_are_there(tmp_path: Path) -> None:
    status.write(tmp_path, STATUS)
    families = list(StatusCollector(tmp_path).collect())
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    for family in families:
        assert family.name.startswith("specdraft_")
        assert family.documentation.endswith("."), family.name
        assert len(family.documentation) > 12, family.name
        kinds = {"_total": "counter", "_info": "info"}
        found = [kind for ending, kind in kinds.items() if any(name.startswith(f"{family.name}{ending}") for name in EXPECTED)]
        assert family.type == (found or ["gauge"])[0], family.name


def test_units_are_in_the_help_texts(tmp_path: Path) -> None:
    help_texts = {name: text for name, text, _ in (*metrics.GAUGES, *metrics.COUNTERS)}
    assert "in ms" in help_texts["specdraft_slice_p95_milliseconds"]
    assert "in seconds" in help_texts["specdraft_learning_seconds"]
    assert "tokens per target step" in help_texts["specdraft_accepted_length"]


@pytest.mark.parametrize(
    ("section", "key", "name"),
    [
        (None, "accepted_length", "specdraft_accepted_length"),
        ("learning", "held_out_served", "specdraft_held_out_accepted_length_served"),
        ("learning", "held_out_candidate", "specdraft_held_out_accepted_length_candidate"),
        ("learning", "slice_ms_p95", "specdraft_slice_p95_milliseconds"),
        ("learning", "checkpoint_unix_time_s", "specdraft_checkpoint_timestamp_seconds"),
    ],
)
def test_what_is_not_known_yet_is_left_out(tmp_path: Path, section: str | None, key: str, name: str) -> None:
    """A zero would be read as an acceptance of nothing; everything else is there all the same."""
    found = scrape(tmp_path, changed(section, **{key: None}))
    assert found == {key: value for key, value in EXPECTED.items() if key != name}


OLD = ("rollbacks", "taps_enabled", "measured", "slice_ms_max", "checkpoint_unix_time_s", "evaluations", "filled_rows")
"""Parts of the status that another version of the worker may not have."""


def test_a_status_without_the_newer_parts_is_no_failed_scrape(tmp_path: Path) -> None:
    def without(node: Any) -> Any:
        return {key: without(value) for key, value in node.items() if key not in OLD} if isinstance(node, dict) else node

    found = scrape(tmp_path, without(STATUS))
    missing = {name.removeprefix("specdraft_").removesuffix("_total") for name in EXPECTED.keys() - found.keys()}
    assert missing == {
        "rollbacks", "taps_enabled", "measured_accepted_length_served", "measured_accepted_length_before",
        "slice_max_milliseconds", "checkpoint_timestamp_seconds", "evaluations", "filled_rows",
        "draft_gap_rows_filled",
    }  # fmt: skip
    assert found == {name: EXPECTED[name] for name in found}


def test_before_the_first_swap_there_is_no_last_one(tmp_path: Path) -> None:
    found = scrape(tmp_path, changed(publishes=[], last_error=None))
    assert not any(name.startswith("specdraft_last_swap") for name in found)
    assert found["specdraft_error"] == 0


def test_zero_is_a_value(tmp_path: Path) -> None:
    assert scrape(tmp_path, changed(draft_version=0))["specdraft_draft_version"] == 0


@pytest.mark.parametrize(("state", "value"), [("BUSY", 0), ("COOLING", 0), ("OPEN", 1)])
def test_the_window_is_open_in_one_state_only(tmp_path: Path, state: str, value: int) -> None:
    assert scrape(tmp_path, changed(idle_state=state))["specdraft_idle_open"] == value


def test_a_pause_shows(tmp_path: Path) -> None:
    assert scrape(tmp_path, changed("learning", paused=True))["specdraft_learning_paused"] == 1


def test_before_the_first_status_there_are_no_metrics(tmp_path: Path) -> None:
    assert scrape(tmp_path) == {}


def test_each_scrape_reads_the_status_anew(tmp_path: Path) -> None:
    collector = StatusCollector(tmp_path)
    status.write(tmp_path, STATUS)

    def version() -> float:
        return {family.name: family for family in collector.collect()}["specdraft_draft_version"].samples[0].value

    assert version() == 7
    status.write(tmp_path, changed(draft_version=8))
    assert version() == 8


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[CollectorRegistry]:
    registry = CollectorRegistry()
    monkeypatch.setattr(metrics, "REGISTRY", registry)
    yield registry


def test_registering_twice_gives_each_metric_once(tmp_path: Path, own_registry: CollectorRegistry) -> None:
    metrics.register(tmp_path)
    metrics.register(tmp_path)
    status.write(tmp_path, STATUS)
    assert generate_latest(own_registry).decode().count("\nspecdraft_draft_version ") == 1


# The status file.


def test_a_status_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert status.read(tmp_path) is None
    status.write(tmp_path, STATUS)
    assert status.read(tmp_path) == STATUS
    status.write(tmp_path, changed(draft_version=8))
    assert status.read(tmp_path) == changed(draft_version=8)
    assert [path.name for path in tmp_path.iterdir()] == [status.NAME]


def test_a_write_that_fails_leaves_the_old_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a full disk, nor a value that JSON does not know, nor a kill before the last step harms what is there."""
    status.write(tmp_path, STATUS)
    with pytest.raises(TypeError):
        status.write(tmp_path, changed(draft_version=object()))
    assert status.read(tmp_path) == STATUS

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            status.write(tmp_path, changed(draft_version=9))
    assert status.read(tmp_path) == STATUS
    status.write(tmp_path, changed(draft_version=9))
    assert status.read(tmp_path) == changed(draft_version=9)


def test_a_reader_never_sees_half_a_status(tmp_path: Path) -> None:
    """Short and long ones in turn: a reader beside the writer gets one of the two, whole."""
    versions = [changed(text="s"), changed(text="l" * 200_000)]
    status.write(tmp_path, versions[0])
    done = threading.Event()

    def write() -> None:
        for index in range(120):
            status.write(tmp_path, versions[index % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not done.is_set():
        assert status.read(tmp_path) in versions
        reads += 1
    writer.join()
    assert reads > 3
