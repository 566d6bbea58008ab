"""What /ready and the log say of events and a pool that work, and are not this gateway's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_master import FakeMaster
from publisher import Publisher, stored
from scripted import Running, Scripted, plain, running, settings

from connector.tiny_model import Shape, write
from gateway.config import GatewayConfig

CHAT = "/v1/chat/completions"


def talk(number: int) -> dict[str, Any]:
    """A body of many blocks that shares only its first ones with the others'."""
    text = "the same beginning " * 20 + f"talk {number} " * 20
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    write(tmp_path / "tiny", Shape())
    return tmp_path / "tiny"


@pytest.fixture
async def master() -> AsyncIterator[FakeMaster]:
    master = FakeMaster(segments={"127.0.0.1:13294": "127.0.0.2:17101"})
    await master.start()
    yield master
    await master.stop()


def exact(
    engines: list[Scripted],
    tokenizer: Path,
    *,
    events: dict[str, Publisher] | None = None,
    segments: dict[str, list[str]] | None = None,
    **model: Any,
) -> GatewayConfig:
    rows = []
    for engine in engines:
        row: dict[str, Any] = {"id": engine.name, "url": engine.url}
        if events and engine.name in events:
            row |= {"events": events[engine.name].endpoint, "replay": events[engine.name].replay}
        rows.append(row | {"segments": (segments or {}).get(engine.name, [])})
    given = {"exact": True, "tokenizer": tokenizer, "engines": rows, **model}
    return settings(engines, model=given)


async def degraded(up: Running, reached: Callable[[list[str]], bool]) -> list[str]:
    """Wait until what is degraded is as wanted; return it."""
    async with asyncio.timeout(20):
        while True:
            lines: list[str] = (await up.client.get("/ready")).json()["degraded"]
            if reached(lines):
                return lines
            await asyncio.sleep(0.02)


def says(text: str) -> Callable[[list[str]], bool]:
    return lambda lines: any(text in line for line in lines)


def silent(lines: list[str]) -> bool:
    return not lines


async def blocks(up: Running, body: dict[str, Any]) -> list[int]:
    """The block ids of a body's prompt, as this gateway hashes it."""
    found = (await up.admin.post("/gateway/explain", json=body)).json()
    return [int(digest[-16:], 16) for digest in found["hashes"]]


def announces(publisher: Publisher, *ids: int) -> Callable[[web.Request], Any]:
    """Return an engine's handler that stores these blocks before it answers."""

    async def handler(request: web.Request) -> web.StreamResponse:
        await publisher.publish(stored(*ids, block_size=16))
        return await plain(request)

    return handler


# -- events --------------------------------------------------------------------


async def test_events_that_never_name_the_engines_own_turns_are_named(
    engines: list[Scripted],
    publishers: Callable[..., Publisher],
    tokenizer: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "gateway.health")
    (engine, *_), publisher = engines, publishers()
    async with running(exact(engines[:1], tokenizer, events={"a": publisher})) as up:
        await up.ready(1)
        await degraded(up, silent)
        for number in range(3):
            assert await degraded(up, silent) == []
            foreign = [1000 * number + i for i in range(40)]
            engine.handler = announces(publisher, *foreign)
            await up.client.post(CHAT, json=talk(number))
        (line,) = await degraded(up, says("KV events of engine a never name"))
        assert "hashing.seed" in line
        assert "mooncake-connector doctor" in line
        assert "it counted 9 prompt tokens" in line
        await up.until(lambda: "degraded: KV events of engine a" in caplog.text)
        engine.handler = announces(publisher, *await blocks(up, talk(4)))
        await up.client.post(CHAT, json=talk(4))
        assert await degraded(up, silent) == []
        await up.until(lambda: "no longer so: KV events of engine a" in caplog.text)
    assert caplog.text.count("never name") == 2, "once when it came, once when it went"


async def test_swapped_event_endpoints_are_named_though_beginnings_are_shared(
    engines: list[Scripted], publishers: Callable[..., Publisher], tokenizer: Path
) -> None:
    of_a, of_b = publishers(), publishers()
    config = exact(engines, tokenizer, events={"a": of_b, "b": of_a})
    async with running(config) as up:
        await up.ready(2)
        await degraded(up, silent)
        for number in range(6):
            ids = await blocks(up, talk(number))
            engines[0].handler = announces(of_a, *ids)
            engines[1].handler = announces(of_b, *ids)
            await up.client.post(CHAT, json=talk(number))
        lines = await degraded(up, lambda found: len(found) == 2)
    assert all("`events` is another engine's" in line for line in lines)


async def test_a_topic_that_names_another_engine_is_believed(
    engines: list[Scripted], publishers: Callable[..., Publisher], tokenizer: Path
) -> None:
    publisher = publishers(topic=b"kv@b@m")
    async with running(exact(engines, tokenizer, events={"a": publisher})) as up:
        await up.ready(2)
        await degraded(up, silent)
        await publisher.publish(stored(1))
        (line,) = await degraded(up, says("topic 'kv@b@m'"))
    assert "so they are engine b's" in line


