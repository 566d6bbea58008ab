"""Small fleets, turns and chains for the tests of policies."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from policies.base import Decision, EngineKey, EngineView, Policy, Ranking, Turn
from policies.book import Book, Charge

BLOCK = 16
A, B, C, D = (EngineKey(name) for name in "abcd")


def chain(*parts: tuple[str, int]) -> list[int]:
    """Hash named stretches of so many blocks into a chain, each block with its parents."""
    ids, parent = [], b""
    for name, blocks in parts:
        for i in range(blocks):
            parent = hashlib.blake2b(parent + f"{name}{i}".encode(), digest_size=8).digest()
            ids.append(int.from_bytes(parent, "big"))
    return ids


def turn(name: str = "t", tokens: int = 1000, **more: Any) -> Turn:
    return Turn(id=name, model="m", prompt_tokens=tokens, block_size=BLOCK, **more)


def fleet(*loads: int) -> list[EngineView]:
    """Engines a, b, ... with so many requests running."""
    return [EngineView(EngineKey("abcdefgh"[i]), running=load) for i, load in enumerate(loads)]


def decide(turn: Turn, key: EngineKey, at: float = 0.0, ranking: Ranking | None = None) -> Decision:
    return Decision(turn, "test", ranking or Ranking.of(()), key, turn.cached(key), at)


def order(ranking: Ranking) -> list[str]:
    return [str(candidate.key) for candidate in ranking.prefill]


def send(book: Book, policy: Policy, turn: Turn, keys: Sequence[EngineKey], now: float) -> Charge:
    """Rank, decide and charge, as the gateway does."""
    ranking = policy.rank(turn, book.views(keys, now), now)
    decision = decide(turn, ranking.prefill[0].key, now, ranking)
    policy.committed(decision)
    return book.charge(decision, now)
