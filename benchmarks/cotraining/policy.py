"""A small decoder in plain torch that runs whole, in stages, and over context-parallel ranks, on packed ragged documents.

Its attention is the operator of `specdraft_kernels` without branches: every row sees its document up to itself, wherever the rows
lie. Parameters depend on the layer alone, so every layout holds the same model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from specdraft_kernels.branch_attention import branch_attention
from specdraft_kernels.zigzag_ring import Exchange, Trunk, ZigzagLayout
from torch import nn

from trainer_bridge.cotrain.microbatch import Microbatch


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of the policy."""

    layers: int = 8
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 61
    dtype: torch.dtype = torch.float64


class Place:
    """Where a context-parallel rank's rows of each microbatch lie."""

    def __init__(self, microbatches: Sequence[Microbatch], exchange: Exchange | None) -> None:
        self._microbatches, self._exchange = microbatches, exchange
        ranks = 1 if exchange is None else exchange.ranks
        self._layouts = [ZigzagLayout(microbatch.lengths, ranks) for microbatch in microbatches]

    def split(self, microbatch: int, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of ``[tokens, ...]``."""
        if self._exchange is None:
            return whole
        return self._layouts[microbatch].split(whole, self._exchange.rank)

    def positions(self, microbatch: int) -> torch.Tensor:
        """``[rows]``"""
        if self._exchange is None:
            return self._microbatches[microbatch].positions
        return self._layouts[microbatch].positions(self._exchange.rank)

    def attend(self, microbatch: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention within documents, ``[rows, heads, size]``."""
        none = k.new_empty(q.shape[0], 0, *k.shape[1:])
        if self._exchange is None:
            lengths = torch.tensor([0, *self._microbatches[microbatch].lengths])
            return branch_attention(q, k, v, none, none, lengths.cumsum(0))[0]
        return Trunk(k, v, self._layouts[microbatch], self._exchange).branch_attention(q, none, none)[0]


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        self.shape, self.size = shape, shape.hidden // shape.heads
        self.before, self.between = (nn.RMSNorm(shape.hidden, dtype=shape.dtype) for _ in range(2))
        linear = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False, dtype=shape.dtype)  # noqa: E731
        self.q, self.o = linear(shape.hidden, shape.hidden), linear(shape.hidden, shape.hidden)
        self.k, self.v = (linear(shape.hidden, shape.kv_heads * self.size) for _ in range(2))
        self.up, self.down = linear(shape.hidden, 2 * shape.hidden), linear(2 * shape.hidden, shape.hidden)
        _seed(self, number)

    def forward(self, hidden: torch.Tensor, place: Place, microbatch: int) -> torch.Tensor:
        """``[rows, hidden]`` to the same."""
        x = self.before(hidden)
        positions = place.positions(microbatch)
        q = _rotate(self.q(x).unflatten(1, (self.shape.heads, self.size)), positions)
        k = _rotate(self.k(x).unflatten(1, (self.shape.kv_heads, self.size)), positions)
        v = self.v(x).unflatten(1, (self.shape.kv_heads, self.size))
        hidden = hidden + self.o(place.attend(microbatch, q, k, v).flatten(1))
        return hidden + self.down(F.silu(self.up(self.between(hidden))))


class Stage(nn.Module):
    """Consecutive layers of the policy, with the embedding before the first and norm and head behind the last."""

    def __init__(self, shape: Shape, layers: range) -> None:
        super().__init__()
        self.shape, self.place = shape, Place([], None)
        self.embedding = nn.Embedding(shape.vocab, shape.hidden, dtype=shape.dtype) if layers.start == 0 else None
        self.blocks = nn.ModuleDict({str(number): Block(shape, number) for number in layers})
        last = layers.stop == shape.layers
        self.norm = nn.RMSNorm(shape.hidden, dtype=shape.dtype) if last else None
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False, dtype=shape.dtype) if last else None
        for number, part in enumerate((self.embedding, self.norm, self.head)):
            if part is not None:
                _seed(part, 1000 + number)

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """By number in the whole model."""
        return {int(number): block for number, block in self.blocks.items()}

    def forward(self, x: torch.Tensor, microbatch: torch.Tensor) -> torch.Tensor:
        """Ids ``[rows]`` or hidden states ``[rows, hidden]`` to hidden states or logits; `microbatch`: ``[1]``, its number."""
        number = int(microbatch)
        hidden = x if self.embedding is None else self.embedding(x)
        for block in self.blocks.values():
            hidden = block(hidden, self.place, number)
        if self.norm is None or self.head is None:
            return hidden
        return self.head(self.norm(hidden))


def stages(shape: Shape, count: int) -> list[range]:
    """Layers of `count` stages, the first ones longer where they do not divide."""
    short, longer = divmod(shape.layers, count)
    bounds = [0]
    for index in range(count):
        bounds.append(bounds[-1] + short + (index < longer))
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    angle = positions[:, None].double() * 100.0 ** (-torch.arange(half).double() / half)
    cos, sin = (part.to(x.dtype)[:, None, :] for part in (angle.cos(), angle.sin()))
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@torch.no_grad()
def _seed(module: nn.Module, number: int) -> None:
    random = torch.Generator().manual_seed(number)
    for parameter in module.parameters():
        spread = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        parameter.copy_(1 + 0.1 * spread if parameter.ndim == 1 else spread * parameter.shape[1] ** -0.5)
