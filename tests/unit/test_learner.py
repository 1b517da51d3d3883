"""Catches a learner that does not learn, that touches what is served, publishes what is not better, dies of one bad number,
or makes a request wait.

The traffic is one cycle of tokens, the same in every answer, so a tiny draft learns all there is in some dozens of steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.builders import HIDDEN, KEPT, TAP_LAYERS, VOCAB, draft, draft_config, frozen_target, generator, sample
from trainer_bridge.draft import checkpoint
from trainer_bridge.draft.eagle3 import Eagle3
from trainer_bridge.draft.eagle3.objective import TrainingTimeTest
from trainer_bridge.draft.interface import FrozenTarget
from trainer_bridge.draft.packing import PackedBatch, pack
from trainer_bridge.taps import TapSample
from vllm_specdraft import learner as learner_module
from vllm_specdraft.anchor_budget import AnchorBudget
from vllm_specdraft.config import EngineConfig
from vllm_specdraft.gate import Gate
from vllm_specdraft.learner import Learner
from vllm_specdraft.learner_state import LearnerState
from vllm_specdraft.replay import Replay

CYCLE = (2, 7, 3, 12, 8, 19)
"""What the target always says; all of it can be proposed by the tiny draft."""
TARGET = frozen_target(dtype=torch.float32)
SLICE_MS = 60_000.0
"""So long that the machine's speed decides nothing: the budget only grows."""

State = dict[str, torch.Tensor]


def answer(index: int, *, cycle: Sequence[int] = CYCLE, length: int = 14) -> TapSample:
    """The cycle from somewhere on: the target is sure of the next token, the taps tell the present one, blurred a little."""
    tokens = [cycle[(index + i) % len(cycle)] for i in range(length)]
    known = torch.randn(VOCAB, len(TAP_LAYERS) * HIDDEN, generator=generator(7))
    blur = 0.1 * torch.randn(length - 1, len(TAP_LAYERS) * HIDDEN, generator=generator(index))
    following = torch.tensor(tokens[1:])
    return sample(
        "..." + "A" * (length - 3),
        tokens=tokens,
        taps=known[torch.tensor(tokens[:-1])] + blur,
        final=4 * TARGET.head[following],
        request_id=f"r{index}",
        group_id=f"g{index}",
    )


def served_state(seed: int = 0) -> State:
    return {name: tensor.clone() for name, tensor in draft(seed=seed, dtype=torch.float32).state_dict().items()}


def make(
    samples: Sequence[TapSample] | None = None,
    *,
    state: State | None = None,
    target: FrozenTarget = TARGET,
    resumed: LearnerState | None = None,
    **fields: Any,
) -> Learner:
    """A learner of the tiny draft on some answers, enough of them held out for the gate."""
    values: dict[str, Any] = {
        "draft_dir": "unused",
        "state_dir": "unused",
        "num_speculative_tokens": 2,
        "slice_ms": SLICE_MS,
        "held_out_share": 0.3,
        "min_samples": 4,
        "learning_rate": 0.02,
        "warmup_steps": 4,
        "evaluate_every_steps": 20,
    }
    # The samples' own.
    config = EngineConfig(**{"policy_version": 3, **values, **fields})
    replay = Replay(limit_bytes=1 << 24, held_out_share=config.held_out_share, seed=0)
    for one in [answer(i) for i in range(24)] if samples is None else samples:
        assert replay.add(one)
    return Learner(
        kind=Eagle3(),
        model_config=draft_config(),
        state=served_state() if state is None else state,
        target=target,
        replay=replay,
        config=config,
        resumed=resumed,
    )


def run(learner: Learner, steps: int) -> None:
    """Until this many more optimizer steps are done, and the measurement that follows the last one, if one does."""
    wanted = learner.progress.steps + steps
    while learner.progress.steps < wanted:
        learner.run_piece()
    tokens = learner.progress.tokens
    while wanted % learner.config.evaluate_every_steps == 0 and learner.progress.tokens == tokens:
        learner.run_piece()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# It learns.


def test_steps_change_the_weights_and_lower_the_loss() -> None:
    """A14: every parameter moves, the loss falls far, and the two maps of the vocabulary stay as they are."""
    learner = make(evaluate_every_steps=1000)
    before = learner.state()
    run(learner, 4)
    first = learner.progress.loss
    assert first is not None
    run(learner, 60)
    last, after = learner.progress.loss, learner.state()
    assert last is not None
    assert last < 0.6 * first
    assert checkpoint.digest_of(after) != checkpoint.digest_of(before)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) is (name in ("d2t", "t2d")), name
    assert learner.progress.gradient_norm is not None
    assert learner.progress.gradient_norm > 0
    assert learner.progress.skipped_steps == 0


