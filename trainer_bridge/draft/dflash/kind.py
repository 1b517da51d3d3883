"""DFlash as a draft type: defaults, checkpoint layout, warm start."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainer_bridge.draft.dflash import start
from trainer_bridge.draft.dflash.model import DFlashDraft
from trainer_bridge.draft.dflash.objective import BlockObjective
from trainer_bridge.draft.interface import DraftType, FrozenTarget, TargetSpec
from trainer_bridge.draft.packing import PackedBatch

MASK_FILE = "mask_embedding.pt"
BLOCK = 8
"""Slots of a block that the checkpoint is made for; how many are used is for training and engine to say."""


class DFlash(DraftType):
    """DFlash (arXiv 2602.06036): a block of mask tokens over three tapped layers, one draft pass for all tokens."""

    name = "dflash"
    engine_method = "dflash"
    architecture = "DFlashDraftModel"
    batch_samples = 8
    anchor_share = 0.12
    default_tokens = 3

    def own_config(self, target: TargetSpec, tap_layers: Sequence[int]) -> dict[str, Any]:
        return {
            "model_type": "qwen3",
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
            # The trunk goes through the layer's projections as the target's states go through the target's.
            gain = layers[f"{prefix}input_layernorm.weight"]
            model.hidden_norm.weight.copy_(gain)
            model.mask_embedding.copy_(target.embedding.float().mean(0))
            for layer in model.each_layer():
                layer.mlp.load_state_dict(
                    {f"{part}.weight": layers[f"{prefix}mlp.{part}.weight"] for part in ("gate_proj", "up_proj", "down_proj")}
                )
                # Nothing attended yet; `meet` makes the first attention.
                layer.self_attn.o_proj.weight.zero_()
                for part in ("q", "k"):
                    if (norm := layers.get(f"{prefix}self_attn.{part}_norm.weight")) is not None:
                        getattr(layer.self_attn, f"{part}_norm").weight.copy_(norm)
                layer.input_layernorm.weight.copy_(gain)
                layer.post_attention_layernorm.weight.copy_(layers[f"{prefix}post_attention_layernorm.weight"])

    def meet(self, model: nn.Module, target: FrozenTarget, batch: PackedBatch) -> bool:
        assert isinstance(model, DFlashDraft)
        if model.each_layer()[0].self_attn.o_proj.weight.any():
            return False
        start.look_back(model, target, batch)
        return True

    def files(self, state: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, bytes]:
        # Where vLLM looks for it; among the weights it is as well.
        content, mask = io.BytesIO(), state["mask_embedding"].detach().clone()
        torch.save({"embedding": mask, "mask_token_id": config["dflash_config"]["mask_token_id"]}, content)
        return {MASK_FILE: content.getvalue()}

    def objective(self, model: nn.Module, target: FrozenTarget, *, passes: int) -> BlockObjective:
        assert isinstance(model, DFlashDraft)
        return BlockObjective(model, target, passes=passes)
