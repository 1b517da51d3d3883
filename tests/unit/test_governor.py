"""Catches a governor that decides wrongly: drafts where none is faster, none where drafts are, trials that cost more than they may,
slow reaction to a draft that went stale or became good, and speed that is believed after the machine has changed.

The machine is simulated: what a step costs, what a draft is worth, and how the machine drifts are known, so the best choice is too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from vllm_specdraft.governor.costs import LEARNED_STEPS, StepCosts, bucket_of
from vllm_specdraft.governor.draft_yield import DraftYield
from vllm_specdraft.governor.policy import CREDIT_S, FREE_S, TRIAL_SHARE, Governor, Step

K = 3
NGRAM = Governor(K).ngram


@dataclass
class Machine:
    """An engine as the governor sees one."""

    rate: float = 0.6
    """Each draft token stands with this probability, given that those before it do."""
    matched: float = 0.05
    """Share of steps in which a request's text has a match."""
    text_rate: float = 0.5
    """As `rate`, for tokens from the text."""
    seed: int = 0
    noise: float = 0.04
    drift: float = 0.0
    """Relative change of speed per step, random in sign."""
    hiccups: float = 0.01
    """Share of steps in which something else happens."""
    cold: float = 0.0
    """By how much the first step takes longer, as a share; it fades within some hundred steps."""
    speed: float = 1.0
    seconds: float = 0.0
    tokens: int = 0
    chosen: list[int] = field(default_factory=list)
    _pending: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @staticmethod
    def rows_cost(rows: float) -> float:
        """Seconds of a step, bound by weights for few rows and by arithmetic for many."""
        return 0.04 + 0.0015 * rows + (0.007 * max(0, rows - 8))

    def cost(self, batch: int, arm: int) -> float:
        """Expected seconds of a step that verifies an arm's drafts for each request, and makes as many."""
        if arm == NGRAM:
            return self.rows_cost(batch * (1 + self.matched * K))
        return self.rows_cost(batch * (1 + arm)) + self.draft_cost(arm)

    @staticmethod
    def draft_cost(arm: int) -> float:
        """Seconds of making drafts."""
        return 0.0 if arm == NGRAM else 0.004 * arm

    def length(self, arm: int) -> float:
        """Expected tokens per step and request."""
        if arm == NGRAM:
            return 1 + self.matched * sum(self.text_rate**i for i in range(1, K + 1))
        return 1 + sum(self.rate**i for i in range(1, arm + 1))

    def per_token(self, batch: int, arm: int) -> float:
        """Seconds per token and request, at speed 1."""
        return self.cost(batch, arm) / self.length(arm)

    def best(self, batch: int) -> int:
        """The arm with the least time per token."""
        return min(range(K + 2), key=lambda arm: self.per_token(batch, arm))

    def step(self, governor: Governor, batch: int) -> None:
        """One step, as the scheduler drives it."""
        verified, drafted = self._pending, governor.choose(batch)
        self.chosen.append(drafted)
        drafts = []
        for _ in range(batch):
            count = (K if self._random.random() < self.matched else 0) if verified == NGRAM else verified
            stood, rate = 0, self.text_rate if verified == NGRAM else self.rate
            while stood < count and self._random.random() < rate:
                stood += 1
            if count:
                drafts.append((count, stood))
        tokens = batch + sum(stood for _, stood in drafts)
        self.speed *= math.exp(self.drift * self._random.choice((-1, 1)))
        factor = self.speed * math.exp(self._random.gauss(0, self.noise))
        factor *= 1 + self.cold * math.exp(-len(self.chosen) / 60)
        if self._random.random() < self.hiccups:
            factor *= self._random.uniform(2, 10)
        rows = batch + sum(count for count, _ in drafts)
        seconds = (self.rows_cost(rows) + self.draft_cost(drafted)) * factor
        self.seconds, self.tokens = self.seconds + seconds, self.tokens + tokens
        self._pending = drafted
        governor.observe(
            Step(
                batch=batch,
                verified=verified,
                drafted=drafted,
                tokens=tokens,
                seconds=seconds,
                drafts=tuple(drafts),
                of_ngram=verified == NGRAM,
            )
        )

    def run(self, governor: Governor, batch: int, steps: int) -> list[int]:
        """So many steps; what was chosen."""
        for _ in range(steps):
            self.step(governor, batch)
        return self.chosen[-steps:]


