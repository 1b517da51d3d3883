"""A part of a checkpoint tensor that one rank of a trainer holds: a box of the whole tensor.

The rows of a tensor that two tensor-parallel ranks cut in the middle:

>>> import torch
>>> rows = torch.arange(6.0).reshape(3, 2)
>>> shard_of(rows, index=1, count=2)
Shard(shape=(3, 2), start=(3, 0), full_shape=(6, 2))

Together the boxes of all ranks must cover the tensor, each element once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from trainer_bridge.errors import ShardError


@dataclass(frozen=True, eq=False)
class Shard:
    """A box of a whole tensor. Raises `ShardError` when it is not inside it."""

    tensor: torch.Tensor
    """The elements of the box, on any device, in any memory layout."""
    full_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    """Index of the box's first element in the whole tensor."""

    def __post_init__(self) -> None:
        shape, whole, start = tuple(self.tensor.shape), tuple(self.full_shape), tuple(self.start)
        if not len(shape) == len(whole) == len(start):
            raise ShardError(f"a box {list(shape)} at {list(start)} of a tensor {list(whole)}: all three need as many dimensions")
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in (*whole, *start)):
            raise ShardError(f"start {list(start)} and shape {list(whole)} of the whole tensor need to be integers of 0 or more")
        if any(begin + size > length for begin, size, length in zip(start, shape, whole, strict=True)):
            raise ShardError(f"a box {list(shape)} at {list(start)} reaches beyond its tensor {list(whole)}")
        object.__setattr__(self, "full_shape", whole)
        object.__setattr__(self, "start", start)

    def __repr__(self) -> str:
        return f"Shard(shape={tuple(self.tensor.shape)}, start={self.start}, full_shape={self.full_shape})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(self.tensor.shape)


Entry: TypeAlias = tuple[str, torch.Tensor | Shard]
"""Checkpoint name, and the whole tensor or a box of it: what adapters give and the publisher takes."""


def shard_of(tensor: torch.Tensor, *, index: int, count: int, dim: int = 0, size: int | None = None) -> Shard:
    """Box of a rank that holds part `index` of `count` parts along one dimension.

    Args:
        tensor: what the rank holds, unpadded.
        dim: the dimension that was cut; negative ones count from the end.
        size: length of the whole tensor along it. When it is given, the parts are those of `torch.chunk`: all but the last
            ones have ``ceil(size / count)`` rows. By default all parts are as large as this one.

    Raises:
        ShardError: the tensor is not that part.
    """
    if not 0 <= index < count:
        raise ShardError(f"part {index} of {count}: parts are counted from 0")
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ShardError(f"cut along dimension {dim}: the tensor has {tensor.ndim}")
    dim %= tensor.ndim
    rows = tensor.shape[dim]
    whole = rows * count if size is None else size
    step = rows if size is None else -(-size // count)
    begin = min(index * step, whole)
    if rows != min(step, whole - begin):
        raise ShardError(
            f"part {index} of {count} of {whole} rows has {min(step, whole - begin)} rows, the tensor has {rows}: "
            "make a Shard with the start that it really has"
        )
    full_shape, start = list(tensor.shape), [0] * tensor.ndim
    full_shape[dim], start[dim] = whole, begin
    return Shard(tensor, tuple(full_shape), tuple(start))
