"""Puts the entries of adapters together again: every element of every tensor has to come exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from trainer_bridge.shards import Entry, Shard


def put_together(entries: Iterable[Entry]) -> dict[str, torch.Tensor]:
    """Whole tensors by name. Fails when an element comes twice or never."""
    whole: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    for name, entry in entries:
        box = entry if isinstance(entry, Shard) else Shard(entry, tuple(entry.shape), (0,) * entry.ndim)
        if name not in whole:
            whole[name] = torch.zeros(box.full_shape, dtype=box.tensor.dtype)
            times[name] = torch.zeros(box.full_shape, dtype=torch.int64)
        assert tuple(whole[name].shape) == box.full_shape, f"{name}: two shapes"
        place = tuple(slice(begin, begin + size) for begin, size in zip(box.start, box.shape, strict=True))
        whole[name][place] = box.tensor
        times[name][place] += 1
    for name, count in times.items():
        assert bool((count == 1).all()), f"{name}: elements came {count.min()} to {count.max()} times"
    return whole


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Equal names, dtypes, shapes and bits."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor.detach()), name
