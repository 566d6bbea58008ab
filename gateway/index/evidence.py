"""Owns the proof that what an index hears concerns this gateway's own turns.

A hash seed that differs, another tokenizer, another engine's event endpoint, a
pool key spelled otherwise: all of these leave every part working and the index
silent, for its blocks match no prompt. What shows them is that a block which a
turn has certainly stored is never named afterwards.

So the first turns of each subject (an engine's events, a model's pool) are kept
until one is confirmed, which settles the matter until `forget`. A turn that is
not confirmed `settle` seconds after its end is a miss; `needed` misses and no
confirmation make a subject silent. At most `needed` turns wait at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from connector.blocks import Chain

S = TypeVar("S")

_REMEMBERED = 64


@dataclass(slots=True)
class Case:
    """One turn that waits to be confirmed: its chain, and when it ended."""

    chain: Chain
    at: float


@dataclass(slots=True)
class _Subject:
    proven: bool = False
    misses: int = 0
    waiting: list[Case] = field(default_factory=list)
    seen: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class Evidence(Generic[S]):
    """The cases of many subjects. Times are in seconds on the caller's clock."""

    def __init__(self, *, needed: int = 3, settle: float = 1.0) -> None:
        self._needed = needed
        self._settle = settle
        self._subjects: dict[S, _Subject] = {}

    def wanted(self, subject: S) -> bool:
        """Tell whether another turn could still say anything new."""
        known = self._subjects.get(subject)
        return known is None or not (known.proven or len(known.waiting) >= self._needed)

    def turn(self, subject: S, chain: Chain, at: float) -> None:
        """Take in a turn that ended `at`; one that ended in the same block before says nothing."""
        known = self._subjects.setdefault(subject, _Subject())
        last = chain.ids[-1]
        if self.wanted(subject) and last not in known.seen:
            known.seen.append(last)
            known.waiting.append(Case(chain, at))

    def waiting(self, subject: S) -> tuple[Case, ...]:
        """Return the turns that wait to be confirmed, oldest first."""
        known = self._subjects.get(subject)
        return tuple(known.waiting) if known else ()

    def confirmed(self, subject: S) -> None:
        """A block of the subject's turns was named: all is well."""
        known = self._subjects.setdefault(subject, _Subject())
        known.proven, known.misses = True, 0
        known.waiting.clear()

    def unconfirmed(self, subject: S, case: Case, now: float) -> None:
        """A turn was looked for, and is not named; a miss if it has ended long enough ago."""
        known = self._subjects[subject]
        if now - case.at >= self._settle and case in known.waiting:
            known.waiting.remove(case)
            known.misses += 1

    def silent(self, subject: S) -> bool:
        """Tell whether enough turns were missed, and none confirmed."""
        known = self._subjects.get(subject)
        return known is not None and not known.proven and known.misses >= self._needed

    def forget(self, subject: S) -> None:
        """Begin anew: the subject may have become another."""
        self._subjects.pop(subject, None)
