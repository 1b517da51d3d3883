"""Catches weights that would go out under a wrong name, twice, or not at all, and a model that cannot be given as it stands."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.boxes import assert_same, put_together
from trainer_bridge.adapters import Shard, fsdp_weights, hf_weights, module_weights, shard_of
from trainer_bridge.adapters.hf import checkpoint_groups
from trainer_bridge.adapters.naming import share_of, tensors_of
from trainer_bridge.errors import ShardError, UnmergedAdapterError, WeightSourceError

SHAPES = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 23,
}  # fmt: skip


class Tied(nn.Module):
    """Two names for one weight, a buffer of each kind, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.arange(4))
        self.register_buffer("dropped", torch.arange(4), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(ids)))

    def get_extra_state(self) -> dict[str, int]:
        return {"step": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def llama(**fields: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPES, **fields))


def mixtral() -> MixtralForCausalLM:
    """Its experts lie in one tensor per layer, and in one per expert in its checkpoint."""
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SHAPES, num_local_experts=3, num_experts_per_tok=2))


def saved(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def test_a_module_gives_what_its_state_dict_holds_and_tied_weights_once() -> None:
    module = Tied()
    entries = module_weights(module)
    names = [name for name, _ in entries]
    assert names == [
        "kept", "embed.weight", "inner.0.weight", "inner.0.bias", "inner.1.weight", "inner.1.bias", "inner.1.running_mean",
        "inner.1.running_var", "inner.1.num_batches_tracked",
    ]  # fmt: skip
    state = module.state_dict()
    assert_same(put_together(entries), {name: state[name] for name in names})
    assert not any(tensor.requires_grad for _, tensor in entries)
    # Detached, not copied.
    assert dict(entries)["embed.weight"].data_ptr() == module.embed.weight.data_ptr()


def test_weights_tied_through_their_data_come_once() -> None:
    module = Tied()
    module.head.weight = nn.Parameter(module.embed.weight.detach().clone())
    assert "head.weight" in dict(module_weights(module))
    module.head.weight.data = module.embed.weight.data
    assert "head.weight" not in dict(module_weights(module))


def test_parts_of_one_storage_and_empty_tensors_are_not_tied() -> None:
    module = nn.Module()
    both = torch.arange(6.0)
    for name, tensor in {"a": both[:3], "b": both[3:], "c": torch.empty(0), "d": torch.empty(0), "e": both[:3].view(3, 1)}.items():
        module.register_parameter(name, nn.Parameter(tensor))
    assert [name for name, _ in module_weights(module)] == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["parallel", "compile"])
def test_wrappers_leave_names_alone(wrap: Any) -> None:
    assert [name for name, _ in module_weights(wrap(Tied()))] == [name for name, _ in module_weights(Tied())]
    inner = Tied()
    inner.inner = wrap(inner.inner)
    expected = [name.replace("inner.", "inner.module.") if wrap is nn.DataParallel else name for name, _ in module_weights(Tied())]
    assert [name for name, _ in module_weights(inner)] == expected


def test_a_checkpointed_part_keeps_its_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module = Tied()
    module.inner = checkpoint_wrapper(module.inner)
    assert [name for name, _ in module_weights(module)] == [name for name, _ in module_weights(Tied())]


def test_names_change_by_map_or_function_and_then_get_their_prefix() -> None:
    module = nn.Linear(2, 3)
    assert [name for name, _ in module_weights(module, rename={"weight": "kernel"}, prefix="draft.")] == [
        "draft.kernel",
        "draft.bias",
    ]
    assert [name for name, _ in module_weights(module, rename=str.upper)] == ["WEIGHT", "BIAS"]


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"model.weight": "kernel"}, "1 names that the module lacks"),
        ({"weight": "bias"}, "weight and bias would both be sent as bias"),
        (lambda name: "same", "weight and bias would both be sent as same"),
        (lambda name: {"weight": "kernel"}.get(name), "None of bias"),
    ],
)
def test_names_that_would_be_lost_are_refused(rename: Any, message: str) -> None:
    """B2: a map that matches next to nothing skipped 112 of 113 names."""
    with pytest.raises(WeightSourceError, match=message):
        module_weights(nn.Linear(2, 3), rename=rename)


