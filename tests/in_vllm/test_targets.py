"""Catches: a target type that cannot be served, tapped, learned from or swapped under; a bias, a norm, a head or a head size of
Llama, Qwen2 or Qwen3 that was left out on the way; an interruption that changes an answer.

All targets are tiny and random, of six layers, with a vocabulary that the engine must pad. Of the six combinations of type and
tying, four run here: every type, and tied and untied embeddings; ``tests/unit/test_targets.py`` makes drafts for all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from tests.in_vllm import engines, tiny, tiny_engine
from tests.tolerances import GREEDY_TIE, TAPS_VS_HUGGING_FACE
from trainer_bridge.draft import checkpoint
from trainer_bridge.taps import TapSample
from vllm_specdraft import drafts
from vllm_specdraft.launch import Server

RUN = [("llama", True), ("qwen2", False), ("qwen3", False)]
NAMES = [tiny.name_of(kind, tied) for kind, tied in RUN]
DRAFT_VOCAB = 100


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], dict[str, Path]]:
    """Targets and their first drafts by name; one target's weights lie in several files."""
    root = tmp_path_factory.mktemp("targets")
    targets, first = {}, {}
    for seed, (kind, tied) in enumerate(RUN):
        name = tiny.name_of(kind, tied)
        shard_size = "200KB" if name == "qwen2-untied" else "1GB"
        targets[name] = tiny.save_target(root / name, kind, tied=tied, seed=seed, shard_size=shard_size)
        first[name] = drafts.init(targets[name], root / f"{name}-draft", draft_vocab_size=DRAFT_VOCAB)
    assert len(list(targets["qwen2-untied"].glob("*.safetensors"))) > 1
    return targets, first


@pytest.fixture(scope="module")
def ran(made: tuple[dict[str, Path], dict[str, Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One engine per target, see `run_targets`."""
    out = tmp_path_factory.mktemp("ran")
    targets, first = made
    arguments = {
        "targets": {name: str(path) for name, path in targets.items()},
        "drafts": {name: str(path) for name, path in first.items()},
        "prompts": tiny.prompts(24),
        "out": str(out),
    }
    tiny_engine.run_script("tests.in_vllm.run_targets", arguments, timeout_s=400)
    return out


def _seen(ran: Path, name: str) -> dict[str, Any]:
    return torch.load(ran / name / "seen.pt", weights_only=False)


def _assert_greedy(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        gaps = tiny.greedy_gaps(model, prompt, answer)
        assert float(gaps.max()) <= GREEDY_TIE.relative, (prompt, answer, gaps, GREEDY_TIE.reason)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_are_those_of_hugging_face(name: str, made: Any, ran: Path) -> None:
    """Also of requests that were preempted in the middle of an answer and computed again (case C12)."""
    seen = _seen(ran, name)
    assert seen["preemptions"] > 0
    assert all(len(answer) == 32 for answer in seen["first"])
    _assert_greedy(tiny.load(made[0][name]), seen["prompts"], seen["first"])


@pytest.mark.parametrize("name", NAMES)
def test_taps_equal_a_hugging_face_forward_row_by_row(name: str, made: Any, ran: Path) -> None:
    """Cases D2, D5, D6 for every target type."""
    samples: list[TapSample] = torch.load(ran / name / "samples.pt", weights_only=False)
    seen, model = _seen(ran, name), tiny.load(made[0][name])
    wanted = {tuple(prompt + answer) for prompt, answer in zip(seen["prompts"], seen["first"], strict=True)}
    assert {tuple(sample.token_ids.tolist()) for sample in samples} >= wanted
    for sample in samples:
        taps, final = tiny.states(model, sample.token_ids[:-1], sample.tap_layers)
        for found, expected in ((sample.taps, taps), (sample.final, final)):
            assert found.shape == expected.shape
            error = (found - expected).abs().amax(-1) / expected.abs().amax(-1)
            assert float(error.max()) < TAPS_VS_HUGGING_FACE.relative


@pytest.mark.parametrize("name", NAMES)
def test_the_draft_learns_and_is_swapped_in(name: str, made: Any, ran: Path) -> None:
    """Cases A14 and A9: training changes the weights, and a reduced head that the engine pads arrives whole."""
    seen = _seen(ran, name)
    learning, publish = seen["status"]["learning"], seen["publish"]
    assert learning["steps"] > 0 and learning["tokens"] > 0 and learning["skipped_steps"] == 0
    assert publish["draft_version"] == 1 and publish["target_untouched"] is True
    assert publish["digest"] == seen["status"]["draft_digest"]
    assert publish["digest"] != checkpoint.digest_of(checkpoint.read_state(made[1][name]))
    assert seen["status"]["counters"]["accepted_tokens"] > 0
    assert seen["status"]["last_error"] is None


@pytest.mark.parametrize("name", NAMES)
def test_a_swap_changes_no_token(name: str, made: Any, ran: Path) -> None:
    seen = _seen(ran, name)
    _assert_greedy(tiny.load(made[0][name]), seen["prompts"], seen["second"])


@pytest.mark.parametrize("name", NAMES)
def test_a_pause_in_the_middle_of_answers_changes_no_token(name: str, made: Any, ran: Path) -> None:
    """Case C12: all running requests lose their KV cache in the pause, the draft's too, and go on."""
    seen = _seen(ran, name)
    assert seen["running_while_paused"] == 6
    _assert_greedy(tiny.load(made[0][name]), seen["prompts"][:6], seen["paused"])


def test_the_server_makes_a_draft_for_a_target_it_never_saw(tmp_path: Path) -> None:
    """``specdraft serve TARGET`` alone, over HTTP, with token ids in and out."""
    target = tiny.save_target(tmp_path / "qwen3-tied", "qwen3", tied=True)
    environment = {"SPECDRAFT_CACHE": str(tmp_path / "cache")}
    with Server(
        target, draft=None, log_path=tmp_path / "server.log", extra=["--kv-gib", "1", "--no-learn"], environment=environment
    ) as server:
        model = tiny.load(target)
        for prompt in tiny.prompts(3, seed=1):
            body = {"model": "specdraft", "prompt": prompt, "max_tokens": 16, "temperature": 0, "return_token_ids": True}
            answer = requests.post(f"{server.url}/v1/completions", json={**body, "ignore_eos": True}, timeout=60)
            answer.raise_for_status()
            choice = answer.json()["choices"][0]
            assert choice["prompt_token_ids"] == prompt
            assert len(choice["token_ids"]) == 16
            _assert_greedy(model, [prompt], [choice["token_ids"]])
        assert engines.status(server.url)["counters"]["draft_steps"] > 0
    assert [path.name.partition("-eagle3-")[0] for path in (tmp_path / "cache" / "drafts").iterdir()] == ["qwen3-tied"]
