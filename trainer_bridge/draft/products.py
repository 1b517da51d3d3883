"""Linear layers whose products may be taken in a narrower dtype than everything around them.

Training a small draft on a CPU is matrix products. A processor with instructions for bf16 takes them twice as fast in it, with sums
in fp32. Only the factors are narrowed, and each product once: weights, their gradients, the optimizer, activations, norms and
attention stay in the dtype they have.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import nn


class Narrow:
    """A context: graphs built inside take their products in `dtype`, forward and backward; None: in that of their factors.

    It can be entered again and again, for as long as no weight changes: each is narrowed once and kept here.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._tokens: list[Token[Narrow | None]] = []

    def __enter__(self) -> Narrow:
        self._tokens.append(_narrow.set(self))
        return self

    def __exit__(self, *raised: object) -> None:
        _narrow.reset(self._tokens.pop())

    def copy_of(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight in `dtype`, as it was at first."""
        # Held together with its copy, so that its id stays its own.
        if id(weight) not in self._copies:
            self._copies[id(weight)] = (weight, weight.detach().to(self.dtype))
        return self._copies[id(weight)][1]


_narrow: ContextVar[Narrow | None] = ContextVar("narrow", default=None)


def dtype() -> torch.dtype | None:
    """What the `Narrow` around this code says."""
    narrow = _narrow.get()
    return None if narrow is None else narrow.dtype


def fastest() -> torch.dtype | None:
    """bf16 where this processor multiplies in it; None where it would have to pretend."""
    found = torch.cpu.get_capabilities()
    return torch.bfloat16 if found.get("avx512_bf16") or found.get("amx_bf16") or found.get("bf16") else None


class Linear(nn.Linear):
    """Without bias, as in all draft architectures here."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., inputs]`` to ``[..., outputs]``."""
        narrow = _narrow.get()
        if narrow is None or narrow.dtype is None or not torch.is_grad_enabled():
            return super().forward(input)
        return _Product.apply(input, self.weight, narrow.copy_of(self.weight))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
        factor = x.to(narrow.dtype)
        ctx.save_for_backward(factor, narrow)
        return (factor @ narrow.T).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factor, narrow = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        short = grad.to(narrow.dtype)
        d_x = (short @ narrow).to(grad.dtype) if wants_x else None
        d_weight = (short.flatten(0, -2).T @ factor.flatten(0, -2)).to(grad.dtype) if wants_weight else None
        return d_x, d_weight, None