def regret(machine: Machine, chosen: list[int], batch: int) -> float:
    """How much more time per token the choices cost than the best one would, as a share."""
    best = machine.per_token(batch, machine.best(batch))
    seconds = sum(machine.cost(batch, k) for k in chosen)
    tokens = sum(machine.length(k) for k in chosen)
    return seconds / tokens / best - 1


def share(chosen: list[int], wanted: int) -> float:
    return sum(k == wanted for k in chosen) / len(chosen)


# Decisions.


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("rate", [0.02, 0.3, 0.6, 0.85])
@pytest.mark.parametrize("drift", [0.0, 0.01])
def test_after_a_warm_up_it_loses_little_to_the_best_fixed_number(batch: int, rate: float, drift: float) -> None:
    machine, governor = Machine(rate=rate, drift=drift, seed=batch), Governor(K)
    machine.run(governor, batch, 500)
    assert regret(machine, machine.run(governor, batch, 2000), batch) <= 0.03


@pytest.mark.parametrize("batch", [1, 4, 32])
def test_a_useless_draft_costs_next_to_nothing(batch: int) -> None:
    """Cases F10, F11: against an engine that never drafts, the warm-up included."""
    machine, governor = Machine(rate=0.0), Governor(K)
    chosen = machine.run(governor, batch, 3000)
    assert regret(machine, chosen, batch) <= 0.03
    assert share(chosen[500:], 0) + share(chosen[500:], NGRAM) > 0.97


@pytest.mark.parametrize(("matched", "rate"), [(0.8, 0.02), (0.8, 0.5), (0.02, 0.02)])
@pytest.mark.parametrize("batch", [1, 4])
def test_text_that_repeats_itself_is_drafted_from(batch: int, matched: float, rate: float) -> None:
    """Where that is better than the draft and than nothing."""
    machine, governor = Machine(rate=rate, matched=matched, text_rate=0.9), Governor(K)
    machine.run(governor, batch, 600)
    assert regret(machine, machine.run(governor, batch, 1500), batch) <= 0.03
    if matched > 0.5:
        assert machine.best(batch) == NGRAM


def test_it_begins_without_drafts() -> None:
    assert Governor(K).choose(1) == 0


@pytest.mark.parametrize(("before", "after"), [(0.8, 0.02), (0.02, 0.8)], ids=["goes stale", "becomes good"])
def test_a_draft_that_changes_is_noticed(before: float, after: float) -> None:
    """A draft that goes stale says so itself; one that becomes good was published."""
    machine, governor = Machine(rate=before), Governor(K)
    machine.run(governor, 1, 800)
    assert share(machine.chosen[-200:], machine.best(1)) > 0.8
    machine.rate = after
    if after > before:
        governor.weights_changed()
    machine.run(governor, 1, 150)
    assert regret(machine, machine.run(governor, 1, 500), 1) <= 0.04


def test_a_draft_that_becomes_good_unannounced_is_found_in_the_end() -> None:
    machine, governor = Machine(rate=0.05), Governor(K)
    machine.run(governor, 1, 1000)
    machine.rate = 0.8
    machine.run(governor, 1, 4000)
    assert share(machine.chosen[-300:], machine.best(1)) > 0.8


def test_a_collapse_is_an_alarm_until_the_draft_is_better() -> None:
    """Case A8: a draft that went stale is told of, and not used while it loses."""
    machine, governor = Machine(rate=0.8), Governor(K)
    machine.run(governor, 1, 600)
    assert not governor.report()["acceptance_collapsed"]
    machine.rate = 0.1
    machine.run(governor, 1, 300)
    assert governor.report()["acceptance_collapsed"]
    machine.run(governor, 1, 100)
    assert share(machine.chosen[-200:], 0) + share(machine.chosen[-200:], NGRAM) > 0.8
    machine.rate = 0.8
    governor.weights_changed()
    machine.run(governor, 1, 400)
    assert not governor.report()["acceptance_collapsed"]


