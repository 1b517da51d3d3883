"""Which part of a whole weight one tensor-parallel rank's layer applies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def local_weight(layer: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The ``[out, in]``, or bias ``[out]``, that `layer` should hold on this rank.

    Args:
        layer: a vLLM linear layer or vocabulary head, whole or split.
        parts: whole checkpoint weights, or biases, in the order in which a fused layer lays them.
    """
    from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    size, rank = getattr(layer, "tp_size", 1), getattr(layer, "tp_rank", 0)
    if isinstance(layer, VocabParallelEmbedding):
        held = layer.shard_indices
        return parts[0][held.org_vocab_start_index : held.org_vocab_end_index]
    if isinstance(layer, RowParallelLinear):
        # Its outputs are sums over the ranks: each holds the whole bias, and one adds it.
        return parts[0].chunk(size, 1)[rank] if parts[0].dim() > 1 else parts[0]
    if isinstance(layer, QKVParallelLinear):
        # More ranks than key heads: several ranks hold the same one.
        replicas = layer.num_kv_head_replicas
        query, *rest = parts
        return torch.cat([query.chunk(size)[rank], *(part.chunk(size // replicas)[rank // replicas] for part in rest)])
    if isinstance(layer, ColumnParallelLinear):
        return torch.cat([part.chunk(size)[rank] for part in parts])
    return torch.cat(list(parts))


def whole_shapes(layer: Any, leaf: str) -> tuple[tuple[int, ...], ...]:
    """Shapes of the checkpoint tensors that make up `layer`'s `leaf`, in the order in which a fused layer lays them.

    Args:
        layer: a vLLM linear layer, embedding or vocabulary head, whole or split.
        leaf: ``weight`` or ``bias``.
    """
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    outputs: tuple[int, ...]
    if isinstance(layer, VocabParallelEmbedding):
        outputs, inputs = (layer.org_vocab_size,), layer.embedding_dim
    elif isinstance(layer, QKVParallelLinear):
        # `output_sizes` counts a key head once for each rank that holds it.
        keys = layer.total_num_kv_heads
        outputs = (layer.total_num_heads * layer.head_size, keys * layer.head_size, keys * layer.v_head_size)
        inputs = layer.input_size
    elif isinstance(layer, MergedColumnParallelLinear):
        outputs, inputs = tuple(layer.output_sizes), layer.input_size
    else:
        outputs, inputs = (layer.output_size,), layer.input_size
    return tuple((rows,) if leaf == "bias" else (rows, inputs) for rows in outputs)
