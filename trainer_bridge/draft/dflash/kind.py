"""DFlash as a draft type: defaults, checkpoint config, warm start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainer_bridge.draft.dflash.model import DFlashDraft
from trainer_bridge.draft.dflash.objective import BlockObjective
from trainer_bridge.draft.interface import DraftType, FrozenTarget, TargetSpec
from trainer_bridge.errors import ConfigError

ARCHITECTURE = "DFlashDraftModel"
BLOCK = 8
"""Slots of a block that the checkpoint is made for; how many are used is for training and engine to say."""


class DFlash(DraftType):
    """DFlash (arXiv 2602.06036): a block of mask tokens over three tapped layers, one draft pass for all tokens."""

    name = "dflash"
    engine_method = "dflash"

    def configure(self, target: TargetSpec, *, tap_layers: Sequence[int], draft_vocab_size: int) -> dict[str, Any]:
        outside = [layer for layer in tap_layers if not 0 < layer < target.num_layers]
        if not tap_layers or outside or list(tap_layers) != sorted(set(tap_layers)):
            raise ConfigError(f"tap layers {tuple(tap_layers)}: needs distinct ascending layers in 1..{target.num_layers - 1}")
        if not 0 < draft_vocab_size < target.vocab_size:
            raise ConfigError(
                f"draft vocabulary of {draft_vocab_size} tokens; needs 1..{target.vocab_size - 1}, below the target's"
            )
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "dtype": "float32",
            "hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": target.num_heads,
            "num_key_value_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "hidden_act": "silu",
            "vocab_size": target.vocab_size,
            "draft_vocab_size": draft_vocab_size,
            "rms_norm_eps": target.rms_norm_eps,
            "rope_theta": target.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": target.rope_theta, **target.rope_scaling},
            "max_position_embeddings": target.max_positions,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "block_size": BLOCK,
            # The last id of a vocabulary is rarely anything that a model says; its embedding is not used.
            "dflash_config": {"mask_token_id": target.vocab_size - 1, "target_layer_ids": [layer - 1 for layer in tap_layers]},
        }

    def tap_layers(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        # Named by their outputs there, by their inputs here.
        return tuple(layer + 1 for layer in config["dflash_config"]["target_layer_ids"])

    def build(self, config: Mapping[str, Any]) -> DFlashDraft:
        return DFlashDraft(config)

    def warm_start(self, model: nn.Module, target: FrozenTarget, layers: Mapping[str, torch.Tensor]) -> None:
        assert isinstance(model, DFlashDraft)
        last = max(int(name.split(".")[2]) for name in layers if name.startswith("model.layers."))
        prefix = f"model.layers.{last}."
        hidden = model.fc.out_features
        with torch.no_grad():
            model.lm_head.weight.copy_(target.head[model.kept()])
            model.norm.weight.copy_(layers["model.norm.weight"])
            # The highest tap passes through; the lower ones start as small corrections.
            model.fc.weight[:, -hidden:].add_(torch.eye(hidden))
            model.mask_embedding.copy_(target.embedding.float().mean(0))
            for layer in model.each_layer():
                layer.mlp.load_state_dict(
                    {f"{part}.weight": layers[f"{prefix}mlp.{part}.weight"] for part in ("gate_proj", "up_proj", "down_proj")}
                )
                for part in ("q", "k", "v", "o"):
                    getattr(layer.self_attn, f"{part}_proj").weight.copy_(layers[f"{prefix}self_attn.{part}_proj.weight"])
                layer.input_layernorm.weight.copy_(layers[f"{prefix}input_layernorm.weight"])
                layer.post_attention_layernorm.weight.copy_(layers[f"{prefix}post_attention_layernorm.weight"])

    def objective(self, model: nn.Module, target: FrozenTarget, *, passes: int) -> BlockObjective:
        assert isinstance(model, DFlashDraft)
        return BlockObjective(model, target, passes=passes)

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return ARCHITECTURE in (config.get("architectures") or ())