def test_a_draining_batch_is_drafted_for_at_its_end() -> None:
    """Case F14; the real engine's soak is in `benchmarks.governor`.

    Sizes are passed quickly, so what one has shown must hold for its neighbours."""
    machine, governor = Machine(rate=0.7), Governor(K)
    for round_ in range(6):
        for batch in range(32, 0, -1):
            chosen = machine.run(governor, batch, 6 if batch > 4 else 30)
            if round_ == 5 and batch in (1, 2, 4):
                assert regret(machine, chosen, batch) <= 0.1, batch
            if round_ == 5 and batch in (24, 32):
                assert share(chosen, 0) > 0.8, batch


@pytest.mark.parametrize("cold", [0.0, 0.8, 1.5])
@pytest.mark.parametrize(("rate", "matched"), [(0.35, 0.35), (0.6, 0.1)])
def test_what_a_cold_machine_showed_is_not_believed_for_long(cold: float, rate: float, matched: float) -> None:
    """Rollouts that begin and end one by one, in batches that draft for nothing: steps without drafts that were slow at first must
    not make all others seem cheap."""
    wrong = 0.0
    for seed in range(6):
        machine, governor = Machine(rate=rate, matched=matched, cold=cold, noise=0.06, drift=0.01, seed=seed), Governor(K)
        assert machine.best(16) == 0
        for rollout in range(20):
            for batch, steps in [*((b, 1) for b in range(2, 16)), (16, 12), *((b, 2) for b in range(15, 0, -1))]:
                chosen = machine.run(governor, batch, steps)
                if batch == 16 and rollout >= 12:
                    wrong += (1 - share(chosen, 0)) / (6 * 8)
    assert wrong < 0.15


def test_a_limit_is_kept() -> None:
    machine, governor = Machine(rate=0.9), Governor(K, limit=2)
    assert set(machine.run(governor, 3, 300)) == {0}
    machine.run(governor, 2, 300)
    assert share(machine.chosen[-100:], 0) < 0.2


def test_trials_cost_no_more_than_their_share() -> None:
    machine, governor = Machine(rate=0.5, drift=0.01), Governor(K)
    for batch in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) * 3:
        machine.run(governor, batch, 300)
    assert governor.trial_cost_s <= FREE_S + TRIAL_SHARE * governor.busy_s + 2.0
    assert governor.trials >= 10


def test_the_allowance_does_not_grow_without_end() -> None:
    machine, governor = Machine(rate=0.0), Governor(K)
    machine.run(governor, 1, 200)
    for _ in range(50):
        governor.observe(Step(batch=1, verified=0, drafted=0, tokens=1, seconds=1000.0))
    assert governor._allowance_s <= CREDIT_S


def test_learning_pays_where_a_perfect_draft_would() -> None:
    machine, governor = Machine(rate=0.6), Governor(K)
    assert governor.learning_pays
    machine.run(governor, 1, 300)
    assert governor.learning_pays
    crowded = Governor(K)
    heavy = Machine(rate=0.6)
    heavy.rows_cost = lambda rows: 0.04 * (1 + 1.5 * (rows / 32 - 1))  # type: ignore[method-assign]
    heavy.run(crowded, 32, 500)
    assert not crowded.learning_pays


# Costs.


def fed(costs: StepCosts, bucket: int, tokens: int, seconds: Callable[[int], float], steps: int) -> None:
    for step in range(steps):
        costs.observe(bucket, tokens, seconds(step))


def test_a_machine_that_slows_down_is_not_a_number_of_tokens_that_costs_more() -> None:
    """Twice as slow within one stay; the next switch is judged at the new speed."""
    costs = StepCosts()
    for _ in range(4):
        fed(costs, 1, 0, lambda step: 0.05 * (1 + min(step, 200) / 200), 250)
        fed(costs, 1, 2, lambda _: 0.13, 30)
        fed(costs, 1, 0, lambda step: 0.1 * (1 - min(step, 200) / 400), 250)
        fed(costs, 1, 2, lambda _: 0.065, 30)
    relative, measured = costs.relative(1, 2)
    assert measured
    assert math.exp(relative) == pytest.approx(1.3, rel=0.06)


