"""Catches what a person would misread: a loss not called one, columns that do not line up, a chart that is not there."""

from __future__ import annotations

import io
import json
from pathlib import Path

from vllm_specdraft.console import Console
from vllm_specdraft.demo import chart, table
from vllm_specdraft.demo.compare import FIRST, LIVE, NONE, ArmSummary
from vllm_specdraft.demo.record import RunRecord
from vllm_specdraft.demo.rhythm import Burst

STATUS = {"draft_version": 3, "learning": {"seconds": 61.4, "held_out_served": None}}
ARMS = [
    ArmSummary(arm=NONE, tokens_per_s=20.0, ratio=1.0, accepted_length=1.0, step_ms=50.0),
    ArmSummary(arm=FIRST, tokens_per_s=18.0, ratio=0.9, accepted_length=1.1, step_ms=61.0),
    ArmSummary(arm=LIVE, tokens_per_s=30.0, ratio=1.5, accepted_length=2.0, step_ms=None),
]


def events() -> list[dict]:
    """A short run with everything a chart shows."""
    fields = {"wall_s": 30.0, "tokens_per_s": 50.0, "single_tokens_per_s": 25.0, "accepted_length": 1.2}
    arms = [vars(arm) for arm in ARMS]
    return [
        {"kind": "burst", "t_s": 60.0, **fields},
        {"kind": "poll", "t_s": 90.0, "held_out_candidate": 1.4},
        {"kind": "publish", "t_s": 92.0, "at_s": 91.0, "draft_version": 1},
        {"kind": "pause", "t_s": 120.0, "wall_s": 60.0},
        {"kind": "burst", "t_s": 150.0, **fields},
        {"kind": "comparison", "t_s": 300.0, "phase": "b1", "arms": arms},
        {"kind": "none_burst", "t_s": 330.0, "tokens_per_s": 55.0, "single_tokens_per_s": 21.0},
    ]


def is_png(path: Path) -> bool:
    """Whether a file holds a PNG image of some size."""
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_rows_line_up_with_the_header() -> None:
    burst = Burst(rollouts=48, tokens=6126, wall_s=100.0, single_tokens_per_s=31.42, accepted_length=1.234, draft_version=3)
    row = table.round_line(index=12, burst=burst, status=STATUS)
    assert len(row) == len(table.round_header())
    assert row.split() == ["12", "61.3", "31.4", "1.23", "3", "61", "-"]


def test_a_loss_is_called_slower_than_none() -> None:
    lines = table.comparison_lines(ARMS, {FIRST: "identical (8)", LIVE: "1 of 8 DIFFER"})
    assert "slower than none" in lines[2] and "0.90x" in lines[2]
    assert "faster than none" in lines[3] and "1 of 8 DIFFER" in lines[3]
    assert "than none" not in lines[1]


def test_identity_tells_ties_from_differences() -> None:
    assert table.identity_of(LIVE, answers=8, differing=0, ties=0) == "identical (8)"
    assert table.identity_of(LIVE, answers=8, differing=2, ties=2) == "identical but 2 ties"
    assert table.identity_of(LIVE, answers=8, differing=2, ties=1) == "1 of 8 DIFFER"


def test_a_chart_is_made_of_a_whole_run_and_of_an_interrupted_one(tmp_path: Path) -> None:
    assert chart.draw(events(), tmp_path / "whole.png", title="whole")
    assert chart.draw(events()[:1], tmp_path / "part.png", title="part")
    assert is_png(tmp_path / "whole.png") and is_png(tmp_path / "part.png")


def test_no_chart_is_made_before_the_first_burst(tmp_path: Path) -> None:
    assert not chart.draw([], tmp_path / "none.png", title="nothing")
    assert not (tmp_path / "none.png").exists()


def test_a_run_leaves_its_config_versions_and_events_even_when_it_ends_early(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, command=["specdraft", "demo"], config={"rounds": 3})
    record.event("burst", tokens=5)
    content = json.loads((record.directory / "run.json").read_text())
    assert content["state"] == "running" and content["config"] == {"rounds": 3} and "python" in content["versions"]
    record.finish("interrupted")
    assert json.loads((record.directory / "run.json").read_text())["state"] == "interrupted"
    (line,) = (record.directory / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["kind"] == "burst" and json.loads(line)["tokens"] == 5


def test_two_runs_of_the_same_second_have_directories_of_their_own(tmp_path: Path) -> None:
    records = [RunRecord(tmp_path, command=[], config={}) for _ in range(3)]
    assert len({record.directory for record in records}) == 3


def test_progress_is_silent_on_a_pipe_and_overwritten_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, expected in ((io.StringIO(), "done\n"), (Terminal(), "half\r    \rdone\n")):
        console = Console(stream)
        console.progress("half")
        console.line("done")
        assert stream.getvalue() == expected
