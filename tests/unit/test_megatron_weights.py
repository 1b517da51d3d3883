"""Catches a Megatron model that would be given or loaded although it is none that a checkpoint describes.

Stand-ins with megatron-core's names and config: real models are in `tests.distributed.test_megatron_weights`.
"""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.boxes import assert_same, put_together
from trainer_bridge.adapters.megatron import load_megatron, megatron_weights
from trainer_bridge.errors import WeightSourceError
from trainer_bridge.shards import Shard

HEADS, GROUPS, SIZE, HIDDEN, FFN, VOCAB = 4, 2, 3, 5, 6, 8
LAYER = {
    "input_layernorm.weight": (HIDDEN,),
    "self_attention.linear_qkv.weight": ((HEADS + 2 * GROUPS) * SIZE, HIDDEN),
    "self_attention.linear_proj.weight": (HIDDEN, HEADS * SIZE),
    "pre_mlp_layernorm.weight": (HIDDEN,),
    "mlp.linear_fc1.weight": (2 * FFN, HIDDEN),
    "mlp.linear_fc2.weight": (HIDDEN, FFN),
}
FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Where Transformer Engine has the norms."""
SHAPES = {
    "embedding.word_embeddings.weight": (VOCAB, HIDDEN),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "output_layer.weight": (VOCAB, HIDDEN),
}


def put(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Register a parameter under a dotted name."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    module.register_parameter(last, nn.Parameter(tensor))


def model(
    numbers: tuple[int, ...] = (1, 2),
    *,
    fused: bool = False,
    tied: bool = False,
    more: tuple[str, ...] = (),
    more_in_layers: tuple[str, ...] = (),
    **fields: Any,
) -> Any:
    """A stage with the layers of these numbers and both ends.

    Args:
        more, more_in_layers: names of further parameters.
        fields: of the config, instead of those here.
    """
    made: Any = nn.Module()
    made.config = SimpleNamespace(**{
        "num_layers": 2, "num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": SIZE, "ffn_hidden_size": FFN,
        "gated_linear_unit": True, "rotary_interleaved": False, **fields,
    })  # fmt: skip
    made.vocab_size, made.share_embeddings_and_output_weights = VOCAB, tied
    made.decoder = nn.Module()
    made.decoder.layers = nn.ModuleList()
    random = torch.Generator().manual_seed(1)
    for number in numbers:
        layer: Any = nn.Module()
        layer.layer_number, layer.config = number, made.config
        for name, shape in {**LAYER, **dict.fromkeys(more_in_layers, (HIDDEN,))}.items():
            put(layer, FUSED.get(name, name) if fused else name, torch.randn(shape, generator=random))
        made.decoder.layers.append(layer)
    for name, shape in {**SHAPES, **dict.fromkeys(more, (HIDDEN,))}.items():
        if not tied or name != "output_layer.weight":
            put(made, name, torch.randn(shape, generator=random))
    return made


def checkpoint(**options: Any) -> dict[str, torch.Tensor]:
    return put_together(megatron_weights(model(**options)))


def test_the_rows_of_each_head_are_where_the_source_says() -> None:
    """Written out by hand: a group is its query heads, its key head, its value head."""
    made = model()
    rows = made.decoder.layers[1].self_attention.linear_qkv.weight.detach().split(SIZE)
    found = checkpoint()
    expected = {"q": (0, 1, 4, 5), "k": (2, 6), "v": (3, 7)}
    for which, heads in expected.items():
        assert torch.equal(found[f"model.layers.1.self_attn.{which}_proj.weight"], torch.cat([rows[head] for head in heads]))
    gate, up = made.decoder.layers[0].mlp.linear_fc1.weight.detach().split(FFN)
    assert torch.equal(found["model.layers.0.mlp.gate_proj.weight"], gate)
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], up)


def test_fused_norms_have_the_names_of_the_others() -> None:
    assert_same(checkpoint(fused=True), checkpoint())


def test_numbers_of_layers_are_their_own() -> None:
    names = {name.split(".")[2] for name, _ in megatron_weights(model((7, 4), num_layers=9)) if ".layers." in name}
    assert names == {"6", "3"}


def test_a_stage_may_be_empty() -> None:
    empty = model(())
    for name in ("embedding", "output_layer"):
        delattr(empty, name)
    del empty.decoder.final_layernorm
    assert list(megatron_weights([empty])) == []
    assert len(list(megatron_weights([model(), empty]))) == len(checkpoint())


def test_parts_are_views_and_load_in_place() -> None:
    """A group that is a rank's only one needs no copy."""
    made = model(num_query_groups=1, num_attention_heads=6)
    for layer in made.decoder.layers:
        put(layer, "self_attention.linear_proj.weight", torch.randn(HIDDEN, 6 * SIZE))
    before = {name: (parameter, parameter.clone()) for name, parameter in made.named_parameters()}
    tensors = put_together(megatron_weights(made))
    for _, tensor in megatron_weights(made):
        assert not isinstance(tensor, Shard) and not tensor.requires_grad
        tensor.add_(1)
    assert all(torch.equal(parameter, old + 1) for parameter, old in before.values())
    load_megatron(made, tensors)
    for name, parameter in made.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1]) and parameter.is_leaf


