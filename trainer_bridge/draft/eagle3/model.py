"""The EAGLE-3 module, parameter for parameter the public checkpoint layout (`LlamaForCausalLMEagle3`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer_bridge.draft.layers import MLP, DraftModel
from trainer_bridge.draft.products import Linear


class Attention(nn.Module):
    """Projections only: the attention itself is an operator of `specdraft_kernels`."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.q_proj = Linear(2 * hidden, heads * head_dim)
        self.k_proj = Linear(2 * hidden, kv_heads * head_dim)
        self.v_proj = Linear(2 * hidden, kv_heads * head_dim)
        self.o_proj = Linear(heads * head_dim, hidden)


class MidLayer(nn.Module):
    """The one decoder layer; its attention reads ``[normed embedding | normed hidden]``, in this order."""

    def __init__(self, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = Attention(hidden, heads, kv_heads, head_dim)
        self.mlp = MLP(hidden, inner)


class Eagle3Draft(DraftModel):
    """EAGLE-3 draft with a reduced vocabulary. ``state_dict`` names are the checkpoint's names.

    The target's embedding is borrowed at call time and is no parameter of the draft.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        hidden = config["hidden_size"]
        eps = config["rms_norm_eps"]
        self.fc = Linear(len(config["eagle_aux_hidden_state_layer_ids"]) * hidden, hidden)
        self.midlayer = MidLayer(hidden, config["intermediate_size"], self.heads, self.kv_heads, self.head_dim, eps)
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.add_head(config)

    def combine(self, taps: torch.Tensor) -> torch.Tensor:
        """Tapped states ``[N, K * hidden]`` to the draft's first hidden states ``[N, hidden]``."""
        return self.fc(taps)

    def layer_input(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` twice to the attention's input ``[..., 2 * hidden]``."""
        return torch.cat([self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(hidden)], -1)

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values ``[N, Hkv, D]`` of layer inputs ``[N, 2 * hidden]``."""
        attention = self.midlayer.self_attn
        keys = attention.k_proj(x).view(-1, self.kv_heads, self.head_dim)
        return self.rotate(keys, positions), attention.v_proj(x).view(-1, self.kv_heads, self.head_dim)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotated queries ``[A, Hq, D]`` of layer inputs ``[A, 2 * hidden]``."""
        return self.rotate(self.midlayer.self_attn.q_proj(x).view(-1, self.heads, self.head_dim), positions)

    def finish_layer(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection, residuals and MLP: ``[A, hidden]`` before the final norm."""
        hidden = hidden + self.midlayer.self_attn.o_proj(attended.flatten(1))
        return hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Draft logits ``[A, draft_vocab]`` of hidden states ``[A, hidden]`` before the final norm."""
        return self.lm_head(self.norm(hidden))
