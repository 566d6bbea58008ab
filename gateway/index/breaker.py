"""Owns the breaker before the pool's master: whether a look-up may be tried at all.

Three states, and one table of what leads from one to another. Calls in a row
that fail trip it open; while open no call passes; after a rest one probe
passes, and its end alone decides. Whoever got a `Permit` gives it back with
exactly one of `succeeded`, `failed`, `abandoned`; a caller that was cancelled
abandons, so a lost probe never leaves the breaker half open. Nothing is held
across an await.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class State(StrEnum):
    """Where the breaker stands."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Event(StrEnum):
    """What can happen to it."""

    TRIPPED = "tripped"  # too many calls in a row have failed
    RESTED = "rested"  # a call asks, and the open breaker has waited long enough
    PROVED = "proved"  # the probe succeeded
    DISPROVED = "disproved"  # the probe failed
    ABANDONED = "abandoned"  # the probe ended without a verdict


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.CLOSED, Event.TRIPPED): State.OPEN,
    (State.OPEN, Event.RESTED): State.HALF_OPEN,
    (State.HALF_OPEN, Event.PROVED): State.CLOSED,
    (State.HALF_OPEN, Event.DISPROVED): State.OPEN,
    (State.HALF_OPEN, Event.ABANDONED): State.OPEN,
}


class Permit:
    """Leave to make one call; give it back with one of the three verdicts, once."""

    __slots__ = ("_breaker", "_given_back", "probe")

    def __init__(self, breaker: Breaker, *, probe: bool) -> None:
        self.probe = probe
        self._breaker = breaker
        self._given_back = False

    def succeeded(self) -> None:
        """The call got its answer."""
        self._end(self._breaker._succeeded)

    def failed(self) -> None:
        """The call got none, or a wrong one."""
        self._end(self._breaker._failed)

    def abandoned(self) -> None:
        """The caller went away; says nothing of the master. No effect after a verdict."""
        if not self._given_back:
            self._end(self._breaker._abandoned)

    def _end(self, tell: Callable[[Permit], None]) -> None:
        if self._given_back:
            raise RuntimeError("a breaker's permit was given back twice")
        self._given_back = True
        tell(self)


class Breaker:
    """A breaker that opens after `failures` failed calls in a row and rests `seconds`.

    `clock` gives seconds and never runs backwards. `moved` is told of every
    change of state, with the state before and after. `opened` counts how often it
    went from closed to open; `refused` the calls it did not let pass.
    """

    def __init__(
        self,
        failures: int,
        seconds: float,
        clock: Callable[[], float],
        moved: Callable[[State, State], None] | None = None,
    ) -> None:
        self.state = State.CLOSED
        self._moved = moved
        self.opened = 0
        self.refused = 0
        self._failures = failures
        self._seconds = seconds
        self._clock = clock
        self._in_a_row = 0
        self._rested_at = 0.0

    def ask(self) -> Permit | None:
        """Return leave to make a call, or None."""
        if self.state is State.OPEN and self._clock() >= self._rested_at:
            self._move(Event.RESTED)
            return Permit(self, probe=True)
        if self.state is State.CLOSED:
            return Permit(self, probe=False)
        self.refused += 1
        return None

    def _succeeded(self, permit: Permit) -> None:
        if permit.probe:
            self._in_a_row = 0
            self._move(Event.PROVED)
        elif self.state is State.CLOSED:
            self._in_a_row = 0
        # An earlier call that comes home while the breaker is open decides nothing.

    def _failed(self, permit: Permit) -> None:
        if permit.probe:
            self._rest(self._seconds)
            self._move(Event.DISPROVED)
        elif self.state is State.CLOSED:
            self._in_a_row += 1
            if self._in_a_row >= self._failures:
                self.opened += 1
                self._rest(self._seconds)
                self._move(Event.TRIPPED)

    def _abandoned(self, permit: Permit) -> None:
        if permit.probe:
            self._rest(0.0)  # the next caller probes in its place
            self._move(Event.ABANDONED)

    def _rest(self, seconds: float) -> None:
        self._rested_at = self._clock() + seconds

    def _move(self, event: Event) -> None:
        before, self.state = self.state, TRANSITIONS[self.state, event]
        if self._moved is not None:
            self._moved(before, self.state)
