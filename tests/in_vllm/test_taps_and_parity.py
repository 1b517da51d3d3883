"""Catches: taps that are shifted, of rejected drafts, of another request, or incomplete after a chunked prefill; a draft whose
forward differs from vLLM's module on the same weights (input order, rotary offset, branch keys, vocabulary)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from specdraft_kernels.block_attention import block_attention
from specdraft_kernels.branch_attention import branch_attention

from tests.tolerances import DRAFT_LOGITS_VS_ENGINE, TAPS_VS_HUGGING_FACE
from trainer_bridge.draft import registry
from trainer_bridge.draft.dflash.model import DFlashDraft
from trainer_bridge.taps import TapSample
from vllm_specdraft import cpu
from vllm_specdraft.config import ENVIRONMENT, EngineConfig

DRAFT_KINDS = ("eagle3", "dflash")


@pytest.fixture(scope="module")
def draft(live: Any, learned: Path) -> Path:
    """A draft that learned a little, so that some of its tokens are accepted and some rejected."""
    return learned


@pytest.fixture(scope="module")
def seen(target: Path, draft_kind: str, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the worker of an offline engine saw: two prompts one by one, then both at once with their prefill cut into chunks."""
    out = tmp_path_factory.mktemp("seen")
    config = EngineConfig(draft_dir=str(draft), state_dir=str(out), learn=False)
    environment = {
        **os.environ,
        **cpu.choose({}, kv_gib=1).environment,
        ENVIRONMENT: config.to_json(),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "tests.in_vllm.probes", str(target), draft_kind, str(draft), str(out)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr[-3000:]
    return out


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def _hugging_face(target: Path, ids: torch.Tensor, layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        out = model.model(ids[None], output_hidden_states=True)
    return torch.cat([out.hidden_states[layer][0] for layer in layers], -1), out.last_hidden_state[0]


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest error of a row relative to that row's largest value."""
    return float(((found - wanted).abs().amax(-1) / wanted.abs().amax(-1)).max())


def test_taps_equal_a_hugging_face_forward_row_by_row(seen: Path, target: Path) -> None:
    """Cases D2, D3, D5, D6: one row per accepted token, chunks assembled by position, after the norm, down to the last row."""
    samples: list[TapSample] = _load(seen / "together.pt")["samples"]
    answers = _load(seen / "answers.pt")
    assert len(samples) >= 4
    wanted_ids = {tuple(prompt + answer) for prompt, answer in answers}
    for sample in samples[:4]:
        assert tuple(sample.token_ids.tolist()) in wanted_ids
        assert sample.taps.shape[0] == sample.num_tokens - 1
        taps, final = _hugging_face(target, sample.token_ids[:-1], sample.tap_layers)
        assert _relative(sample.taps, taps) < TAPS_VS_HUGGING_FACE.relative
        assert _relative(sample.final, final) < TAPS_VS_HUGGING_FACE.relative


def test_a_request_taps_the_same_alone_and_in_a_batch(seen: Path) -> None:
    """Case D7."""
    samples: list[TapSample] = _load(seen / "together.pt")["samples"]
    by_tokens: dict[tuple[int, ...], list[TapSample]] = {}
    for sample in samples:
        by_tokens.setdefault(tuple(sample.token_ids.tolist()), []).append(sample)
    pairs = [group for group in by_tokens.values() if len(group) >= 2]
    assert len(pairs) == 2, "each prompt was answered twice"
    for alone, batched, *_ in pairs:
        assert _relative(alone.taps, batched.taps) < TAPS_VS_HUGGING_FACE.relative


def test_our_draft_equals_the_engines_module_over_all_draft_steps(seen: Path, target: Path, draft: Path) -> None:
    """Cases D19 and E5: logits of every draft step along the tokens that the engine itself drafted, or of every slot of a block."""
    data = _load(seen / "alone.pt")
    weights = load_file(target / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    model, _ = registry.of_config(json.loads((draft / "config.json").read_text())).load(draft)
    compared, accepted = 0, 0
    prompt, answer = _load(seen / "answers.pt")[0]
    tokens = torch.tensor(prompt + answer)
    taps, _final = _hugging_face(target, tokens[:-1], (2, 15, 27))
    for call in data["calls"]:
        theirs_of_all = torch.cat(call["logits"]) if call["logits"] else torch.empty(0)
        if len(theirs_of_all) != 3 or call["next"].shape[0] != 1:
            continue
        last = int(call["positions"][-1]) - call["rejected"]
        if last + 1 < len(prompt) or last + 1 >= len(tokens) or int(call["next"][0]) != int(tokens[last + 1]):
            continue  # a prefill chunk, or the second prompt
        logits_of = _slot_logits if isinstance(model, DFlashDraft) else _draft_chain
        chain = logits_of(model, embedding, taps[: last + 1], tokens[1 : last + 2], call["drafts"][0])
        for ours, theirs in zip(chain, theirs_of_all, strict=True):
            kept = model.kept()
            assert _relative(ours[None], theirs[None, kept]) < DRAFT_LOGITS_VS_ENGINE.relative
            assert bool(torch.isinf(theirs[~model.t2d]).all())
        compared += 1
        accepted += int(call["drafts"][0, 0] == tokens[last + 2]) if last + 2 < len(tokens) else 0
    assert compared >= 10
    assert accepted >= 1, "a draft of which nothing is accepted proves little"


@torch.no_grad()
def _draft_chain(
    model: Any, embedding: torch.Tensor, taps: torch.Tensor, shifted: torch.Tensor, drafts: torch.Tensor
) -> list[torch.Tensor]:
    """Logits of each draft step from the last row, feeding the engine's own draft tokens back."""
    rows = taps.shape[0]
    hidden0 = model.combine(taps)
    x = model.layer_input(embedding[shifted], hidden0)
    keys, values = model.keys_values(x, torch.arange(rows))
    hidden, embedded = hidden0[-1:], embedding[shifted[-1:]]
    cu, last = torch.tensor([0, rows]), torch.tensor([rows - 1])
    branch_k, branch_v, logits = [], [], []
    for d in range(drafts.shape[0]):
        x = model.layer_input(embedded, hidden)
        position = torch.tensor([rows - 1 + d])
        if d:
            k, v = model.keys_values(x, position)
            branch_k.append(k)
            branch_v.append(v)
        empty = keys.new_empty(1, 0, *keys.shape[1:])
        kb = torch.stack(branch_k, 1) if branch_k else empty
        vb = torch.stack(branch_v, 1) if branch_v else empty
        attended, _ = branch_attention(model.queries(x, position), keys, values, kb, vb, cu, anchors=last)
        hidden = model.finish_layer(hidden, attended)
        logits.append(model.logits(hidden)[0])
        embedded = embedding[drafts[d : d + 1]]
    return logits


@torch.no_grad()
def _slot_logits(
    model: DFlashDraft, embedding: torch.Tensor, taps: torch.Tensor, shifted: torch.Tensor, drafts: torch.Tensor
) -> list[torch.Tensor]:
    """Logits of each proposing slot of the block that stands right after the last row."""
    rows, width = taps.shape[0], drafts.shape[0] + 1
    trunk, positions = model.combine(taps), torch.arange(rows, rows + width)
    hidden = model.slots(embedding[shifted[-1:]], width)[0]
    cu, document, prefix = torch.tensor([0, rows]), torch.tensor([0]), torch.tensor([rows])
    for layer in model.each_layer():
        x = layer.input_layernorm(hidden)
        own = [each[None] for each in model.keys_values(layer, x, positions)]
        context = model.keys_values(layer, trunk, torch.arange(rows))
        attended, _ = block_attention(model.queries(layer, x, positions)[None], *context, *own, cu, document, prefix)
        hidden = layer.finish(hidden, attended[0])
    return list(model.logits(hidden[1:]))
