"""Catches: a swap that fails halfway and leaves a draft of two versions, a written target, or an engine that cannot swap again;
a draft that lost a tensor on the way and serves all the same; KV of the old draft behind a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.in_vllm import tiny, tiny_engine
from tests.in_vllm.run_faults import FAULTS
from vllm_specdraft import drafts


@pytest.fixture(scope="module", params=["eagle3", "dflash"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `run_faults` left."""
    out = tmp_path_factory.mktemp("faults")
    target = tiny.save_target(out / "target", "llama", tied=True, seed=11)
    draft = drafts.init(target, out / "draft", draft_vocab_size=100, kind=request.param)
    arguments = {"kind": request.param, "targets": {"faults": str(target)}, "drafts": {"faults": str(draft)}, "out": str(out)}
    tiny_engine.run_script("tests.in_vllm.run_faults", arguments, timeout_s=300)
    return out


@pytest.fixture(scope="module")
def seen(ran: Path) -> dict[str, Any]:
    return torch.load(ran / "seen.pt", weights_only=False)


@pytest.mark.parametrize("index", range(len(FAULTS)), ids=[f"{fault} {argument or ''}".strip() for fault, argument in FAULTS])
def test_a_failed_swap_leaves_the_old_draft_serving_and_the_target_untouched(seen: dict[str, Any], index: int) -> None:
    """Same answers, same numbers of drafted and accepted tokens, same digests and version; and the caller was told."""
    start, after = seen["start"], seen["faults"][index]
    assert after["error"] is not None, "the fault was not met"
    assert "still serving draft 1" in after["last_error"]
    assert start["accepted_tokens"] > 20
    for key in ("answers", "drafted_tokens", "accepted_tokens", "draft_version", "draft_digest", "target_digest"):
        assert after[key] == start[key], key


@pytest.mark.parametrize("index", [i for i, (fault, _) in enumerate(FAULTS) if fault.startswith("a tensor")])
def test_a_parameter_that_got_nothing_or_something_else_is_named(seen: dict[str, Any], index: int) -> None:
    """Case A9."""
    served = {
        "LAYER.mlp.up_proj.weight": "gate_up_proj",
        "LAYER.self_attn.o_proj.weight": "o_proj",
        "HIDDEN_NORM": "hidden_norm",
        "lm_head.weight": "lm_head",
        "d2t": "draft_id_to_target_id",
        "LAYER.self_attn.k_proj.weight": "qkv_proj",
        "norm.weight": "norm",
    }
    fault = seen["faults"][index]
    assert served[fault["argument"]] in fault["error"]


def test_a_rollback_serves_the_draft_before_and_there_is_only_one(seen: dict[str, Any]) -> None:
    """Sixteen failed swaps changed nothing about which draft was before."""
    first, second = seen["nothing to roll back to"]
    assert first is None
    assert second is not None and "no draft to go back to" in second
    back, start = seen["rolled back"], seen["start"]
    assert back["answers"] == start["answers"]
    assert back["draft_version"] == start["draft_version"] + 1
    assert back["draft_digest"] != start["draft_digest"]
    assert back["accepted_tokens"] < start["accepted_tokens"], "the first draft had learned nothing"


def test_a_draft_that_accepts_less_than_promised_is_taken_back(seen: dict[str, Any]) -> None:
    """The engine's own acceptance decides, request by request, on both drafts."""
    served, judged, record = (seen["probation"][key] for key in ("served", "judged", "record"))
    assert served["rollback_wanted"] is None
    before, after = judged["measured"]["before"], judged["measured"]["served"]
    assert before["length"] > after["length"] + 0.02
    assert judged["rollback_wanted"] == served["draft_version"]
    assert record["digest"] == seen["end"]["draft_digest"]
    assert record["origin"].startswith(f"rollback of draft {served['draft_version']} ")


@pytest.mark.parametrize("guest", ["the checkpoint", "the taps"])
def test_what_fails_inside_a_step_ends_no_step(seen: dict[str, Any], guest: str) -> None:
    """Taps, status and checkpoints are guests in the engine: it answers on, and says what failed."""
    assert seen[guest]["answers"] == seen["end"]["answers"]
    assert "tapping stopped: InjectedError" in seen["guests"]["last_error"]


def test_after_all_a_swap_serves_what_a_fresh_engine_serves(seen: dict[str, Any], ran: Path) -> None:
    """Case B11: the same weights again, the same answers; same counts on repeated prompts, so neither weights nor KV of any draft
    in between are left."""
    end, start = seen["end"], seen["start"]
    fresh = torch.load(ran / "fresh.pt", weights_only=False)
    assert end["draft_digest"] == start["draft_digest"]
    for key in ("answers", "drafted_tokens", "accepted_tokens"):
        assert end[key] == fresh[key] == start[key], key
