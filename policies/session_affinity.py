"""`session_affinity`: every session has an engine of its own, unless that one is overrun."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from policies.base import (
    BasePolicy,
    Candidate,
    EngineKey,
    EngineView,
    PolicyError,
    Ranking,
    Turn,
    register,
)


@register("session_affinity")
@dataclass
class SessionAffinity(BasePolicy):
    """Keep a session on its engine by rendezvous hashing, with bounded load.

    Formula: the engines in falling order of `hash(session, engine)`; those with
    `load + 1 > ceil(bound * (total load + 1) / n)`, this turn included, are
    walked past and stand behind all others, in the same order. A turn without
    a session is hashed by its own id and so goes anywhere.

    Inputs: `session` of the turn, `load` of the views. Cost: place in the walk
    from the session's own engine, no unit.
    Options: `bound` (1.25): how much more than the mean an engine may hold, at
    least 1. The seed plays no part: all gateways agree.
    Source: D. Thaler, C. Ravishankar, IEEE/ACM ToN 6(1), 1998 (rendezvous); V.
    Mirrokni, M. Thorup, M. Zadimoghaddam, arXiv 1608.01350 (bounded load).
    Bad at: prefixes shared between sessions, which it does not see; what a
    session left behind when it walked on is not known either, so it returns to
    its own engine although the other may be the warmer. In a nearly idle fleet the
    bound is a single turn, so one of somebody else's is enough to be sent on.
    """

    bound: float = 1.25

    def __post_init__(self) -> None:
        if self.bound < 1.0:
            raise PolicyError(
                f"policy 'session_affinity': option 'bound' must be at least 1, not {self.bound}"
            )

    def rank(self, turn: Turn, fleet: Sequence[EngineView], now: float) -> Ranking:
        """Rank the fleet in the session's own order, overrun engines last."""
        if not fleet:
            return Ranking.of(())
        total = sum(view.load for view in fleet) + 1
        limit = math.ceil(self.bound * total / len(fleet))
        # The two name spaces are kept apart: a session may be called like a turn.
        name = f"session/{turn.session}" if turn.session else f"turn/{turn.id}"
        walk = sorted(fleet, key=lambda view: _weight(name, view.key), reverse=True)
        within: list[Candidate] = []
        beyond: list[Candidate] = []
        for place, view in enumerate(walk):
            side, word = (within, "within") if view.load < limit else (beyond, "beyond")
            reason = f"place {place} for {name}; {view.load + 1} of {limit} requests, {word} bound"
            side.append(Candidate(view.key, float(place), reason))
        return Ranking.by_role(within + beyond, fleet)


def _weight(name: str, key: EngineKey) -> bytes:
    # Lengths first, so that no two pairs of texts run together into one.
    text = f"{len(name)}/{name}/{key.engine}/{key.rank}"
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
