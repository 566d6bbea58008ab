"""`round_robin`: every engine in its turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.base import (
    BasePolicy,
    Candidate,
    Decision,
    EngineView,
    Ranking,
    Turn,
    register,
)


@register("round_robin")
@dataclass
class RoundRobin(BasePolicy):
    """Go round the fleet, engine by engine.

    Formula: start at `position mod n` and rank the engines as they follow one
    another in the fleet, from the last on to the first again. The position
    belongs to the model and moves on by one with each decision acted on.

    Inputs: the fleet's order. Cost: steps from the start, no unit.
    Options: none.
    Source: the textbook; nginx's and most proxies' default.
    Bad at: everything that differs. It sees neither load nor caches, so turns of
    uneven length pile up, and every turn of a conversation finds another
    engine. Over a healthy pool that costs a fetch instead of a recompute, which
    makes it a stronger baseline than it looks. When the fleet grows or shrinks,
    the round starts anywhere.
    """

    _positions: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def rank(self, turn: Turn, fleet: Sequence[EngineView], now: float) -> Ranking:
        """Rank the fleet from the position on."""
        start = self._positions.get(turn.model, 0)
        candidates = []
        for step in range(len(fleet)):
            view = fleet[(start + step) % len(fleet)]
            candidates.append(Candidate(view.key, float(step), f"{step} after the next in turn"))
        return Ranking.by_role(candidates, fleet)

    def committed(self, decision: Decision) -> None:
        """Move on."""
        model = decision.turn.model
        self._positions[model] = self._positions.get(model, 0) + 1
