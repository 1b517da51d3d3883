"""Catches a learner that trains while the engine generates, or in the short gaps inside one burst."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specdraft.idle import IdleMonitor, IdleState


class Clock:
    """Seconds that pass only when told to. All times here are sums of powers of two, so nothing is rounded."""

    def __init__(self) -> None:
        self.now = 1024.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_an_engine_that_never_ran_cools_down_first(clock: Clock) -> None:
    monitor = IdleMonitor(0.5, clock)
    assert monitor.state is IdleState.COOLING
    clock.now += 0.5
    assert monitor.state is IdleState.OPEN


def test_one_burst_goes_through_every_state(clock: Clock) -> None:
    monitor = IdleMonitor(0.5, clock)
    clock.now += 8
    seen = [monitor.state]
    monitor.step_began()
    seen.append(monitor.state)
    monitor.step_ended()
    seen.append(monitor.state)
    clock.now += 0.25
    monitor.step_began()
    seen.append(monitor.state)
    monitor.step_ended()
    seen.append(monitor.state)
    clock.now += 0.5
    seen.append(monitor.state)
    assert [state.value for state in seen] == ["OPEN", "BUSY", "COOLING", "BUSY", "COOLING", "OPEN"]


def test_a_step_is_busy_however_long_it_takes(clock: Clock) -> None:
    monitor = IdleMonitor(0.5, clock)
    monitor.step_began()
    clock.now += 4096
    assert monitor.state is IdleState.BUSY


def test_a_short_gap_between_two_steps_never_opens_the_window(clock: Clock) -> None:
    """The quiet time starts again with every step: gaps do not add up."""
    monitor = IdleMonitor(0.5, clock)
    for _ in range(20):
        monitor.step_began()
        clock.now += 0.125
        monitor.step_ended()
        clock.now += 0.375
        assert monitor.state is IdleState.COOLING


def test_the_window_opens_exactly_when_the_quiet_time_is_over(clock: Clock) -> None:
    monitor = IdleMonitor(0.5, clock)
    monitor.step_began()
    clock.now += 3
    monitor.step_ended()
    clock.now += 0.5 - 2**-20
    assert (monitor.state, monitor.opens_in_s) == (IdleState.COOLING, 2**-20)
    clock.now += 2**-20
    assert (monitor.state, monitor.opens_in_s) == (IdleState.OPEN, 0.0)
    clock.now += 100
    assert (monitor.state, monitor.opens_in_s) == (IdleState.OPEN, 0.0)


def test_opens_in_counts_down_from_the_end_of_the_last_step(clock: Clock) -> None:
    monitor = IdleMonitor(2.0, clock)
    clock.now += 1.5
    assert monitor.opens_in_s == 0.5
    monitor.step_began()
    clock.now += 64
    monitor.step_ended()
    assert monitor.opens_in_s == 2.0


def test_quiet_time_is_counted_from_the_end_of_the_last_step(clock: Clock) -> None:
    monitor = IdleMonitor(0.5, clock)
    monitor.step_began()
    clock.now += 4
    monitor.step_ended()
    assert monitor.quiet_s == 0
    clock.now += 2
    assert monitor.quiet_s == 2


def test_without_quiet_time_the_window_opens_with_the_end_of_the_step(clock: Clock) -> None:
    monitor = IdleMonitor(0.0, clock)
    assert monitor.state is IdleState.OPEN
    monitor.step_began()
    assert monitor.state is IdleState.BUSY
    monitor.step_ended()
    assert monitor.state is IdleState.OPEN


def test_a_negative_quiet_time_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cool_s is -0\.1"):
        IdleMonitor(-0.1)


@given(
    cool=st.integers(0, 8),
    events=st.lists(st.sampled_from(["began", "ended"]) | st.integers(0, 5), max_size=40),
)
def test_the_window_is_open_only_after_enough_quiet(cool: int, events: list[str | int]) -> None:
    """Whatever the steps: open if and only if nothing runs and the last `cool_s` were quiet, and `opens_in_s` agrees."""
    clock = Clock()
    monitor = IdleMonitor(cool / 4, clock)
    running, quiet_since = False, clock.now
    for event in events:
        if event == "began":
            monitor.step_began()
            running = True
        elif event == "ended":
            monitor.step_ended()
            running, quiet_since = False, clock.now
        else:
            clock.now += event / 4
        quiet = clock.now - quiet_since >= cool / 4
        expected = IdleState.BUSY if running else IdleState.OPEN if quiet else IdleState.COOLING
        assert monitor.state is expected
        if not running:
            assert monitor.opens_in_s == max(0.0, cool / 4 - (clock.now - quiet_since))
            assert (monitor.opens_in_s == 0) == (monitor.state is IdleState.OPEN)


def test_time_in_which_the_process_was_stopped_is_not_quiet(clock: Clock) -> None:
    """It was stopped in the middle of a burst: the next step is on its way when it goes on."""
    monitor = IdleMonitor(0.5, clock)
    monitor.step_began()
    monitor.step_ended()
    assert monitor.waits(0.5) == 0.5
    clock.now += 8
    monitor.woke()
    assert monitor.state is IdleState.COOLING
    monitor.waits(0.5)
    clock.now += 0.5
    monitor.woke()
    assert monitor.state is IdleState.OPEN
