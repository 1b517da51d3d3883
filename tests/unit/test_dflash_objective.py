"""Catches a block that sees the future, another block or another document, a wrong position, label, weight or gradient.

The oracle takes one anchor at a time, and builds its block from the text of the paper with dense scores; fp64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from tests.builders import HIDDEN, KEPT, TAP_LAYERS, VOCAB, dflash_draft, frozen_target, sample, target_spec
from tests.tolerances import OBJECTIVE_FP64, REGROUPED_FP64, Tolerance, assert_close
from trainer_bridge.draft.dflash.kind import DFlash
from trainer_bridge.draft.dflash.model import DFlashDraft
from trainer_bridge.draft.dflash.objective import BlockObjective
from trainer_bridge.draft.packing import PackedBatch, microbatches, pack
from trainer_bridge.taps import TapSample

PASSES, DECAY = 3, 0.8
SAMPLES = (
    sample("...AAAAAA", seed=1),
    sample(".AAAA", seed=2, start=4),
    sample("..AA.AAAA..AAA", seed=3),
    sample("AA.AAA", seed=4),
)
Gradients = dict[str, torch.Tensor]


def packed(samples: Sequence[TapSample], passes: int = PASSES) -> PackedBatch:
    batch = pack(samples, passes)
    return dataclasses.replace(batch, taps=batch.taps.double(), final=batch.final.double())


def gradients_of(model: DFlashDraft) -> Gradients:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def train(batches: Sequence[PackedBatch], *, passes: int = PASSES, layers: int = 2) -> tuple[float, Gradients]:
    model = dflash_draft(layers=layers)
    objective = BlockObjective(model, frozen_target(), passes=passes, slot_decay=DECAY)
    normalisers = torch.stack([objective.label_counts(batch) for batch in batches]).sum(0)
    for batch in batches:
        for _ in objective.pieces(batch, normalisers):
            pass
    return objective.take_loss(), gradients_of(model)


def assert_same(found: tuple[float, Gradients], expected: tuple[float, Gradients], tolerance: Tolerance) -> None:
    mine, theirs = torch.tensor([found[0], expected[0]], dtype=torch.float64)
    assert_close(mine, theirs, tolerance, "loss")
    assert found[1].keys() == expected[1].keys()
    for name, theirs in expected[1].items():
        assert theirs.abs().max() > 1e-5, f"the gradient of {name} vanishes: nothing to compare"
        assert_close(found[1][name], theirs, tolerance, f"gradient of {name}")


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + target_spec().rms_norm_eps).sqrt() * weight


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as a multiplication of complex numbers."""
    size = x.shape[-1]
    speed = target_spec().rope_theta ** (-2 * torch.arange(size // 2, dtype=torch.float64) / size)
    angle = positions.double()[:, None, None] * speed
    z = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def oracle_block(one: TapSample, p: int, w: Gradients, passes: int, layers: int) -> torch.Tensor:
    """Draft logits ``[passes, draft_vocab]`` of the block at token `p` of a document."""
    spec = target_spec()
    share = spec.num_heads // spec.num_kv_heads
    context = normed(one.taps[:p].double() @ w["fc.weight"].T, w["hidden_norm.weight"])
    embedding = frozen_target().embedding[one.token_ids[p]]
    x = torch.stack([embedding, *[w["mask_embedding"]] * passes])
    positions = one.positions[0] + p + torch.arange(passes + 1)
    for index in range(layers):
        prefix = f"layers.{index}."
        y = normed(x, w[prefix + "input_layernorm.weight"])
        states, at = torch.cat([context, y]), torch.cat([one.positions[:p], positions])
        part = {name: w[f"{prefix}self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")}
        q = normed((y @ part["q_proj"].T).unflatten(-1, (-1, spec.head_dim)), part["q_norm"])
        k = normed((states @ part["k_proj"].T).unflatten(-1, (-1, spec.head_dim)), part["k_norm"])
        v = (states @ part["v_proj"].T).unflatten(-1, (-1, spec.head_dim)).repeat_interleave(share, 1)
        q, k = turned(q, positions), turned(k, at).repeat_interleave(share, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / spec.head_dim**0.5
        attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
        x = x + attended @ w[prefix + "self_attn.o_proj.weight"].T
        y = normed(x, w[prefix + "post_attention_layernorm.weight"])
        gate, up = y @ w[prefix + "mlp.gate_proj.weight"].T, y @ w[prefix + "mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[prefix + "mlp.down_proj.weight"].T
    return normed(x[1:], w["norm.weight"]) @ w["lm_head.weight"].T


def labelled(one: TapSample, p: int, passes: int) -> int:
    """How many slots of the block at token `p` have a label: the answer goes on for so long without a hole."""
    mask = one.loss_mask.tolist()
    count = 0
    while count < passes and p + 1 + count < one.num_tokens and mask[p + 1 + count]:
        count += 1
    return count if p > 0 and mask[p] else 0


def oracle(samples: Sequence[TapSample], *, passes: int = PASSES, layers: int = 2) -> tuple[float, Gradients]:
    model, target = dflash_draft(layers=layers), frozen_target()
    w = dict(model.named_parameters())
    total, normaliser = torch.tensor(0.0).double(), 0.0
    for one in samples:
        teacher = (one.final.double() @ target.head.T)[:, list(KEPT)].softmax(-1)
        for p in range(1, one.num_tokens):
            if not (count := labelled(one, p, passes)):
                continue
            logits = oracle_block(one, p, w, passes, layers)
            for j in range(count):
                total = total - DECAY**j * (teacher[p + j] * logits[j].log_softmax(-1)).sum()
                normaliser += DECAY**j
    loss = total / normaliser
    loss.backward()
    return float(loss.detach()), gradients_of(model)


@pytest.mark.parametrize(("passes", "layers"), [(1, 1), (2, 1), (3, 2), (7, 1)])
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2, 3)], ids=["plain", "late start", "holes", "all"])
def test_loss_and_every_gradient_equal_the_dense_oracle(which: tuple[int, ...], passes: int, layers: int) -> None:
    samples = [SAMPLES[i] for i in which]
    assert_same(
        train([packed(samples, passes)], passes=passes, layers=layers),
        oracle(samples, passes=passes, layers=layers),
        OBJECTIVE_FP64,
    )


def test_packed_equals_unpacked() -> None:
    assert_same(train([packed([one]) for one in SAMPLES]), train([packed(SAMPLES)]), REGROUPED_FP64)


@pytest.mark.parametrize(("max_anchors", "max_rows"), [(1, 100), (3, 100), (100, 9)])
def test_splitting_into_microbatches_changes_nothing(max_anchors: int, max_rows: int) -> None:
    parts = [
        dataclasses.replace(batch, taps=batch.taps.double(), final=batch.final.double())
        for batch in microbatches(SAMPLES, PASSES, max_anchors, max_rows)
    ]
    assert len(parts) > 1
    assert_same(train(parts), train([packed(SAMPLES)]), REGROUPED_FP64)


def slots_of(model: DFlashDraft, samples: Sequence[TapSample], batch: PackedBatch) -> torch.Tensor:
    """Outputs ``[A, W, hidden]`` of the last layer."""
    objective = BlockObjective(model, frozen_target(), passes=PASSES)
    with torch.no_grad():
        trunk, blocks = objective._trunk(batch), objective._blocks(batch)
        hidden = objective._inputs(batch)
        for layer in model.each_layer():
            hidden = objective._layer(layer, hidden, objective._layer_trunk(layer, trunk, batch), blocks)
    return hidden.view(batch.anchors.shape[0], PASSES + 1, -1)


def test_a_block_sees_neither_the_future_nor_other_blocks_nor_other_documents() -> None:
    model, one = dflash_draft(layers=2), SAMPLES[0]
    batch = packed([SAMPLES[1], one])
    before = slots_of(model, SAMPLES, batch)
    rows = batch.anchors[batch.document[batch.anchors] == 1]
    first = int((batch.anchors < rows[0]).sum())
    offset = int(batch.cu_seqlens[1])
    # Everything from the second anchor's own row on is another: tokens, taps, everything after it.
    p = int(rows[1]) - offset + 1
    tokens, taps = one.token_ids.clone(), one.taps.clone()
    tokens[p:] = (tokens[p:] + 5) % VOCAB
    taps[p - 1 :] += 1.0
    other = dataclasses.replace(one, token_ids=tokens, taps=taps)
    after = slots_of(model, SAMPLES, packed([SAMPLES[1], other]))
    assert torch.equal(after[: first + 1], before[: first + 1])
    assert not torch.equal(after[first + 1], before[first + 1])
    # Another document beside it changes nothing, bit by bit.
    alone = slots_of(model, SAMPLES, packed([one]))
    assert_close(alone, before[first:], REGROUPED_FP64)


def test_measured_acceptance_follows_the_dense_oracle() -> None:
    model = dflash_draft(layers=2)
    w = dict(model.named_parameters())
    for one in SAMPLES:
        found = BlockObjective(model, frozen_target(), passes=PASSES).measure(packed([one]))
        lengths, hits = [], [0] * PASSES
        for p in range(1, one.num_tokens):
            count = labelled(one, p, PASSES)
            if not count:
                continue
            proposed = torch.tensor(KEPT)[oracle_block(one, p, w, PASSES, 2).argmax(-1)]
            run = 0
            while run < count and int(proposed[run]) == int(one.token_ids[p + 1 + run]):
                hits[run] += 1
                run += 1
            lengths.append(1 + run)
        assert float(found.accepted_sum.sum()) == sum(lengths)
        assert (int(found.anchors.sum()), found.hits.tolist()) == (len(lengths), hits)


def test_stopping_anywhere_leaves_no_loss() -> None:
    batch = packed(SAMPLES)
    objective = BlockObjective(dflash_draft(layers=2), frozen_target(), passes=PASSES, slot_decay=DECAY)
    total = sum(1 for _ in objective.pieces(batch, objective.label_counts(batch)))
    assert objective.take_loss() > 0
    for stop in range(total - 1):
        pieces = objective.pieces(batch, objective.label_counts(batch))
        for _ in range(stop):
            next(pieces)
        del pieces
        assert objective.take_loss() == 0


def test_the_config_names_taps_by_their_outputs() -> None:
    kind = DFlash()
    config = kind.configure(target_spec(), tap_layers=TAP_LAYERS, draft_vocab_size=len(KEPT))
    assert config["dflash_config"]["target_layer_ids"] == [layer - 1 for layer in TAP_LAYERS]
    assert kind.tap_layers(config) == TAP_LAYERS
    assert kind.build(config).fc.in_features == len(TAP_LAYERS) * HIDDEN
