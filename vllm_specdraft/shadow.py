"""A second body for a served model: modules of its own, into which vLLM loads and packs weights while the first ones serve.

vLLM's layerwise reload works on a module tree in place. It is given this one: every module that has parameters, and those on
the way to them, as new objects around new tensors. Modules without parameters (attention with its KV cache, which the engine
finds by name, and rotary tables) are left out, so the reload cannot touch them.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

Entries = list[tuple[nn.Module, dict[str, Any]]]
"""Served modules, each with attributes (names in its ``__dict__``) to be put into it; `ABSENT` takes an attribute out."""
ABSENT = object()

_OWN = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
"""Containers of a module that a twin has to itself."""


class Shadow:
    """The twin of one served model. Call `dissolve` in the end: without it vLLM's books keep the twin alive for ever."""

    def __init__(self, served: nn.Module) -> None:
        self._twins: dict[int, nn.Module | None] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._pairs: list[tuple[nn.Module, nn.Module]] = []
        root = self._twin_of(served)
        if root is None:
            raise ValueError(f"{type(served).__name__} has no parameters")
        self.root: Any = root
        try:
            for original, twin in self._pairs:
                self._record(original, twin)
        except BaseException:
            self.dissolve()
            raise

    def _twin_of(self, module: nn.Module) -> nn.Module | None:
        """The module's twin, always the same one; None when neither it nor anything below it has parameters."""
        if id(module) in self._twins:
            return self._twins[id(module)]
        below = {name: self._twin_of(child) for name, child in module._modules.items() if child is not None}
        children = {name: twin for name, twin in below.items() if twin is not None}
        twin = None
        if children or any(parameter is not None for parameter in module._parameters.values()):
            # Not through the class: its constructor builds layers, and registers them with the engine.
            twin = object.__new__(type(module))
            vars(twin).update(
                vars(module),
                _modules=children,
                _parameters={name: self._tensor(value, keep=False) for name, value in module._parameters.items()},
                _buffers={name: self._tensor(value, keep=True) for name, value in module._buffers.items()},
                _non_persistent_buffers_set=set(module._non_persistent_buffers_set),
            )
            self._pairs.append((module, twin))
        self._twins[id(module)] = twin
        return twin

    def _tensor(self, tensor: torch.Tensor | None, *, keep: bool) -> torch.Tensor | None:
        """A tensor of the same kind for the twin, always the same one (tied weights stay tied); with the values, or any."""
        if tensor is None:
            return None
        if id(tensor) not in self._tensors:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            if keep:
                twin.copy_(tensor)
            twin.__class__ = tensor.__class__
            # Loaders among the attributes stay bound to the served module: this tensor will be served by it.
            twin.__dict__ = dict(tensor.__dict__)
            self._tensors[id(tensor)] = twin
        return self._tensors[id(tensor)]

    def _record(self, original: nn.Module, twin: nn.Module) -> None:
        """What vLLM knows of the original as it was before its weights were packed, for the twin."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info

        known = LAYERWISE_INFO.get(original)
        if known is None:
            raise LookupError(f"vLLM kept no record of how {type(original).__name__} looked before its weights were packed")
        parameters, buffers = ({name: self._as_recorded(one) for name, one in group.items()} for group in known.restore_metadata)
        if isinstance(original, VocabParallelEmbedding) and "weight" in parameters:
            # Rows that only pad the vocabulary are never loaded. Told so, vLLM packs the layer as soon as the others are there.
            rows = original.num_org_embeddings_per_partition
            parameters["weight"].__dict__["weight_loader_numel"] = rows * original.embedding_dim
        info = get_layerwise_info(twin)
        info.restore_metadata, info.restore_device = (parameters, buffers), known.restore_device

    def _as_recorded(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a record on the meta device; the reload writes into the attributes of what it is given."""
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        copy.__class__ = tensor.__class__
        copy.__dict__ = {key: self._rebound(value) for key, value in tensor.__dict__.items()}
        return copy

    def _rebound(self, value: Any) -> Any:
        # An earlier reload of the served modules leaves its wrappers in their records.
        while getattr(value, "__name__", None) == "online_process_loader":
            value = value.__wrapped__
        if isinstance(value, MethodType) and (twin := self._twins.get(id(value.__self__))) is not None:
            return value.__func__.__get__(twin)
        return value

    def load(self, name: str, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load all tensors of one module, by names that the model's own loader takes; vLLM packs it when it has the last one.

        Returns:
            Names of the served parameters that were loaded into.
        """
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        # One module at a time: for all of them together it takes as long as to pack the largest one.
        initialize_layerwise_reload(nn.ModuleList([self.module(name)]))
        return self.root.load_weights(iter(weights))

    def module(self, name: str) -> Any:
        """The twin of the served module of this name."""
        return self.root.get_submodule(name)

    def packed(self, name: str) -> bool:
        """Whether everything was loaded into this module and it serves by now."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        return not get_layerwise_info(self.module(name)).can_load()

    def finish(self, model_config: Any) -> None:
        """End vLLM's reload on the twin."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.root, model_config)

    def entries(self) -> Entries:
        """What has to be put into the served modules so that they serve the twin's weights."""
        found: Entries = []
        for original, twin in self._pairs:
            if all(parameter is None for parameter in original._parameters.values()):
                continue
            before = vars(original)
            values = {k: v for k, v in vars(twin).items() if k not in _OWN and v is not before.get(k, ABSENT)}
            values["_parameters"] = dict(twin._parameters)
            if twin._buffers:
                values["_buffers"] = dict(twin._buffers)
            found.append((original, values))
        return found

    def dissolve(self) -> None:
        """Free the twin. What `entries` gave out lives on; nothing else of it does."""
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        for _, twin in self._pairs:
            # While it loads, the twin, its tensors and vLLM's record of it refer to each other.
            if (info := LAYERWISE_INFO.pop(twin, None)) is not None:
                info.reset()
                info.restore_metadata = ({}, {})
            vars(twin).clear()
        self._pairs.clear()
        self._twins.clear()
        self._tensors.clear()
