"""Weights of a megatron-core ``GPTModel`` under the names and in the layout of a Hugging Face checkpoint, and back again.

For models like Llama, Qwen2 and Qwen3: rotary positions, RMSNorm, gated MLP, grouped key heads, with or without a bias of
queries, keys and values, norms of queries and keys, tied embeddings. Megatron is not imported: the model brings it along.

Both directions walk the same list of `Part`: a view into a parameter, and the box of a checkpoint's tensor that lies there.
`megatron_weights` reads the views, `load_megatron` writes them. Of a model with tensor parallelism a rank holds

| parameter | tensors | what the rank holds of each |
|---|---|---|
| ``linear_qkv`` | ``q_proj``, ``k_proj``, ``v_proj`` | the rows of its heads, group by group (see `split_heads`) |
| ``linear_fc1`` | ``gate_proj``, ``up_proj`` | rows: its own of the one, then its own of the other |
| ``linear_proj``, ``linear_fc2`` | ``o_proj``, ``down_proj`` | columns |
| ``word_embeddings``, ``output_layer`` | ``embed_tokens``, ``lm_head`` | rows; the last ones may be padding |
| norms | norms | all of it |
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer_bridge.adapters.naming import is_sharded, tensors_of, unwrapped
from trainer_bridge.errors import WeightSourceError
from trainer_bridge.shards import Entry, Shard


@dataclass(frozen=True)
class Part:
    """What a parameter holds of one tensor of the checkpoint."""

    name: str
    """Of the checkpoint's tensor."""
    held: torch.Tensor
    """A view of the parameter: the elements of the box in their order, in as many dimensions as that takes."""
    shape: tuple[int, ...]
    """Shape of the box."""
    start: tuple[int, ...]
    """Index of the box's first element in the whole tensor."""
    full_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    is_copy: bool
    """Whether another rank of the same replica holds the same, and gives it."""

    def entry(self) -> Entry:
        """What the adapter gives: a view where one can have the box's shape, else a copy (heads of several groups)."""
        tensor = self.held.reshape(self.shape)
        return self.name, tensor if self.shape == self.full_shape else Shard(tensor, self.full_shape, self.start)

    def load(self, whole: torch.Tensor) -> None:
        """Write the box of the whole tensor into the parameter."""
        box = whole.detach()[tuple(slice(begin, begin + size) for begin, size in zip(self.start, self.shape, strict=True))]
        self.held.copy_(box.reshape(self.held.shape))


def megatron_weights(
    chunks: nn.Module | Sequence[nn.Module],
    *,
    vocab_size: int | None = None,
    tensor_rank: int | None = None,
    tensor_size: int | None = None,
    gives: bool | None = None,
) -> Iterable[Entry]:
    """What this rank gives of a model, without a collective: detached views, and copies one at a time where heads are regrouped.

    With ``overlap_param_gather`` parameters are old until the next forward pass: finish the gather first, on all ranks
    (``chunk.start_param_sync(force_sync=True)``).

    Args:
        chunks: this rank's ``GPTModel``, or all of its virtual pipeline stages; they may be wrapped. Each layer knows its number
            in the whole model, so stages may be uneven.
        vocab_size: rows of the vocabulary in the checkpoint. What the model holds beyond them is padding, and not given.
            Default: all that it holds.
        tensor_rank, tensor_size: place in the tensor-parallel group. Default: megatron's own groups, or one rank without them.
        gives: False for all but one of the ranks that hold the same as plain data or context parallelism has it. Default:
            by megatron's own groups the first one gives; without them this rank does.

    Returns:
        Entries as `trainer_bridge.adapters` describes them. Norms come from the first tensor rank; a tied embedding comes once,
        as ``model.embed_tokens.weight``, from the stage that embeds.

    Raises:
        WeightSourceError: parameters that are not of such a model (experts, latent attention, LayerNorm), a config that stores them
            in another form, fewer key heads than tensor ranks, shapes that do not fit the place in the group or `vocab_size`, or
            parameters sharded by FSDP.
    """
    parts = _parts(_models(chunks), vocab_size, _tensor_place(tensor_rank, tensor_size))
    if gives is None:
        state = _parallel_state()
        gives = state is None or state.get_data_parallel_rank(with_context_parallel=True) == 0
    chosen = [part for part in parts if gives and not part.is_copy]
    # One at a time: a copy is gone when the next one is made.
    return (part.entry() for part in chosen)


