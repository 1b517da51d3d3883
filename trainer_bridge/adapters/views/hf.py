"""A Hugging Face causal language model as the policy of co-training: whole on every rank, plain or sharded by ``fully_shard``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer_bridge.adapters.naming import unwrapped
from trainer_bridge.cotrain.borrowed import Rows
from trainer_bridge.cotrain.run import PolicyView
from trainer_bridge.cotrain.trainer import DraftGroups
from trainer_bridge.errors import WeightSourceError
from trainer_bridge.taps.hooks import ChunkView


def hf_policy(model: nn.Module, groups: DraftGroups | None = None) -> PolicyView:
    """What `CoTraining` needs to know of a Llama-like model (``model.model.layers``, ``.norm``, ``lm_head``).

    Args:
        model: its forward takes ``[documents, length]`` token ids; it may be wrapped (DistributedDataParallel, torch.compile of
            layers), and its parameters may be DTensors.
        groups: data parallel ranks, see `DraftGroups`.

    Raises:
        WeightSourceError: the model is built otherwise.
    """
    model = unwrapped(model)
    body: Any = getattr(model, "model", None)
    if not all(hasattr(body, part) for part in ("layers", "norm")) or not hasattr(model, "get_input_embeddings"):
        raise WeightSourceError(
            f"{type(model).__name__} is no Llama-like model (model.layers, model.norm): make a PolicyView of your own, see "
            "trainer_bridge.cotrain.run"
        )
    of_model: Any = model
    embedding, head = of_model.get_input_embeddings().weight, of_model.get_output_embeddings().weight
    chunk = ChunkView(chunk=0, module=model, layers=dict(enumerate(body.layers)), final_norm=body.norm)
    return PolicyView(
        chunks=[chunk], hidden_size=embedding.shape[1], vocab_size=embedding.shape[0], dtype=_dtype_of(body.norm),
        embedding=Rows(weight=embedding), head=Rows(weight=head), groups=groups or DraftGroups(),
    )  # fmt: skip


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype
