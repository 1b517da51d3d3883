"""Ragged microbatches with the hidden states of a policy that is not there, for tests of the draft's side of co-training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tests.builders import HIDDEN, TAP_LAYERS, VOCAB, dflash_draft, draft, generator
from trainer_bridge.cotrain.microbatch import Microbatch

PASSES = 3
LENGTHS = ((9, 1, 14), (5,), (2, 3, 17, 4))
"""Documents of three microbatches: odd lengths, one without any label, one that is shorter than the ranks are many."""


@dataclass(frozen=True)
class Made:
    """A microbatch and its whole hidden states, in fp64."""

    microbatch: Microbatch
    taps: torch.Tensor
    final: torch.Tensor


def made(lengths: tuple[int, ...], seed: int) -> Made:
    """Seeded; the first third of every document is its prompt, and now and then a token in the answer is no label."""
    random, tokens = generator(seed), sum(lengths)
    mask = torch.cat([torch.arange(length) >= length // 3 for length in lengths])
    mask &= torch.rand(tokens, generator=random) > 0.1
    return Made(
        Microbatch(token_ids=torch.randint(VOCAB, (tokens,), generator=random), loss_mask=mask, lengths=lengths),
        torch.randn(tokens, len(TAP_LAYERS) * HIDDEN, generator=random).double(),
        torch.randn(tokens, HIDDEN, generator=random).double(),
    )


def draft_of(kind: str, *, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A random draft of a type; the DFlash draft has two layers."""
    return draft(dtype=dtype) if kind == "eagle3" else dflash_draft(layers=2, dtype=dtype)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies, by name."""
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
