"""Weights of any torch module that each rank holds whole."""

from __future__ import annotations

import torch
from torch import nn

from trainer_bridge.adapters.naming import (
    Rename,
    nbytes_of,
    refuse_sharded,
    renamed,
    same_tensor_names,
    share_of,
    tensors_of,
    unwrapped,
)


def module_weights(
    module: nn.Module, *, rename: Rename | None = None, prefix: str = "", rank: int = 0, world: int = 1
) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers of a module, detached; tied ones once, under their first name.

    Args:
        module: may be wrapped in DistributedDataParallel, torch.compile or activation checkpointing: names are those without.
        rename: a function of the module's name that gives the checkpoint's, or a map that holds only the names that differ.
        prefix: put before every name, after `rename`.
        rank, world: with plain data parallelism each rank gives a share of the tensors, dealt out by bytes. No collective is
            needed: all ranks hold the same shapes, so all come to the same shares.

    Raises:
        WeightSourceError: the module is sharded, offloaded or empty, or names do not fit.
    """
    tensors = tensors_of(unwrapped(module))
    refuse_sharded(tensors)
    names = [same[0] for same in same_tensor_names(tensors)]
    new_names = renamed(names, rename, prefix)
    chosen = share_of([nbytes_of(tensors[name]) for name in names], rank, world)
    return [(new_names[names[i]], tensors[names[i]].detach()) for i in chosen]
