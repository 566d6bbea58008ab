"""The gateway's tokens, hashes and keys are the engines' own (must show 1)."""

from __future__ import annotations

from typing import Any

import pytest
from fleet import Front, prompt, until

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run a command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}, "seconds": {"type": "number"}},
                "required": ["command"],
            },
        },
    }
]


def turns(seed: str) -> list[list[dict[str, Any]]]:
    """Return the message lists of a conversation's three turns."""
    system = {"role": "system", "content": prompt(f"{seed} system", 12)}
    first = {
        "role": "user",
        "content": prompt(seed, 12) + " — naïve café \N{GRINNING FACE}\r\n日本",
    }
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "run", "arguments": '{"command": "ls", "seconds": 1.50}'},
            }
        ],
    }
    result = {"role": "tool", "tool_call_id": "c1", "content": prompt(f"{seed} output", 10)}
    said = {"role": "assistant", "content": "Done.", "reasoning_content": "Let me see."}
    last = {"role": "user", "content": [{"type": "text", "text": prompt(f"{seed} more", 6)}]}
    return [
        [system, first],
        [system, first, called, result],
        [system, first, called, result, said, last],
    ]


@pytest.mark.parametrize("salt", [None, "tenant-1"])
@pytest.mark.parametrize(("served", "engine"), [("tiny", None), ("tiny-64", "c")])
def test_tokens_hashes_and_keys_are_the_engines(
    gateway: Front, served: str, engine: str | None, salt: str | None
) -> None:
    gateway.policy("round_robin")
    settings = gateway.stack.fleet.engine_settings(engine or "a")
    before: list[str] = []
    for messages in turns(f"parity {served} {salt}"):
        body: dict[str, Any] = {
            "model": served,
            "messages": messages,
            "tools": TOOLS,
            "tool_choice": "none",
            "max_tokens": 4,
            "temperature": 0,
        }
        if salt:
            body["cache_salt"] = salt
        found = gateway.explain(body)
        assert found["exact"], found["inexact_reason"]
        assert found["block_size"] == settings.block_size
        hashes = found["hashes"]
        assert len(hashes) > 4
        assert hashes[: len(before)] == before, "a later turn extends the earlier one's chain"
        before = hashes[: len(hashes) - 1]

        turn = gateway.chat(body)
        assert found["token_ids"] == gateway.rendered(turn.engine, body)
        assert turn.prompt_tokens == found["prompt_tokens"] == len(found["token_ids"])

        # Every block of the prompt is announced by the engine that computed or loaded it.
        ids = [int(digest[-16:], 16) for digest in hashes]
        stored = until(
            lambda turn=turn: {
                block: event
                for event in gateway.events(turn.engine)
                for block in event.block_hashes
            },
            lambda stored, ids=ids: set(ids) <= set(stored),
        )
        size = settings.block_size
        for position, block in enumerate(ids):
            event = stored[block]
            at = event.block_hashes.index(block)
            tokens = event.token_ids[at * size : (at + 1) * size]
            assert tokens == found["token_ids"][position * size : (position + 1) * size]
            parent = event.block_hashes[at - 1] if at else event.parent_block_hash
            assert parent == (ids[position - 1] if position else None)

        # Every block's object is at the master, under the very key the gateway asks for.
        prefix = f"{settings.cache_prefix}@" if settings.cache_prefix else ""
        keys = {f"{prefix}tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{digest}" for digest in hashes}
        until(gateway.pool_keys, lambda known, keys=keys: keys <= known)
        gateway.until_pooled(body)


def test_salted_and_plain_prompts_share_tokens_but_no_block(gateway: Front) -> None:
    body = {"model": "tiny", "messages": turns("salt")[0]}
    plain, salted = gateway.explain(body), gateway.explain(body | {"cache_salt": "s"})
    assert plain["token_ids"] == salted["token_ids"]
    assert not set(plain["hashes"]) & set(salted["hashes"])


def test_completions_are_hashed_as_the_engine_does(gateway: Front) -> None:
    gateway.policy("round_robin")
    text = prompt("completion", 30)
    for shape in (text, gateway.explain({"model": "tiny", "prompt": text})["token_ids"]):
        body = {"model": "tiny", "prompt": shape, "max_tokens": 2}
        answer = gateway.client.post(f"{gateway.url}/v1/completions", json=body)
        assert answer.status_code == 200
        found = gateway.until_pooled(body)
        assert answer.json()["usage"]["prompt_tokens"] == found["prompt_tokens"]
