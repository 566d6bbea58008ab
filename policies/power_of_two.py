"""`power_of_two`: the better of two engines drawn by chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.base import BasePolicy, Candidate, EngineView, Ranking, Turn, register


@register("power_of_two")
@dataclass
class PowerOfTwo(BasePolicy):
    """Draw two engines and take the one with fewer requests.

    Formula: shuffle the fleet by chance from (seed, turn id); of each successive
    pair the one with less `running + waiting` goes first (a tie: the one drawn
    first). So the second of the pair is the first fallback, and the fallbacks
    after it are chosen as the first was.

    Inputs: `load` of the views. Cost: requests; it need not rise along the ranking.
    Options: none.
    Source: M. Mitzenmacher, "The Power of Two Choices in Randomized Load
    Balancing", IEEE TPDS 12(10), 2001. vLLM's and SGLang's routers have it too.
    Bad at: caches and sizes, like `least_requests`. Its strength is stale load:
    many gateways that see the same old report do not all run to one engine.
    """

    def rank(self, turn: Turn, fleet: Sequence[EngineView], now: float) -> Ranking:
        """Rank the fleet pair by pair."""
        drawn = self.chance(turn).sample(fleet, len(fleet))
        candidates = []
        for i in range(0, len(drawn), 2):
            pair = sorted(drawn[i : i + 2], key=lambda view: view.load)
            against = " against ".join(str(view.load) for view in pair)
            candidates += [
                Candidate(view.key, float(view.load), f"pair {i // 2}: {against} requests")
                for view in pair
            ]
        return Ranking.by_role(candidates, fleet)
