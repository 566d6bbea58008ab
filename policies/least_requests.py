"""`least_requests`: the engine with the fewest requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.base import BasePolicy, Candidate, EngineView, Ranking, Turn, register


@register("least_requests")
@dataclass
class LeastRequests(BasePolicy):
    """Send each turn to the engine with the fewest requests.

    Formula: argmin of `running + waiting`, everybody's as last reported and this
    gateway's own to the moment; ties by chance from (seed, turn id).

    Inputs: `load` of the views. Cost: requests.
    Options: none.
    Source: the textbook's "least connections"; `least_load` and the like in
    SGLang's, vLLM's and other routers.
    Bad at: caches, which it does not see, and sizes: a turn with 100,000 tokens
    to compute counts as much as one with ten.
    """

    def rank(self, turn: Turn, fleet: Sequence[EngineView], now: float) -> Ranking:
        """Rank the fleet by requests."""
        # A stable sort of a shuffled fleet breaks ties by chance.
        drawn = self.chance(turn).sample(fleet, len(fleet))
        drawn.sort(key=lambda view: view.load)
        return Ranking.by_role(
            [
                Candidate(
                    view.key, float(view.load), f"{view.running} running, {view.waiting} waiting"
                )
                for view in drawn
            ],
            fleet,
        )
