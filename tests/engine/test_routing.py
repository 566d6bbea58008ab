"""Turns go where their blocks are, and what was expected there is there (must show 2 and 3)."""

from __future__ import annotations

import random
from typing import Any

from fleet import Front, Turn, prompt

CONVERSATIONS = 9
HITS = "vllm:external_prefix_cache_hits_total"
LOCAL_HITS = "vllm:prefix_cache_hits_total"


class Conversation:
    """One agent's conversation, growing by an answer and a new message a turn."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": prompt(f"{seed} rules", 8)}
        ]
        self.turns: list[Turn] = []

    def body(self) -> dict[str, Any]:
        """Return the next turn's body."""
        new = prompt(f"{self.seed} turn {len(self.turns)}", 3)
        self.messages.append({"role": "user", "content": new})
        return {
            "model": "tiny",
            "messages": list(self.messages),
            "max_tokens": 6,
            "temperature": 0,
        }

    def took(self, turn: Turn) -> None:
        """Take the answer into the conversation."""
        self.turns.append(turn)
        self.messages.append({"role": "assistant", "content": turn.text})


def test_pool_aware_returns_every_turn_to_the_engine_that_holds_it(gateway: Front) -> None:
    gateway.policy("pool_aware")
    talks = [Conversation(f"aware {i}") for i in range(CONVERSATIONS)]
    for _ in range(8):
        for talk in talks:
            talk.took(gateway.chat(talk.body()))
    for talk in talks:
        home = talk.turns[0].engine
        for number, turn in enumerate(talk.turns[1:], 2):
            assert turn.engine == home, f"turn {number} of {talk.seed}"
            assert turn.expected["device"] > 0
            assert turn.cached >= sum(turn.expected.values())
    assert {talk.turns[0].engine for talk in talks} == {"a", "b"}, "both engines are used"


def test_round_robin_hops_and_hits_from_the_pool_block_for_block(gateway: Front) -> None:
    gateway.policy("round_robin")
    chance = random.Random(3)
    talks = [Conversation(f"robin {i}") for i in range(CONVERSATIONS)]
    fetched = hops = 0
    for _ in range(4):
        for talk in chance.sample(talks, len(talks)):
            before = {
                engine: (gateway.metric(engine, HITS), gateway.metric(engine, LOCAL_HITS))
                for engine in "ab"
            }
            body = talk.body()
            turn = gateway.chat(body)
            external, local = before[turn.engine]
            assert gateway.metric(turn.engine, HITS) - external == turn.expected["pool"]
            assert gateway.metric(turn.engine, LOCAL_HITS) - local == turn.expected["device"]
            assert turn.cached == sum(turn.expected.values())
            fetched += turn.expected["pool"]
            hops += bool(talk.turns) and talk.turns[-1].engine != turn.engine
            talk.took(turn)
            # The next turn is sent only when this one's keys are visible at the master.
            gateway.until_pooled(body)
    assert hops >= CONVERSATIONS, "the conversations did hop"
    assert fetched > 100 * CONVERSATIONS, "and were loaded from the pool"
