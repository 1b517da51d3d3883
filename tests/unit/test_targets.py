"""Catches: a Hugging Face Llama, Qwen2 or Qwen3 directory that no draft can be made for; the wrong matrix for a head; angles that
differ from the target's; a model silently taken for one of these three.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests import builders
from tests.in_vllm import tiny
from tests.tolerances import ROPE_FP32, WITH_HEAD_NORM, assert_close
from trainer_bridge.draft import checkpoint, registry, rope
from trainer_bridge.draft.eagle3 import Eagle3
from trainer_bridge.draft.interface import FrozenTarget, TargetSpec
from trainer_bridge.draft.packing import pack
from trainer_bridge.errors import ConfigError
from vllm_specdraft import drafts

VOCAB = 50
LAST = "model.layers.5."


def make(directory: Path, kind: str = "llama", *, tied: bool = False, **options: Any) -> Path:
    return tiny.save_target(directory, kind, tied=tied, vocab=VOCAB, **options)


def edit(target: Path, **config: Any) -> Path:
    """Overwrite entries of a target's config; None removes one."""
    path = target / "config.json"
    entries = json.loads(path.read_text()) | config
    path.write_text(json.dumps({key: value for key, value in entries.items() if value is not None}))
    return target


@pytest.mark.parametrize(("kind", "tied"), tiny.ALL)
def test_a_draft_is_made_for_every_type(kind: str, tied: bool, tmp_path: Path) -> None:
    target = make(tmp_path / "target", kind, tied=tied)
    info = drafts.info(drafts.init(target, tmp_path / "draft", draft_vocab_size=20))
    assert info["tap_layers"] == [2, 3, 4]
    assert (info["hidden_size"], info["vocab_size"], info["draft_vocab_size"]) == (tiny.HIDDEN, VOCAB, 20)
    weights, state = load_file(target / "model.safetensors"), checkpoint.read_state(tmp_path / "draft")
    assert ("lm_head.weight" in weights) is not tied
    kept = torch.arange(20) + state["d2t"]
    head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert torch.equal(state["lm_head.weight"], head[kept])
    assert tiny.END in kept
    assert torch.equal(state["midlayer.self_attn.o_proj.weight"], weights[f"{LAST}self_attn.o_proj.weight"])
    assert torch.equal(state["midlayer.mlp.down_proj.weight"], weights[f"{LAST}mlp.down_proj.weight"])


@pytest.mark.parametrize(("kind", "tied"), tiny.ALL)
def test_a_draft_of_every_type_learns_from_its_target(kind: str, tied: bool, tmp_path: Path) -> None:
    """Taps, teacher and training shapes fit together, and every step lowers the loss."""
    target = make(tmp_path / "target", kind, tied=tied)
    draft, _ = registry.by_name("eagle3").load(drafts.init(target, tmp_path / "draft", draft_vocab_size=VOCAB - 1))
    model, samples = tiny.load(target), []
    frozen = FrozenTarget(embedding=model.get_input_embeddings().weight.detach(), head=model.lm_head.weight.detach())
    for index, prompt in enumerate(tiny.prompts(4, vocab=VOCAB)):
        taps, final = tiny.states(model, torch.tensor(prompt[:-1]), (2, 3, 4))
        sample = builders.sample(
            "." + "A" * (len(prompt) - 1), seed=index, tokens=prompt, tap_layers=(2, 3, 4), taps=taps, final=final
        )
        samples.append(sample.validate())
    objective = registry.by_name("eagle3").objective(draft, frozen, passes=2)
    batch = pack(samples, 2)
    optimizer, losses = torch.optim.AdamW(draft.parameters(), lr=1e-3), []
    for _ in range(5):
        optimizer.zero_grad()
        list(objective.pieces(batch, batch.label_counts()))
        losses.append(objective.take_loss())
        optimizer.step()
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


