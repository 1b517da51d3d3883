"""Weights of an FSDP2 module (``fully_shard``), HSDP included, and of tensor-parallel DTensors: each rank gives what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# What torch's own distributed checkpoint computes its offsets with.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer_bridge.adapters.hf import Group, checkpoint_groups, converted
from trainer_bridge.adapters.naming import Rename, renamed, tensors_of, unwrapped
from trainer_bridge.errors import WeightSourceError
from trainer_bridge.shards import Entry, Shard


def fsdp_weights(
    module: nn.Module, *, full: bool = False, rename: Rename | None = None, prefix: str = "", replica: int = 0
) -> Iterable[Entry]:
    """Boxes of a sharded module's parameters, without a collective; or whole tensors, gathered one after the other.

    Each element comes from one rank: of mesh dimensions that replicate, the first replica gives. What is no DTensor (buffers,
    parameters that were left out of sharding) comes from the first rank of the mesh. A rank that holds no rows of a tensor gives
    nothing of it. Names are those of `hf_weights`.

    Args:
        module: all its ranks call this at the same point of training. With pipeline parallelism, each stage for its own module.
        full: gather each tensor on all ranks of its mesh; the first rank gives it, the others give nothing and must walk
            through all the same. The first rank may stop early: it takes part in the remaining gathers, and the others come to
            their end. Needs memory for one tensor, or one layer's experts, beside the model.
        rename, prefix: as in `module_weights`, applied to the names of the checkpoint.
        replica: number of this rank's copy where several groups of ranks hold the same module and no mesh says so (plain data
            parallelism around sharded groups). Copies other than 0 give nothing.

    Raises:
        WeightSourceError: nothing is sharded, a parameter is no box of its tensor (`full` can be), or names do not fit.
        UnmergedAdapterError: the model carries LoRA or other adapters.
    """
    module = unwrapped(module)
    tensors = tensors_of(module)
    meshes = {tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor)}
    if not meshes:
        raise WeightSourceError(f"{type(module).__name__} has no DTensor parameters: use module_weights or hf_weights")
    coordinates = [mesh.get_coordinate() for mesh in meshes]
    gives = replica == 0
    is_first = gives and all(at is not None and not any(at) for at in coordinates)
    groups = checkpoint_groups(module, tensors)
    new_names = renamed([name for group in groups for name in group.names], rename, prefix)
    if full:
        return _gathered(module, tensors, groups, new_names, is_first)
    entries: list[Entry] = []
    for group in groups:
        if group.converted:
            raise WeightSourceError(
                f"{group.sources[0]} is {len(group.names)} tensors in a checkpoint ({group.names[0]}, ...), and a box of it is "
                "not a box of those: call with full=True"
            )
        name, tensor = new_names[group.names[0]], tensors[group.sources[0]]
        if isinstance(tensor, DTensor):
            box = _box(name, tensor, is_first)
            if gives and box is not None:
                entries.append((name, box))
        elif is_first:
            entries.append((name, tensor.detach()))
    return entries


def _box(name: str, tensor: DTensor, is_first: bool) -> Shard | None:
    """What this rank gives of a tensor; None when that is nothing."""
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    sharding: dict[int, int] = {}
    """Per dimension of the tensor, into how many parts the mesh dimensions looked at so far cut it."""
    is_replica = False
    # From the right: a strided shard says into how many parts the dimensions to its right cut the tensor before it does.
    for mesh_dim in reversed(range(mesh.ndim)):
        placement = placements[mesh_dim]
        dim = getattr(placement, "dim", None)
        if placement.is_replicate():
            is_replica |= coordinate is not None and coordinate[mesh_dim] > 0
        elif placement.is_partial() or dim is None:
            raise WeightSourceError(f"{name} is placed as {placement}: sum it up (redistribute) before it is sent")
        else:
            parts = sharding.get(dim, 1)
            if getattr(placement, "split_factor", parts) != parts:
                raise WeightSourceError(f"{name} is placed as {placements}: the rows of one rank are no box; call with full=True")
            sharding[dim] = parts * mesh.size(mesh_dim)
    if coordinate is None or is_replica:
        return None
    local = cast(DTensor, tensor.detach()).to_local()
    if not tensor.numel():
        # Nothing to send, but the tensor has to be named by somebody.
        return Shard(local.new_empty(tensor.shape), tuple(tensor.shape), (0,) * tensor.ndim) if is_first else None
    shape, start = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if tuple(local.shape) != tuple(shape):
        raise WeightSourceError(
            f"{name}: this rank holds {list(local.shape)} of {list(tensor.shape)}, its placement {placements} says {list(shape)}: "
            "call with full=True"
        )
    return Shard(local, tuple(tensor.shape), tuple(start)) if local.numel() else None


def _gathered(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], groups: Iterable[Group], new_names: Mapping[str, str], is_first: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    remaining = iter(groups)
    try:
        for group in remaining:
            whole = {name: _whole(tensors[name]) for name in group.sources}
            if is_first:
                for name, tensor in converted(module, group, whole).items():
                    yield new_names[name], tensor
    except GeneratorExit:
        # Whoever took the tensors has given up; the other ranks wait in the gathers that are left.
        for group in remaining:
            for name in group.sources:
                _whole(tensors[name])
        raise


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
