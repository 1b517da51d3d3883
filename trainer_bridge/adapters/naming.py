"""What the adapters share: the tensors of a module by name, tied ones found, names changed, work dealt out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trainer_bridge.errors import WeightSourceError

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Parts of names that torch.compile and activation checkpointing put between."""
_EXTRA_STATE = "_extra_state"


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(module, DistributedDataParallel | DataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of an unwrapped module, in its order; tied ones under each of their names.

    Raises `WeightSourceError` when tensors are not there: sharded by FSDP1 or ZeRO-3, or offloaded.
    """
    for name, part in module.named_modules():
        if type(part).__name__ == "FullyShardedDataParallel":
            raise WeightSourceError(
                f"{name or 'the module'} is sharded by FSDP1, whose flat parameters have no names: use fully_shard and "
                "fsdp_weights, or give the entries of its full state dict"
            )
    found: dict[str, torch.Tensor] = {}
    # The state dict and not the parameters: its hooks put FSDP2's parameters back into shards after a forward pass.
    for key, tensor in module.state_dict(keep_vars=True).items():
        if key.rpartition(".")[2] == _EXTRA_STATE:
            continue
        name = ".".join(part for part in key.split(".") if part not in _WRAPPERS)
        if not isinstance(tensor, torch.Tensor):
            raise WeightSourceError(f"{name} is a {type(tensor).__name__}, no tensor: it cannot be sent")
        if tensor.is_meta:
            raise WeightSourceError(f"{name} is on the meta device, without data: load the model, or take it back from offloading")
        if getattr(tensor, "ds_numel", tensor.numel()) != tensor.numel():
            raise WeightSourceError(f"{name} is partitioned by ZeRO-3: gather it (deepspeed.zero.GatheredParameters) first")
        found[name] = tensor
    if not found:
        raise WeightSourceError(f"{type(module).__name__} has no parameters")
    return found


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor; it is not imported here, which would take its time."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def refuse_sharded(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `WeightSourceError` for DTensors."""
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            raise WeightSourceError(f"{name} is a DTensor, of which this rank holds a part: use fsdp_weights")


def same_tensor_names(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names by tensor: tied weights share one list. In order."""
    names: dict[Hashable, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(_identity(tensor), []).append(name)
    return list(names.values())


def _identity(tensor: torch.Tensor) -> Hashable:
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    if not plain or tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    # Not the object: tying may set `.data`, or hooks of the state dict may have made views.
    place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return (tensor.device, *place, tensor.dtype, tuple(tensor.shape), tensor.stride())


def renamed(names: Sequence[str], rename: Rename | None, prefix: str = "") -> dict[str, str]:
    """New name by old name. Raises `WeightSourceError` when two become one, or the map holds a name that is not there."""
    if isinstance(rename, Mapping):
        # A map that is off by a prefix would silently change nothing.
        if unknown := sorted(rename.keys() - set(names)):
            raise WeightSourceError(
                f"rename holds {len(unknown)} names that the module lacks ({', '.join(unknown[:3])}); it has "
                f"{', '.join(list(names)[:3])}, ...: leave them out, or give a function"
            )
        changed = {name: rename.get(name, name) for name in names}
    else:
        changed = {name: rename(name) if rename else name for name in names}
    origin: dict[str, str] = {}
    for name, new in changed.items():
        if not isinstance(new, str) or not new:
            raise WeightSourceError(f"rename makes {new!r} of {name}: it needs to give a name for every tensor")
        if new in origin:
            raise WeightSourceError(f"{origin[new]} and {name} would both be sent as {new}: rename one")
        origin[new] = name
    return {name: prefix + new for name, new in changed.items()}


def share_of(sizes: Sequence[int], rank: int, world: int) -> list[int]:
    """Indexes of the items that are this rank's: the largest first, each to whom has least. The same on all ranks.

    >>> [share_of([10, 70, 30, 40, 10], rank, 2) for rank in (0, 1)]
    [[0, 1], [2, 3, 4]]
    """
    if not 0 <= rank < world:
        raise WeightSourceError(f"rank {rank} of a world of {world}: ranks are counted from 0")
    loads, mine = [0] * world, []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        taker = loads.index(min(loads))
        loads[taker] += sizes[index]
        if taker == rank:
            mine.append(index)
    return sorted(mine)


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a whole tensor."""
    return tensor.numel() * tensor.element_size()