async def test_turns_that_stored_nothing_prove_nothing(
    engines: list[Scripted], publishers: Callable[..., Publisher], tokenizer: Path
) -> None:
    async def all_cached(_: web.Request) -> web.Response:
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 10_000}}
        return web.json_response({"id": "1", "choices": [], "usage": usage})

    engines[0].handler = all_cached
    async with running(exact(engines[:1], tokenizer, events={"a": publishers()})) as up:
        await up.ready(1)
        await degraded(up, silent)
        for number in range(4):
            await up.client.post(CHAT, json=talk(number))
        short = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        for _ in range(4):
            await up.client.post(CHAT, json=short)
        key = up.gateway.fleet.engine("a").keys[0]
        assert up.gateway.health._events.waiting(key) == ()


# -- the pool ------------------------------------------------------------------


async def test_a_pool_that_never_has_the_turns_keys_is_named(
    engines: list[Scripted],
    tokenizer: Path,
    master: FakeMaster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.health._POOL_SETTLE", 0.2)
    config = exact(engines[:1], tokenizer, pool={"master": master.url, "deadline": 5})
    async with running(config) as up:
        await up.ready(1)
        for number in range(3):
            assert await degraded(up, silent) == []
            await up.client.post(CHAT, json=talk(number))
        (line,) = await degraded(up, says("no pool key of this gateway's turns was ever found"))
        assert "check pool.key" in line
        asked = {key for keys in master.queries for key in keys}
        master.keys = dict.fromkeys(asked, ("memory", "127.0.0.1:13294"))
        await up.client.post(CHAT, json=talk(0))
        assert await degraded(up, silent) == []


async def test_a_pool_with_some_ranks_objects_only_is_named(
    engines: list[Scripted],
    tokenizer: Path,
    master: FakeMaster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.health._POOL_SETTLE", 0.2)
    pool = {"master": master.url, "deadline": 5, "key": {"ranks": {"tp": 2}}}
    async with running(exact(engines[:1], tokenizer, pool=pool)) as up:
        await up.ready(1)
        for number in range(3):
            await up.client.post(CHAT, json=talk(number))
            asked = {key for keys in master.queries for key in keys if "tp_rank:0" in key}
            master.keys = dict.fromkeys(asked, ("memory", "127.0.0.1:13294"))
        (line,) = await degraded(up, says("only some were ever found"))
    assert "pool.key.ranks" in line


async def test_a_segment_that_is_not_mounted_is_named_until_it_is(
    engines: list[Scripted],
    tokenizer: Path,
    master: FakeMaster,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = exact(
        engines,
        tokenizer,
        segments={"a": ["127.0.0.2:17101"], "b": ["10.0.0.1:17101"]},
        pool={"master": master.url},
    )
    async with running(config) as up:
        await up.ready(2)
        (line,) = await degraded(up, says("is not mounted"))
        assert line == "segment 10.0.0.1:17101 of engine b is not mounted; mounted: 127.0.0.2:17101"
        await up.until(lambda: f"degraded: {line}" in caplog.text)
        master.segments["10.0.0.1:9999"] = "10.0.0.1:17101"
        assert await degraded(up, silent) == []


async def test_a_master_that_is_no_master_is_named_before_the_first_turn(
    engines: list[Scripted], tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as rpc:
        port = rpc.sockets[0].getsockname()[1]
        config = exact(engines, tokenizer, pool={"master": f"http://127.0.0.1:{port}"})
        async with running(config) as up:
            await up.ready(2)
            (line,) = await degraded(up, says("pool.master"))
            assert (await up.client.get("/ready")).status_code == 200
    assert line.startswith(f"model m: the pool's master at http://127.0.0.1:{port}: it does not")
    assert "not of its RPC port" in line
    warned = [r for r in caplog.records if r.name == "gateway.index.pool"]
    assert [r.levelname for r in warned] == ["WARNING"]
    assert "does not list its segments" in warned[0].getMessage()


# -- engines -------------------------------------------------------------------


async def test_an_engine_that_never_answered_is_logged_once_with_its_cause(
    engines: list[Scripted], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.fleet")
    engines[0].healthy = False
    async with running(settings(engines[:1])) as up:
        probes = up.gateway.fleet.engine("a")
        await up.until(lambda: probes.failures >= 4)
        ready = await up.client.get("/ready")
        (row,) = (await up.admin.get("/gateway/engines")).json()
        engines[0].healthy, engines[0].card = True, {"id": "other"}
        await up.until(lambda: "it serves" in (probes.error or ""))
        engines[0].card = {"id": "m"}
        await up.ready(1)
    assert ready.status_code == 503
    assert "a is starting (ValueError: /health answered 500)" in ready.json()["reasons"][0]
    assert (row["state"], row["error"]) == ("starting", "ValueError: /health answered 500")
    lines = [r.getMessage() for r in caplog.records if r.name == "gateway.fleet"]
    assert lines[0] == (
        f"engine a at {engines[0].url} has not answered yet: ValueError: /health answered 500"
    )
    assert "has not answered yet: ValueError: it serves 'other', not 'm'" in lines[1]
    assert lines[2:] == ["engine a is ready"]
    assert vars(caplog.records[0])["fields"]["url"] == engines[0].url
