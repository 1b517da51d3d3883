"""Weights of a Hugging Face model, named as ``save_pretrained`` writes them. Imports no transformers: the model brings it along.

Three things differ from the module's own names: a tied weight is left out under the name that is tied, some names are never
saved, and since transformers 5 a model may hold weights in another form than its checkpoint (a layer's experts in one tensor):
then transformers' own conversion takes them back, one layer at a time, so that memory never holds a second model.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer_bridge.adapters.naming import nbytes_of, refuse_sharded, same_tensor_names, share_of, tensors_of, unwrapped
from trainer_bridge.errors import UnmergedAdapterError, WeightSourceError

_ADAPTER_PARTS = frozenset({"base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "modules_to_save"})
_LAYER = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True)
class Group:
    """Tensors of a model that become tensors of its checkpoint together."""

    sources: tuple[str, ...]
    """Names in the model."""
    names: tuple[str, ...]
    """Names in the checkpoint."""
    converted: bool = False
    """False: one tensor that is the same in both."""


def hf_weights(model: nn.Module, rank: int = 0, world: int = 1) -> Iterable[tuple[str, torch.Tensor]]:
    """Tensors of a Hugging Face model, detached. Any other module goes too: then tied weights keep their first name.

    Args:
        model: a model with merged adapters, not sharded; it may be wrapped (see `module_weights`).
        rank, world: with plain data parallelism each rank gives a share, without a collective (see `module_weights`).

    Raises:
        UnmergedAdapterError: the model carries LoRA or other adapters.
        WeightSourceError: the model is sharded, offloaded, quantized or empty.
    """
    model = unwrapped(model)
    tensors = tensors_of(model)
    refuse_sharded(tensors)
    groups = checkpoint_groups(model, tensors)
    sizes = [sum(nbytes_of(tensors[name]) for name in group.sources) for group in groups]
    chosen = [groups[i] for i in share_of(sizes, rank, world)]
    return _entries(model, tensors, chosen)


def _entries(model: nn.Module, tensors: Mapping[str, torch.Tensor], groups: Iterable[Group]) -> Iterator[tuple[str, torch.Tensor]]:
    for group in groups:
        yield from converted(model, group, {name: tensors[name].detach() for name in group.sources}).items()


def checkpoint_groups(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[Group]:
    """What becomes of the `tensors` (`tensors_of` the model, by name) in a checkpoint; only shapes and names are looked at.

    Raises as `hf_weights`.
    """
    _refuse_unsaveable(model, tensors)
    names = _saved_names(model, tensors)
    # Stand-ins without data: what comes out as it went in was only renamed.
    stand_ins = {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta") for name in names}
    saved = _revert(model, stand_ins)
    new_names = {id(tensor): name for name, tensor in saved.items()}
    same = {name: new_names[id(stand_in)] for name, stand_in in stand_ins.items() if id(stand_in) in new_names}
    changed = [name for name in names if name not in same]
    groups = [Group((name,), (new,)) for name, new in same.items()]
    if changed:
        outputs = saved.keys() - same.values()
        groups += _by_layer(model, {name: stand_ins[name] for name in changed}, outputs)
    return groups


def converted(model: nn.Module, group: Group, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Checkpoint tensors of a group by name. `tensors`: the whole tensors of its sources."""
    if not group.converted:
        return {group.names[0]: tensors[group.sources[0]]}
    with torch.no_grad():
        return _revert(model, tensors)


def _by_layer(model: nn.Module, stand_ins: Mapping[str, torch.Tensor], outputs: Collection[str]) -> list[Group]:
    """Groups of one layer each, or a single one where the conversion does not come to the same layer by layer."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in stand_ins.items():
        layer = _LAYER.match(name)
        layers.setdefault(layer[1] if layer else "", {})[name] = tensor
    groups = [Group(tuple(part), tuple(_revert(model, part)), True) for part in layers.values()]
    found = [name for group in groups for name in group.names]
    if len(found) == len(outputs) and set(found) == set(outputs):
        return groups
    return [Group(tuple(stand_ins), tuple(sorted(outputs)), True)]


def _revert(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors in the checkpoint's form: other ones only for a model of transformers 5 or later."""
    revert = getattr(sys.modules.get("transformers.core_model_loading"), "revert_weight_conversion", None)
    if revert is None or not hasattr(model, "_tied_weights_keys"):
        return dict(tensors)
    return revert(model, dict(tensors))


def _refuse_unsaveable(model: Any, names: Iterable[str]) -> None:
    parts = {part for name in names for part in name.split(".")}
    if parts & _ADAPTER_PARTS or hasattr(model, "get_base_model"):
        raise UnmergedAdapterError(
            f"{type(model).__name__} carries adapters ({', '.join(sorted(parts & _ADAPTER_PARTS)) or 'PEFT'}) beside its weights: "
            "merge them first (model.merge_and_unload(), on a copy when training goes on) and give the merged model"
        )
    if getattr(model, "is_quantized", False):
        raise WeightSourceError(f"{type(model).__name__} is quantized: give the weights that are trained, or dequantize() a copy")


def _saved_names(model: Any, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that ``save_pretrained`` keeps, in order."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    declares = hasattr(model, "_tied_weights_keys")
    is_tied = _tied(model)
    kept: set[str] = set()
    for same in same_tensor_names(tensors):
        if len(same) == 1:
            kept.update(same)
        elif declares:
            # What the config does not declare as tied, whoever loads the checkpoint looks for under each name.
            kept.update([name for name in same if not is_tied(name)] or same[:1])
        else:
            kept.add(same[0])
    return [name for name in tensors if name in kept and name not in ignored]


def _tied(model: Any) -> Callable[[str], bool]:
    """Whether a name is declared as tied to another one."""
    expanded = getattr(model, "all_tied_weights_keys", None)  # transformers 5: {tied: source}, empty when the config says no
    if expanded is not None:
        return set(expanded).__contains__
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return lambda name: False
    patterns = [re.compile(key) for key in getattr(model, "_tied_weights_keys", None) or ()]  # transformers 4
    return lambda name: any(pattern.search(name) for pattern in patterns)
