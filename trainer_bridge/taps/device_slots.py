"""Slots in a GPU's memory that processes of one host share (CUDA IPC): taps go from GPU to GPU without a way through the host.

Written, and never run: it needs two processes on GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist


def allocate(sizes: Mapping[int, tuple[int, int]], device: torch.device) -> dict[int, torch.Tensor]:
    """Per chunk ``[slots, bytes]`` uint8, from slots and bytes of each."""
    return {chunk: torch.zeros(shape, dtype=torch.uint8, device=device) for chunk, shape in sizes.items()}


def broadcast(
    owned: Mapping[int, torch.Tensor] | None, sizes: Mapping[int, tuple[int, int]], *, group: dist.ProcessGroup, owner: int
) -> dict[int, torch.Tensor]:
    """The owner's slots, on every rank of a group of host memory. `owned`: on the owner, None elsewhere.

    They live for as long as the owner holds them.
    """
    content = b""
    if owned is not None:
        # Numbers and handles of CUDA, no code: nothing is unpickled.
        shared = {str(chunk): list(tensor.untyped_storage()._share_cuda_()) for chunk, tensor in owned.items()}
        content = msgspec.msgpack.encode(shared)
    length = torch.tensor([len(content)])
    dist.broadcast(length, group=group, group_src=owner)
    packed = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.zeros(int(length), dtype=torch.uint8)
    dist.broadcast(packed, group=group, group_src=owner)
    if owned is not None:
        return dict(owned)
    found: dict[str, list[Any]] = msgspec.msgpack.decode(packed.numpy().tobytes())
    storages = {int(chunk): torch.UntypedStorage._new_shared_cuda(*handle) for chunk, handle in found.items()}
    return {
        chunk: torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, sizes[chunk], (sizes[chunk][1], 1))
        for chunk, storage in storages.items()
    }