def load_megatron(
    chunks: nn.Module | Sequence[nn.Module],
    tensors: Mapping[str, torch.Tensor],
    *,
    vocab_size: int | None = None,
    tensor_rank: int | None = None,
    tensor_size: int | None = None,
) -> None:
    """Write a checkpoint's tensors into this rank's parameters, in place, in the parameters' dtype: all of them, or on error none.

    Every rank loads what it holds, replicas too. Padding rows of the vocabulary stay as they are. An optimizer's own copies are
    not written: with mixed precision call its ``reload_model_params()`` afterwards.

    Args:
        chunks, vocab_size, tensor_rank, tensor_size: as in `megatron_weights`.
        tensors: whole tensors by their names in the checkpoint. Those of other stages may be missing.

    Raises:
        WeightSourceError: as `megatron_weights`; a tensor is missing or has another shape, or the checkpoint has tensors or layers
            that the model lacks (a bias of the queries, say): it would compute something else.
    """
    models = _models(chunks)
    parts = _parts(models, vocab_size, _tensor_place(tensor_rank, tensor_size))
    if missing := sorted({part.name for part in parts} - tensors.keys()):
        raise WeightSourceError(f"the checkpoint lacks {_some(missing)}, which this rank's chunks hold")
    _refuse_unexpected(models, {part.name for part in parts}, tensors)
    for part in parts:
        if tuple(tensors[part.name].shape) != part.full_shape:
            raise WeightSourceError(
                f"{part.name} is {list(tensors[part.name].shape)} in the checkpoint and {list(part.full_shape)} in the model: "
                "build it with the checkpoint's config, and give vocab_size where its vocabulary is padded"
            )
    with torch.no_grad():
        for part in parts:
            part.load(tensors[part.name])


