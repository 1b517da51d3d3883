"""One step of a tiny megatron-core model on one rank, in megatron's own schedule, with a draft beside it or without."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from benchmarks.cotraining import policy
from benchmarks.cotraining.megatron_cpu import Shape, build_chunks, parallel
from benchmarks.cotraining.run import PASSES, draft_of
from trainer_bridge.adapters.megatron import load_megatron
from trainer_bridge.adapters.views.megatron import megatron_policy, megatron_schedule
from trainer_bridge.cotrain.microbatch import Microbatch
from trainer_bridge.cotrain.options import CoTrainOptions
from trainer_bridge.cotrain.run import CoTraining
from trainer_bridge.cotrain.trainer import DraftCoTrainer

SHAPE = Shape(layers=8, tied=True)
TAP_LAYERS = (2, 4, 6)
MICROBATCHES, DOCUMENTS, LENGTH = 4, 2, 12


def checkpoint(shape: Shape) -> dict[str, torch.Tensor]:
    """Random weights with Hugging Face names; each depends on its name alone."""
    hidden, size, found = shape.hidden, shape.head_dim, dict[str, torch.Tensor]()

    def add(name: str, *sizes: int) -> None:
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        spread = torch.randn(*sizes, generator=random, dtype=torch.float64)
        found[name] = 1 + 0.1 * spread if len(sizes) == 1 else spread * sizes[-1] ** -0.5

    add("model.embed_tokens.weight", shape.vocab, hidden)
    add("model.norm.weight", hidden)
    if not shape.tied:
        add("lm_head.weight", shape.vocab, hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", shape.heads), ("k", shape.groups), ("v", shape.groups)):
            add(f"{prefix}self_attn.{name}_proj.weight", rows * size, hidden)
        add(f"{prefix}self_attn.o_proj.weight", hidden, shape.heads * size)
        add(f"{prefix}mlp.gate_proj.weight", shape.ffn, hidden)
        add(f"{prefix}mlp.up_proj.weight", shape.ffn, hidden)
        add(f"{prefix}mlp.down_proj.weight", hidden, shape.ffn)
        add(f"{prefix}input_layernorm.weight", hidden)
        add(f"{prefix}post_attention_layernorm.weight", hidden)
    return found


def batches() -> list[Microbatch]:
    """Seeded; answers end at different lengths, padding follows."""
    ids = torch.randint(SHAPE.vocab, (MICROBATCHES, DOCUMENTS, LENGTH), generator=torch.Generator().manual_seed(3))
    ends = torch.tensor([[LENGTH, LENGTH - 3], [7, LENGTH], [LENGTH - 1, 8], [LENGTH, LENGTH]])[:, :, None]
    places = torch.arange(LENGTH)
    return [Microbatch.of_rows(one, (places >= 4) & (places < end)) for one, end in zip(ids, ends, strict=True)]


def step(
    kind: str | None,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    virtual: int = 1,
    defer: int | None = None,
    recompute: bool = False,
    tied: bool = True,
    uneven: bool = False,
    draft_dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Gradients of this rank's share of the policy, and the draft's loss and gradients where it is. Every rank calls it."""
    shape = Shape(**{**vars(SHAPE), "tied": tied})
    fields: dict[str, Any] = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} if recompute else {}
    )
    if uneven:
        fields["num_layers_in_first_pipeline_stage"] = shape.layers // pipeline + 1
    with parallel(tensor=tensor, pipeline=pipeline, virtual=virtual):
        chunks = build_chunks(shape, tensor=tensor, pipeline=pipeline, virtual=virtual, dtype=torch.float64, **fields)
        load_megatron(chunks, checkpoint(shape))
        co = draft = None
        if kind is not None:
            view = megatron_policy(chunks, vocab_size=shape.vocab)
            if view.head is not None:
                of = policy.Shape(
                    layers=shape.layers, hidden=shape.hidden, heads=shape.heads, kv_heads=shape.groups, vocab=shape.vocab
                )
                options = CoTrainOptions(passes=PASSES, max_gradient_norm=1e9, vocabulary_every_steps=0, anchor_share=1.0)
                made, model = draft_of(kind, of, TAP_LAYERS)
                draft = DraftCoTrainer(made, model.to(draft_dtype), options, view.groups)
                # Past the first step, whose start is a rank's own.
                draft.steps = 1
            co = CoTraining(
                view, tap_layers=TAP_LAYERS, schedule=megatron_schedule(MICROBATCHES), draft=draft, defer=defer,
                max_rows=DOCUMENTS * LENGTH, timeout_s=60.0,
            )  # fmt: skip
        losses = _forward_backward(chunks, co)
        found: dict[str, Any] = {
            "losses": losses,
            "policy": {
                f"{index}.{name}": parameter.grad
                for index, chunk in enumerate(chunks)
                for name, parameter in chunk.named_parameters()
                if parameter.grad is not None
            },
        }
        if draft is not None and co is not None and co.result is not None:
            found["loss"], found["labels"] = co.result.loss, co.result.labels
            found["draft"] = {name: parameter.grad for name, parameter in draft.model.named_parameters()}
        return found


def _forward_backward(chunks: list[Any], co: CoTraining | None) -> list[float]:
    """Megatron's schedule over all microbatches; the policy's losses, on the last stage."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    announced = batches()
    ids = [one.token_ids.view(DOCUMENTS, LENGTH) for one in announced]
    positions = torch.arange(LENGTH).expand(DOCUMENTS, -1)
    future = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)

    def forward_step(iterator: Any, model: Any) -> Any:
        rows = next(iterator)
        output = model(rows, positions, future, labels=rows)
        return output, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})

    def run() -> Any:
        many = len(chunks) > 1
        return get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=[iter(ids) for _ in chunks] if many else iter(ids),
            model=chunks if many else chunks[0], num_microbatches=MICROBATCHES, seq_length=LENGTH, micro_batch_size=DOCUMENTS,
            forward_only=False,
        )  # fmt: skip

    if co is None:
        return [float(each["loss"]) for each in run()]
    with co.step(announced):
        return [float(each["loss"]) for each in run()]
