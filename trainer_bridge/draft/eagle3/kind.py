"""EAGLE-3 as a draft type: defaults, checkpoint config, warm start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainer_bridge.draft.eagle3.model import Eagle3Draft
from trainer_bridge.draft.eagle3.objective import TrainingTimeTest
from trainer_bridge.draft.interface import DraftType, FrozenTarget, TargetSpec


class Eagle3(DraftType):
    """EAGLE-3 (arXiv 2503.01840): one decoder layer over three tapped layers, one draft pass per token."""

    name = "eagle3"
    engine_method = "eagle3"
    architecture = "LlamaForCausalLMEagle3"
    default_tokens = 3

    def own_config(self, target: TargetSpec, tap_layers: Sequence[int]) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "eagle_aux_hidden_state_layer_ids": list(tap_layers),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(tap_layers), "use_aux_hidden_state": True},
        }

    def tap_layers(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(config["eagle_aux_hidden_state_layer_ids"])

    def build(self, config: Mapping[str, Any]) -> Eagle3Draft:
        return Eagle3Draft(config)

    def warm_start(self, model: nn.Module, target: FrozenTarget, layers: Mapping[str, torch.Tensor]) -> None:
        assert isinstance(model, Eagle3Draft)
        last = max(int(name.split(".")[2]) for name in layers if name.startswith("model.layers."))
        prefix = f"model.layers.{last}."
        hidden = model.fc.out_features
        mid = model.midlayer
        with torch.no_grad():
            model.lm_head.weight.copy_(target.head[model.kept()])
            model.norm.weight.copy_(layers["model.norm.weight"])
            mid.mlp.load_state_dict(
                {f"{part}.weight": layers[f"{prefix}mlp.{part}.weight"] for part in ("gate_proj", "up_proj", "down_proj")}
            )
            gain = layers[f"{prefix}input_layernorm.weight"]
            for part in ("q", "k", "v"):
                weight = layers[f"{prefix}self_attn.{part}_proj.weight"]
                if (norm := layers.get(f"{prefix}self_attn.{part}_norm.weight")) is not None:
                    weight = _with_norm(weight, norm, gain)
                # The target's layer reads hidden states only: its weights go to the hidden half of the input.
                getattr(mid.self_attn, f"{part}_proj").weight[:, hidden:].copy_(weight)
            mid.self_attn.o_proj.weight.copy_(layers[f"{prefix}self_attn.o_proj.weight"])
            mid.hidden_norm.weight.copy_(gain)
            mid.post_attention_layernorm.weight.copy_(layers[f"{prefix}post_attention_layernorm.weight"])
            # The highest tap passes through; the lower ones start as small corrections.
            model.fc.weight[:, -hidden:].add_(torch.eye(hidden))

    def objective(self, model: nn.Module, target: FrozenTarget, *, passes: int) -> TrainingTimeTest:
        assert isinstance(model, Eagle3Draft)
        return TrainingTimeTest(model, target, passes=passes)


def _with_norm(weight: torch.Tensor, norm: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """A projection whose heads have about the size that a norm after it would give them; the draft's layer has no such norm.

    Args:
        weight: ``[heads * head_dim, hidden]``.
        norm: ``[head_dim]``: weight of the root-mean-square norm over each head's output.
        gain: ``[hidden]``: weight of the norm before the projection, whose inputs are taken for independent of each other.
    """
    heads = weight.float().view(-1, norm.shape[0], weight.shape[1])
    size = (heads * gain.float()).square().sum(-1).mean(1, keepdim=True).sqrt()
    return (heads * (norm.float() / size.clamp_min(1e-12))[..., None]).view_as(weight)
