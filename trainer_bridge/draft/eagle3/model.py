"""The EAGLE-3 module, parameter for parameter the public checkpoint layout (`LlamaForCausalLMEagle3`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer_bridge.draft import rope, vocab
from trainer_bridge.draft.products import Linear


class Attention(nn.Module):
    """Projections only: the attention itself is an operator of `specdraft_kernels`."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.q_proj = Linear(2 * hidden, heads * head_dim)
        self.k_proj = Linear(2 * hidden, kv_heads * head_dim)
        self.v_proj = Linear(2 * hidden, kv_heads * head_dim)
        self.o_proj = Linear(heads * head_dim, hidden)


class MLP(nn.Module):
    """Gated SiLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, inner)
        self.up_proj = Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` to ``[..., hidden]``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The one decoder layer; its attention reads ``[normed embedding | normed hidden]``, in this order."""

    def __init__(self, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = Attention(hidden, heads, kv_heads, head_dim)
        self.mlp = MLP(hidden, inner)


class Eagle3Draft(nn.Module):
    """EAGLE-3 draft with a reduced vocabulary. ``state_dict`` names are the checkpoint's names.

    The target's embedding is borrowed at call time and is no parameter of the draft.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor
    inverse_frequency: torch.Tensor

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.vocab_size, self.draft_vocab_size = config["vocab_size"], config["draft_vocab_size"]
        eps = config["rms_norm_eps"]
        self.fc = Linear(len(config["eagle_aux_hidden_state_layer_ids"]) * hidden, hidden)
        self.midlayer = MidLayer(hidden, config["intermediate_size"], self.heads, self.kv_heads, self.head_dim, eps)
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.lm_head = Linear(hidden, self.draft_vocab_size)
        self.register_buffer("d2t", torch.zeros(self.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(self.vocab_size, dtype=torch.bool))
        frequency, self._rotary_factor = rope.frequencies(rope.parameters_of(config), self.head_dim)
        self.register_buffer("inverse_frequency", frequency, persistent=False)

    def set_vocabulary(self, kept: torch.Tensor) -> None:
        """Write both maps for the distinct target ids `kept` ``[draft_vocab]``."""
        d2t, t2d = vocab.maps_of(kept, self.vocab_size)
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    def replace_tokens(self, rows: torch.Tensor, ids: torch.Tensor, head: torch.Tensor) -> None:
        """Let draft tokens `rows` ``[R]`` stand for target ids `ids` ``[R]`` from now on, with the target's head rows."""
        kept = self.kept()
        self.t2d[kept[rows]] = False
        self.t2d[ids] = True
        self.d2t[rows] = ids - rows
        with torch.no_grad():
            self.lm_head.weight[rows] = head[ids].to(self.lm_head.weight.dtype)

    def kept(self) -> torch.Tensor:
        """Target ids ``[draft_vocab]`` of the draft's tokens."""
        return vocab.kept_of(self.d2t, self.t2d)

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

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of ``[N, heads, D]`` at integer positions ``[N]`` (halves layout, as Llama's)."""
        angle = positions[:, None].double() * self.inverse_frequency.double()
        cos, sin = (self._rotary_factor * part.to(x.dtype)[:, None, :] for part in (angle.cos(), angle.sin()))
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
