"""`random`: any engine, each as likely as the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.base import BasePolicy, Candidate, EngineView, Ranking, Turn, register


@register("random")
@dataclass
class RandomChoice(BasePolicy):
    """Shuffle the fleet.

    Formula: a uniform permutation, drawn from (seed, turn id).

    Inputs: none. Cost: place in the shuffle, no unit.
    Options: none.
    Source: the textbook; the weakest baseline of Mooncake (FAST'25).
    Bad at: everything. With m turns on n engines the fullest one holds about
    m/n + sqrt(2 m/n log n), and caches are met by luck alone.
    """

    def rank(self, turn: Turn, fleet: Sequence[EngineView], now: float) -> Ranking:
        """Rank the fleet as shuffled for this turn."""
        drawn = self.chance(turn).sample(fleet, len(fleet))
        return Ranking.by_role(
            [Candidate(view.key, float(i), f"drawn at place {i}") for i, view in enumerate(drawn)],
            fleet,
        )
