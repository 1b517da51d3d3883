"""Catches a recipe that trains but serves the old policy, rolls out from weights that are not the trainer's, forgets the draft,
lets it learn beside the training step, or begins anew when it is called again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.in_vllm import engines
from vllm_specdraft.launch import Server

DRAFT_KINDS = ("eagle3",)
MOST_KL = 1e-5
"""Between the engine and the trainer, both fp32: a policy one step old is further away."""


def run(server: Server, out: Path, draft: Path, *, steps: int) -> list[dict[str, Any]]:
    command = [
        sys.executable, "-m", "recipes.grpo", "--url", server.url, "--out", out, "--cotrain", draft, "--steps", steps,
        "--groups", 3, "--samples", 4, "--max-tokens", 32, "--concurrency", 6, "--temperature", 0.6,
        "--learn-s", 2, "--learning-rate", 1e-4,
    ]  # fmt: skip
    subprocess.run([str(part) for part in command], check=True, timeout=400)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def ran(target: Path, first_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Metrics and the server's status after two calls: one step, and one more."""
    out = tmp_path_factory.mktemp("grpo")
    options = ["--kv-gib", "1", "--logprobs-mode", "processed_logprobs"]
    with Server(target, draft=first_draft, log_path=out / "server.log", governor=True, extra=options) as server:
        once = run(server, out, first_draft, steps=1)
        first = engines.status(server.url)
        twice = run(server, out, first_draft, steps=2)
        return {"once": once, "twice": twice, "first": first, "second": engines.status(server.url)}


def test_each_step_brings_policy_and_draft_to_the_server(ran: dict[str, Any]) -> None:
    """The second call brings what was resumed, too: the server may be a new one."""
    assert (ran["first"]["policy_version"], ran["second"]["policy_version"]) == (1, 3)
    assert not ran["second"]["draft_is_behind"]
    assert ran["second"]["draft_digest"] != ran["first"]["draft_digest"]


def test_rollouts_come_from_the_trainers_weights(ran: dict[str, Any]) -> None:
    assert ran["twice"][0]["gradient_norm"] > 0, "the policy did not move"
    assert [row["kl"] for row in ran["twice"]] == pytest.approx([0, 0], abs=MOST_KL)
    assert all(row["tokens"] > 0 and 0 <= row["reward"] <= 1 for row in ran["twice"])


def test_a_second_call_goes_on(ran: dict[str, Any]) -> None:
    assert [row["step"] for row in ran["twice"]] == [0, 1]
    assert ran["twice"][0] == ran["once"][0]


def test_the_draft_learns_in_the_trainer_and_between_answers_and_training_only(ran: dict[str, Any]) -> None:
    assert all(row["draft_loss"] > 0 and row["learn_s"] >= 2 for row in ran["twice"])
    assert ran["second"]["learning"]["paused"]
    assert ran["second"]["learning"]["seconds"] < 8
