"""Catches a rollback for chance, a loss that nobody takes back, counts of one draft booked on another, and a learner that
learns on for ever or rests for ever."""

from __future__ import annotations

import math

import pytest

from vllm_specdraft.acceptance import AcceptanceLog, MeasuredAcceptance, measured
from vllm_specdraft.gate import Gate, Patience, Probation, Verdict, probation


def acceptance(length: float, error: float = 0.01, *, requests: int = 20, steps: int = 1000) -> MeasuredAcceptance:
    return MeasuredAcceptance(length=length, standard_error=error, draft_tokens=3, requests=requests, steps=steps)


def test_the_length_is_over_steps_not_over_requests() -> None:
    found = measured([(10, 20), (30, 0)], draft_tokens=3)
    assert found is not None
    assert (found.length, found.requests, found.steps) == (1.5, 2, 40)


def test_the_error_is_the_textbook_one_for_requests_of_one_length() -> None:
    """Steps per request equal: the ratio's error is the standard error of the mean of the requests' rates."""
    rates = [0.5, 1.0, 0.25, 0.75, 0.9]
    found = measured([(100, round(100 * rate)) for rate in rates], draft_tokens=3)
    mean = sum(rates) / len(rates)
    spread = math.sqrt(sum((rate - mean) ** 2 for rate in rates) / (len(rates) - 1))
    assert found is not None
    assert found.standard_error == pytest.approx(spread / math.sqrt(len(rates)))


def test_nothing_measured_is_none_and_one_request_has_no_error() -> None:
    assert measured([], draft_tokens=3) is None
    assert measured([(0, 0)], draft_tokens=3) is None
    found = measured([(5, 5)], draft_tokens=3)
    assert found is not None
    assert found.standard_error == math.inf


def test_each_draft_has_the_steps_it_drafted_for() -> None:
    """A request in the middle of a swap counts for the old one only, and only until then: its KV cache is the old draft's."""
    log = AcceptanceLog(3)
    for accepted in (3, 3):
        log.step("a", accepted, drafted=3)
    log.step("b", 1, drafted=3)
    log.finish("b")
    log.draft_changed()
    log.step("a", 0, drafted=3)
    log.finish("a")
    log.finish("never seen")
    log.step("c", 2, drafted=3)
    log.finish("c")
    before, served = log.compared()
    assert before is not None and served is not None
    assert (before.requests, before.steps, before.length) == (2, 3, pytest.approx(1 + 7 / 3))
    assert (served.requests, served.steps, served.length) == (1, 1, 3.0)
    log.step("a", 1, drafted=3)
    log.finish("a")
    _, again = log.compared()
    assert again is not None
    assert again.requests == 2, "the name is free again"


def test_a_clear_loss_fails_and_a_gain_passes_in_time() -> None:
    assert probation(acceptance(2.0), acceptance(1.7), margin=0.02) is Probation.FAILED
    assert probation(acceptance(1.7), acceptance(2.0), margin=0.02) is Probation.RUNNING
    assert probation(acceptance(1.7), acceptance(2.0, requests=64), margin=0.02) is Probation.PASSED


@pytest.mark.parametrize(("loss", "expected"), [(0.047, Probation.RUNNING), (0.05, Probation.FAILED)])
def test_a_loss_must_exceed_the_margin_and_two_joint_errors(loss: float, expected: Probation) -> None:
    """Margin 0.02 and 2 * hypot(0.01, 0.01) = 0.0283."""
    assert probation(acceptance(2.0), acceptance(2.0 - loss), margin=0.02) is expected


@pytest.mark.parametrize("few", [{"requests": 7}, {"steps": 199}])
def test_little_traffic_on_either_side_says_nothing(few: dict[str, int]) -> None:
    assert probation(acceptance(2.0, **few), acceptance(1.0), margin=0.02) is Probation.RUNNING
    assert probation(acceptance(2.0), acceptance(1.0, **few), margin=0.02) is Probation.RUNNING
    assert probation(None, acceptance(1.0), margin=0.02) is Probation.RUNNING
    assert probation(acceptance(2.0), None, margin=0.02) is Probation.RUNNING


