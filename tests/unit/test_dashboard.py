"""Catches a dashboard that shows nothing: a panel that asks for a metric which neither this server nor vLLM has."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_metrics import STATUS, scrape

DASHBOARD = Path(__file__).resolve().parents[2] / "dashboards" / "specdraft.json"
FUNCTIONS = {
    "sum", "rate", "by", "le", "instance", "position", "reason", "histogram_quantile", "increase", "delta", "clamp_min",
    "avg_over_time", "time", "on", "group_left", "changes",
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def expressions(node: Any) -> Iterator[str]:
    """All queries, wherever they are: panels, annotations, variables."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "definition") and isinstance(value, str):
                yield value
            else:
                yield from expressions(value)
    elif isinstance(node, list):
        for item in node:
            yield from expressions(item)


def metrics_in(expression: str) -> set[str]:
    """Names of the metrics that a query asks for."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|label_values\(|, *instance\)", " ", expression)
    return {word for word in re.findall(r"[a-zA-Z_][\w:]*", bare) if word not in FUNCTIONS}


QUERIES = sorted(set(expressions(dashboard())))
ASKED = sorted(set().union(*(metrics_in(query) for query in QUERIES)))


def test_the_dashboard_asks_for_something() -> None:
    """The checks below would pass on nothing."""
    assert len(QUERIES) > 20
    assert any(name.startswith("specdraft_") for name in ASKED) and any(name.startswith("vllm:") for name in ASKED)
    assert all(name.startswith(("specdraft_", "vllm:")) for name in ASKED), ASKED


@pytest.mark.parametrize("name", [name for name in ASKED if name.startswith("specdraft_")])
def test_our_metric_is_exported(name: str, tmp_path: Path) -> None:
    found = {sample.partition("{")[0] for sample in scrape(tmp_path, STATUS)}
    assert name in found


@pytest.mark.parametrize("name", [name for name in ASKED if name.startswith("vllm:")])
def test_vllm_s_metric_is_one_it_has(name: str) -> None:
    """By name, in its source; Prometheus adds the endings of counters and histograms."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent / "v1"
    named = {
        metric
        for file in (*(root / "metrics").glob("*.py"), *(root / "spec_decode").glob("*.py"))
        for metric in re.findall(r"""["'](vllm:\w+)["']""", file.read_text())
    }
    assert re.sub(r"_(total|bucket|sum|count)$", "", name) in named


def test_what_an_operator_looks_for_is_on_it() -> None:
    for name in (
        "specdraft_accepted_length", "vllm:generation_tokens_total", "specdraft_draft_version", "specdraft_policy_version",
        "specdraft_learning_tokens_total", "specdraft_held_out_accepted_length_candidate", "specdraft_slice_p95_milliseconds",
        "specdraft_replay_samples", "specdraft_replay_bytes", "specdraft_samples_dropped_total", "specdraft_rollbacks_total",
        "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
    ):  # fmt: skip
        assert name in ASKED


def test_panels_have_a_title_and_a_text_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        assert panel["type"] == "row" or panel["description"].endswith("."), panel["title"]
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_every_query_goes_to_the_data_source_that_is_chosen() -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert target["expr"].count("(") == target["expr"].count(")")
