"""The plain way to train an EAGLE-3 draft, as most first versions do: the baseline of the learner's speed.

Padded rows, dense ``[T, T]`` scores of all positions, prompts included, logits and teacher logits of the whole batch at
once, autograd through all of it. The objective is the learner's, and a test of the benchmark says so: same loss, same gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer_bridge.draft.eagle3.model import Eagle3Draft
from trainer_bridge.draft.interface import FrozenTarget
from trainer_bridge.taps import TapSample


@dataclass(frozen=True)
class PaddedBatch:
    """Samples side by side, padded to the longest."""

    ids: torch.Tensor
    trained: torch.Tensor
    """``[B, T]`` bool: the row's next token is an answer token."""
    taps: torch.Tensor
    final: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[TapSample]) -> PaddedBatch:
        """Pad `samples`."""
        longest = max(sample.num_tokens for sample in samples)
        first = samples[0]
        ids = torch.zeros(len(samples), longest, dtype=torch.int64)
        trained = torch.zeros(len(samples), longest, dtype=torch.bool)
        taps = torch.zeros(len(samples), longest, first.taps.shape[1])
        final = torch.zeros(len(samples), longest, first.final.shape[1])
        for row, sample in enumerate(samples):
            n = sample.num_tokens
            ids[row, :n], trained[row, : n - 1] = sample.token_ids, sample.loss_mask[1:]
            taps[row, : n - 1], final[row, : n - 1] = sample.taps.float(), sample.final.float()
        return cls(ids, trained, taps, final)


def _one_pass(
    model: Eagle3Draft, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, cache: list[tuple[torch.Tensor, ...]]
) -> torch.Tensor:
    batch, length, width = hidden.shape
    x = model.layer_input(embedded, hidden).flatten(0, 1)
    at = positions.repeat(batch)
    share = model.heads // model.kv_heads

    def heads_first(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(batch, length, -1, model.head_dim).transpose(1, 2)

    q = heads_first(model.queries(x, at))
    k, v = (heads_first(part).repeat_interleave(share, 1) for part in model.keys_values(x, at))
    cache.append((k, v))
    (trunk_k, trunk_v), branch = cache[0], cache[1:]
    later = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
    scores = [(q @ trunk_k.transpose(-1, -2)).masked_fill(later, float("-inf"))]
    scores += [(q * key).sum(-1, keepdim=True) for key, _ in branch]
    weights = (torch.cat(scores, -1) * model.head_dim**-0.5).softmax(-1)
    out = weights[..., :length] @ trunk_v
    for index, (_, value) in enumerate(branch):
        out = out + weights[..., length + index : length + index + 1] * value
    finished = model.finish_layer(hidden.flatten(0, 1), out.transpose(1, 2).flatten(0, 1))
    return finished.view(batch, length, width)


def loss_of(model: Eagle3Draft, target: FrozenTarget, batch: PaddedBatch, *, passes: int, pass_decay: float) -> torch.Tensor:
    """The loss of all passes, each normalised by its own labels."""
    length = batch.ids.shape[1]
    teacher = batch.final @ target.head[model.kept()].T
    hidden, loss = model.combine(batch.taps), torch.zeros(())
    cache: list[tuple[torch.Tensor, ...]] = []
    for d in range(passes):
        embedded = target.embedding[batch.ids.roll(-1 - d, 1)]
        hidden = _one_pass(model, embedded, hidden, torch.arange(length) + d, cache)
        valid = batch.trained.roll(-1 - d, 1) & batch.trained
        valid[:, length - 1 - d :] = False
        logits, wanted = model.logits(hidden)[valid], teacher.roll(-1 - d, 1)[valid]
        loss = loss - pass_decay**d * (wanted.softmax(-1) * logits.log_softmax(-1)).sum() / max(1, int(valid.sum()))
    return loss
