"""Catches a draft in training that learns something else than the engine's learner would from the same samples, that reaches into
the policy, that steps on rubbish, or that goes on from a checkpoint as another run.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.builders import KEPT, TAP_LAYERS, VOCAB, dflash_draft, draft, frozen_target, generator
from tests.cotraining import LENGTHS, PASSES, Made, draft_of, gradients, made
from tests.tolerances import NARROW_PRODUCTS, OBJECTIVE_FP64, assert_close
from trainer_bridge.cotrain.microbatch import Microbatch, share_of
from trainer_bridge.cotrain.options import CoTrainOptions
from trainer_bridge.cotrain.trainer import DraftCoTrainer, StepResult
from trainer_bridge.draft.interface import FrozenTarget
from trainer_bridge.draft.packing import pack
from trainer_bridge.draft.registry import by_name
from trainer_bridge.errors import CheckpointError, ConfigError, TapOrderError
from trainer_bridge.taps import TapSample

KINDS = ("eagle3", "dflash")
BATCHES = [made(lengths, seed) for seed, lengths in enumerate(LENGTHS)]


def trainer_of(kind: str, model: nn.Module | None = None, *, steps: int = 1, **options: Any) -> DraftCoTrainer:
    """Past the first step, unless it is said otherwise; all anchors, no clip, no adaptation."""
    values = {"passes": PASSES, "anchor_share": 1.0, "max_gradient_norm": 1e9, "vocabulary_every_steps": 0, "warmup_steps": 0}
    trainer = DraftCoTrainer(by_name(kind), model or draft_of(kind), CoTrainOptions(**{**values, **options}))
    trainer.steps = steps
    return trainer


def step(trainer: DraftCoTrainer, batches: Sequence[Made] = BATCHES, target: FrozenTarget | None = None) -> StepResult:
    rows = trainer.begin_step([one.microbatch for one in batches], target or frozen_target(dtype=trainer.dtype))
    assert rows == [one.final.shape[0] for one in batches]
    for index, one in enumerate(batches):
        trainer.add(index, one.taps, one.final)
    return trainer.finish_step()


def state_of(trainer: DraftCoTrainer) -> dict[str, torch.Tensor]:
    """Weights and moments, copied."""
    found = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    for number, moments in trainer.state_dict()["optimizer"]["state"].items():
        found |= {f"{number} {name}": torch.as_tensor(value).clone() for name, value in moments.items()}
    return found


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


def samples_of(one: Made) -> list[TapSample]:
    """What an engine would have tapped of the same documents; those that teach nothing are none."""
    found, begin = [], 0
    for number, length in enumerate(one.microbatch.lengths):
        rows = slice(begin, begin + length)
        begin += length
        mask = one.microbatch.loss_mask[rows]
        if length < 3 or not bool((mask[1:-1] & mask[2:]).any()):
            continue
        found.append(
            TapSample(
                request_id=f"document {number}", group_id="", policy_version=0, token_ids=one.microbatch.token_ids[rows],
                positions=torch.arange(length), loss_mask=mask, tap_layers=TAP_LAYERS, taps=one.taps[rows][:-1],
                final=one.final[rows][:-1], final_is_normed=True,
            ).validate()
        )  # fmt: skip
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_the_engines_learner(kind: str) -> None:
    """Its objective on the same samples, packed as it packs them; three microbatches count as one."""
    trainer = trainer_of(kind)
    model = copy.deepcopy(trainer.model)
    objective = by_name(kind).objective(model, frozen_target(), passes=PASSES)
    # Packed samples are fp32, which these values survive.
    packed = [pack(samples_of(one), PASSES) for one in BATCHES]
    batches = [dataclasses.replace(one, taps=one.taps.double(), final=one.final.double()) for one in packed]
    labels = torch.stack([objective.label_counts(one) for one in batches]).sum(0)
    for one in batches:
        for _ in objective.pieces(one, labels):
            pass
    result = step(trainer)
    assert result.labels == labels.tolist() and min(result.labels) > 5
    assert result.loss == pytest.approx(objective.take_loss(), rel=OBJECTIVE_FP64.relative) and result.loss > 1
    found, wanted = gradients(trainer.model), gradients(model)
    assert found.keys() >= wanted.keys() and len(wanted) > 8
    for name, gradient in found.items():
        assert_close(gradient, wanted.get(name, torch.zeros_like(gradient)), OBJECTIVE_FP64, name)
    norm = float(torch.stack([gradient.norm() for gradient in wanted.values()]).norm())
    assert result.gradient_norm == pytest.approx(norm, rel=OBJECTIVE_FP64.relative)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_prompt_token_is_called_as_a_label_does_not_matter(kind: str) -> None:
    """Case A15: the teacher's rows of prompt tokens, and what lies behind the last label, have no say."""
    one = BATCHES[2]
    plain, changed = trainer_of(kind), trainer_of(kind)
    _, valid = one.microbatch.shifted(PASSES)
    needed = torch.zeros(one.final.shape[0], dtype=torch.bool)
    for row, d in valid.nonzero().tolist():
        assert bool(one.microbatch.loss_mask[row + d + 2])
        needed[row + 1 + d] = True
    assert 5 < int(needed.sum()) < needed.shape[0] - 5
    other = dataclasses.replace(one, final=torch.where(needed[:, None], one.final, 100 * torch.ones_like(one.final)))
    assert step(plain, [one]).loss == step(changed, [other]).loss
    assert_same(gradients(changed.model), gradients(plain.model))
    # And what is needed has.
    step(changed, [dataclasses.replace(one, final=one.final + needed[:, None])])
    assert not torch.equal(changed.model.lm_head.weight.grad, plain.model.lm_head.weight.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_knows_nothing_of_its_neighbours(kind: str) -> None:
    """Case D9: of three documents the middle one has labels; the others become other documents."""
    one = made((7, 12, 6), 5)
    middle = slice(7, 19)
    mask = torch.zeros(25, dtype=torch.bool)
    mask[middle] = one.microbatch.loss_mask[middle]

    def with_others(number: int) -> Made:
        random = generator(90 + number)
        ids = torch.randint(VOCAB, (25,), generator=random)
        taps, final = (torch.randn(whole.shape, generator=random).double() for whole in (one.taps, one.final))
        ids[middle], taps[middle], final[middle] = one.microbatch.token_ids[middle], one.taps[middle], one.final[middle]
        return Made(Microbatch(token_ids=ids, loss_mask=mask, lengths=(7, 12, 6)), taps, final)

    first, second = trainer_of(kind), trainer_of(kind)
    assert step(first, [with_others(0)]).loss == step(second, [with_others(1)]).loss != 0.0
    assert_same(gradients(second.model), gradients(first.model))
    # A change within the document is seen.
    changed = with_others(0)
    changed.taps[8] += 1.0
    assert step(trainer_of(kind), [changed]).loss != step(trainer_of(kind), [with_others(0)]).loss


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_reaches_the_policy(kind: str) -> None:
    """Case A15: its embedding, head and hidden states get no gradient, though all of them want one."""
    trainer, plain = trainer_of(kind), frozen_target()
    policy = [plain.embedding.clone().requires_grad_(), plain.head.clone().requires_grad_()]
    target = FrozenTarget(embedding=policy[0] * 1.0, head=policy[1] * 1.0)
    batches = []
    for one in BATCHES:
        leaves = [one.taps.clone().requires_grad_(), one.final.clone().requires_grad_()]
        policy += leaves
        batches.append(dataclasses.replace(one, taps=leaves[0] * 1.0, final=leaves[1] * 1.0))
    result = step(trainer, batches, target)
    assert all(leaf.grad is None for leaf in policy)
    assert len(gradients(trainer.model)) > 8
    # The policy's own backward comes later, through a graph that is still there.
    (sum(one.taps.sum() for one in batches) + target.head.sum()).backward()
    assert float(policy[1].grad.sum()) == policy[1].numel() and float(policy[2].grad.sum()) == policy[2].numel()
    assert result.loss == step(trainer_of(kind)).loss


@pytest.mark.parametrize("kind", KINDS)
def test_the_draft_is_clipped_by_itself(kind: str) -> None:
    free = step(trainer_of(kind)).gradient_norm
    trainer = trainer_of(kind, max_gradient_norm=free / 10)
    unclipped = trainer_of(kind)
    step(unclipped)
    assert step(trainer).gradient_norm == free
    for name, gradient in gradients(trainer.model).items():
        # torch keeps a norm of 0 from dividing with this.
        assert_close(gradient, gradients(unclipped.model)[name] * (free / 10 / (free + 1e-6)), OBJECTIVE_FP64, name)
    loose = trainer_of(kind, max_gradient_norm=free * 10)
    step(loose)
    assert_same(gradients(loose.model), gradients(unclipped.model))


SPOILED: dict[str, Callable[[Made], Made]] = {
    "a teacher that is not a number": lambda one: dataclasses.replace(one, final=one.final * math.nan),
    "an infinite tap": lambda one: dataclasses.replace(one, taps=one.taps * math.inf),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", SPOILED)
def test_what_is_not_finite_changes_nothing(kind: str, what: str) -> None:
    trainer, spared = trainer_of(kind), trainer_of(kind)
    step(trainer)
    step(spared)
    before = state_of(trainer)
    result = step(trainer, [BATCHES[0], SPOILED[what](BATCHES[1]), BATCHES[2]])
    assert result.skipped and not (math.isfinite(result.loss) and math.isfinite(result.gradient_norm))
    assert_same(state_of(trainer), before)
    assert trainer.steps == 3
    # And nothing of it is left in the next step.
    spared.steps += 1
    assert not step(trainer).skipped
    step(spared)
    assert_same(state_of(trainer), state_of(spared))


def test_a_gradient_that_is_not_finite_is_enough() -> None:
    trainer = trainer_of("eagle3")
    trainer.begin_step([one.microbatch for one in BATCHES], frozen_target())
    for index, one in enumerate(BATCHES):
        trainer.add(index, one.taps, one.final)
    trainer.model.norm.weight.grad[0] = math.inf
    before = state_of(trainer)
    result = trainer.finish_step()
    assert result.skipped and math.isfinite(result.loss)
    assert_same(state_of(trainer), before)


def begun(trainer: DraftCoTrainer) -> DraftCoTrainer:
    trainer.begin_step([one.microbatch for one in BATCHES], frozen_target())
    return trainer


def add(trainer: DraftCoTrainer, index: int) -> DraftCoTrainer:
    trainer.add(index, BATCHES[index].taps, BATCHES[index].final)
    return trainer


DISORDER: dict[str, tuple[Callable[[DraftCoTrainer], object], str]] = {
    "a later one first": (lambda t: add(begun(t), 1), "was given microbatch 1; it is the turn of microbatch 0"),
    "one twice": (lambda t: add(add(begun(t), 0), 0), "was given microbatch 0; it is the turn of microbatch 1"),
    "one missing": (lambda t: add(add(begun(t), 0), 1).finish_step(), "the draft has seen 2 of 3 microbatches of this step"),
    "two steps at once": (lambda t: begun(begun(t)), "has begun and was not finished"),
    "no step": (lambda t: add(t, 0), "no step of the draft has begun: call begin_step first"),
    "an end without a beginning": (lambda t: t.finish_step(), "no step of the draft has begun"),
    "two ends": (lambda t: (step(t), t.finish_step()), "no step of the draft has begun"),
    "after it was given up": (lambda t: (begun(t).abort_step(), add(t, 0)), "no step of the draft has begun"),
}


@pytest.mark.parametrize("what", DISORDER)
def test_every_disorder_has_a_name(what: str) -> None:
    act, message = DISORDER[what]
    with pytest.raises(TapOrderError, match=message):
        act(trainer_of("eagle3"))


def test_a_step_that_was_given_up_leaves_nothing_behind() -> None:
    trainer, spared = trainer_of("eagle3"), trainer_of("eagle3")
    before = state_of(trainer)
    add(begun(trainer), 0).abort_step()
    assert_same(state_of(trainer), before)
    assert step(trainer) == dataclasses.replace(step(spared), seconds=pytest.approx(0.0, abs=1e3))
    assert_same(state_of(trainer), state_of(spared))


@pytest.mark.parametrize("kind", KINDS)
def test_an_fp32_draft_learns_from_bf16_states(kind: str) -> None:
    """Case D20: each state is cast, so the same numbers in fp32 give the same step."""
    narrow, wide = (trainer_of(kind, draft_of(kind, dtype=torch.float32)) for _ in range(2))
    short = [dataclasses.replace(one, taps=one.taps.bfloat16(), final=one.final.bfloat16()) for one in BATCHES]
    long = [dataclasses.replace(one, taps=one.taps.float(), final=one.final.float()) for one in short]
    target = frozen_target(dtype=torch.bfloat16)
    cast = FrozenTarget(embedding=target.embedding.float(), head=target.head.float())
    assert step(narrow, short, target).loss == step(wide, long, cast).loss
    assert_same(state_of(narrow), state_of(wide))
    assert all(tensor.dtype == torch.float32 for tensor in narrow.model.parameters())


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    content = io.BytesIO()
    torch.save(state, content)
    content.seek(0)
    return torch.load(content, weights_only=True)


def of_step(number: int) -> list[Made]:
    return [made(lengths, 10 * number + seed) for seed, lengths in enumerate(LENGTHS)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_run_that_went_on(kind: str) -> None:
    """Bitwise: anchors drawn, warm-up, moments, the vocabulary that has changed meanwhile."""
    options = {"anchor_share": 0.5, "deep_anchor_share": 0.5, "vocabulary_every_steps": 2, "warmup_steps": 5, "steps": 0}
    whole, first, then = (trainer_of(kind, **options) for _ in range(3))
    results = [step(whole, of_step(number)) for number in range(6)]
    for number in range(3):
        step(first, of_step(number))
    # A fresh process has weights of its own.
    with torch.no_grad():
        for parameter in then.model.parameters():
            parameter.add_(1.0)
    then.load_state_dict(through_a_file(first.state_dict()))
    assert then.steps == 3
    again = [step(then, of_step(number)) for number in range(3, 6)]
    assert [(one.loss, one.labels) for one in again] == [(one.loss, one.labels) for one in results[3:]]
    assert_same(state_of(then), state_of(whole))
    assert set(whole.model.kept().tolist()) != set(KEPT)
    # Sampling was on, and drew something else in every step.
    everything = step(trainer_of(kind), of_step(0)).labels[0]
    assert len({one.labels[0] for one in results}) > 1 and max(one.labels[0] for one in results) < everything


def test_the_state_of_another_draft_is_refused() -> None:
    trainer = trainer_of("eagle3")
    step(trainer)
    before = state_of(trainer)
    smaller = trainer_of("eagle3", draft(kept=KEPT[:5]))
    deeper, flat = trainer_of("dflash"), trainer_of("dflash", dflash_draft(layers=1))
    for one, other, message in (
        (trainer, smaller, "the state is of another draft: .*lm_head.weight differ"),
        (trainer, deeper, "the state is of another draft: "),
        (deeper, flat, "the state is of another draft: .*build it from the config it was saved with"),
    ):
        step(other)
        with pytest.raises(CheckpointError, match=message):
            one.load_state_dict(through_a_file(other.state_dict()))
    assert_same(state_of(trainer), before)
    assert trainer.steps == 2


def used(*tokens: int) -> list[Made]:
    """One document that says nothing but these."""
    ids = torch.tensor([*tokens] * 6)
    one = made((ids.shape[0],), 3)
    mask = torch.ones_like(ids, dtype=torch.bool)
    return [Made(Microbatch(token_ids=ids, loss_mask=mask, lengths=(ids.shape[0],)), one.taps, one.final)]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_new_tokens_start_with_the_policys_head_and_no_moments(kind: str) -> None:
    trainer, target = trainer_of(kind, vocabulary_every_steps=2, steps=1), frozen_target()
    step(trainer)
    moments = trainer._optimizer.state[trainer.model.lm_head.weight]
    assert tuple(trainer.model.kept().tolist()) == KEPT and bool((moments["exp_avg_sq"] > 0).all())
    before, old = trainer.model.lm_head.weight.detach().clone(), {name: moments[name].clone() for name in ("exp_avg", "exp_avg_sq")}
    batches = used(5, 6, 5, KEPT[0])
    trainer.begin_step([one.microbatch for one in batches], target)
    kept = trainer.model.kept()
    changed = (kept != torch.tensor(KEPT)).nonzero().squeeze(1)
    assert sorted(kept[changed].tolist()) == [5, 6] and KEPT[0] in kept.tolist()
    stays = torch.ones(len(KEPT), dtype=torch.bool)
    stays[changed] = False
    weight = trainer.model.lm_head.weight
    assert torch.equal(weight[changed], target.head[kept[changed]]) and torch.equal(weight[stays], before[stays])
    for name in old:
        assert not moments[name][changed].any() and torch.equal(moments[name][stays], old[name][stays])
    trainer.add(0, batches[0].taps, batches[0].final)
    assert not trainer.finish_step().skipped
    # Between two adaptations the vocabulary stays.
    step(trainer, used(1, 4, 9, 10))
    assert torch.equal(trainer.model.kept(), kept)


def test_a_step_that_adapts_asks_for_the_whole_head() -> None:
    """Which tokens come in is decided with those of all data parallel ranks: rows of one's own tokens are not enough."""
    trainer = trainer_of("eagle3", vocabulary_every_steps=2, steps=0)
    asked = []
    for number in range(4):
        asked.append(trainer.vocabulary().tolist())
        step(trainer, of_step(number))
    everything = list(range(VOCAB))
    assert asked[0] == asked[2] == everything and len(asked[1]) == len(asked[3]) == len(KEPT)
    assert trainer_of("eagle3").vocabulary().tolist() == list(KEPT)


def new_dflash() -> nn.Module:
    """A draft that nothing has attended with yet."""
    model = dflash_draft(layers=1)
    with torch.no_grad():
        model.each_layer()[0].self_attn.o_proj.weight.zero_()
    return model


def test_a_new_draft_meets_its_first_microbatch_and_no_other() -> None:
    model, kind, target = new_dflash(), by_name("dflash"), frozen_target()
    met = copy.deepcopy(model)
    share = share_of(BATCHES[0].microbatch, PASSES, sampling=None, exchange=None)
    assert kind.meet(met, target, share.batch(BATCHES[0].taps, BATCHES[0].final))
    trainer = trainer_of("dflash", model, steps=0)
    begun(trainer)
    assert not model.each_layer()[0].self_attn.o_proj.weight.any()
    add(trainer, 0)
    assert_same(dict(model.state_dict()), dict(met.state_dict()))
    add(add(trainer, 1), 2).finish_step()
    # One that has been trained is left alone, also before a step 0.
    weights = draft_of("dflash")
    old = trainer_of("dflash", copy.deepcopy(weights), steps=0)
    add(begun(old), 0)
    assert_same(dict(old.model.state_dict()), dict(weights.state_dict()))


def test_products_may_be_narrow_and_learn_much_the_same() -> None:
    plain = step(trainer_of("eagle3")).loss
    trainer = trainer_of("eagle3")
    narrow = DraftCoTrainer(trainer.kind, trainer.model, trainer.options, product_dtype=torch.bfloat16)
    narrow.steps = 1
    found = step(narrow).loss
    assert found != plain and found == pytest.approx(plain, rel=NARROW_PRODUCTS[torch.bfloat16].relative)


def test_the_learning_rate_warms_up_and_a_new_one_counts_after_a_restart() -> None:
    trainer = trainer_of("eagle3", warmup_steps=4, learning_rate=0.1, steps=0)
    rates = []
    for number in range(5):
        step(trainer, of_step(number))
        rates.append(trainer._optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    slower = trainer_of("eagle3", warmup_steps=4, learning_rate=0.01)
    slower.load_state_dict(trainer.state_dict())
    step(slower)
    assert slower._optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0, must be above 0"),
        ({"learning_rate": math.nan}, "learning_rate is nan"),
        ({"max_gradient_norm": -1.0}, "max_gradient_norm is -1.0, must be above 0"),
        ({"anchor_share": 0.0}, "anchor_share is 0.0, must lie above 0 and be at most 1"),
        ({"anchor_share": 1.5}, "anchor_share is 1.5"),
        ({"deep_anchor_share": 0}, "deep_anchor_share is 0, must lie above 0"),
        ({"passes": 0}, "passes is 0, must be 1 or more"),
        ({"warmup_steps": -1}, "warmup_steps is -1, must be 0 or more"),
        ({"vocabulary_every_steps": -1}, "vocabulary_every_steps is -1, must be 0 or more"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CoTrainOptions(**options)


def test_options_that_can_be_are_taken() -> None:
    options = CoTrainOptions(passes=1, anchor_share=1, deep_anchor_share=1e-3, warmup_steps=0, vocabulary_every_steps=0)
    assert options.deep_anchor_share == 1e-3 and CoTrainOptions().anchor_share is None
    assert DraftCoTrainer(by_name("dflash"), draft_of("dflash")).passes == by_name("dflash").default_tokens