@pytest.mark.parametrize("world", [1, 2, 3, 20])
@pytest.mark.parametrize("make", [lambda r, w: module_weights(Tied(), rank=r, world=w), lambda r, w: hf_weights(llama(), r, w)])
def test_ranks_share_the_names(make: Any, world: int) -> None:
    """Each name from one rank, in the order of the module: the union is what one rank alone gives."""
    alone = [name for name, _ in make(0, 1)]
    shares = [[name for name, _ in make(rank, world)] for rank in range(world)]
    assert sorted(name for share in shares for name in share) == sorted(alone)
    assert all(share == [name for name in alone if name in share] for share in shares)


@given(sizes=st.lists(st.integers(0, 1000)), world=st.integers(1, 9))
def test_shares_are_even(sizes: list[int], world: int) -> None:
    shares = [share_of(sizes, rank, world) for rank in range(world)]
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@pytest.mark.parametrize(("rank", "world"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_its_world_is_refused(rank: int, world: int) -> None:
    with pytest.raises(WeightSourceError, match=f"rank {rank} of a world of {world}"):
        module_weights(nn.Linear(2, 2), rank=rank, world=world)


@pytest.mark.parametrize("tie", [True, False])
def test_a_hugging_face_model_is_given_as_it_is_saved(tie: bool, tmp_path: Path) -> None:
    """B9: with tied embeddings one copy, without them two."""
    model = llama(tie_word_embeddings=tie)
    found = put_together(hf_weights(model))
    assert_same(found, saved(model, tmp_path))
    assert ("lm_head.weight" in found) != tie
    assert not any("inv_freq" in name for name in found)


def test_a_head_tied_by_hand_is_given_under_both_names() -> None:
    """Whoever loads it goes by the config, which says that there are two."""
    model = llama(tie_word_embeddings=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    found = dict(hf_weights(model))
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


def test_a_loaded_model_is_given_as_it_is_saved(tmp_path: Path) -> None:
    llama(tie_word_embeddings=True).save_pretrained(tmp_path / "a")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    assert_same(put_together(hf_weights(nn.DataParallel(model))), saved(model, tmp_path / "b"))


def test_experts_are_given_one_by_one_as_they_are_saved(tmp_path: Path) -> None:
    """transformers 5 keeps a layer's experts in one tensor, which no checkpoint and no engine knows by that name."""
    mixtral().save_pretrained(tmp_path / "a")
    for model in (mixtral(), MixtralForCausalLM.from_pretrained(tmp_path / "a")):
        expected = saved(model, tmp_path / "b")
        assert any(".experts.2." in name for name in expected)
        assert_same(put_together(hf_weights(model)), expected)
        shares = [dict(hf_weights(model, rank, 3)) for rank in range(3)]
        assert_same(put_together([entry for share in shares for entry in share.items()]), expected)


def test_experts_are_converted_one_layer_at_a_time() -> None:
    model = mixtral()
    groups = [group for group in checkpoint_groups(model, tensors_of(model)) if group.converted]
    assert [{".".join(name.split(".")[:3]) for name in group.sources + group.names} for group in groups] == [
        {"model.layers.0"},
        {"model.layers.1"},
    ]


class OlderModel(nn.Module):
    """As transformers 4 declares tied weights: patterns in a list, and a word in the config."""

    _tied_weights_keys = (r"lm_head\.weight",)
    _keys_to_ignore_on_save = ("step",)

    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=tie)
        self.lm_head = nn.Linear(3, 5, bias=False)
        self.embed = nn.Embedding(5, 3)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("step", torch.zeros(1))


def test_the_tied_name_is_left_out_and_not_the_second() -> None:
    assert [name for name, _ in hf_weights(OlderModel(tie=True))] == ["embed.weight"]
    assert [name for name, _ in hf_weights(OlderModel(tie=False))] == ["lm_head.weight", "embed.weight"]


def test_what_is_no_hugging_face_model_is_given_as_any_module() -> None:
    assert [name for name, _ in hf_weights(Tied())] == [name for name, _ in module_weights(Tied())]


class WithLora(nn.Module):
    """Names as PEFT makes them around one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2)})


def test_unmerged_adapters_are_refused() -> None:
    model = llama()
    model.model.layers[1].self_attn.q_proj = WithLora()
    with pytest.raises(UnmergedAdapterError, match=r"LlamaForCausalLM carries adapters \(base_layer, lora_A\).*merge them first"):
        hf_weights(model)
    prompts = llama()
    prompts.get_base_model = lambda: None
    with pytest.raises(UnmergedAdapterError, match=r"\(PEFT\)"):
        hf_weights(prompts)


def test_a_quantized_model_is_refused() -> None:
    model = llama()
    model.is_quantized = True
    with pytest.raises(WeightSourceError, match="is quantized"):
        hf_weights(model)


class FullyShardedDataParallel(nn.Module):
    """Named like FSDP1's wrapper."""


def broken(kind: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    if kind == "meta":
        module[0].to("meta")
    elif kind == "zero":
        module[0].weight = nn.Parameter(torch.empty(0))
        module[0].weight.ds_numel = 4  # type: ignore[assignment]
    elif kind == "fsdp1":
        module.append(FullyShardedDataParallel())
    elif kind == "no tensor":
        module[0].register_state_dict_post_hook(lambda m, state, prefix, meta: state.update({prefix + "scale": 3.0}))
    return nn.Sequential() if kind == "empty" else module


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("meta", "0.weight is on the meta device"),
        ("zero", "partitioned by ZeRO-3"),
        ("fsdp1", "1 is sharded by FSDP1"),
        ("no tensor", "0.scale is a float"),
        ("empty", "has no parameters"),
    ],
)
@pytest.mark.parametrize("adapter", [module_weights, hf_weights, fsdp_weights])
def test_tensors_that_are_not_there_are_refused(adapter: Any, kind: str, message: str) -> None:
    with pytest.raises(WeightSourceError, match=message):
        adapter(broken(kind))


def test_a_module_that_is_not_sharded_has_its_own_adapter() -> None:
    with pytest.raises(WeightSourceError, match="use module_weights or hf_weights"):
        fsdp_weights(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("full_shape", "start", "message"),
    [
        ((4, 3), (0,), "as many dimensions"),
        ((4,), (0, 0), "as many dimensions"),
        ((4, 3), (3, 0), "reaches beyond"),
        ((4, 2), (0, 0), "reaches beyond"),
        ((4, 3), (-1, 0), "0 or more"),
        ((4, 3.0), (0, 0), "integers"),
        ((4, 3), (True, 0), "integers"),
    ],
)
def test_a_box_outside_its_tensor_is_refused(full_shape: Any, start: Any, message: str) -> None:
    with pytest.raises(ShardError, match=message):
        Shard(torch.zeros(2, 3), full_shape, start)


def test_a_box_may_fill_its_tensor_or_be_empty() -> None:
    assert Shard(torch.zeros(2, 3), torch.Size([2, 3]), (0, 0)).full_shape == (2, 3)
    assert Shard(torch.zeros(0, 3), (2, 3), (2, 0)).shape == (0, 3)
    assert Shard(torch.tensor(1.0), (), ()).shape == ()


@given(rows=st.integers(0, 12), count=st.integers(1, 5), dim=st.sampled_from([0, 1, -1]))
def test_parts_cut_by_hand_cover_the_tensor(rows: int, count: int, dim: int) -> None:
    """Uneven ones as torch.chunk cuts them, with empty ones at the end."""
    whole = torch.arange(rows * 3).reshape((rows, 3) if dim == 0 else (3, rows))
    parts = list(torch.chunk(whole, count, dim))
    parts += [whole.narrow(dim, 0, 0)] * (count - len(parts))
    boxes = [shard_of(part, index=i, count=count, dim=dim, size=rows) for i, part in enumerate(parts)]
    assert torch.equal(put_together([("w", box) for box in boxes])["w"], whole)
    even = [shard_of(whole, index=i, count=count, dim=dim) for i in range(count)]
    assert torch.equal(put_together([("w", box) for box in even])["w"], torch.cat([whole] * count, dim))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index": 2, "count": 2}, "part 2 of 2"),
        ({"index": 0, "count": 2, "dim": 2}, "dimension 2"),
        ({"index": 1, "count": 2, "size": 7}, "has 3 rows, the tensor has 4"),
    ],
)
def test_a_part_that_is_none_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ShardError, match=message):
        shard_of(torch.zeros(4, 2), **fields)


@pytest.mark.parametrize("module", ["delta", "shards", "adapters", "adapters.naming"])
def test_the_examples_in_the_docstrings_are_true(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"trainer_bridge.{module}"))
    assert result.attempted and not result.failed