def test_weights_in_several_files_give_the_same_draft(tmp_path: Path) -> None:
    whole, sharded = make(tmp_path / "whole"), make(tmp_path / "sharded", shard_size="200KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    # A file that the index does not name is not the model's.
    save_file({"model.norm.weight": torch.zeros(tiny.HIDDEN)}, sharded / "zzz.safetensors")
    digests = [drafts.info(drafts.init(target, tmp_path / f"{target.name}-draft"))["digest"] for target in (whole, sharded)]
    assert digests[0] == digests[1]


def test_a_missing_weight_file_is_named(tmp_path: Path) -> None:
    target = make(tmp_path / "target", shard_size="200KB")
    gone = sorted(target.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ConfigError, match=gone.name):
        drafts.init(target, tmp_path / "draft")


def test_a_damaged_weight_file_is_named(tmp_path: Path) -> None:
    target = make(tmp_path / "target")
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        drafts.init(target, tmp_path / "draft")


def test_tied_embeddings_win_over_a_head_in_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Case B8: config says tied, checkpoint holds both copies."""
    target = make(tmp_path / "target", tied=True)
    weights = load_file(target / "model.safetensors")
    save_file(weights | {"lm_head.weight": torch.zeros(VOCAB, tiny.HIDDEN)}, target / "model.safetensors", {"format": "pt"})
    with caplog.at_level(logging.WARNING):
        drafts.init(target, tmp_path / "draft", draft_vocab_size=20)
    state = checkpoint.read_state(tmp_path / "draft")
    assert torch.equal(state["lm_head.weight"], weights["model.embed_tokens.weight"][torch.arange(20) + state["d2t"]])
    assert "ties its embeddings" in caplog.text


def test_an_untied_target_without_a_head_is_refused(tmp_path: Path) -> None:
    target = edit(make(tmp_path / "target", tied=True), tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"no lm_head\.weight"):
        drafts.init(target, tmp_path / "draft")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "gemma3_text"}, "gemma3_text"),
        ({"model_type": None}, "None"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_a_target_that_would_be_misread_is_refused(config: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        drafts.init(edit(make(tmp_path / "target"), **config), tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


def test_a_target_without_a_layers_weight_is_refused_by_its_name(tmp_path: Path) -> None:
    target = make(tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    del weights[f"{LAST}mlp.up_proj.weight"]
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.5\.mlp\.up_proj"):
        drafts.init(target, tmp_path / "draft")


def test_a_norm_over_heads_goes_into_the_projection(tmp_path: Path) -> None:
    """Qwen3 norms queries and keys, the draft's layer does not: its projections give heads of the same size instead."""
    target = make(tmp_path / "target", "qwen3", tied=True, seed=3)
    weights, state = load_file(target / "model.safetensors"), checkpoint.read_state(drafts.init(target, tmp_path / "draft"))
    x = torch.randn(400, tiny.HIDDEN, generator=torch.Generator().manual_seed(0)) * weights[f"{LAST}input_layernorm.weight"]
    for part in ("q", "k"):
        plain = (x @ weights[f"{LAST}self_attn.{part}_proj.weight"].T).unflatten(1, (-1, 32))
        normed = torch.nn.functional.rms_norm(plain, (32,), weights[f"{LAST}self_attn.{part}_norm.weight"])
        ours = (x @ state[f"midlayer.self_attn.{part}_proj.weight"][:, tiny.HIDDEN :].T).unflatten(1, (-1, 32))
        error = (ours - normed).square().mean((0, 2)).sqrt() / normed.square().mean((0, 2)).sqrt()
        assert float(error.max()) < WITH_HEAD_NORM.relative, WITH_HEAD_NORM.reason


# Rotary embeddings.

SCALED = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 99},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "attention_factor": 0.9},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.7},
]


@pytest.mark.parametrize("scaling", SCALED, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_scaled_angles_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    parameters = {"rope_theta": 5000.0, **scaling}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=512, rope_parameters=dict(parameters)
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    found, ours = rope.frequencies(rope.parameters_of({"rope_parameters": parameters}), 32)
    assert_close(found.float(), wanted, ROPE_FP32, "frequencies")
    assert ours == pytest.approx(factor)


def test_the_angle_factor_scales_what_is_rotated() -> None:
    plain = {"rope_type": "default", "rope_theta": 100.0}
    scaled = {**plain, "rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64, "attention_factor": 0.5}
    x, positions = torch.randn(4, 2, 6, dtype=torch.float64), torch.arange(4)
    configs = [builders.draft_config(rope_parameters=parameters) for parameters in (plain, scaled)]
    one, half = (Eagle3().build(config).rotate(x, positions) for config in configs)
    assert torch.equal(half, 0.5 * one)
    assert torch.equal(one, builders.draft().rotate(x, positions))


@pytest.mark.parametrize("scaling", SCALED[:3], ids=lambda s: s["rope_type"])
def test_a_draft_takes_its_targets_scaling_over(scaling: dict[str, Any], tmp_path: Path) -> None:
    """Both layouts: as transformers writes it today, and ``rope_scaling`` beside ``rope_theta`` as it did before."""
    wanted = {"rope_theta": 300.0, **scaling}
    target = make(tmp_path / "today", rope_parameters=wanted)
    configs = [checkpoint.read_config(drafts.init(target, tmp_path / "today-draft"))]
    older = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    edit(target, rope_parameters=None, rope_scaling=older, rope_theta=300.0)
    configs.append(checkpoint.read_config(drafts.init(target, tmp_path / "older-draft")))
    for config in configs:
        assert config["rope_parameters"] == wanted
        assert config["max_position_embeddings"] == tiny.MAX_POSITIONS


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "default"}, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks 'factor'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks 'low_freq_factor'"),
    ],
)
def test_a_rotary_embedding_that_would_be_misread_is_refused(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        rope.parameters_of(config)


def test_a_plain_rotary_embedding_has_no_scaling() -> None:
    for config in ({"rope_theta": 7e4}, {"rope_scaling": None, "rope_theta": 7e4}, {"rope_parameters": {"rope_theta": 7e4}}):
        assert rope.parameters_of(config) == {"rope_type": "default", "rope_theta": 7e4}
    spec = TargetSpec.from_config({"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 1,
                                   "vocab_size": 9, "rope_theta": 7e4})  # fmt: skip
    assert spec.rope_theta == 7e4 and not spec.rope_scaling
    found, factor = rope.frequencies({"rope_type": "default", "rope_theta": 7e4}, 8)
    assert found.tolist() == pytest.approx([math.pow(7e4, -d / 8) for d in (0, 2, 4, 6)])
    assert factor == 1.0