def test_loading_casts_to_the_dtype_of_the_parameters() -> None:
    tensors = {name: tensor.double() for name, tensor in checkpoint().items()}
    made = model().bfloat16()
    load_megatron(made, tensors)
    assert_same(put_together(megatron_weights(made)), {name: tensor.bfloat16() for name, tensor in tensors.items()})


def test_padding_is_not_given_and_not_loaded() -> None:
    made = model()
    found = put_together(megatron_weights(made, vocab_size=7))
    assert found["lm_head.weight"].shape == (7, HIDDEN)
    other = model()
    nn.init.zeros_(other.output_layer.weight)
    load_megatron(other, found, vocab_size=7)
    assert not other.output_layer.weight[7].any() and torch.equal(other.output_layer.weight[:7], made.output_layer.weight[:7])


def test_norms_come_from_the_first_tensor_rank() -> None:
    half = model(num_query_groups=4, num_attention_heads=8, ffn_hidden_size=2 * FFN)
    half.vocab_size = 2 * VOCAB
    entries = [list(megatron_weights(half, tensor_rank=rank, tensor_size=2)) for rank in (0, 1)]
    assert len(put_together(entries[0] + entries[1])) == len(checkpoint())
    assert [isinstance(entry, Shard) for _, entry in entries[1]] == [True] * len(entries[1])
    assert [name for name, entry in entries[0] if not isinstance(entry, Shard)] == [
        name for name in checkpoint() if "norm" in name
    ]  # fmt: skip


def test_a_rank_of_replicas_gives_nothing() -> None:
    assert list(megatron_weights(model(), gives=False)) == []


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"more": ("mtp.layers.0.eh_proj.weight",)}, {}, r"^mtp.layers.0.eh_proj.weight: .*multi-token"),
        ({"more_in_layers": ("mlp.experts.weight1", "mlp.router.weight")}, {}, r"mlp.experts.weight1.*, \.\.\. \(4 in all\)"),
        ({"more_in_layers": ("self_attention.linear_q_down_proj.weight",)}, {}, "latent attention"),
        ({"more_in_layers": ("self_attention.linear_proj.bias",)}, {}, "linear_proj.bias"),
        ({"layernorm_zero_centered_gamma": True}, {}, "layernorm_zero_centered_gamma=True: norms hold their weight less 1"),
        ({"rotary_interleaved": True}, {}, "rotary_interleaved=True"),
        ({"attention_output_gate": True}, {}, "attention_output_gate=True"),
        ({"gated_linear_unit": False}, {}, "gated_linear_unit=False: the MLP has no gate"),
        ({"num_query_groups": 1}, {"tensor_rank": 0, "tensor_size": 2}, r"1 key heads \(num_query_groups\) on 2 tensor ranks"),
        ({"num_query_groups": 4}, {}, r"linear_qkv.weight is \[24, 5\] on each of 1 tensor ranks, and 36 along dimension 0"),
        ({"ffn_hidden_size": 7}, {}, r"linear_fc1.weight is \[12, 5\].*and 14 along dimension 0"),
        ({}, {"tensor_rank": 0, "tensor_size": 2}, r"tensor ranks, and 24 along dimension 0.*give the tensor_rank"),
        ({}, {"tensor_rank": 2, "tensor_size": 2}, "tensor_rank=2 of tensor_size=2"),
        ({}, {"tensor_rank": 0}, "tensor_rank=0 of tensor_size=None: give both"),
        ({}, {"vocab_size": 9}, "vocab_size=9: the model holds 8 rows"),
        ({}, {"vocab_size": 0}, "vocab_size=0"),
    ],
)  # fmt: skip
def test_what_no_checkpoint_describes_is_refused_both_ways(options: Any, arguments: Any, message: str) -> None:
    """When it is called, not when it is walked."""
    with pytest.raises(WeightSourceError, match=message):
        megatron_weights(model(**options), **arguments)
    with pytest.raises(WeightSourceError, match=message):
        load_megatron(model(**options), checkpoint(), **arguments)


