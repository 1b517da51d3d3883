"""Weights that fit `tests.distributed.stand.PLAN`, and what an engine must hold of them."""

from __future__ import annotations

import torch

from tests.distributed.stand import PLAN
from trainer_bridge.carriers.sending import TORCH_DTYPES


def weights(seed: int, *, model: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors of target (0) or draft (1)."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for spec in PLAN.specs(model):
        dtype = TORCH_DTYPES[spec.dtype]
        if dtype.is_floating_point:
            made[spec.name] = torch.randn(spec.shape, generator=random).to(dtype)
        else:
            made[spec.name] = torch.randint(0, 2, spec.shape, generator=random).to(dtype)
    return made


def raw(tensors: dict[str, torch.Tensor], model: str = "target") -> dict[str, bytes]:
    """What a stand-in engine holds of them."""
    return {
        f"{model}.{name}": tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()
    }


def nudged(base: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A few elements of each large tensor changed."""
    changed = {name: tensor.clone() for name, tensor in base.items()}
    random = torch.Generator().manual_seed(seed)
    for name in ("embed", "layer.weight"):
        flat = changed[name].view(-1)
        flat[torch.randperm(flat.numel(), generator=random)[:5]] += 1.0
    return changed
