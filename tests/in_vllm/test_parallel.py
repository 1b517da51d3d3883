"""Catches: a rank without the plugin; ranks that serve different drafts; one rank that fails and another that waits for ever;
answers, taps or acceptance that change with the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.in_vllm import engines, tiny, tiny_engine
from tests.tolerances import GREEDY_TIE, TAPS_VS_HUGGING_FACE
from trainer_bridge import connect
from trainer_bridge.adapters.hf import hf_weights
from trainer_bridge.errors import UpdateError
from vllm_specdraft import drafts
from vllm_specdraft.launch import Server


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, grouped queries, a vocabulary that no two ranks share evenly."""
    return tiny.save_target(tmp_path_factory.mktemp("parallel") / "target", "llama", tied=False, vocab=150, seed=12)


@pytest.fixture(scope="module", params=["eagle3", "dflash"])
def ran(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `run_parallel` left."""
    out = tmp_path_factory.mktemp("ran")
    draft = drafts.init(target, out / "draft", draft_vocab_size=90, kind=request.param)
    arguments = {"targets": {"parallel": str(target)}, "drafts": {"parallel": str(draft)}, "out": str(out)}
    tiny_engine.run_script("tests.in_vllm.run_parallel", arguments, timeout_s=400, ranks=2)
    return out


@pytest.fixture(scope="module")
def seen(ran: Path) -> dict[str, Any]:
    return torch.load(ran / "seen.pt", weights_only=False)


def test_the_plugin_is_in_every_rank_and_one_of_them_learns(seen: dict[str, Any]) -> None:
    """Case C15."""
    plugins = seen["plugins"]
    assert [one["rank"] for one in plugins] == [0, 1]
    assert all(one["patched"] for one in plugins)
    assert [one["agent"] for one in plugins] == ["WorkerAgent", "FollowerAgent"]
    assert len({one["process"] for one in plugins}) == 2


def test_answers_are_greedy_whatever_is_swapped(seen: dict[str, Any], target: Path) -> None:
    model = tiny.load(target)
    for look in ("first", "learned", "after errors"):
        for prompt, answer in zip(seen["prompts"], seen[look]["answers"], strict=True):
            assert float(tiny.greedy_gaps(model, prompt, answer).max()) <= GREEDY_TIE.relative, look


def test_taps_of_the_first_rank_are_whole(ran: Path, target: Path) -> None:
    model = tiny.load(target)
    samples = torch.load(ran / "samples.pt", weights_only=False)
    assert len(samples) >= 24
    for sample in samples:
        taps, final = tiny.states(model, sample.token_ids[:-1], sample.tap_layers)
        for found, wanted in ((sample.taps, taps), (sample.final, final)):
            error = ((found - wanted).abs().amax(-1) / wanted.abs().amax(-1)).max()
            assert float(error) < TAPS_VS_HUGGING_FACE.relative


def test_a_draft_learned_on_one_rank_is_served_by_both(seen: dict[str, Any], ran: Path) -> None:
    """It accepts more than before, and exactly as much as in an engine of one rank that starts from it."""
    single = torch.load(ran / "single.pt", weights_only=False)
    assert seen["publish"]["target_untouched"] is True
    assert seen["learned"]["accepted_tokens"] > seen["first"]["accepted_tokens"]
    for key in ("drafted_tokens", "accepted_tokens"):
        assert seen["learned"][key] == single[key]


def test_a_rank_that_fails_takes_the_swap_back_on_all(seen: dict[str, Any]) -> None:
    other_rank, no_draft = seen["errors"]
    assert "another rank refused the draft" in other_rank
    assert "no draft checkpoint" in no_draft
    for key in ("drafted_tokens", "accepted_tokens", "version", "digest", "answers"):
        assert seen["after errors"][key] == seen["learned"][key], key


def test_updates_of_target_and_draft_arrive_on_both_ranks(target: Path, tmp_path: Path) -> None:
    """A rank that kept its half of the old weights would give the tokens of neither version; so would one that refused alone."""
    newer = tiny.save_target(tmp_path / "newer", "llama", tied=False, vocab=150, seed=13)
    first, second = (drafts.init(one, tmp_path / f"draft-{one.name}", draft_vocab_size=90) for one in (target, newer))
    models = {0: tiny.load(target), 1: tiny.load(newer)}
    prompts = tiny.prompts(4, seed=9, vocab=150)

    def serves(url: str, version: int) -> None:
        for prompt in prompts:
            answer = engines.tokens(url, prompt, max_tokens=16)
            gaps = {v: float(tiny.greedy_gaps(model, prompt, answer).max()) for v, model in models.items()}
            assert gaps[version] <= GREEDY_TIE.relative < gaps[1 - version]

    extra = ["--tensor-parallel-size", "2", "--kv-gib", "1", "--no-auto-publish", "--keep-previous"]
    with (
        Server(target, draft=first, log_path=tmp_path / "server.log", extra=extra) as server,
        connect(server.url) as bridge,
    ):
        serves(server.url, 0)
        with bridge.update(version=1) as update:
            update.target(hf_weights(models[1]))
            update.draft(load_file(second / "model.safetensors").items())
        serves(server.url, 1)
        draft_digest = engines.status(server.url)["draft_digest"]
        broken = [(name, tensor * float("nan")) for name, tensor in hf_weights(models[0])]
        with pytest.raises(UpdateError, match="NaN or infinity"), bridge.update(version=2) as update:
            update.target(broken)
        serves(server.url, 1)
        with bridge.update(version=3) as update:
            update.target(hf_weights(models[0]))
        serves(server.url, 0)
        assert engines.status(server.url)["draft_digest"] == draft_digest
        engines.post(server.url, "rollback", {"policy": True}).raise_for_status()
        serves(server.url, 1)
