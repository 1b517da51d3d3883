"""What a trainer's modules look like to the publisher: checkpoint names, and whole tensors or boxes of them.

The contract. An adapter is an iterable of entries, walked once per update; a new one is made for the next. An entry is

- ``(name, tensor)``: a whole tensor, named as in a Hugging Face checkpoint of the model that is served, or
- ``(name, Shard(tensor, full_shape, start))``: a box of it (`trainer_bridge.shards`).

Tensors are detached, not copied, and may lie on any device: nothing may change them until the update is committed. Over all ranks
each element of each tensor is given exactly once, in the dtype in which the trainer holds it; the publisher casts. A name
comes at most once per rank and tied weights come once.

| trainer | adapter | each rank gives |
|---|---|---|
| any module, one process or plain data parallel | `module_weights` | its share of whole tensors |
| a Hugging Face model, the same | `hf_weights` | its share of whole tensors, named as ``save_pretrained`` does |
| megatron-core's GPTModel, over tensor, pipeline and virtual ranks | `megatron_weights` | its own layers and boxes |
| ``fully_shard`` (FSDP2), HSDP, and tensor parallel by DTensor | `fsdp_weights` | its own boxes, without a collective |

Whoever cuts by hand needs no adapter. A pipeline stage gives the names of its own layers, a rank of an expert-parallel group
those of its experts, a tensor-parallel rank its boxes:

>>> import torch
>>> from trainer_bridge.shards import shard_of
>>> def stage_weights(stage, first_layer, rank, world):
...     for layer, block in enumerate(stage, first_layer):
...         name = f"model.layers.{layer}"
...         yield f"{name}.self_attn.o_proj.weight", shard_of(block["o"], dim=1, index=rank, count=world)
...         for expert, weight in enumerate(block["experts"]):
...             yield f"{name}.mlp.experts.{rank * len(block['experts']) + expert}.up_proj.weight", weight
>>> block = {"o": torch.zeros(4, 2), "experts": [torch.zeros(3, 4)]}
>>> for entry in stage_weights([block], first_layer=8, rank=1, world=2):
...     print(entry[0], getattr(entry[1], "start", "whole"))
model.layers.8.self_attn.o_proj.weight (0, 2)
model.layers.8.mlp.experts.1.up_proj.weight whole

What all ranks of a tensor-parallel group hold alike (norms), one of them gives.
"""

from trainer_bridge.adapters.fsdp import fsdp_weights
from trainer_bridge.adapters.hf import hf_weights
from trainer_bridge.adapters.megatron import load_megatron, megatron_weights
from trainer_bridge.adapters.module import module_weights
from trainer_bridge.shards import Entry, Shard, shard_of

__all__ = ["Entry", "Shard", "fsdp_weights", "hf_weights", "load_megatron", "megatron_weights", "module_weights", "shard_of"]
