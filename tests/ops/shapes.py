"""Random leaves for attention operators, their gradients, and what a backend needs to run here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.builders import generator

BACKENDS = ("naive", "torch", "triton")
"""Those that run without a GPU."""


def leaves_of(
    queries: Sequence[int], trunk: Sequence[int], own: Sequence[int], *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[torch.Tensor]:
    """Queries, trunk keys and values, own keys and values, as leaves."""
    random = generator(seed)
    shapes = (queries, trunk, trunk, own, own)
    return [torch.randn(tuple(shape), generator=random, dtype=dtype).requires_grad_() for shape in shapes]


def gradients_of(out: torch.Tensor, leaves: Sequence[torch.Tensor], seed: int = 1) -> tuple[torch.Tensor, ...]:
    """Gradients of a randomly weighted sum of `out`; zeros for a leaf that it does not depend on."""
    if not out.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    weight = torch.randn(out.shape, generator=generator(seed), dtype=torch.float64).to(out.dtype)
    return torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True, materialize_grads=True)


@contextlib.contextmanager
def needs(backend: str) -> Iterator[None]:
    """Within it the Triton backend runs in its interpreter; the package has imported it so (see ``tests/ops/__init__.py``).

    Memory that a kernel is to fill holds NaN: else it may hold the right numbers of an earlier call.
    """
    if backend != "triton":
        yield
        return
    plain = torch.empty

    def filled(*arguments: Any, **options: Any) -> torch.Tensor:
        made = plain(*arguments, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(torch, "empty", filled)
        yield