def test_what_is_learned_shows_in_the_accepted_length() -> None:
    learner = make()
    run(learner, 100)
    verdict = learner.verdict
    assert verdict is not None
    assert verdict.served < 1.8
    assert verdict.candidate > 2.5, "of 3 at most: two drafts and the bonus token"


def test_the_learning_rate_warms_up() -> None:
    learner = make(warmup_steps=10, learning_rate=1e-3)
    rates = []
    for _ in range(12):
        run(learner, 1)
        rates.append(learner._optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1e-3 * min(1.0, i / 10) for i in range(1, 13)])


def test_no_warm_up_is_a_setting() -> None:
    learner = make(warmup_steps=0)
    run(learner, 1)
    assert learner._optimizer.param_groups[0]["lr"] == 0.02


def test_progress_counts_what_was_done() -> None:
    learner = make(evaluate_every_steps=1000)
    anchors = 14 - 3 - 1
    run(learner, 5)
    assert (learner.progress.steps, learner.progress.tokens) == (5, 5 * 2 * anchors)


def test_gradients_are_clipped() -> None:
    """With a clip this small and plain momentum untouched, the norm that is reported is the one before clipping."""
    learner = make(max_gradient_norm=1e-6, evaluate_every_steps=1000)
    run(learner, 1)
    assert learner.progress.gradient_norm is not None
    assert learner.progress.gradient_norm > 1e-3
    norm = torch.cat([p.grad.flatten() for p in learner._model.parameters()]).norm()
    assert float(norm) == pytest.approx(1e-6, rel=1e-3)


# Pieces.


def test_a_piece_is_short_and_counted() -> None:
    """One step is many pieces: none of them runs a whole step, and whoever drives may stop after any."""
    learner = make(evaluate_every_steps=1000)
    run(learner, 1)
    first = learner.progress.slices
    run(learner, 3)
    per_step = (learner.progress.slices - first) / 3
    # Per microbatch: teacher, trunk, layer and head per pass, backward per pass, trunk's backward; then clip, update.
    assert per_step == 2 + 2 * 2 + 2 + 1 + 2
    assert learner.progress.seconds > 0
    assert learner.piece_ms_p95() is not None