def test_a_step_in_which_something_else_happened_is_not_counted() -> None:
    costs = StepCosts()
    fed(costs, 1, 0, lambda step: 5.0 if step % 17 == 16 else 0.05, 100)
    fed(costs, 1, 1, lambda step: 5.0 if step % 5 == 4 else 0.06, 20)
    assert math.exp(costs.relative(1, 1)[0]) == pytest.approx(1.2, rel=0.02)
    assert costs.seconds(1, 0) == pytest.approx(0.05, rel=0.05)


def test_what_was_never_measured_is_guessed_and_says_so() -> None:
    costs = StepCosts()
    assert costs.relative(4, 0) == (0.0, True)
    assert costs.relative(4, 1)[1] is False and costs.relative(4, 3)[0] > costs.relative(4, 1)[0] > 0
    fed(costs, 4, 0, lambda _: 0.05, 30)
    fed(costs, 4, 1, lambda _: 0.075, 30)
    # A near size is as good as measured; more rows cost no less; one token tells of three.
    assert costs.relative(5, 1) == (costs.relative(4, 1)[0], True)
    assert costs.relative(16, 1) == (costs.relative(4, 1)[0], False)
    assert costs.relative(4, 3)[0] > costs.relative(4, 1)[0]


def test_a_cost_is_not_measured_against_another_batch_size() -> None:
    """What the machine's speed did while another size ran is no cost of what follows."""
    costs = StepCosts()
    fed(costs, 1, 0, lambda _: 0.05, 30)
    fed(costs, 1, 2, lambda _: 0.06, 30)
    for factor in (1.5, 0.7, 1.3):
        fed(costs, 8, 0, lambda _: 0.08, 30)
        # The size is back, and the machine has another speed.
        fed(costs, 1, 2, lambda _, factor=factor: 0.06 * factor, 30)  # type: ignore[misc]
        assert math.exp(costs.relative(1, 2)[0]) == pytest.approx(1.2, rel=0.01)
        assert costs.seconds(1, 2) == pytest.approx(0.06 * factor, rel=0.1)


def test_drafts_of_any_number_cost_by_how_many_they_are() -> None:
    """Measured where there were few matches, asked where there are many."""
    costs, ngram = StepCosts(3), 4
    fed(costs, 1, 0, lambda _: 0.05, 30)
    for _ in range(30):
        costs.observe(1, ngram, 0.055, drafts=0.8)
    few, many = (math.exp(costs.relative(1, ngram, drafts=drafts)[0]) for drafts in (0.8, 1.8))
    assert few == pytest.approx(1.1, rel=0.01) and many == pytest.approx(1.2, rel=0.01)
    before = costs.error(1, ngram)
    for _ in range(4):
        fed(costs, 1, 0, lambda _: 0.05, 15)
        for _ in range(15):
            costs.observe(1, ngram, 0.055, drafts=0.8)
    assert 0 < costs.error(1, ngram) < before


def test_a_stay_too_short_tells_nothing() -> None:
    costs = StepCosts()
    fed(costs, 1, 0, lambda _: 0.05, LEARNED_STEPS)
    fed(costs, 1, 1, lambda _: 0.06, 3)
    fed(costs, 1, 0, lambda _: 0.05, 3)
    assert costs.stays(1, 1) == 0 and costs.stays(1, 0) == 1


@pytest.mark.parametrize(
    ("batch", "bucket"), [(1, 1), (7, 7), (8, 8), (15, 15), (16, 16), (17, 16), (18, 18), (33, 32), (36, 36), (255, 240)]
)
def test_buckets(batch: int, bucket: int) -> None:
    assert bucket_of(batch) == bucket


# What drafts give.


def test_lengths_of_all_numbers_come_from_one() -> None:
    """With three tokens verified it is known what one would have given."""
    found, draw = DraftYield(3), random.Random(1)
    for _ in range(4000):
        stood = 0
        while stood < 3 and draw.random() < 0.7:
            stood += 1
        found.observe(3, stood)
    assert [found.length(k) for k in range(4)] == pytest.approx([1, 1.7, 2.19, 2.533], abs=0.1)


def test_a_position_that_was_never_reached_keeps_its_prior() -> None:
    found = DraftYield(3)
    prior = found.rate(2)
    for _ in range(200):
        found.observe(1, 1)
        found.observe(3, 0)
    assert found.rate(2) == prior
    assert found.rate(0) == pytest.approx(0.5, abs=0.05)
