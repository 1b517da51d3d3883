"""Which part of a whole weight one tensor-parallel rank's layer applies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def local_weight(layer: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The ``[out, in]`` that `layer` should hold on this rank.

    Args:
        layer: a vLLM linear layer or vocabulary head, whole or split.
        parts: whole checkpoint weights, in the order in which a fused layer lays them.
    """
    from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    size, rank = getattr(layer, "tp_size", 1), getattr(layer, "tp_rank", 0)
    if isinstance(layer, VocabParallelEmbedding):
        held = layer.shard_indices
        return parts[0][held.org_vocab_start_index : held.org_vocab_end_index]
    if isinstance(layer, RowParallelLinear):
        return parts[0].chunk(size, 1)[rank]
    if isinstance(layer, QKVParallelLinear):
        # More ranks than key heads: several ranks hold the same one.
        replicas = layer.num_kv_head_replicas
        query, *rest = parts
        return torch.cat([query.chunk(size)[rank], *(part.chunk(size // replicas)[rank // replicas] for part in rest)])
    if isinstance(layer, ColumnParallelLinear):
        return torch.cat([part.chunk(size)[rank] for part in parts])
    return torch.cat(list(parts))
