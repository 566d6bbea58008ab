"""One engine as the gateway knows it: its state, its load, and how it hashes.

States, and who moves them:

    starting --probe ok--> ready <--probe ok-- suspect --more failures--> down
    ready --one failed probe, or a request that could not reach it--> suspect
    down --probe ok--> ready

A suspect engine stays a candidate, after all ready ones: one lost probe must
not empty a fleet. `starting` and `down` engines get no turns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from connector.model import EngineConfig
from gateway.fleet.metrics import HashFacts, RankLoad
from policies.base import EngineKey


class State(StrEnum):
    """Whether an engine can take a turn."""

    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
    DOWN = "down"


@dataclass(slots=True)
class Engine:
    """The mutable account of one engine; only the fleet writes to it."""

    config: EngineConfig
    model: str
    state: State = State.STARTING
    error: str | None = None
    failures: int = 0
    probes: int = 0
    since: float = 0.0
    facts: HashFacts | None = None
    loads: dict[int, RankLoad] = field(default_factory=lambda: {0: RankLoad(0, 0, 0.0)})
    loads_asked_at: float = 0.0
    loads_at: float | None = None
    metrics_error: str | None = None
    cards: list[dict[str, Any]] | None = None
    mismatch: str | None = None

    @property
    def id(self) -> str:
        """The configured id."""
        return self.config.id

    @property
    def keys(self) -> tuple[EngineKey, ...]:
        """One key per data-parallel rank that the engine has reported."""
        return tuple(EngineKey(self.config.id, rank) for rank in sorted(self.loads))

    @property
    def usable(self) -> bool:
        """Whether it may be given a turn."""
        return self.state in (State.READY, State.SUSPECT)
