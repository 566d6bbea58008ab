"""The breaker's states, driven by a clock that the test holds."""

from __future__ import annotations

import itertools

import pytest

from gateway.index.breaker import TRANSITIONS, Breaker, Event, Permit, State


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(3, 5.0, clock)


def ask(breaker: Breaker) -> Permit:
    permit = breaker.ask()
    assert permit is not None
    return permit


def trip(breaker: Breaker) -> None:
    for _ in range(3):
        ask(breaker).failed()
    assert breaker.state is State.OPEN


def test_failures_in_a_row_open_it(breaker: Breaker) -> None:
    for _ in range(10):
        ask(breaker).failed()
        ask(breaker).failed()
        ask(breaker).succeeded()
    assert (breaker.state, breaker.opened) == (State.CLOSED, 0)
    trip(breaker)
    assert (breaker.ask(), breaker.opened, breaker.refused) == (None, 1, 1)


def test_one_probe_decides_after_the_rest(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    clock.now += 4.9
    assert breaker.ask() is None
    clock.now += 0.1
    probe = ask(breaker)
    assert (probe.probe, breaker.state, breaker.ask()) == (True, State.HALF_OPEN, None)
    probe.failed()
    assert (breaker.state, breaker.ask()) == (State.OPEN, None)
    clock.now += 5.0
    ask(breaker).succeeded()
    assert (breaker.state, breaker.opened) == (State.CLOSED, 1)
    ask(breaker).failed()
    ask(breaker).failed()
    assert breaker.state is State.CLOSED  # counted anew


def test_a_lost_probe_is_replaced(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    clock.now += 5.0
    ask(breaker).abandoned()
    assert breaker.state is State.OPEN
    assert ask(breaker).probe


def test_late_calls_decide_nothing(breaker: Breaker, clock: Clock) -> None:
    late = [ask(breaker) for _ in range(3)]
    trip(breaker)
    late[0].succeeded()
    late[1].failed()
    assert breaker.ask() is None
    clock.now += 5.0
    ask(breaker)
    late[2].failed()
    assert breaker.state is State.HALF_OPEN


def test_a_permit_is_given_back_once(breaker: Breaker) -> None:
    permit = ask(breaker)
    permit.succeeded()
    permit.abandoned()
    with pytest.raises(RuntimeError, match="twice"):
        permit.failed()
    ask(breaker).abandoned()
    assert breaker.state is State.CLOSED


def test_the_table_names_what_is_possible() -> None:
    reachable = {State.CLOSED}
    for _ in State:
        reachable |= {to for (source, _), to in TRANSITIONS.items() if source in reachable}
    assert reachable == set(State)
    assert {event for _, event in TRANSITIONS} == set(Event)
    impossible = set(itertools.product(State, Event)) - set(TRANSITIONS)
    assert (State.CLOSED, Event.PROVED) in impossible
