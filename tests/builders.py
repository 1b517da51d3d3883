"""Builders of tiny samples, targets and drafts. Everything is drawn from a seed, so a failure can be repeated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainer_bridge.draft.dflash import DFlash
from trainer_bridge.draft.dflash.model import DFlashDraft
from trainer_bridge.draft.eagle3.kind import Eagle3
from trainer_bridge.draft.eagle3.model import Eagle3Draft
from trainer_bridge.draft.interface import FrozenTarget, TargetSpec
from trainer_bridge.taps import TapSample

HIDDEN = 8
VOCAB = 23
TAP_LAYERS = (1, 2, 4)
KEPT = (0, 2, 3, 7, 8, 11, 12, 19, 22)
"""Target ids of the tiny draft's vocabulary: with gaps at both ends, so that ids and offsets cannot be confused."""


def generator(seed: int) -> torch.Generator:
    """A seeded random generator."""
    return torch.Generator().manual_seed(seed)


def sample(mask: str, *, seed: int = 0, tokens: Sequence[int] | None = None, start: int = 0, **fields: Any) -> TapSample:
    """A random sample.

    Args:
        mask: one character per token, ``.`` for a prompt token and ``A`` for an answer token.
        seed: of tokens and hidden states.
        tokens: the ids, random by default.
        start: position of the first token.
        fields: any other field of `TapSample`, instead of its default here.
    """
    n, random = len(mask), generator(seed)
    ids = torch.randint(1, VOCAB, (n,), generator=random) if tokens is None else torch.tensor(tokens)
    values: dict[str, Any] = {
        "request_id": f"request-{seed}",
        "group_id": f"group-{seed}",
        "policy_version": 3,
        "token_ids": ids,
        "positions": torch.arange(start, start + n),
        "loss_mask": torch.tensor([c == "A" for c in mask]),
        "tap_layers": TAP_LAYERS,
        "taps": torch.randn(n - 1, len(TAP_LAYERS) * HIDDEN, generator=random),
        "final": torch.randn(n - 1, HIDDEN, generator=random),
        "final_is_normed": True,
    }
    return TapSample(**{**values, **fields})


def target_spec(**fields: Any) -> TargetSpec:
    """Shapes of the tiny target: grouped-query attention, a head size that is not ``hidden / heads``."""
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 12,
        "num_layers": 6,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "max_positions": 64,
    }
    return TargetSpec(**{**values, **fields})


def draft_config(**fields: Any) -> dict[str, Any]:
    """Checkpoint config of the tiny draft; `fields` overwrite its entries."""
    config = Eagle3().configure(target_spec(), tap_layers=TAP_LAYERS, draft_vocab_size=len(KEPT))
    return {**config, **fields}


def dflash_config(**changes: Any) -> dict[str, Any]:
    """The same of a DFlash draft."""
    return {**DFlash().configure(target_spec(), tap_layers=TAP_LAYERS, draft_vocab_size=len(KEPT)), **changes}


def dflash_draft(*, layers: int = 1, dtype: torch.dtype = torch.float64) -> DFlashDraft:
    """A DFlash draft with random parameters, norms and all."""
    model = DFlash().build(dflash_config(num_hidden_layers=layers))
    random = generator(1000)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = torch.randn(parameter.shape, generator=random)
            parameter.copy_(1 + 0.3 * spread if parameter.ndim == 1 else spread * parameter.shape[1] ** -0.5)
    model.set_vocabulary(torch.tensor(KEPT))
    return model.to(dtype)


def draft(*, seed: int = 0, kept: Sequence[int] = KEPT, dtype: torch.dtype = torch.float64) -> Eagle3Draft:
    """A tiny draft with random parameters (norms and all, so that no factor is an unnoticed 1)."""
    model = Eagle3().build(draft_config(draft_vocab_size=len(kept)))
    random = generator(1000 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = torch.randn(parameter.shape, generator=random)
            parameter.copy_(1 + 0.3 * spread if parameter.ndim == 1 else spread * parameter.shape[1] ** -0.5)
    model.set_vocabulary(torch.tensor(kept))
    return model.to(dtype)


def frozen_target(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> FrozenTarget:
    """Random embedding and head of the tiny target."""
    random = generator(2000 + seed)
    embedding, head = (torch.randn(VOCAB, HIDDEN, generator=random).to(dtype) for _ in range(2))
    return FrozenTarget(embedding=embedding, head=head)


def target_dir(directory: Path, **fields: Any) -> Path:
    """A model directory of the tiny target's shapes, with one small file of weights; `fields` overwrite its config's entries."""
    spec = target_spec()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        **fields,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}, directory / "model.safetensors")
    return directory
