"""What vLLM's modules for drafts do differently from each other when their weights are replaced, by speculative method.

A method that is not listed is served by a module whose names are the checkpoint's under ``model.`` and that derives nothing
from its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from vllm_specdraft.shards import local_weight


class Method:
    """The plain case."""

    def checkpoint_name(self, served: str) -> str:
        """Checkpoint name of a tensor that the engine's module calls `served`."""
        name = served.removeprefix("model.")
        return "d2t" if name == "draft_id_to_target_id" else name

    def load(self, model: Any, state: Mapping[str, torch.Tensor]) -> None:
        """Give the module its tensors while vLLM's layerwise reload is open."""
        model.load_weights(iter(state.items()))

    def derive(self, model: Any, state: Mapping[str, torch.Tensor]) -> None:
        """Make again what the module made from its weights, once all of them are in place."""

    def off_by(self, model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """By name, how far what was derived is from what `state` says, as a share of the largest value."""
        return {}


class Eagle3Method(Method):
    """``LlamaForCausalLMEagle3``: its one layer has a name of its own in checkpoints."""

    def checkpoint_name(self, served: str) -> str:
        return super().checkpoint_name(served).replace("layers.0.", "midlayer.")


class DFlashMethod(Method):
    """``DFlashDraftModel``: all layers' projections of the trunk are one matrix beside the layers', and the mask embedding is read
    from the directory that the engine was started with, whatever is loaded."""

    def load(self, model: Any, state: Mapping[str, torch.Tensor]) -> None:
        # The matrix would be cut from weights that the reload has packed away by then.
        with (
            _replaced(model, "_read_mask_embedding", lambda: state["mask_embedding"]),
            _replaced(model.model, "_build_fused_kv_buffers", lambda: None),
        ):
            super().load(model, state)

    def derive(self, model: Any, state: Mapping[str, torch.Tensor]) -> None:
        inner = model.model
        inner._hidden_norm_weight = inner.hidden_norm.weight.data
        inner._k_norm_weights = torch.stack([layer.self_attn.k_norm.weight.data for layer in inner.layers]).contiguous()
        inner._fused_kv_weight = _trunk_projection(inner, state).to(inner._fused_kv_weight)

    def off_by(self, model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, float]:
        inner, layers = model.model, len(model.model.layers)
        projection, norm = _trunk_projection(inner, state), state["hidden_norm.weight"]
        states = torch.randn(3, norm.shape[0], generator=torch.Generator().manual_seed(0)).to(inner._fused_kv_weight)
        normed = F.rms_norm(states, norm.shape, norm.to(states), inner._rms_norm_eps)
        wanted = (normed @ projection.to(states).T).view(3, layers, 2, inner._num_kv_heads, inner._head_dim).permute(2, 1, 0, 3, 4)
        found = inner._project_context_kv(states, 3, layers, inner._num_kv_heads, inner._head_dim)
        norms = torch.stack([state[f"layers.{i}.self_attn.k_norm.weight"] for i in range(layers)])
        return {
            "the trunk's keys and values": max(_gap(a, b) for a, b in zip(found, wanted, strict=True)),
            "the trunk's key norms": _gap(inner._k_norm_weights, norms.to(inner._k_norm_weights)),
        }


_METHODS: dict[str, Method] = {"eagle3": Eagle3Method(), "dflash": DFlashMethod()}


def of(method: str) -> Method:
    """What is known of one of vLLM's speculative methods."""
    return _METHODS.get(method, Method())


def _trunk_projection(inner: Any, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """``[layers * 2 * kv_size, hidden]``: this rank's key and value rows of every layer."""
    parts = []
    for index, layer in enumerate(inner.layers):
        attention = layer.self_attn
        whole = [state[f"layers.{index}.self_attn.{part}_proj.weight"] for part in ("q", "k", "v")]
        parts.append(local_weight(attention.qkv_proj, whole)[attention.q_size :])
    return torch.cat(parts)


def _gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of this one object, in front of its class's, for a while."""
    vars(owner)[name] = value
    try:
        yield
    finally:
        vars(owner).pop(name, None)
