"""Catches an adapter that taps the wrong layer or state, or borrows another embedding or head than the policy's, and a draft that
learns something else when the policy is sharded by FSDP2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.cotraining import policy
from benchmarks.cotraining.run import PASSES, draft_of
from tests.cotraining import gradients
from tests.distributed.processes import on_ranks
from tests.tolerances import REGROUPED_FP64, assert_close
from trainer_bridge.adapters.views.hf import hf_policy
from trainer_bridge.cotrain.microbatch import Microbatch
from trainer_bridge.cotrain.options import CoTrainOptions
from trainer_bridge.cotrain.run import CoTraining
from trainer_bridge.cotrain.trainer import DraftCoTrainer, DraftGroups
from trainer_bridge.draft.interface import FrozenTarget
from trainer_bridge.taps.schedules import one_f_one_b

LAYERS, HIDDEN, VOCAB, TAP_LAYERS, LENGTH = 6, 16, 29, (1, 3, 5), 11
OPTIONS = CoTrainOptions(passes=PASSES, max_gradient_norm=1e9, vocabulary_every_steps=0, anchor_share=1.0)


def model(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def batches() -> list[Microbatch]:
    random = torch.Generator().manual_seed(4)
    places = torch.arange(LENGTH).expand(2, -1)
    return [Microbatch.of_rows(torch.randint(VOCAB, (2, LENGTH), generator=random), places >= 3 + i) for i in range(2)]


def drafter(groups: DraftGroups | None = None) -> DraftCoTrainer:
    shape = policy.Shape(layers=LAYERS, hidden=HIDDEN, heads=4, kv_heads=2, vocab=VOCAB)
    kind, made = draft_of("eagle3", shape, TAP_LAYERS)
    trainer = DraftCoTrainer(kind, made, OPTIONS, groups)
    trainer.steps = 1
    return trainer


def trained(policy_model: Any, mine: list[Microbatch], groups: DraftGroups | None) -> dict[str, torch.Tensor]:
    """Gradients of a draft that learns inside the policy's forward."""
    draft = drafter(groups)
    co = CoTraining(
        hf_policy(policy_model, groups), tap_layers=TAP_LAYERS, schedule=one_f_one_b(1, len(mine)), max_rows=2 * LENGTH, draft=draft
    )
    with co.step(mine):
        for batch in mine:
            policy_model(batch.token_ids.view(2, LENGTH)).logits.square().sum().backward()
    return gradients(draft.model)


def wanted(reference: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """The same from hidden states that transformers gives."""
    draft = drafter()
    draft.begin_step(batches(), FrozenTarget(embedding=reference.get_input_embeddings().weight, head=reference.lm_head.weight))
    for index, batch in enumerate(batches()):
        with torch.no_grad():
            states = reference.model(batch.token_ids.view(2, LENGTH), output_hidden_states=True)
        taps = torch.cat([states.hidden_states[layer] for layer in TAP_LAYERS], -1).flatten(0, 1)
        draft.add(index, taps, states.last_hidden_state.flatten(0, 1))
    draft.finish_step()
    return gradients(draft.model)


def test_a_hugging_face_model_gives_what_transformers_says_of_it() -> None:
    for tied in (False, True):
        found, expected = trained(model(tied=tied), batches(), None), wanted(model(tied=tied))
        for name, gradient in expected.items():
            assert_close(found[name], gradient, REGROUPED_FP64, name)


def on_sharded_ranks(directory: Path) -> dict[str, torch.Tensor]:
    """Each rank has one of the two microbatches."""
    sharded: Any = model(tied=False)
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    groups = DraftGroups(replicas=dist.group.WORLD, data_rank=dist.get_rank())
    return trained(sharded, batches()[dist.get_rank() :: 2], groups)


def test_a_model_sharded_by_fsdp_trains_the_same_draft(tmp_path: Path) -> None:
    expected = wanted(model(tied=False))
    for found in on_ranks(on_sharded_ranks, 2, tmp_path):
        for name, gradient in expected.items():
            assert_close(found[name], gradient, REGROUPED_FP64, name)
