"""Catches a draft that does not fit its target: wrong shapes read from a config, taps at impossible layers, a warm start
that forgot a weight, a misspelt type that silently became another.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.builders import HIDDEN, KEPT, TAP_LAYERS, VOCAB, draft, frozen_target, generator, target_spec
from trainer_bridge.draft import registry
from trainer_bridge.draft.eagle3 import Eagle3
from trainer_bridge.draft.interface import TargetSpec
from trainer_bridge.errors import CheckpointError, ConfigError

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 99,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "max_position_embeddings": 512,
}
"""A target's ``config.json`` with everything spelt out."""


def without(*keys: str, **more: Any) -> dict[str, Any]:
    return {key: value for key, value in LLAMA.items() if key not in keys} | more


# The registry.


def test_known_types_are_found_by_name() -> None:
    assert "eagle3" in registry.names()
    for name in registry.names():
        kind = registry.by_name(name)
        assert kind.name == name
        assert kind is registry.by_name(name)


@pytest.mark.parametrize("name", ["eagle", "eagel3", "EAGLE3", "eagle-3"])
def test_a_misspelt_type_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown draft type '{name}', known: .*eagle3"):
        registry.by_name(name)


def test_a_misspelt_type_comes_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'eagle3'"):
        registry.by_name("eagel3")
    with pytest.raises(ConfigError) as caught:
        registry.by_name("xyz")
    assert "did you mean" not in str(caught.value)


def test_a_type_recognises_what_it_configures() -> None:
    for name in registry.names():
        kind = registry.by_name(name)
        spec = target_spec()
        config = kind.configure(spec, tap_layers=kind.default_tap_layers(spec), draft_vocab_size=9)
        assert registry.of_config(config) is kind


def test_a_config_of_no_known_type_is_refused() -> None:
    with pytest.raises(CheckpointError, match="MedusaModel"):
        registry.of_config({"architectures": ["MedusaModel"]})


# The target's shapes.


def test_a_full_config_is_read_as_it_stands() -> None:
    assert TargetSpec.from_config(LLAMA) == TargetSpec(
        hidden_size=64,
        intermediate_size=128,
        num_layers=5,
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=99,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        max_positions=512,
    )


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (without("num_key_value_heads"), "num_kv_heads", 8),
        (without(num_key_value_heads=None), "num_kv_heads", 8),
        (without("head_dim"), "head_dim", 8),
        (without(head_dim=None), "head_dim", 8),
        (without("rope_parameters", rope_theta=7e4), "rope_theta", 7e4),
        (without(rope_parameters=None, rope_theta=7e4), "rope_theta", 7e4),
        (without(rope_parameters={"rope_type": "default"}, rope_theta=7e4), "rope_theta", 7e4),
        (without(rope_theta=7e4), "rope_theta", 5e5),
        (without("rope_parameters"), "rope_theta", 10000.0),
        (without("rms_norm_eps"), "rms_norm_eps", 1e-6),
        (without("max_position_embeddings"), "max_positions", 2048),
    ],
)
def test_what_a_config_leaves_out_is_filled_in(config: dict[str, Any], field: str, value: float) -> None:
    assert getattr(TargetSpec.from_config(config), field) == value


# Tap layers and configuration.


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(30, (2, 15, 27)), (32, (2, 16, 29)), (8, (2, 4, 5)), (6, (2, 3, 4)), (5, (2, 3, 4)), (4, (1, 2, 3))],
)
def test_default_tap_layers_are_low_middle_and_high(layers: int, expected: tuple[int, ...]) -> None:
    assert Eagle3().default_tap_layers(target_spec(num_layers=layers)) == expected


def test_default_tap_layers_fit_every_target_that_can_be_tapped() -> None:
    for layers in range(4, 130):
        spec = target_spec(num_layers=layers)
        taps = Eagle3().default_tap_layers(spec)
        assert list(taps) == sorted(set(taps))
        assert taps[0] > 0 and taps[-1] < layers
        Eagle3().configure(spec, tap_layers=taps, draft_vocab_size=9)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_target_too_shallow_for_defaults_is_refused(layers: int) -> None:
    with pytest.raises(ConfigError, match=f"target of {layers} layers is too shallow.*--tap-layers"):
        Eagle3().default_tap_layers(target_spec(num_layers=layers))


@pytest.mark.parametrize("taps", [(0, 2, 4), (1, 2, 6), (1, 2, 2), (-1, 2, 3), (), (4, 2, 1)])
def test_impossible_tap_layers_are_refused(taps: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"needs distinct ascending layers in 1\.\.5"):
        Eagle3().configure(target_spec(), tap_layers=taps, draft_vocab_size=9)


