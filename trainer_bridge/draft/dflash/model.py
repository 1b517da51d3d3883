"""The DFlash module, parameter for parameter the public checkpoint layout (`DFlashDraftModel`), with a reduced vocabulary.

A block at position p holds slots 0..W-1 at positions p, p+1, ...: slot 0 is the embedding of the last accepted token, the others
are a learned mask embedding. In every layer a slot attends to the trunk, the target's tapped states at positions below p, and to
all slots of its own block in both directions. Slot j proposes token p + j. The trunk passes through no layer: each layer projects
keys and values of its own from the same combined states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer_bridge.draft.layers import MLP, DraftModel
from trainer_bridge.draft.products import Linear


class Attention(nn.Module):
    """Projections and head norms only: the attention itself is an operator of `specdraft_kernels`."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.q_proj = Linear(hidden, heads * head_dim)
        self.k_proj = Linear(hidden, kv_heads * head_dim)
        self.v_proj = Linear(hidden, kv_heads * head_dim)
        self.o_proj = Linear(heads * head_dim, hidden)
        self.q_norm = nn.RMSNorm(head_dim, eps=eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=eps)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = Attention(hidden, heads, kv_heads, head_dim, eps)
        self.mlp = MLP(hidden, inner)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection, residuals and MLP: ``[S, hidden]`` from the layer's input and ``[S, heads, head_dim]``."""
        hidden = hidden + self.self_attn.o_proj(attended.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DFlashDraft(DraftModel):
    """DFlash draft. ``state_dict`` names are the checkpoint's names; ``mask_embedding`` also lies in a file of its own there.

    The target's embedding is borrowed at call time and is no parameter of the draft.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        hidden = config["hidden_size"]
        eps = config["rms_norm_eps"]
        self.fc = Linear(len(config["dflash_config"]["target_layer_ids"]) * hidden, hidden)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.layers = nn.ModuleList(
            Layer(hidden, config["intermediate_size"], self.heads, self.kv_heads, self.head_dim, eps)
            for _ in range(config["num_hidden_layers"])
        )
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.mask_embedding = nn.Parameter(0.02 * torch.randn(hidden))
        self.add_head(config)

    def each_layer(self) -> list[Layer]:
        """Its layers, from the first."""
        return list(self.layers)  # type: ignore[arg-type]

    def combine(self, taps: torch.Tensor) -> torch.Tensor:
        """Tapped states ``[N, K * hidden]`` to the trunk's states ``[N, hidden]``, one for all layers."""
        return self.hidden_norm(self.fc(taps))

    def slots(self, first: torch.Tensor, width: int) -> torch.Tensor:
        """Inputs ``[B, width, hidden]`` of blocks whose slot 0 has the embeddings ``first [B, hidden]``."""
        masks = self.mask_embedding.to(first.dtype).expand(first.shape[0], width - 1, -1)
        return torch.cat([first[:, None], masks], 1)

    def keys_values(self, layer: Layer, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed and rotated keys, and values, ``[N, Hkv, D]`` of a layer's inputs or of the trunk's states ``[N, hidden]``."""
        attention = layer.self_attn
        keys = attention.k_norm(attention.k_proj(x).view(-1, self.kv_heads, self.head_dim))
        values = attention.v_proj(x).view(-1, self.kv_heads, self.head_dim)
        return self.rotate(keys, positions), values

    def queries(self, layer: Layer, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Normed and rotated queries ``[N, Hq, D]``."""
        attention = layer.self_attn
        return self.rotate(attention.q_norm(attention.q_proj(x).view(-1, self.heads, self.head_dim)), positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Draft logits ``[N, draft_vocab]`` of the last layer's outputs ``[N, hidden]``."""
        return self.lm_head(self.norm(hidden))
