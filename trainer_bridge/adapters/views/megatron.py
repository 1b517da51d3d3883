"""A megatron-core GPTModel, in chunks over pipeline, virtual and tensor-parallel ranks, as the policy of co-training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainer_bridge.cotrain.borrowed import Rows
from trainer_bridge.cotrain.groups import own_group
from trainer_bridge.cotrain.run import PolicyView
from trainer_bridge.cotrain.trainer import DraftGroups
from trainer_bridge.errors import ConfigError
from trainer_bridge.taps.hooks import ChunkView
from trainer_bridge.taps.schedules import Schedule, forward_only, interleaved, one_f_one_b


def megatron_policy(chunks: nn.Module | Sequence[nn.Module], *, vocab_size: int, own_groups: bool = True) -> PolicyView:
    """What `CoTraining` needs to know of this rank, from its chunks and megatron's ``parallel_state``. Every rank calls it.

    Hidden states are ``[length, documents, hidden]``, as megatron-core holds them; with context parallelism each document is cut
    zigzag (``get_batch_on_this_cp_rank``), which is the layout of `specdraft_kernels.zigzag_ring`.

    Args:
        chunks: the rank's model, or its virtual stages in order; they may be wrapped.
        vocab_size: tokens without the padding that megatron-core appends.
        own_groups: make groups for taps and for the draft's collectives beside megatron's own.

    Raises:
        ConfigError: sequence parallelism, where no rank holds whole rows of what it computes.
    """
    from megatron.core import parallel_state as ps

    models = [_unwrapped(chunk) for chunk in ([chunks] if isinstance(chunks, nn.Module) else chunks)]
    config = models[0].config
    if config.sequence_parallel:
        raise ConfigError("sequence_parallel spreads rows over tensor-parallel ranks: taps need it off for now")
    stages, stage = ps.get_pipeline_model_parallel_world_size(), ps.get_pipeline_model_parallel_rank()
    views = []
    for virtual, model in enumerate(models):
        layers = {layer.layer_number - 1: layer for layer in model.decoder.layers}
        norm = model.decoder.final_layernorm if model.post_process else None
        views.append(
            ChunkView(chunk=virtual * stages + stage, module=model, layers=layers, final_norm=norm, rows=_document_by_document)
        )
    shares = ps.get_tensor_model_parallel_world_size()
    split_sequences, replicas = (
        ps.get_context_parallel_world_size() > 1,
        ps.get_data_parallel_world_size(with_context_parallel=True) > 1,
    )
    keep = own_group if own_groups else (lambda group: group)
    return PolicyView(
        chunks=views, hidden_size=config.hidden_size, vocab_size=vocab_size, dtype=config.params_dtype,
        embedding=_embedding(models, ps.get_tensor_model_parallel_rank()), head=_head(models, ps.get_tensor_model_parallel_rank()),
        pipeline=own_group(ps.get_pipeline_model_parallel_group()) if stages > 1 else None,
        tensor=keep(ps.get_tensor_model_parallel_group()) if shares > 1 else None,
        groups=DraftGroups(
            context=keep(ps.get_context_parallel_group()) if split_sequences else None,
            replicas=keep(ps.get_data_parallel_group(with_context_parallel=True)) if replicas else None,
            data_rank=ps.get_data_parallel_rank(),
        ),
    )  # fmt: skip


def megatron_schedule(microbatches: int, *, forward: bool = False) -> Schedule:
    """The order of ``get_forward_backward_func()`` with megatron's present ``parallel_state``."""
    from megatron.core import parallel_state as ps

    stages, virtual = ps.get_pipeline_model_parallel_world_size(), ps.get_virtual_pipeline_model_parallel_world_size() or 1
    if forward and virtual > 1:
        raise ConfigError("forward passes alone with virtual stages: give a trainer_bridge.taps.schedules.Schedule of your own")
    if forward:
        return forward_only(stages, microbatches)
    return interleaved(stages, virtual, microbatches) if virtual > 1 else one_f_one_b(stages, microbatches)


def _document_by_document(hidden: torch.Tensor) -> torch.Tensor:
    """``[length, documents, hidden]`` to rows, documents one behind the other."""
    return hidden.transpose(0, 1).flatten(0, 1)


def _unwrapped(module: nn.Module) -> Any:
    """The GPTModel inside of Float16Module, DistributedDataParallel and the like."""
    while not hasattr(module, "decoder"):
        inner = getattr(module, "module", None)
        if not isinstance(inner, nn.Module):
            raise ConfigError(f"{type(module).__name__} holds no megatron-core GPTModel")
        module = inner
    return module


def _embedding(models: Sequence[Any], tensor_rank: int) -> Rows | None:
    """This tensor-parallel rank's rows of the embedding, where a chunk has it or the tied head."""
    for model in models:
        if model.pre_process:
            weight = model.embedding.word_embeddings.weight
        elif model.post_process and model.share_embeddings_and_output_weights:
            weight = model.shared_embedding_or_output_weight()
        else:
            continue
        return Rows(weight=weight, start=tensor_rank * weight.shape[0])
    return None


def _head(models: Sequence[Any], tensor_rank: int) -> Rows | None:
    for model in models:
        if model.post_process:
            tied = model.share_embeddings_and_output_weights
            weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
            return Rows(weight=weight, start=tensor_rank * weight.shape[0])
    return None


__all__ = ["megatron_policy", "megatron_schedule"]
