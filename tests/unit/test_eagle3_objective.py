"""Catches a training objective that trains something else than the engine runs: a wrong rotary position, label, mask or
weight in any pass, a gradient that got lost between the pieces, documents that see each other.

The oracle is written from the definition and shares only parameters with the objective: every row of a document is an
anchor, one dense mask over the keys of all passes, one autograd graph, log-softmax cross-entropy over all rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch

from tests.builders import HIDDEN, KEPT, TAP_LAYERS, draft, draft_config, frozen_target, sample
from tests.tolerances import OBJECTIVE_FP64, REGROUPED_FP64, Tolerance, assert_close
from trainer_bridge.draft.eagle3 import Eagle3
from trainer_bridge.draft.eagle3.model import Eagle3Draft
from trainer_bridge.draft.eagle3.objective import TrainingTimeTest
from trainer_bridge.draft.interface import FrozenTarget
from trainer_bridge.draft.packing import PackedBatch, microbatches, pack
from trainer_bridge.taps import TapSample

PASSES = 3
DECAY = 0.8
SAMPLES = (
    sample("...AAAAAA", seed=1),
    sample(".AAAA", seed=2, start=4),
    sample("..AA.AAAA..AAA", seed=3),
    sample("AA.AAA", seed=4),
)
"""Odd and even lengths, holes in the answers, an answer too short for all passes, a document that starts late."""

Gradients = dict[str, torch.Tensor]


def fp64(batch: PackedBatch) -> PackedBatch:
    """The same batch with fp64 hidden states (`pack` casts to fp32, as training wants it)."""
    return dataclasses.replace(batch, taps=batch.taps.double(), final=batch.final.double())


def packed(samples: Sequence[TapSample], passes: int = PASSES) -> PackedBatch:
    return fp64(pack(samples, passes))


def gradients_of(model: Eagle3Draft) -> Gradients:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def train(batches: Sequence[PackedBatch], *, passes: int = PASSES, model: Eagle3Draft | None = None) -> tuple[float, Gradients]:
    """Loss and gradients of one optimizer step over these microbatches."""
    model = model or draft()
    model.zero_grad()
    objective = TrainingTimeTest(model, frozen_target(), passes=passes, pass_decay=DECAY)
    normalisers = torch.stack([batch.label_counts() for batch in batches]).sum(0)
    for batch in batches:
        for _ in objective.pieces(batch, normalisers):
            pass
    return objective.take_loss(), gradients_of(model)


def assert_same(found: tuple[float, Gradients], expected: tuple[float, Gradients], tolerance: Tolerance) -> None:
    """Loss and every gradient; none of the expected ones may be zero, or equality would say nothing."""
    mine, theirs = torch.tensor([found[0], expected[0]], dtype=torch.float64)
    assert_close(mine, theirs, tolerance, "loss")
    assert found[1].keys() == expected[1].keys()
    for name, theirs in expected[1].items():
        assert theirs.abs().max() > 1e-4, f"the gradient of {name} vanishes: nothing to compare"
        assert_close(found[1][name], theirs, tolerance, f"gradient of {name}")


# The oracle.


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + draft_config()["rms_norm_eps"]).sqrt() * weight


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as a multiplication of complex numbers: entries k and k + D/2 are one number."""
    size = x.shape[-1]
    speed = draft_config()["rope_theta"] ** (-2 * torch.arange(size // 2, dtype=torch.float64) / size)
    angle = positions.double()[:, None, None] * speed
    z = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def label_mask(one: TapSample, d: int) -> torch.Tensor:
    """``[n - 1]``: rows whose pass d has a label, by the rule of the packing: drafting starts inside an answer."""
    mask, n = one.loss_mask.tolist(), one.num_tokens
    return torch.tensor([i + d + 1 < n and mask[i + 1] and mask[i + 2] and mask[i + d + 1] for i in range(n - 1)])


def oracle_passes(one: TapSample, w: Gradients, target: FrozenTarget, passes: int) -> list[torch.Tensor]:
    """Draft logits ``[n - 1, draft_vocab]`` of every pass over a whole document."""
    n, config = one.num_tokens, draft_config()
    heads, kv_heads, size = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    rows = torch.arange(n - 1)
    hidden = one.taps.double() @ w["fc.weight"].T
    keys, values, masks, logits = [], [], [], []
    for d in range(1, passes + 1):
        # Rows whose input lies beyond the document take any token: nothing they compute is used.
        embedded = target.embedding[one.token_ids[(rows + d).clamp_max(n - 1)]]
        left = normed(embedded, w["midlayer.input_layernorm.weight"])
        x = torch.cat([left, normed(hidden, w["midlayer.hidden_norm.weight"])], -1)
        positions = one.positions[: n - 1] + d - 1
        q = turned((x @ w["midlayer.self_attn.q_proj.weight"].T).unflatten(-1, (heads, size)), positions)
        keys.append(turned((x @ w["midlayer.self_attn.k_proj.weight"].T).unflatten(-1, (kv_heads, size)), positions))
        values.append((x @ w["midlayer.self_attn.v_proj.weight"].T).unflatten(-1, (kv_heads, size)))
        # Pass 1 is the causal trunk; of later passes a row sees its own key only.
        masks.append(rows[None, :] <= rows[:, None] if d == 1 else rows[None, :] == rows[:, None])
        k = torch.cat(keys).repeat_interleave(heads // kv_heads, dim=1)
        v = torch.cat(values).repeat_interleave(heads // kv_heads, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / size**0.5
        weights = scores.masked_fill(~torch.cat(masks, 1), -1e300).softmax(-1)
        attended = torch.einsum("hij,jhd->ihd", weights, v).flatten(1)
        hidden = hidden + attended @ w["midlayer.self_attn.o_proj.weight"].T
        inner = normed(hidden, w["midlayer.post_attention_layernorm.weight"])
        gate, up = inner @ w["midlayer.mlp.gate_proj.weight"].T, inner @ w["midlayer.mlp.up_proj.weight"].T
        hidden = hidden + (gate * gate.sigmoid() * up) @ w["midlayer.mlp.down_proj.weight"].T
        logits.append(normed(hidden, w["norm.weight"]) @ w["lm_head.weight"].T)
    return logits


def oracle(samples: Sequence[TapSample], *, passes: int = PASSES) -> tuple[float, Gradients]:
    """Loss and gradients by the definition: per pass the mean over all labels, weighted ``decay ** (d - 1)``."""
    model, target = draft(), frozen_target()
    w = dict(model.named_parameters())
    sums, counts = [torch.tensor(0.0).double()] * passes, [0] * passes
    for one in samples:
        teacher = (one.final.double() @ target.head.T)[:, list(KEPT)].softmax(-1)
        for d, logits in enumerate(oracle_passes(one, w, target, passes), start=1):
            labelled = label_mask(one, d)
            for i in labelled.nonzero().squeeze(1).tolist():
                sums[d - 1] = sums[d - 1] - (teacher[i + d] * logits[i].log_softmax(-1)).sum()
            counts[d - 1] += int(labelled.sum())
    loss = sum(DECAY**d * total / max(1, count) for d, (total, count) in enumerate(zip(sums, counts, strict=True)))
    loss.backward()
    return float(loss.detach()), gradients_of(model)


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2, 3)], ids=["plain", "late start", "holes", "all"])
def test_loss_and_every_gradient_equal_the_dense_oracle(which: tuple[int, ...], passes: int) -> None:
    """E3, A15: gradients of the whole chain of passes, over labelled tokens only."""
    samples = [SAMPLES[i] for i in which]
    found = train([packed(samples, passes)], passes=passes)
    assert_same(found, oracle(samples, passes=passes), OBJECTIVE_FP64)


def test_a_pass_without_any_label_takes_no_part() -> None:
    """Three answer tokens label two passes; the third has nothing to learn from and divides by nothing."""
    samples = [sample("..AAA", seed=5)]
    batch = packed(samples)
    assert batch.label_counts().tolist() == [2, 1, 0]
    assert_same(train([batch]), oracle(samples), OBJECTIVE_FP64)


def test_anchors_that_go_on_to_later_passes_are_exact_without_the_others() -> None:
    """Those that go on and those that do not, each trained alone, add up to all of them, and the first pass once more."""
    batch = packed(SAMPLES)

    def part(valid: torch.Tensor) -> tuple[float, Gradients]:
        model = draft()
        objective = TrainingTimeTest(model, frozen_target(), passes=PASSES, pass_decay=DECAY)
        for _ in objective.pieces(dataclasses.replace(batch, valid=valid), batch.label_counts()):
            pass
        return objective.take_loss(), gradients_of(model)

    def added(one: tuple[float, Gradients], other: tuple[float, Gradients]) -> tuple[float, Gradients]:
        return one[0] + other[0], {name: one[1][name] + other[1][name] for name in one[1]}

    stays = torch.arange(batch.valid.shape[0]) % 3 == 0
    first = torch.arange(PASSES) == 0
    deep = part(batch.valid & (first | stays[:, None]))
    rest = part(batch.valid & (first | ~stays[:, None]))
    assert_same(added(deep, rest), added(part(batch.valid), part(batch.valid & first)), REGROUPED_FP64)


def test_packed_equals_unpacked() -> None:
    """D9, D12: documents laid end to end give what they give one by one, whatever their lengths."""
    together = train([packed(SAMPLES)])
    assert_same(train([packed([one]) for one in SAMPLES]), together, REGROUPED_FP64)
    assert_same(train([packed(SAMPLES[::-1])]), together, REGROUPED_FP64)


@pytest.mark.parametrize(("max_anchors", "max_rows"), [(1, 1), (2, 100), (3, 12), (5, 20), (100, 100)])
def test_splitting_into_microbatches_changes_nothing(max_anchors: int, max_rows: int) -> None:
    batches = [fp64(batch) for batch in microbatches(SAMPLES, PASSES, max_anchors, max_rows)]
    assert len(batches) > 1 or max_anchors == 100
    assert_same(train(batches), train([packed(SAMPLES)]), REGROUPED_FP64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["before", "after"])
def test_another_document_in_the_pack_changes_nothing(dtype: torch.dtype, order: tuple[int, int]) -> None:
    """D9: other tokens and other states in document A leave B's loss and gradients bitwise unchanged."""

    def of_b(a: TapSample) -> tuple[float, Gradients]:
        documents = (a, SAMPLES[0])
        batch = pack([documents[i] for i in order], PASSES)
        batch = dataclasses.replace(batch, taps=batch.taps.to(dtype), final=batch.final.to(dtype))
        mine = batch.document[batch.anchors] == order.index(1)
        batch = dataclasses.replace(batch, anchors=batch.anchors[mine], valid=batch.valid[mine])
        model = draft(dtype=dtype)
        objective = TrainingTimeTest(model, frozen_target(dtype=dtype), passes=PASSES)
        for _ in objective.pieces(batch, batch.label_counts()):
            pass
        return objective.take_loss(), gradients_of(model)

    mask = "..AAAAA"
    loss, gradients = of_b(sample(mask, seed=10))
    other_loss, other_gradients = of_b(sample(mask, seed=11))
    assert loss > 0
    assert loss == other_loss
    for name, gradient in gradients.items():
        assert torch.equal(gradient, other_gradients[name]), name


def test_stopping_anywhere_and_dropping_the_gradients_is_harmless() -> None:
    """An iterator closed after any piece leaves nothing behind, in gradients or in the loss, once they are zeroed."""
    batch = packed(SAMPLES[:2])
    model = draft()
    expected_loss, expected = train([batch])
    objective = TrainingTimeTest(model, frozen_target(), passes=PASSES, pass_decay=DECAY)
    pieces = sum(1 for _ in objective.pieces(batch, batch.label_counts()))
    assert pieces > 3 * PASSES, "a microbatch is cut into at least a forward, a head and a backward per pass"
    objective.take_loss()
    for stop in range(pieces):
        model.zero_grad()
        cut = objective.pieces(batch, batch.label_counts())
        for _ in itertools.islice(cut, stop):
            pass
        cut.close()
        model.zero_grad()
        for _ in objective.pieces(batch, batch.label_counts()):
            pass
        assert objective.take_loss() == expected_loss, f"stopped after {stop} pieces"
        for name, gradient in gradients_of(model).items():
            assert torch.equal(gradient, expected[name]), f"{name}, stopped after {stop} pieces"


def test_gradients_are_added_to_what_is_there() -> None:
    batch = packed(SAMPLES[:1])
    model = draft()
    _, once = train([batch], model=model)
    objective = TrainingTimeTest(model, frozen_target(), passes=PASSES, pass_decay=DECAY)
    for _ in objective.pieces(batch, batch.label_counts()):
        pass
    for name, gradient in gradients_of(model).items():
        assert_close(gradient, 2 * once[name], REGROUPED_FP64, name)


def test_the_target_gets_no_gradient() -> None:
    """A15: embedding, head, taps and teacher states of a policy in training stay out of the draft's backward."""
    batch, target, model = packed(SAMPLES), frozen_target(), draft()
    policy = {"embedding": target.embedding, "head": target.head, "taps": batch.taps, "final": batch.final}
    for tensor in policy.values():
        tensor.requires_grad_()
    objective = TrainingTimeTest(model, target, passes=PASSES, pass_decay=DECAY)
    for _ in objective.pieces(batch, batch.label_counts()):
        pass
    assert {name for name, tensor in policy.items() if tensor.grad is not None} == set()
    assert_same((objective.take_loss(), gradients_of(model)), oracle(SAMPLES), OBJECTIVE_FP64)


def test_training_inside_inference_only_code_works() -> None:
    """Engine workers run with gradients switched off: the pieces switch them on for themselves."""
    with torch.no_grad():
        found = train([packed(SAMPLES[:2])])
    assert_same(found, train([packed(SAMPLES[:2])]), REGROUPED_FP64)


def test_the_draft_trains_in_single_precision() -> None:
    """D20: an fp32 draft of a target with bf16 weights computes and learns in fp32."""
    target = frozen_target(dtype=torch.bfloat16)
    model = draft(dtype=torch.float32)
    batch = pack(SAMPLES, PASSES)
    objective = TrainingTimeTest(model, target, passes=PASSES)
    for _ in objective.pieces(batch, batch.label_counts()):
        pass
    assert 0 < objective.take_loss() < 20
    assert {gradient.dtype for gradient in gradients_of(model).values()} == {torch.float32}


# Measuring.


def parrot(choices: Sequence[int]) -> tuple[Eagle3Draft, torch.Tensor]:
    """A draft that proposes one token per anchor, in every pass, and the taps ``[rows, ...]`` that make it do so.

    Attention and MLP add nothing, so the hidden state stays what the taps gave: the one-hot vector of a draft token.
    """
    kept = (1, 4, 5, 9)
    model = draft(kept=kept)
    with torch.no_grad():
        model.midlayer.self_attn.o_proj.weight.zero_()
        model.midlayer.mlp.down_proj.weight.zero_()
        model.norm.weight.fill_(1)
        model.fc.weight.zero_()
        model.fc.weight[:, :HIDDEN] = torch.eye(HIDDEN)
        model.lm_head.weight.copy_(torch.eye(HIDDEN)[: len(kept)])
    taps = torch.zeros(len(choices), len(TAP_LAYERS) * HIDDEN)
    for row, token in enumerate(choices):
        taps[row, kept.index(token)] = 1
    return model, taps


def test_measured_acceptance_of_a_draft_whose_tokens_are_known() -> None:
    """Runs counted by hand; a right token after a wrong one does not count, and neither does one after the answer's end."""
    # Row i is asked for tokens i+2, i+3, i+4 and always proposes its one choice; rows 0 and the last are no anchors.
    # row 1: 5 5 5 -> 3     row 2: 5 5 9 -> 2     row 3: 5 9 9 -> 0     row 4: 9 9 -> 2     row 5: 9 -> 1
    model, taps = parrot([9, 5, 5, 9, 9, 9, 9])
    first = sample("..AAAAAA", tokens=[2, 2, 5, 5, 5, 5, 9, 9], taps=taps)
    # row 1: 9 4 -> 0       row 2: 4 -> 1
    model, taps = parrot([4, 1, 4, 4])
    second = sample("..AAA", seed=1, tokens=[1, 1, 3, 9, 4], taps=taps)
    objective = TrainingTimeTest(model, frozen_target(), passes=3)
    found = objective.measure(fp64(pack([first, second], 3)))
    assert found.anchors.tolist() == [5, 2]
    assert found.accepted_sum.tolist() == [5 + 3 + 2 + 0 + 2 + 1, 2 + 0 + 1]
    assert found.hits.tolist() == [5, 3, 1]
    assert found.length == pytest.approx(16 / 7)


def test_measured_acceptance_follows_the_dense_oracle() -> None:
    """With attention at work: greedy tokens of every pass, over a reduced vocabulary, compared with the sampled ones."""
    model, target = draft(), frozen_target()
    kept, w = torch.tensor(KEPT), dict(model.named_parameters())
    # Answers made of what the oracle proposes in most places, so that there is something to accept.
    samples = []
    for one in SAMPLES:
        ids = one.token_ids.clone()
        for i in range(one.num_tokens - 2):
            redone = dataclasses.replace(one, token_ids=ids)
            proposed = int(kept[oracle_passes(redone, w, target, 1)[0][i].argmax()])
            ids[i + 2] = proposed if i % 4 else ids[i + 2]
        samples.append(dataclasses.replace(one, token_ids=ids))
    sums, hits = [], [0] * PASSES
    for one in samples:
        proposals = [kept[logits.argmax(-1)] for logits in oracle_passes(one, w, target, PASSES)]
        total = 0
        for i in label_mask(one, 1).nonzero().squeeze(1).tolist():
            total += 1
            for d in range(1, PASSES + 1):
                if not label_mask(one, d)[i] or proposals[d - 1][i] != one.token_ids[i + d + 1]:
                    break
                total += 1
                hits[d - 1] += 1
        sums.append(total)
    assert hits[1] > 0, "nothing accepted beyond the first token: nothing to compare"
    found = TrainingTimeTest(model, target, passes=PASSES).measure(packed(samples))
    assert found.accepted_sum.tolist() == sums
    assert found.hits.tolist() == hits


def test_measuring_nothing_gives_no_acceptance_and_no_error() -> None:
    found = TrainingTimeTest(draft(), frozen_target(), passes=2).measure(packed([sample(".....")], 2))
    assert found.anchors.tolist() == [0]
    assert found.hits.tolist() == [0, 0]
    assert found.length == 0


def test_the_draft_type_makes_this_objective() -> None:
    objective = Eagle3().objective(draft(), frozen_target(), passes=2)
    assert isinstance(objective, TrainingTimeTest)
    assert objective.passes == 2
