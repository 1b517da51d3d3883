"""From named tensors to pieces on the wire: names, shapes and dtypes held against what the engines take."""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Iterator

import torch

from trainer_bridge import wire
from trainer_bridge.carriers.sending import TORCH_DTYPES, Item
from trainer_bridge.config import BridgeConfig
from trainer_bridge.errors import PlanError
from trainer_bridge.plan import ITEM_BYTES, Plan, place, split, wire_dtype
from trainer_bridge.shards import Shard

logger = logging.getLogger(__name__)

_WIDENS = {
    ("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "float64"), ("float16", "float64"), ("float32", "float64"),
}  # fmt: skip
"""Casts that lose nothing."""


class Pieces:
    """Cuts tensors into pieces, each looked up by name once."""

    def __init__(self, plan: Plan, config: BridgeConfig) -> None:
        self._plan, self._config = plan, config
        self._names = [{spec.name: t for t, spec in enumerate(plan.specs(model))} for model in (0, 1)]
        self.casts: Counter[str] = Counter()
        """Tensors cast on the way, by ``from->to``."""
        self.ignored: list[str] = []
        """Tensors that the engines take and do not need."""

    def of(self, model: int, name: str, entry: torch.Tensor | Shard) -> Iterator[Item]:
        """Pieces of one tensor, none larger than a bucket. Raises `PlanError` for what the engines do not take."""
        if model == wire.TARGET and name in self._plan.ignored:
            logger.warning("%s is not needed: %s", name, self._plan.ignored[name])
            self.ignored.append(name)
            return
        index = self._names[model].get(name)
        if index is None:
            raise self._unknown(model, name)
        spec = self._plan.specs(model)[index]
        shard = entry if isinstance(entry, Shard) else Shard(tensor=entry, full_shape=tuple(entry.shape), start=(0,) * entry.ndim)
        if shard.full_shape != spec.shape:
            raise PlanError(f"{name} has shape {list(shard.full_shape)}, the engine takes {list(spec.shape)}")
        chosen = (self._config.dtype, self._config.draft_dtype)[model]
        dtype = wire_dtype(spec, chosen)
        self._check_cast(name, str(shard.tensor.dtype).removeprefix("torch."), dtype)
        if not shard.tensor.numel() and spec.shape != shard.tensor.shape:
            return
        tensor = shard.tensor.detach()
        for start, shape in split(tuple(tensor.shape), itemsize=ITEM_BYTES[dtype], bucket_bytes=self._config.bucket_bytes):
            whole_start = tuple(s + o for s, o in zip(start, shard.start, strict=True))
            yield Item(model=model, tensor=index, start=whole_start, source=tensor[place(start, shape)], dtype=TORCH_DTYPES[dtype])

    def _unknown(self, model: int, name: str) -> PlanError:
        known = self._names[model]
        which = wire.MODELS[model]
        if not known:
            return PlanError(f"{name}: the engines take no {which}")
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return PlanError(f"{name} is no tensor of the {which} that the engines serve ({len(known)} are){hint}")

    def _check_cast(self, name: str, source: str, target: str) -> None:
        if source == target:
            return
        if not self._config.cast and (source, target) not in _WIDENS:
            raise PlanError(
                f"{name} is {source}, on the wire it would be {target}: cast it, set dtype={source!r}, or allow it (cast=True)"
            )
        self.casts[f"{source}->{target}"] += 1
