"""Catches: a server that does not learn while idle, or not stop when told; status, metrics or errors that do not reach the
user; a refused draft that leaves the engine in pieces."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import requests
from safetensors.torch import load_file, save_file

from tests.in_vllm import engines
from vllm_specdraft import drafts
from vllm_specdraft.launch import Server


def test_the_draft_learned_in_idle_windows(live: Server, learned: Path) -> None:
    found = engines.status(live.url)
    assert found["last_error"] is None
    assert found["learning"]["tokens"] > 0 and found["learning"]["steps"] > 0
    assert found["replay"]["samples"] + found["replay"]["held_out_samples"] >= 48
    assert found["replay"]["bytes"] <= found["replay"]["limit_bytes"]
    assert found["publishes"][0]["origin"].startswith("learner")
    assert found["publishes"][0]["target_untouched"] is True


def test_slices_keep_to_their_budget(live: Server, learned: Path) -> None:
    assert engines.status(live.url)["learning"]["slice_ms_p95"] <= 150


def test_a_paused_learner_rests_and_a_resumed_one_learns(live: Server, learned: Path) -> None:
    before = engines.status(live.url)["learning"]
    time.sleep(1.5)
    assert engines.status(live.url)["learning"]["steps"] == before["steps"]
    engines.post(live.url, "train", {"action": "resume"}).raise_for_status()
    deadline = time.monotonic() + 30
    while engines.status(live.url)["learning"]["steps"] <= before["steps"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    paused = engines.post(live.url, "train", {"action": "pause"}).json()
    assert paused["learning"]["paused"] is True


def test_metrics_are_exported(live: Server, learned: Path) -> None:
    # The accepted length is that of the served draft: it needs an answer of its own.
    engines.chat(live.url, engines.QUESTIONS[0])
    engines.status(live.url)
    text = requests.get(f"{live.url}/metrics", timeout=10).text
    for name in (
        "specdraft_draft_version",
        "specdraft_accepted_length",
        "specdraft_learning_seconds_total",
        "specdraft_slice_p95_milliseconds",
        "specdraft_replay_bytes",
        "specdraft_accepted_tokens_total",
    ):
        assert f"# HELP {name}" in text or f"# HELP {name.removesuffix('_total')}" in text, name


def test_a_bad_draft_is_refused_by_name_and_the_old_one_serves_on(
    live: Server, learned: Path, target: Path, tmp_path: Path
) -> None:
    before = engines.status(live.url)
    wanted = engines.chat(live.url, engines.QUESTIONS[0])
    truncated = tmp_path / "truncated"
    shutil.copytree(learned, truncated)
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    other = drafts.init(target, tmp_path / "other", draft_vocab_size=512)
    contradiction = tmp_path / "contradiction"
    shutil.copytree(learned, contradiction)
    state = load_file(contradiction / "model.safetensors")
    state["d2t"][7] = 10**6
    save_file(state, contradiction / "model.safetensors")
    slower = tmp_path / "slower"
    shutil.copytree(learned, slower)
    config = json.loads((slower / "config.json").read_text())
    (slower / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    for draft, word in (
        (tmp_path / "nowhere", "config.json"),
        (truncated, "model.safetensors"),
        (other, "draft_vocab_size"),
        # Served, this one would end the engine, the next compute another function of the same weights.
        (contradiction, "d2t and t2d contradict"),
        (slower, "rope_theta"),
    ):
        refused = engines.post(live.url, "publish", {"draft": str(draft)})
        assert refused.status_code == 409
        assert word in refused.json()["error"]
    after = engines.status(live.url)
    assert (after["draft_version"], after["draft_digest"]) == (before["draft_version"], before["draft_digest"])
    assert "still serving" in after["last_error"]
    assert engines.chat(live.url, engines.QUESTIONS[0]) == wanted


def test_malformed_control_requests_are_refused(live: Server) -> None:
    assert engines.post(live.url, "train", {"action": "sleep"}).status_code == 400
    assert engines.post(live.url, "publish", {"draft_dir": "/x"}).status_code == 400
    for nothing in ("", None, 5):
        assert engines.post(live.url, "publish", {"draft": nothing}).status_code == 400
    assert engines.post(live.url, "rollback", {"version": 1}).status_code == 400
    assert engines.post(live.url, "taps", {"enabled": "no"}).status_code == 400
    refused = engines.post(live.url, "checkpoint", {})
    assert refused.status_code == 409 and "--checkpoint-dir" in refused.json()["error"]
    assert engines.post(live.url, "save", {}).status_code == 400
    route = f"{live.url}/specdraft/train"
    assert requests.post(route, data="{", headers={"Content-Type": "application/json"}, timeout=10).status_code == 400
    assert requests.post(route, data='{"action": "pause"}', headers={"Content-Type": "text/plain"}, timeout=10).status_code == 415


def test_saving_never_overwrites_what_is_no_checkpoint(live: Server, learned: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    refused = engines.post(live.url, "save", {"directory": str(tmp_path)})
    assert refused.status_code == 409 and "thesis.txt" in refused.json()["error"]
    assert (tmp_path / "thesis.txt").exists()


def test_a_seeded_request_with_a_chunked_prefill_is_answered_the_same_twice(live: Server) -> None:
    """A stock vLLM 0.32 on a CPU ends at such a request."""
    question = "Consider this. " * 900
    first, second = (engines.chat(live.url, question, temperature=1.0, seed=5, max_tokens=8) for _ in range(2))
    assert first == second
    assert live.alive
