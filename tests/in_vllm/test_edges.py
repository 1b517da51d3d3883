"""Catches: a request whose rows are shifted, missing, borrowed from the wrong prompt or of a rejected draft because of the way
it started (prefix hit, chunks, preemption), ran (batch size, logprobs, penalties) or ended (limits, stops, abort)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.in_vllm import tiny, tiny_engine
from tests.in_vllm.run_edges import MAX_MODEL_LEN
from tests.tolerances import TAPS_VS_HUGGING_FACE
from trainer_bridge.taps import TapSample
from vllm_specdraft import drafts


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_target(tmp_path_factory.mktemp("edges") / "target", "llama", tied=True, seed=9)


@pytest.fixture(scope="module")
def ran(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `run_edges` left."""
    out = tmp_path_factory.mktemp("ran")
    draft = drafts.init(target, out / "draft", draft_vocab_size=100)
    arguments = {"targets": {"edges": str(target)}, "drafts": {"edges": str(draft)}, "out": str(out)}
    tiny_engine.run_script("tests.in_vllm.run_edges", arguments, timeout_s=300)
    return out


@pytest.fixture(scope="module")
def seen(ran: Path) -> dict[str, Any]:
    return torch.load(ran / "seen.pt", weights_only=False)


@pytest.fixture(scope="module")
def samples(ran: Path) -> list[TapSample]:
    return torch.load(ran / "samples.pt", weights_only=False)


def test_the_edges_were_met(seen: dict[str, Any]) -> None:
    """Without these the other tests would prove nothing."""
    counters, replay = seen["status"]["counters"], seen["status"]["replay"]
    assert seen["preemptions"] > 0
    assert replay["filled_rows"] > 0
    assert 0 < counters["accepted_tokens"] < counters["drafted_tokens"]
    reasons = {entry["name"]: entry["reason"] for entry in seen["done"]}
    assert [reason for name, reason in reasons.items() if name.startswith("aborted")] == [None] * 3
    assert {reason for name, reason in reasons.items() if name.startswith("stop")} == {"stop"}
    limit = next(entry for entry in seen["done"] if entry["name"] == "to the length limit")
    assert len(limit["prompt"]) + len(limit["answer"]) == MAX_MODEL_LEN


def test_every_row_is_the_target_s_own(samples: list[TapSample], target: Path) -> None:
    """Cases D1, D2, D3, D6, D7: whatever way a row came, it is that of a Hugging Face forward over the sample's tokens."""
    model = tiny.load(target)
    for sample in samples:
        sample.validate()
        taps, final = tiny.states(model, sample.token_ids[:-1], sample.tap_layers)
        for found, wanted in ((sample.taps, taps), (sample.final, final)):
            error = ((found - wanted).abs().amax(-1) / wanted.abs().amax(-1)).max()
            assert float(error) < TAPS_VS_HUGGING_FACE.relative, sample.token_ids


def test_every_answer_gives_a_sample_of_exactly_what_was_returned(samples: list[TapSample], seen: dict[str, Any]) -> None:
    """Ends inside an accepted run: nothing behind the end is learned, nothing before it is lost."""
    found = {tuple(sample.token_ids.tolist()) for sample in samples}
    for entry in seen["done"]:
        if entry["reason"] is None or "stop word" in entry["name"] or len(entry["answer"]) < 2:
            continue
        assert (*entry["prompt"], *entry["answer"]) in found, entry["name"]


def test_behind_a_stop_word_there_are_at_most_the_tokens_of_one_run(samples: list[TapSample], seen: dict[str, Any]) -> None:
    """The worker knows no text: what it sampled until the word was noticed is the target's too, and stays."""
    found = [tuple(sample.token_ids.tolist()) for sample in samples]
    for entry in seen["done"]:
        if "stop word" not in entry["name"] or len(entry["answer"]) < 2:
            continue
        returned = (*entry["prompt"], *entry["answer"])
        tails = [len(ids) - len(returned) for ids in found if ids[: len(returned)] == returned]
        assert tails and min(tails) <= 2 * tiny_engine.DRAFT_TOKENS + 2, entry["name"]


def test_an_aborted_answer_is_a_sample_of_its_beginning(samples: list[TapSample], seen: dict[str, Any]) -> None:
    prompts = {entry["name"]: entry["prompt"] for entry in seen["done"] if entry["name"].startswith("aborted")}
    assert len(prompts) == 3
    for prompt in prompts.values():
        # Other prompts begin with the same tokens.
        mine = [sample for sample in samples if sample.token_ids[~sample.loss_mask].tolist() == prompt]
        assert any(0 < sample.num_answer_tokens < 60 for sample in mine)


def test_what_gave_no_sample_is_counted(seen: dict[str, Any]) -> None:
    """No hole is left: all siblings of the shared prompt and all second turns were filled."""
    dropped = seen["status"]["replay"]["dropped"]
    assert dropped.keys() <= {"nothing_to_draft", "no_answer", "duplicate_id"}, dropped
