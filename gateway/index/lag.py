"""Owns the measure of the event loop's own lateness while something is awaited.

A deadline that passes may be the fault of whoever was asked, or of this process
having been too busy to look. Timers of a known time tell which: they run late
exactly when the loop does.
"""

from __future__ import annotations

import asyncio
import time


class Lag:
    """Measures, from its making to `end`, with a timer every `step` seconds."""

    __slots__ = ("_due", "_handle", "_loop", "_step", "_worst")

    def __init__(self, step: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._step = step
        self._worst = 0.0
        self._set()

    @property
    def worst(self) -> float:
        """Return the longest lateness so far, in seconds; a timer that is overdue counts."""
        return max(self._worst, time.monotonic() - self._due)

    def end(self) -> None:
        """Stop measuring."""
        self._handle.cancel()

    def _set(self) -> None:
        self._due = time.monotonic() + self._step
        self._handle = self._loop.call_later(self._step, self._tick)

    def _tick(self) -> None:
        self._worst = self.worst
        self._set()
