"""Test the conditions on which an engine is left alone, and its return."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from bridle.proxy.engines.circuit import COOL_DOWN_S, LONGEST_COOL_DOWN_S, Circuit, CircuitState


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Circuit:
    circuit = Circuit(3, clock=clock)
    for _ in range(3):
        circuit.failed(circuit.begin())
    return circuit


def test_it_opens_after_failures_in_a_row_and_not_after_scattered_ones() -> None:
    circuit = Circuit(3, clock=Clock())
    for outcome in (circuit.failed, circuit.failed, circuit.succeeded) * 5:
        circuit.begin()
        circuit.answered()
        outcome()
        assert circuit.admits
    assert opened(Clock()).state is CircuitState.OPEN


def test_after_the_cool_down_one_call_may_try_and_its_outcome_decides() -> None:
    clock = Clock()
    circuit = opened(clock)
    assert not circuit.admits
    assert circuit.retry_after == COOL_DOWN_S
    clock.now += COOL_DOWN_S
    assert circuit.admits
    trial = circuit.begin()
    assert circuit.state is CircuitState.HALF_OPEN
    assert not circuit.admits, "one at a time"
    circuit.failed(trial)
    assert circuit.retry_after == 2 * COOL_DOWN_S
    clock.now += 2 * COOL_DOWN_S
    circuit.abandoned(circuit.begin())
    assert circuit.admits, "a client that left told nothing about the engine"
    circuit.begin()
    circuit.answered()
    assert circuit.state is CircuitState.CLOSED


def test_replies_that_break_off_open_it_though_each_was_begun() -> None:
    circuit = Circuit(3, clock=Clock())
    for _ in range(3):
        assert circuit.admits
        circuit.begin()
        circuit.answered()
        circuit.failed()
    assert circuit.state is CircuitState.OPEN


def test_what_one_session_alone_meets_opens_nothing() -> None:
    circuit = Circuit(3, clock=Clock())
    for _ in range(20):
        circuit.failed(circuit.begin(), "poisoned")
    assert circuit.state is CircuitState.CLOSED
    circuit.failed(circuit.begin(), "another")
    assert circuit.state is CircuitState.OPEN


def test_an_engine_that_nobody_can_reach_is_left_alone_though_one_session_found_out() -> None:
    circuit = Circuit(3, clock=Clock())
    for session in ("one", "one", None):
        circuit.failed(circuit.begin(), session)
    assert circuit.state is CircuitState.OPEN


def test_a_trial_that_breaks_off_opens_it_again_for_twice_as_long() -> None:
    clock = Clock()
    circuit = opened(clock)
    clock.now += COOL_DOWN_S
    circuit.begin()
    circuit.answered()
    assert circuit.admits
    circuit.failed()
    assert circuit.retry_after == 2 * COOL_DOWN_S
    clock.now += 2 * COOL_DOWN_S
    circuit.begin()
    circuit.answered()
    circuit.succeeded()
    circuit.failed()
    assert circuit.state is CircuitState.CLOSED


def test_calls_that_die_with_an_engine_are_one_failure_to_come_back() -> None:
    """They began before the circuit opened, so none of them is a trial of it."""
    circuit = Circuit(3, clock=Clock())
    calls = [circuit.begin() for _ in range(64)]
    for trial in calls:
        circuit.failed(trial)
    assert circuit.retry_after == COOL_DOWN_S
    assert circuit.openings == 1


def test_a_good_check_lets_the_next_call_try_and_bad_ones_keep_it_out() -> None:
    clock = Clock()
    circuit = opened(clock)
    clock.now += COOL_DOWN_S / 2
    circuit.checked(False)
    clock.now += COOL_DOWN_S / 2
    assert not circuit.admits
    circuit.checked(True)
    assert circuit.state is CircuitState.HALF_OPEN
    assert circuit.openings == 1


@given(
    st.lists(
        st.sampled_from(["begin", "ok", "whole", "bad", "gone", "well", "ill", "wait"]), max_size=60
    )
)
def test_whatever_happens_it_comes_back_within_the_longest_cool_down(steps: list[str]) -> None:
    clock = Clock()
    circuit = Circuit(3, clock=clock)
    running: list[bool] = []

    def begin() -> None:
        if circuit.admits:
            running.append(circuit.begin())

    def wait() -> None:
        clock.now += 0.7

    events = {
        "begin": begin,
        "ok": circuit.answered,
        "whole": circuit.succeeded,
        "bad": lambda: circuit.failed(running.pop() if running else False),
        "gone": lambda: circuit.abandoned(running.pop() if running else False),
        "well": lambda: circuit.checked(True),
        "ill": lambda: circuit.checked(False),
        "wait": wait,
    }
    for step in steps:
        events[step]()
    for trial in running:
        circuit.abandoned(trial)
    assert circuit.retry_after <= LONGEST_COOL_DOWN_S
    clock.now += LONGEST_COOL_DOWN_S
    assert circuit.admits
