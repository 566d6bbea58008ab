"""Owns the search for the end of a chain's leading run in the pool; pure.

Blocks of a prefix are stored in order, so a chain's blocks are there up to a
boundary and not beyond it. The search keeps the last block known present and
the first known missing, and narrows the stretch between them by asking for a
few blocks spread over it at once: with 32 probes, 1,600 blocks take two rounds
and a million take four. An eviction can leave a hole before the boundary that
no probe meets; that is for the check of the whole chain, after the decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Boundary:
    """A search over blocks `0 .. blocks-1`.

    `present` is the last block known to be there (-1: none), `missing` the
    first known not to be (`blocks`: none); the run is decided once nothing is
    unknown between them.
    """

    __slots__ = ("missing", "present")

    def __init__(self, blocks: int) -> None:
        self.present = -1
        self.missing = blocks

    @property
    def unknown(self) -> int:
        """How many blocks still may or may not belong to the run."""
        return self.missing - self.present - 1

    @property
    def run(self) -> int:
        """Leading blocks that are known to be there; all of them once `unknown` is 0."""
        return self.present + 1

    def probes(self, most: int, hints: Iterable[int] = ()) -> list[int]:
        """Return the blocks to ask for next, ascending: `most`, evenly spaced, and the hints.

        The first and the last unknown block are always among them: a chain that
        is there whole, or not at all, is decided in one round. `hints` are
        blocks that may end the run; each is asked for with the block after it.
        """
        first, unknown = self.present + 1, self.unknown
        if unknown <= most:
            return list(range(first, self.missing))
        asked = {first + (unknown - 1) * i // (most - 1) for i in range(most)}
        for hint in hints:
            asked.update(b for b in (hint, hint + 1) if self.present < b < self.missing)
        return sorted(asked)

    def learn(self, there: Mapping[int, bool]) -> None:
        """Narrow by an answer: for each block asked, whether it is there."""
        self.missing = min(
            (b for b, found in there.items() if not found and b < self.missing),
            default=self.missing,
        )
        self.present = max(
            (b for b, found in there.items() if found and self.present < b < self.missing),
            default=self.present,
        )