@pytest.mark.parametrize("size", [0, -3, VOCAB, VOCAB + 1])
def test_an_impossible_draft_vocabulary_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"draft vocabulary of {size} tokens.*1..{VOCAB - 1}, below"):
        Eagle3().configure(target_spec(), tap_layers=TAP_LAYERS, draft_vocab_size=size)


def test_a_draft_has_its_target_s_shapes_and_the_public_entries() -> None:
    config = Eagle3().configure(target_spec(), tap_layers=TAP_LAYERS, draft_vocab_size=9)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True}
    shapes = {name: tuple(tensor.shape) for name, tensor in Eagle3().build(config).state_dict().items()}
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    assert shapes == {
        "d2t": (9,),
        "t2d": (VOCAB,),
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "lm_head.weight": (9, HIDDEN),
        "norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        f"{attention}.q_proj.weight": (24, 2 * HIDDEN),
        f"{attention}.k_proj.weight": (12, 2 * HIDDEN),
        f"{attention}.v_proj.weight": (12, 2 * HIDDEN),
        f"{attention}.o_proj.weight": (HIDDEN, 24),
        f"{mlp}.gate_proj.weight": (12, HIDDEN),
        f"{mlp}.up_proj.weight": (12, HIDDEN),
        f"{mlp}.down_proj.weight": (HIDDEN, 12),
    }


# Warm start.


def fake_target_state(layers: int = 3) -> dict[str, torch.Tensor]:
    """A Llama-like state dict of random weights, no two alike."""
    spec, random = target_spec(), generator(9)
    attention = {"q_proj": (24, 8), "k_proj": (12, 8), "v_proj": (12, 8), "o_proj": (8, 24)}
    mlp = {"gate_proj": (12, 8), "up_proj": (12, 8), "down_proj": (8, 12)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, 8), "model.norm.weight": (8,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{part}.weight": shape for part, shape in attention.items()}
        shapes |= {f"{prefix}mlp.{part}.weight": shape for part, shape in mlp.items()}
        shapes |= {f"{prefix}{norm}.weight": (8,) for norm in ("input_layernorm", "post_attention_layernorm")}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


@pytest.mark.parametrize("layers", [3, 11])
def test_a_warm_start_takes_all_that_the_target_can_give(layers: int) -> None:
    """D19: the target's projections read hidden states, so they go to the second half of ``[embedding | hidden]``.

    Eleven layers: the last one is number 10, which sorts before 2 as text.
    """
    model, target, state = draft(dtype=torch.float32), frozen_target(dtype=torch.float32), fake_target_state(layers)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Eagle3().warm_start(model, target, state)
    after = model.state_dict()
    last, mid = f"model.layers.{layers - 1}.", "midlayer."
    expected = {
        "lm_head.weight": target.head[list(KEPT)],
        "norm.weight": state["model.norm.weight"],
        f"{mid}hidden_norm.weight": state[f"{last}input_layernorm.weight"],
        f"{mid}post_attention_layernorm.weight": state[f"{last}post_attention_layernorm.weight"],
        f"{mid}self_attn.o_proj.weight": state[f"{last}self_attn.o_proj.weight"],
    }
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"self_attn.{part}.weight"
        expected[mid + name] = torch.cat([before[mid + name][:, :HIDDEN], state[last + name]], 1)
    for part in ("gate_proj", "up_proj", "down_proj"):
        expected[f"{mid}mlp.{part}.weight"] = state[f"{last}mlp.{part}.weight"]
    top = torch.cat([torch.zeros(HIDDEN, 2 * HIDDEN), torch.eye(HIDDEN)], 1)
    expected["fc.weight"] = before["fc.weight"] + top
    for name, tensor in expected.items():
        assert torch.equal(after[name], tensor), name
    untouched = set(after) - set(expected)
    assert untouched == {"d2t", "t2d", "midlayer.input_layernorm.weight"}
    for name in untouched:
        assert torch.equal(after[name], before[name]), name


def test_a_warm_start_leaves_the_target_alone() -> None:
    """The draft copies the target's weights and never shares their memory."""
    model, target, state = draft(dtype=torch.float32), frozen_target(dtype=torch.float32), fake_target_state()
    kept = {name: tensor.clone() for name, tensor in state.items()} | {"head": target.head.clone()}
    Eagle3().warm_start(model, target, state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(target.head, kept["head"])
    for name, tensor in state.items():
        assert torch.equal(tensor, kept[name]), name