def split_heads(rows: torch.Tensor, groups: int, per_group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values in the rows of ``linear_qkv``: views [groups, heads of a group, head size, ...].

    A group is one key head, its value head, and the `per_group` query heads that look at it. Two groups of two, head size 1:

    >>> rows = torch.arange(8)                                     # q0 q1 k0 v0 q2 q3 k1 v1
    >>> [part.flatten().tolist() for part in split_heads(rows, groups=2, per_group=2)]
    [[0, 1, 4, 5], [2, 6], [3, 7]]

    Args:
        rows: [groups * (per_group + 2) * head size, ...].
    """
    grouped = rows.unflatten(0, (groups, per_group + 2, -1))
    return grouped[:, :per_group], grouped[:, per_group : per_group + 1], grouped[:, per_group + 1 :]


class _Rule(NamedTuple):
    """What becomes of a parameter."""

    names: tuple[str, ...]
    """Tensors of the checkpoint that lie in it."""
    dim: int | None = None
    """The dimension that tensor parallelism cuts; None: each rank holds all of it."""
    full: Callable[[Any], int] = lambda config: 0
    """Its length over all ranks, from the layer's config; of the vocabulary, the model knows it."""
    cut: Callable[[torch.Tensor, Any, int], Sequence[torch.Tensor]] = lambda tensor, config, ranks: [tensor]
    """Views of the tensors in it, in any number of dimensions."""


def _heads(tensor: torch.Tensor, config: Any, ranks: int) -> Sequence[torch.Tensor]:
    return split_heads(tensor, config.num_query_groups // ranks, config.num_attention_heads // config.num_query_groups)


def _qkv(kind: str) -> _Rule:
    names = tuple(f"self_attn.{which}_proj.{kind}" for which in "qkv")
    return _Rule(names, 0, lambda config: (config.num_attention_heads + 2 * config.num_query_groups) * config.kv_channels, _heads)


_OUTPUT, _EMBEDDING, _HEAD = "output_layer.weight", "model.embed_tokens.weight", "lm_head.weight"
_OF_THE_MODEL = {
    "embedding.word_embeddings.weight": _Rule((_EMBEDDING,), 0),
    "decoder.final_layernorm.weight": _Rule(("model.norm.weight",)),
    _OUTPUT: _Rule((_HEAD,), 0),
}
_OF_A_LAYER = {
    "input_layernorm.weight": _Rule(("input_layernorm.weight",)),
    "self_attention.linear_qkv.layer_norm_weight": _Rule(("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": _qkv("weight"),
    "self_attention.linear_qkv.bias": _qkv("bias"),
    "self_attention.q_layernorm.weight": _Rule(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": _Rule(("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": _Rule(
        ("self_attn.o_proj.weight",), 1, lambda config: config.num_attention_heads * config.kv_channels
    ),
    "pre_mlp_layernorm.weight": _Rule(("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": _Rule(("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": _Rule(
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        0,
        lambda config: 2 * config.ffn_hidden_size,
        lambda tensor, config, ranks: tensor.chunk(2),
    ),
    "mlp.linear_fc2.weight": _Rule(("mlp.down_proj.weight",), 1, lambda config: config.ffn_hidden_size),
}
"""By the parameter's name in a layer. A norm may have another name: Transformer Engine fuses it with what follows."""
_FORM = {
    "gated_linear_unit": (True, "the MLP has no gate"),
    "layernorm_zero_centered_gamma": (False, "norms hold their weight less 1"),
    "rotary_interleaved": (False, "rotary positions pair neighbouring channels, a checkpoint pairs those of two halves"),
    "attention_output_gate": (False, "heads have gates between them"),
}
"""What fields of the config have to be for parameters to be those of a checkpoint, and what they are otherwise."""
_MEGATRON_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_CHECKPOINT_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def _parts(models: Sequence[Any], vocab_size: int | None, place: tuple[int, int]) -> list[Part]:
    """All that this rank's models hold. Raises as `megatron_weights`."""
    parts: list[Part] = []
    for model in models:
        # A stage of a pipeline may be empty.
        tensors = tensors_of(model) if next(model.parameters(), None) is not None else {}
        _refuse(model, tensors, vocab_size, place[1])
        for name, tensor in tensors.items():
            parts += _parts_of(model, name, tensor.detach(), vocab_size or model.vocab_size, place)
    return parts


def _rule_of(parameter: str) -> tuple[_Rule | None, int | None]:
    """What becomes of a parameter, None where nothing is known; and which of its model's layers it belongs to."""
    if layer := _MEGATRON_LAYER.fullmatch(parameter):
        return _OF_A_LAYER.get(layer[2]), int(layer[1])
    return _OF_THE_MODEL.get(parameter), None


def _parts_of(model: Any, parameter: str, tensor: torch.Tensor, vocab_size: int, place: tuple[int, int]) -> Iterator[Part]:
    """The parts of one parameter; what is empty is left out."""
    rank, ranks = place
    rule, layer = _rule_of(parameter)
    assert rule is not None, parameter
    if layer is None:
        config, prefix, full = model.config, "", model.vocab_size
    else:
        block = model.decoder.layers[layer]
        # Its own config: layers may differ in width.
        config, prefix, full = block.config, f"model.layers.{block.layer_number - 1}.", rule.full(block.config)
    if rule.dim is not None and tensor.shape[rule.dim] * ranks != full:
        raise WeightSourceError(
            f"{parameter} is {list(tensor.shape)} on each of {ranks} tensor ranks, and {full} along dimension {rule.dim} in the "
            "whole model: give the tensor_rank and tensor_size it was built with"
        )
    is_tied = parameter == _OUTPUT and model.share_embeddings_and_output_weights
    for name, held in zip((_EMBEDDING,) if is_tied else rule.names, rule.cut(tensor, config, ranks), strict=True):
        shape, start, full_shape = list(tensor.shape), [0] * tensor.ndim, list(tensor.shape)
        if rule.dim is not None:
            length = held.numel() * tensor.shape[rule.dim] // tensor.numel()
            full = vocab_size if layer is None else length * ranks
            begin = min(rank * length, full)
            if (left := full - begin) < length:  # the rest is padding of the vocabulary
                held, length = held[:left], left
            shape[rule.dim], start[rule.dim], full_shape[rule.dim] = length, begin, full
        if held.numel():
            is_copy = is_tied or (rule.dim is None and rank > 0)
            yield Part(prefix + name, held, tuple(shape), tuple(start), tuple(full_shape), is_copy)


def _refuse(model: Any, tensors: Mapping[str, torch.Tensor], vocab_size: int | None, ranks: int) -> None:
    """Raise `WeightSourceError` for a model that is no Llama or Qwen, or holds it in another form."""
    if unknown := [name for name in tensors if _rule_of(name)[0] is None]:
        raise WeightSourceError(
            f"{_some(unknown)}: no Llama, Qwen2 or Qwen3 has that (experts, latent attention, multi-token prediction and LayerNorm "
            "are not covered): give entries of your own"
        )
    if sharded := [name for name, tensor in tensors.items() if is_sharded(tensor)]:
        raise WeightSourceError(f"{_some(sharded)}: sharded by FSDP; train with data parallelism that keeps parameters whole")
    config = model.config
    for field, (needed, otherwise) in _FORM.items():
        if getattr(config, field, False) != needed:
            raise WeightSourceError(f"the config says {field}={not needed}: {otherwise}, which is not converted")
    if config.num_query_groups % ranks:
        raise WeightSourceError(
            f"{config.num_query_groups} key heads (num_query_groups) on {ranks} tensor ranks: each needs whole ones, use fewer"
        )
    if vocab_size is not None and not 0 < vocab_size <= model.vocab_size:
        raise WeightSourceError(f"vocab_size={vocab_size}: the model holds {model.vocab_size} rows, padding included")


def _refuse_unexpected(models: Sequence[Any], expected: set[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `WeightSourceError` for tensors of this rank's layers that they have no place for, layers beyond the model's, and a
    head of its own for a model that ties it to the embedding."""
    held = {layer.layer_number - 1 for model in models for layer in model.decoder.layers}
    count = models[0].config.num_layers
    numbers = {name: int(layer[1]) for name in tensors.keys() - expected if (layer := _CHECKPOINT_LAYER.match(name))}
    # Older checkpoints carry the frequencies of rotary positions, which follow from the config.
    homeless = sorted(n for n, at in numbers.items() if (at in held or at >= count) and not n.endswith("rotary_emb.inv_freq"))
    if _EMBEDDING in expected and models[0].share_embeddings_and_output_weights and _HEAD in tensors:
        homeless += [] if torch.equal(tensors[_HEAD], tensors[_EMBEDDING]) else [_HEAD]
    if homeless:
        raise WeightSourceError(
            f"the checkpoint has {_some(homeless)}, for which the model of {count} layers has no place: build it with the "
            "checkpoint's config (add_qkv_bias, qk_layernorm, num_layers, share_embeddings_and_output_weights)"
        )


def _models(chunks: nn.Module | Sequence[nn.Module]) -> list[Any]:
    """The models inside of their wrappers (data parallelism, half precision)."""
    models: list[Any] = []
    for chunk in [chunks] if isinstance(chunks, nn.Module) else chunks:
        model = unwrapped(chunk)
        while isinstance(inner := getattr(model, "module", None), nn.Module):
            model = unwrapped(inner)
        models.append(model)
    if strange := [type(model).__name__ for model in models if not hasattr(model, "share_embeddings_and_output_weights")]:
        raise WeightSourceError(f"{_some(strange)}: no GPTModel of megatron-core")
    if not models:
        raise WeightSourceError("no chunks were given: give this rank's GPTModel, or the list of its virtual stages")
    return models


def _parallel_state() -> Any:
    """Megatron's own groups, or None where it has made none."""
    state = sys.modules.get("megatron.core.parallel_state")
    return state if state is not None and state.model_parallel_is_initialized() else None


def _tensor_place(rank: int | None, size: int | None) -> tuple[int, int]:
    """Rank in the tensor-parallel group, and its size."""
    if rank is None and size is None:
        state = _parallel_state()
        return (0, 1) if state is None else (state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size())
    if rank is None or size is None or not 0 <= rank < size:
        raise WeightSourceError(f"tensor_rank={rank} of tensor_size={size}: give both, counted from 0, or neither")
    return rank, size


def _some(names: Sequence[str]) -> str:
    """The first names of several, and how many there are."""
    return ", ".join(names[:3]) + (f", ... ({len(names)} in all)" if len(names) > 3 else "")