def test_a_piece_does_at_most_one_forward_or_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    backward = torch.autograd.backward

    def counted(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        backward(*arguments, **options)

    monkeypatch.setattr(torch.autograd, "backward", counted)
    learner = make(evaluate_every_steps=1000)
    total = 0
    while learner.progress.steps < 3:
        calls = 0
        learner.run_piece()
        assert calls <= 1
        total += calls
    assert total == 3 * (2 + 2 + 1), "head and layer of two passes, and the trunk"


def test_measuring_is_cut_into_pieces_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make(evaluate_every_steps=2)
    calls = 0
    measure = TrainingTimeTest.measure

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return measure(*arguments)

    monkeypatch.setattr(TrainingTimeTest, "measure", counted)
    most = total = 0
    for _ in range(120):
        calls = 0
        learner.run_piece()
        most, total = max(most, calls), total + calls
    assert most == 1
    assert total >= 2 * learner.replay.num_held_out


def test_the_95th_percentile_is_one_of_the_pieces() -> None:
    learner = make()
    assert learner.piece_ms_p95() is None
    learner._piece_ms.extend(float(i) for i in range(1, 101))
    assert learner.piece_ms_p95() == 95.0


@pytest.mark.parametrize(
    ("train", "held_out", "paused", "missing"),
    [
        (4, 2, False, None),
        (3, 2, False, "samples: 3 of 4"),
        (4, 1, False, "held-out samples: 1 of 2"),
        (9, 9, True, "resume: paused"),
    ],
)
def test_without_samples_or_when_paused_it_waits_and_says_for_what(
    train: int, held_out: int, paused: bool, missing: str | None
) -> None:
    everything = [answer(i) for i in range(80)]
    side = Replay(limit_bytes=1, held_out_share=0.3, seed=0).is_held_out
    chosen = [one for one in everything if not side(one.group_id)][:train] + [o for o in everything if side(o.group_id)][:held_out]
    learner = make(chosen)
    learner.paused = paused
    assert learner.can_learn() is (missing is None)
    assert (learner.waiting_for() or "").startswith(missing or "")


@pytest.mark.parametrize(("held_out", "waits"), [(5, True), (6, False)])
def test_too_few_held_out_samples_for_any_publish_are_said(held_out: int, waits: bool) -> None:
    everything = [answer(i) for i in range(80)]
    side = Replay(limit_bytes=1, held_out_share=0.3, seed=0).is_held_out
    learner = make([one for one in everything if side(one.group_id)][:held_out])
    assert (learner.publish_waits_for() == "held-out samples: 5 of 6; where they find no room, --replay-mb makes some") is waits


# What is served is not touched.


def test_training_never_writes_a_served_tensor() -> None:
    state = served_state()
    digest = checkpoint.digest_of(state)
    target = FrozenTarget(embedding=TARGET.embedding.clone(), head=TARGET.head.clone())
    learner = make(state=state, target=target, weight_decay=0.1)
    run(learner, 25)
    assert checkpoint.digest_of(learner.state()) != digest
    assert checkpoint.digest_of(state) == digest
    assert checkpoint.digest_of(learner._served_model.state_dict()) == digest
    assert torch.equal(target.embedding, TARGET.embedding)
    assert torch.equal(target.head, TARGET.head)
    assert target.embedding.grad is None
    assert target.head.grad is None


def test_a_candidate_does_not_change_while_training_goes_on() -> None:
    learner = make()
    run(learner, 60)
    candidate = learner.candidate
    assert candidate is not None
    for _ in range(15):
        learner.run_piece()
    assert checkpoint.digest_of(candidate.state) == candidate.digest
    assert checkpoint.digest_of(learner.state()) != candidate.digest


# Candidates.


def test_a_better_draft_becomes_a_candidate() -> None:
    learner = make(publish_min_gain=0.5)
    assert learner.candidate is None
    run(learner, 100)
    verdict = learner.verdict
    assert verdict is not None
    assert verdict.publish
    assert verdict.gain > 0.5 + verdict.standard_error
    candidate = learner.candidate
    assert candidate is not None
    assert candidate.digest == checkpoint.digest_of(candidate.state)
    assert candidate.verdict == verdict


def test_a_draft_that_is_not_better_does_not() -> None:
    """The served draft has learned all there is; going on from it gains nothing."""
    teacher = make()
    run(teacher, 120)
    learner = make(state=teacher.state(), learning_rate=1e-6, evaluate_every_steps=5)
    run(learner, 20)
    assert learner.verdict is not None
    assert learner.verdict.served > 2.5
    assert not learner.verdict.publish
    assert learner.candidate is None


def test_a_candidate_keeps_its_own_verdict() -> None:
    """A later measurement that lets nothing through says nothing about what an earlier one let through."""
    learner = make()
    run(learner, 100)
    candidate = learner.candidate
    assert candidate is not None
    learner.gate = Gate(min_gain=100.0)
    run(learner, 20)
    assert learner.verdict is not None
    assert not learner.verdict.publish
    assert learner.candidate is candidate
    assert candidate.verdict.publish


def test_the_present_state_is_a_copy() -> None:
    """What is published by hand does not change while training goes on."""
    learner = make(evaluate_every_steps=1000)
    run(learner, 3)
    taken = learner.state()
    digest = checkpoint.digest_of(taken)
    run(learner, 1)
    assert checkpoint.digest_of(taken) == digest
    assert checkpoint.digest_of(learner.state()) != digest


def test_another_served_draft_drops_the_candidate_and_is_measured_against() -> None:
    learner = make()
    run(learner, 100)
    candidate = learner.candidate
    assert candidate is not None
    learner.served_changed(learner.prepare_served(candidate.state))
    assert (learner.candidate, learner.verdict) == (None, None)
    run(learner, 20)
    assert learner.verdict is not None
    assert learner.verdict.served > 2.5
    assert checkpoint.digest_of(learner._served_model.state_dict()) == candidate.digest


def test_a_draft_swapped_in_at_any_moment_never_meets_a_candidate_of_before() -> None:
    """After each piece in turn, also in the middle of a measurement or of its digest, a draft is swapped in that nothing
    beats: no later piece may bring a candidate, or numbers, that were measured against the one before it.
    """
    teacher = make()
    run(teacher, 100)
    best = teacher.state()
    moments, published = 0, 0
    for pieces in range(14, 70):
        learner = make(evaluate_every_steps=1, publish_min_gain=0.2, learning_rate=1e-6)
        # Far better than what is served, from the first measurement on.
        checkpoint.load_state(learner._model, best, "test")
        learner._objective_for(learner._model, 3).vocabulary_changed()
        for _ in range(pieces):
            learner.run_piece()
        published += learner.candidate is not None
        learner.served_changed(learner.prepare_served(best))
        moments += 1
        for _ in range(40):
            learner.run_piece()
            assert learner.candidate is None, f"swapped after piece {pieces}"
            assert learner.verdict is None or learner.verdict.served > 2.5, (
                f"swapped after piece {pieces}: measured against the old"
            )
    assert moments > published > 0, "the swap came before a candidate was there, and after"


def test_parts_of_one_answer_do_not_count_as_independent_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the anchors are cut into microbatches, the gate sees one number per sample: its error is the same."""

    def verdict_with(anchors: int) -> Any:
        learner = make(evaluate_every_steps=3)
        anchors_of_measured.clear()
        monkeypatch.setattr(learner._budget, "measured", lambda *_: None)
        learner._budget.anchors = 512
        while learner.progress.steps < 3:
            learner.run_piece()
        learner._budget.anchors = anchors
        while learner.verdict is None:
            learner.run_piece()
        return learner.verdict

    anchors_of_measured: list[int] = []
    measure = TrainingTimeTest.measure

    def noted(objective: TrainingTimeTest, batch: PackedBatch) -> Any:
        anchors_of_measured.append(batch.anchors.shape[0])
        return measure(objective, batch)

    monkeypatch.setattr(TrainingTimeTest, "measure", noted)
    whole = verdict_with(512)
    assert set(anchors_of_measured) == {10}, "every answer in one part"
    cut = verdict_with(2)
    assert set(anchors_of_measured) == {8, 2}, "every answer in two"
    assert whole.standard_error > 0
    assert cut.standard_error == pytest.approx(whole.standard_error)
    assert (cut.served, cut.candidate) == (pytest.approx(whole.served), pytest.approx(whole.candidate))


# Bad numbers and errors.


def test_a_loss_that_is_not_finite_skips_the_step_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make(evaluate_every_steps=1000)
    run(learner, 3)
    before, loss = learner.state(), learner.progress.loss
    with monkeypatch.context() as patch:
        patch.setattr(learner._objective_for(learner._model, 3), "take_loss", lambda: math.nan)
        run(learner, 2)
    assert learner.progress.skipped_steps == 2
    assert checkpoint.digest_of(learner.state()) == checkpoint.digest_of(before)
    assert learner.progress.loss == loss
    run(learner, 1)
    assert learner.progress.skipped_steps == 2
    assert checkpoint.digest_of(learner.state()) != checkpoint.digest_of(before)


def test_gradients_that_are_not_finite_skip_the_step_and_are_gone_with_it() -> None:
    """The loss may be finite where a gradient is not; the next step starts from clean gradients."""
    learner = make(evaluate_every_steps=1000)
    weight = learner._model.get_parameter("fc.weight")
    spoilt = weight.register_hook(lambda gradient: gradient * math.inf)
    before = checkpoint.digest_of(learner.state())
    run(learner, 1)
    assert (learner.progress.skipped_steps, checkpoint.digest_of(learner.state())) == (1, before)
    spoilt.remove()
    run(learner, 1)
    assert learner.progress.skipped_steps == 1
    after = learner.state()
    assert checkpoint.digest_of(after) != before
    assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())


def test_learning_can_go_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error reaches the caller once, as itself; the pieces after it are those of a new step."""
    learner = make(evaluate_every_steps=1000)
    run(learner, 2)

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(TrainingTimeTest, "_trunk", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(learner, 1)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(learner, 1)
    before = checkpoint.digest_of(learner.state())
    run(learner, 2)
    assert learner.progress.steps == 4
    assert checkpoint.digest_of(learner.state()) != before


# The vocabulary.

OTHER_CYCLE = (4, 7, 17, 12, 8, 19)
"""Two of its tokens, 4 and 17, are not among those that the tiny draft can propose."""


def proposals(state: State, samples: Sequence[TapSample]) -> set[int]:
    """Target tokens that a draft proposes first, over all anchors of some samples."""
    model = Eagle3().build(draft_config())
    checkpoint.load_state(model, state, "test")
    batch = pack(list(samples), 1)
    found: set[int] = set()
    logits = model.logits

    def seen(hidden: torch.Tensor) -> torch.Tensor:
        scores = logits(hidden)
        found.update(model.kept()[scores.argmax(-1)].tolist())
        return scores

    model.logits = seen  # type: ignore[method-assign]
    Eagle3().objective(model, TARGET, passes=1).measure(batch)
    return found


def test_a_token_that_could_not_be_proposed_is_proposed_after_learning() -> None:
    assert not {4, 17} & set(KEPT)
    samples = [answer(i, cycle=OTHER_CYCLE) for i in range(24)]
    learner = make(samples)
    assert not proposals(learner.state(), samples) & {4, 17}
    run(learner, 100)
    assert learner.progress.vocabulary_changes == 2
    after = learner.state()
    assert proposals(after, samples) >= {4, 17}
    assert learner.verdict is not None
    assert learner.verdict.candidate > 2
    model = Eagle3().build(draft_config())
    checkpoint.load_state(model, after, "test")
    assert set(OTHER_CYCLE) <= set(model.kept().tolist())


def test_an_adapted_row_starts_with_fresh_optimizer_state() -> None:
    """The moments of a token that is gone must not move the one in its place; all other rows keep theirs."""
    learner = make(evaluate_every_steps=1000)
    run(learner, 5)
    head = learner._model.get_parameter("lm_head.weight")
    moments = learner._optimizer.state[head]
    before = {key: moments[key].clone() for key in ("exp_avg", "exp_avg_sq")}
    for value in before.values():
        assert bool((value.abs().sum(1) > 0).all())
    for index in range(40, 60):
        learner.replay.add(answer(index, cycle=OTHER_CYCLE))
    kept = learner._model.kept().clone()
    learner._adapt_vocabulary()
    changed = learner._model.kept() != kept
    assert int(changed.sum()) == learner.progress.vocabulary_changes == 2
    for key, value in before.items():
        assert bool((moments[key][changed] == 0).all()), key
        assert torch.equal(moments[key][~changed], value[~changed]), key
    assert torch.equal(learner._objective_for(learner._model, 3)._kept, learner._model.kept()), "the objective was told"


def test_the_served_draft_keeps_its_vocabulary_until_the_swap() -> None:
    learner = make([answer(i, cycle=OTHER_CYCLE) for i in range(16)])
    run(learner, 1)
    assert learner.progress.vocabulary_changes == 2
    assert learner._served_model.kept().tolist() == list(KEPT)
    learner.served_changed(learner.prepare_served(learner.state()))
    assert learner._served_model.kept().tolist() == learner._model.kept().tolist() != list(KEPT)


# The size of the pieces.


def test_a_slow_piece_shrinks_the_budget_at_once() -> None:
    budget = AnchorBudget(100.0, start=200)
    budget.measured(280.0, 200)
    assert budget.anchors == 50, "what fits into 70% of the slice"


def test_the_budget_grows_slowly() -> None:
    budget = AnchorBudget(100.0, start=32)
    seen = []
    for _ in range(4):
        budget.measured(0.01, budget.anchors)
        seen.append(budget.anchors)
    assert seen == [41, 52, 66, 83]


def test_the_budget_settles_where_its_pieces_fill_seven_tenths_of_a_slice() -> None:
    budget = AnchorBudget(100.0, start=32)
    for _ in range(60):
        budget.measured(0.5 * budget.anchors, budget.anchors)
    assert 130 <= budget.anchors <= 140


def test_the_budget_stays_within_its_bounds() -> None:
    budget = AnchorBudget(100.0, start=32, low=8, high=64)
    for _ in range(20):
        budget.measured(1e-9, budget.anchors)
        assert budget.anchors <= 64
    assert budget.anchors == 64
    budget.measured(1e9, 64)
    assert budget.anchors == 8
    budget.measured(0.0, 8)
    assert 8 < budget.anchors <= 11


def test_a_small_microbatch_that_fits_changes_nothing() -> None:
    """The rest of an answer: its trunk costs nearly as much as a full one's, which says nothing about more anchors."""
    budget = AnchorBudget(100.0, start=100)
    budget.measured(20.0, 3)
    budget.measured(0.01, 3)
    assert budget.anchors == 100


def test_a_small_microbatch_that_does_not_fit_shrinks_the_budget() -> None:
    budget = AnchorBudget(100.0, start=100)
    budget.measured(140.0, 30)
    assert budget.anchors == 15


def test_the_learner_reports_its_slowest_piece_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured with a clock that the head makes jump by a second: microbatches get smaller, but not below the bound."""
    learner = make(evaluate_every_steps=1000, slice_ms=100.0)
    now = 0.0

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return now

    def slow(*arguments: Any) -> float:
        nonlocal now
        now += 1.0
        return head(*arguments)

    head = learner._objective_for(learner._model, 3)._head
    monkeypatch.setattr(learner_module, "time", Clock)
    monkeypatch.setattr(learner._objective_for(learner._model, 3), "_head", slow)
    run(learner, 2)
    assert learner._budget.anchors == 8
    assert learner.progress.seconds == now