def test_a_setback_asks_for_more_and_a_confirmation_for_no_more_than_at_first() -> None:
    gate = Gate(min_gain=0.02)
    gate.setback()
    gate.setback()
    assert gate.min_gain == pytest.approx(0.08)
    for _ in range(20):
        gate.setback()
    assert gate.min_gain == 0.5, "never so much that nothing could be published again"
    gate.reset()
    assert gate.min_gain == 0.02


def verdict(candidate: float, *, publish: bool = False) -> Verdict:
    return Verdict(served=1.5, candidate=candidate, gain=candidate - 1.5, standard_error=0.1, publish=publish)


def test_learning_rests_when_nothing_gets_better_and_goes_on_with_new_samples() -> None:
    patience = Patience(evaluations=3)
    patience.judged(verdict(1.6), 40)
    for _ in range(2):
        patience.judged(verdict(1.6), 40)
    assert patience.waiting_for(40, 30) is None
    patience.judged(verdict(1.604), 40)
    assert patience.waiting_for(40, 30) == "new samples: 0 of 8 (no better draft in the last 3 measurements)"
    assert patience.waiting_for(47, 37) is not None
    assert patience.waiting_for(48, 38) is None
    patience.judged(verdict(1.2), 48)
    assert patience.waiting_for(48, 38) is None, "new samples are a new measure: the old best is forgotten"


def test_progress_keeps_it_learning_and_a_candidate_that_nobody_publishes_does_not() -> None:
    patience = Patience(evaluations=2)
    for step in range(20):
        patience.judged(verdict(1.5 + 0.006 * step), 40)
        assert patience.waiting_for(40, 30) is None
    for _ in range(2):
        patience.judged(verdict(1.6, publish=True), 40)
    assert patience.waiting_for(40, 30) is not None
    patience.renew()
    assert patience.waiting_for(40, 30) is None


def test_a_draft_that_saw_no_traffic_is_not_what_the_next_one_is_compared_with() -> None:
    """Two drafts published in one pause: the second is judged against the last that was measured."""
    log = AcceptanceLog(3)
    for request in range(10):
        for _ in range(25):
            log.step(str(request), 2, drafted=3)
        log.finish(str(request))
    assert log.draft_changed() is True
    assert log.draft_changed() is False
    before, _ = log.compared()
    assert before is not None
    assert (before.length, before.requests) == (3.0, 10)
    log.step("few", 0, drafted=3)
    log.finish("few")
    assert log.draft_changed() is False
    assert log.compared()[0] == before


def test_two_drafts_are_compared_by_the_largest_number_of_tokens_that_both_were_measured_with() -> None:
    """Three at first; later two pay, of which a step of three says as much as a step of two."""
    log = AcceptanceLog(3)

    def requests(drafted: int, accepted: int) -> None:
        for request in range(10):
            for _ in range(25):
                log.step(str(request), accepted, drafted=drafted)
            log.finish(str(request))

    requests(3, 3)
    assert log.draft_changed()
    before, served = log.compared()
    assert before is not None and served is None
    assert (before.draft_tokens, before.length) == (3, 4.0)
    requests(2, 1)
    log.step("once more with all", 3, drafted=3)
    log.finish("once more with all")
    before, served = log.compared()
    assert before is not None and served is not None
    assert (before.draft_tokens, before.length, before.steps) == (2, 3.0, 250)
    assert (served.draft_tokens, served.steps) == (2, 251)
    assert served.length == pytest.approx(1 + (250 * 1 + 2) / 251)
    assert probation(before, served, margin=0.02) is Probation.FAILED


def test_a_tenth_of_many_samples_must_be_new() -> None:
    patience = Patience(evaluations=1)
    patience.judged(verdict(1.5), 1000)
    patience.judged(verdict(1.5), 1000)
    assert patience.waiting_for(1099, 1000) is not None
    assert patience.waiting_for(1100, 1000) is None


def test_patience_without_a_limit_never_ends() -> None:
    patience = Patience(evaluations=0)
    for _ in range(100):
        patience.judged(verdict(1.5), 40)
    assert patience.waiting_for(40, 30) is None
