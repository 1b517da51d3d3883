"""The reduced draft vocabulary: which target tokens a draft can propose, and the two maps between the vocabularies."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trainer_bridge.errors import CheckpointError, ConfigError


def choose(counts: torch.Tensor, size: int, always: Iterable[int] = ()) -> torch.Tensor:
    """The `size` most frequent target ids, ascending.

    Args:
        counts: ``[vocab]`` token statistics; ties and unseen tokens go to the lower id (byte-pair vocabularies put
            frequent merges first).
        size: size of the draft vocabulary; at most ``vocab``.
        always: ids that are kept whatever their count (end of text and the like).

    Returns:
        ``[size]`` int64.
    """
    vocab = counts.shape[0]
    if not 0 < size <= vocab:
        raise ConfigError(f"draft vocabulary of {size} tokens; needs 1..{vocab}, the target's vocabulary")
    fixed = sorted(set(always))
    if len(fixed) > size:
        raise ConfigError(f"{len(fixed)} ids must be kept, a draft vocabulary of {size} has no room for them")
    weight = counts.double().clone()
    weight[fixed] = float("inf")
    # A stable sort leaves ties in the order of their ids.
    order = torch.argsort(weight, descending=True, stable=True)
    return order[:size].sort().values


def exchange(kept: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which draft tokens to give away for target tokens that the traffic uses and the draft cannot propose.

    Args:
        kept: ``[draft]`` target ids of the draft's tokens.
        counts: ``[vocab]`` int64 use of each target token.

    Returns:
        ``rows`` and ``ids``, both ``[R]``: draft token ``rows[r]`` should stand for ``ids[r]``. The most used absent tokens
        take the places of the least used present ones, as long as that is a gain.
    """
    present = torch.zeros(counts.shape[0], dtype=torch.bool)
    present[kept] = True
    absent = ((counts > 0) & ~present).nonzero().squeeze(1)
    absent = absent[counts[absent].argsort(descending=True, stable=True)]
    # Among equally unused tokens the highest ids go first: byte-pair merges of high id are rare ones.
    rows = (-kept).argsort(stable=True)
    rows = rows[counts[kept[rows]].argsort(stable=True)]
    size = min(absent.shape[0], rows.shape[0])
    absent, rows = absent[:size], rows[:size]
    gains = counts[absent] > counts[kept[rows]]
    return rows[gains], absent[gains]


def maps_of(kept: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``d2t`` ``[draft]`` int64 OFFSETS (target id = i + d2t[i]) and ``t2d`` ``[vocab]`` bool, as in public checkpoints."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[kept] = True
    return kept - torch.arange(kept.shape[0]), t2d


def kept_of(d2t: torch.Tensor, t2d: torch.Tensor) -> torch.Tensor:
    """Target ids ``[draft]`` of the draft's tokens. Raises `CheckpointError` when the maps contradict each other."""
    kept = torch.arange(d2t.shape[0]) + d2t
    if bool((kept < 0).any()) or int(kept.max()) >= t2d.shape[0] or not bool(t2d[kept].all()):
        raise CheckpointError("d2t and t2d contradict each other: d2t holds offsets (target id = i + d2t[i]), not ids")
    if kept.unique().shape[0] != kept.shape[0]:
        raise CheckpointError("d2t maps to one target token twice")
    if int(t2d.sum()) != kept.shape[0]:
        raise CheckpointError(f"t2d marks {int(t2d.sum())} tokens, d2t maps {kept.shape[0]}")
    return kept
