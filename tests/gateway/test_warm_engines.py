"""What engines report of their caches teaches where blocks are that no event told of."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio
from aiohttp import web
from index.publisher import Publisher
from scripted import Running, Scripted, running, settings

from connector.events import BlockStored
from connector.tiny_model import Shape, write

CHAT = "/v1/chat/completions"
BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "read the file and change its third line; " * 20}],
}


def usage(prompt: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Engine:
    """An engine's handler that reports what it is told to."""

    def __init__(self) -> None:
        self.prompt = 0
        self.cached = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(
            {
                "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}}],
                "usage": usage(self.prompt, self.cached),
            }
        )


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    with zmq.asyncio.Context() as context:
        made = Publisher(context)
        yield made
        await made.stop()


@pytest.fixture
async def up(tmp_path: Path, publisher: Publisher, request: pytest.FixtureRequest) -> Any:
    """A gateway before one engine that has cached nothing that it heard of."""
    write(tmp_path / "tiny", Shape())
    handler = Engine()
    engine = Scripted("a", 0, handler=handler, block=32)
    await engine.start()
    model: dict[str, Any] = {
        "exact": True,
        "tokenizer": tmp_path / "tiny",
        "engines": [{"id": "a", "url": engine.url, "events": publisher.endpoint}],
    } | getattr(request, "param", {})
    async with running(settings([engine], model=model, allow_engine_fields=True)) as started:
        await started.ready(1)
        subscriber = next(iter(started.gateway.subscribers.values()))
        await subscriber.until(lambda status: status.connected)
        yield started, engine, handler
    await engine.stop()


async def known(up: Running, body: dict[str, Any]) -> int:
    found = (await up.admin.post("/gateway/explain", json=body)).json()
    tokens: int = found["residency"]["device"].get("a", 0)
    return tokens


async def tokens(up: Running, body: dict[str, Any]) -> int:
    found = (await up.admin.post("/gateway/explain", json=body)).json()
    count: int = found["prompt_tokens"]
    return count


async def test_cached_tokens_tell_of_blocks_from_before(up: Any) -> None:
    gateway, _, engine = up
    engine.prompt, engine.cached = await tokens(gateway, BODY), 96
    assert await known(gateway, BODY) == 0
    first = await gateway.client.post(CHAT, json=BODY)
    assert first.headers["x-gateway-expected-cached"] == "device=0,pool=0"
    assert await known(gateway, BODY) == 96
    page = (await gateway.admin.get("/metrics")).text
    assert 'mooncake_gateway_learned_blocks_total{model="m"} 3.0' in page


async def test_what_the_engine_contradicts_is_forgotten(up: Any) -> None:
    gateway, _, engine = up
    engine.prompt, engine.cached = await tokens(gateway, BODY), 96
    await gateway.client.post(CHAT, json=BODY)
    engine.cached = 32
    await gateway.until(lambda: gateway.in_flight() == 0)
    gateway.gateway.router.book.forget(next(iter(gateway.gateway.subscribers)))
    await gateway.client.post(CHAT, json=BODY)
    assert await known(gateway, BODY) == 32


async def test_counts_of_another_prompt_teach_nothing(up: Any) -> None:
    gateway, _, engine = up
    engine.prompt, engine.cached = await tokens(gateway, BODY) + 1, 96
    await gateway.client.post(CHAT, json=BODY)
    assert await known(gateway, BODY) == 0


@pytest.mark.parametrize("up", [{"full_reports": 1.0}], indirect=True)
async def test_a_share_of_turns_asks_for_a_report_of_the_prefix(
    up: Any, publisher: Publisher
) -> None:
    gateway, engine, told = up
    told.prompt = await tokens(gateway, BODY)
    sent = json.dumps(BODY).encode()
    await gateway.client.post(CHAT, content=sent)
    (_, _, got) = engine.requests[-1]
    asked = b'"vllm_xargs":{"kv_cache_report_mode":"full"},'
    assert got == b"{" + asked + sent[1:]
    # The engine answers it with an event: the same blocks twice are one copy.
    found = (await gateway.admin.post("/gateway/explain", json=BODY)).json()
    ids = [int(digest[-16:], 16) for digest in found["hashes"][:3]]
    event = BlockStored(
        block_hashes=ids, parent_block_hash=None, token_ids=[], block_size=32, medium="GPU"
    )
    subscriber = next(iter(gateway.gateway.subscribers.values()))
    gateway.gateway.device.store(next(iter(gateway.gateway.subscribers)), event)
    await publisher.publish(event)
    await subscriber.until(lambda status: status.batches == 1)
    assert gateway.gateway.device.reported == 1


@pytest.mark.parametrize("up", [{"full_reports": 1.0}], indirect=True)
async def test_a_body_with_arguments_of_its_own_stays_as_it_is(up: Any) -> None:
    gateway, engine, _ = up
    sent = json.dumps(BODY | {"vllm_xargs": {"x": 1}}).encode()
    await gateway.client.post(CHAT, content=sent)
    assert engine.requests[-1][2] == sent


async def test_bodies_are_untouched_unless_configured(up: Any) -> None:
    gateway, engine, _ = up
    sent = json.dumps(BODY).encode()
    await gateway.client.post(CHAT, content=sent)
    assert engine.requests[-1][2] == sent
