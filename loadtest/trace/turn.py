"""A turn to be played: what every readable trace becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Own(NamedTuple):
    """Stands for the answer that the engine gave to turn `turn` of the same session."""

    turn: int


Message = Mapping[str, Any] | Own


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session. `number` counts from 1; `body` is what goes beside the messages."""

    session: str
    number: int
    messages: Sequence[Message]
    body: Mapping[str, Any] = field(default_factory=dict)
