"""Modules that draft types share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer_bridge.draft import rope, vocab
from trainer_bridge.draft.products import Linear


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


class DraftModel(nn.Module):
    """What all types have: the target's head shapes and rotary embedding, and a head over a reduced vocabulary."""

    d2t: torch.Tensor
    t2d: torch.Tensor
    inverse_frequency: torch.Tensor

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.vocab_size, self.draft_vocab_size = config["vocab_size"], config["draft_vocab_size"]

    def add_head(self, config: Mapping[str, Any]) -> None:
        """Make head, vocabulary maps and rotary frequencies, once all else is made."""
        self.lm_head = Linear(config["hidden_size"], self.draft_vocab_size)
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

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of ``[N, heads, D]`` at integer positions ``[N]`` (halves layout, as Llama's)."""
        angle = positions[:, None].double() * self.inverse_frequency.double()
        cos, sin = (self._rotary_factor * part.to(x.dtype)[:, None, :] for part in (angle.cos(), angle.sin()))
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