@pytest.mark.parametrize(
    ("tied", "change", "message"),
    [
        (False, {"model.norm.weight": None}, "lacks model.norm.weight"),
        (False, {"lm_head.weight": None}, "lacks lm_head.weight"),
        (False, {"model.norm.weight": torch.zeros(6)}, r"model.norm.weight is \[6\] in the checkpoint and \[5\] in the model"),
        (False, {"lm_head.weight": torch.zeros(7, HIDDEN)}, r"lm_head.weight is \[7, 5\].*give vocab_size"),
        (False, {"model.layers.1.self_attn.q_norm.weight": torch.zeros(3)}, r"has model.layers.1.self_attn.q_norm.weight.*qk_lay"),
        (False, {"model.layers.2.input_layernorm.weight": torch.zeros(5)}, "has model.layers.2.* model of 2 layers"),
        (True, {"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}, "has lm_head.weight.*share_embeddings_and_output_weights"),
    ],
)  # fmt: skip
def test_another_models_checkpoint_is_refused_and_nothing_written(tied: bool, change: dict[str, Any], message: str) -> None:
    made = model(tied=tied)
    before = [parameter.clone() for parameter in made.parameters()]
    tensors = {name: torch.zeros_like(tensor) for name, tensor in checkpoint(tied=tied).items()}
    tensors["model.embed_tokens.weight"] += 1
    tensors |= change
    with pytest.raises(WeightSourceError, match=message):
        load_megatron(made, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    assert all(torch.equal(parameter, old) for parameter, old in zip(made.parameters(), before, strict=True))


def test_what_computes_the_same_may_be_in_the_checkpoint() -> None:
    """The head of a model that ties it, frequencies of rotary positions, layers of other stages."""
    made = model((1,), tied=True)
    tensors = checkpoint(tied=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    tensors["model.layers.1.self_attn.q_norm.weight"] = torch.zeros(3)
    load_megatron(made, tensors)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "no chunks were given"),
        (nn.Linear(2, 2), "Linear: no GPTModel"),
        ([nn.ModuleList([nn.Linear(2, 2)])], "ModuleList: no"),
    ],
)
def test_other_modules_are_refused(chunks: Any, message: str) -> None:
    with pytest.raises(WeightSourceError, match=message):
        megatron_weights(chunks)


class Sharded(nn.Parameter):
    """Looks like a DTensor."""

    placements = device_mesh = ()


def test_parameters_that_fsdp_cut_are_refused() -> None:
    made = model()
    made.output_layer.weight = Sharded(torch.zeros(VOCAB, HIDDEN))
    with pytest.raises(WeightSourceError, match=r"output_layer.weight: sharded by FSDP"):
        megatron_weights(made)


def test_megatron_and_transformers_stay_outside() -> None:
    code = "import sys, trainer_bridge.adapters.megatron\nprint(*{'megatron', 'transformers', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_the_example_in_the_docstring_is_true() -> None:
    result = doctest.testmod(importlib.import_module("trainer_bridge.adapters.megatron"))
    assert result.attempted and not result.failed
