"""The emulated fleet as clients see it: HTTP, SSE, KV events, master, faults, command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
import zmq.asyncio
from openai import APIStatusError, AsyncOpenAI
from typer.testing import CliRunner

from connector.blocks import Hasher
from connector.model import PoolKeys
from connector.pool import KeySchema, locate, parse_query, parse_segments, query_path
from connector.tiny_model import write
from gateway.fleet.metrics import read_page
from gateway.index.device import DeviceIndex
from gateway.index.subscriber import Subscriber
from gateway.reading import load
from loadtest.cli import app
from loadtest.emulator.engine import EmulatedEngine
from loadtest.emulator.faults import OF_ENGINE, FaultError, Faults, parse, parse_option
from loadtest.emulator.fleet import Fleet
from loadtest.emulator.settings import Settings
from loadtest.engine import Limits, Rates
from policies.base import EngineKey

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TEXT = "Read the failing test, find the function that it calls, and say in a line why it fails. "


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer") / "tiny"
    write(directory)
    return directory


@contextlib.asynccontextmanager
async def emulated(tokenizer: Path, **settings: Any) -> AsyncIterator[Fleet]:
    """Run a fleet, ten times as fast as its model unless told otherwise."""
    async with Fleet(Settings(tokenizer, **{"speed": 10.0, "engines": 2} | settings)) as running:
        yield running


@pytest.fixture
async def fleet(tokenizer: Path) -> AsyncIterator[Fleet]:
    async with emulated(tokenizer) as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=20, trust_env=False) as made:
        yield made


def body(text: str = TEXT * 8, **fields: Any) -> dict[str, Any]:
    return {"model": "emulated", "messages": [{"role": "user", "content": text}]} | fields


async def chat(client: httpx.AsyncClient, engine: EmulatedEngine, **fields: Any) -> dict[str, Any]:
    answer = await client.post(f"{engine.url}{CHAT}", json=body(**fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


async def until(look: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not await look():
            await asyncio.sleep(0.01)


async def metric(client: httpx.AsyncClient, engine: EmulatedEngine, name: str) -> float:
    text = (await client.get(f"{engine.url}/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith(name + "{")]
    assert lines, name
    return sum(float(line.rpartition(" ")[2]) for line in lines)


# -- inference ---------------------------------------------------------------------------


async def test_openais_client_streams_and_the_second_time_the_prompt_is_cached(
    fleet: Fleet,
) -> None:
    engine = fleet.engines["e1"]
    async with AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="-", max_retries=0) as openai:
        seen = []
        for _ in range(2):
            stream = await openai.chat.completions.create(
                **body(), max_tokens=5, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
            assert chunks[0].choices[0].delta.role == "assistant"
            assert len(texts) == 6
            assert chunks[-2].choices[0].finish_reason == "length"
            usage = chunks[-1].usage
            assert usage is not None
            assert usage.completion_tokens == 5
            assert usage.prompt_tokens_details is not None
            seen.append((usage.prompt_tokens_details.cached_tokens, "".join(texts)))
        whole = await openai.chat.completions.create(**body(), max_tokens=5)
    assert usage.prompt_tokens > 100
    assert [tokens for tokens, _ in seen] == [0, (usage.prompt_tokens - 1) // 32 * 32]
    assert seen[0][1] == seen[1][1] == whole.choices[0].message.content


async def test_tokens_come_at_the_models_pace(tokenizer: Path, client: httpx.AsyncClient) -> None:
    rates = Rates(prefill_token=0.0, step=0.2)
    async with emulated(tokenizer, engines=1, rates=rates) as fleet:
        engine = fleet.engines["e1"]
        began = time.monotonic()
        async with client.stream(
            "POST", f"{engine.url}{CHAT}", json=body(max_tokens=10, stream=True)
        ) as answer:
            times = [
                time.monotonic() - began
                async for line in answer.aiter_lines()
                if '"content"' in line
            ]
    # 0.2 s a token, ten times as fast; the role comes with the first.
    assert len(times) == 11
    assert 0.2 <= times[-1] < 1.0
    assert times[5] - times[1] >= 0.06


async def test_a_conversation_that_goes_on_hits_its_answers_too(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    engine = fleet.engines["e1"]
    first = await chat(client, engine, max_tokens=80)
    said = first["choices"][0]["message"]["content"]
    messages = [
        *body()["messages"],
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And now?"},
    ]
    second = await chat(client, engine, messages=messages)
    assert cached(second) == (first["usage"]["total_tokens"] - 1) // 32 * 32
    assert cached(second) > first["usage"]["prompt_tokens"]


async def test_the_pool_serves_what_another_engine_computed(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    one, other = fleet.engines.values()
    first = await chat(client, one, max_tokens=1)
    full = first["usage"]["prompt_tokens"] // 32
    assert fleet.pool is not None
    await until(lambda: _is(fleet, lambda pool: len(pool) == full))
    second = await chat(client, other, max_tokens=1)
    assert cached(second) == (first["usage"]["prompt_tokens"] - 1) // 32 * 32
    assert await metric(client, other, "vllm:external_prefix_cache_hits_total") == cached(second)
    assert await metric(client, other, "vllm:prefix_cache_hits_total") == 0
    third = await chat(client, other, max_tokens=1)
    assert await metric(client, other, "vllm:prefix_cache_hits_total") == cached(third)


async def _is(fleet: Fleet, look: Callable[[Any], bool]) -> bool:
    return look(fleet.pool)


async def test_a_salt_keeps_prompts_apart(fleet: Fleet, client: httpx.AsyncClient) -> None:
    engine = fleet.engines["e1"]
    hits = [
        cached(await chat(client, engine, **fields)) > 0
        for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {})
    ]
    assert hits == [False, False, False, True, True]


async def test_completions_take_texts_and_ids_one_or_several(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    url = f"{fleet.engines['e1'].url}{COMPLETIONS}"

    async def complete(prompt: Any, **fields: Any) -> dict[str, Any]:
        answer = await client.post(url, json={"prompt": prompt, "return_token_ids": True} | fields)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    text = await complete(TEXT)
    ids = text["choices"][0]["prompt_token_ids"]
    assert len(text["choices"][0]["token_ids"]) == 16
    assert (await complete(ids))["choices"][0]["text"] == text["choices"][0]["text"]
    several = await complete([TEXT, "def read(self):"], max_tokens=3)
    assert [choice["index"] for choice in several["choices"]] == [0, 1]
    assert several["usage"]["completion_tokens"] == 6
    assert (await complete([ids, ids[:4]], max_tokens=3))["usage"]["completion_tokens"] == 6
    two = await complete(TEXT, n=2)
    assert two["usage"]["prompt_tokens"] == len(ids)
    assert two["choices"][0]["text"] != two["choices"][1]["text"]
    stopped = (await complete(TEXT, stop=text["choices"][0]["text"][20:24]))["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert text["choices"][0]["text"].startswith(stopped["text"])
    assert len(stopped["text"]) <= 20


async def test_errors_are_the_openai_clients(fleet: Fleet) -> None:
    url = f"{fleet.engines['e1'].url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as openai:
        with pytest.raises(APIStatusError) as unknown:
            await openai.chat.completions.create(**body() | {"model": "other"})
        with pytest.raises(APIStatusError) as long:
            await openai.completions.create(model="emulated", prompt="word " * 40_000)
    assert (unknown.value.status_code, unknown.value.body["param"]) == (404, "model")  # type: ignore[index,call-overload]
    assert long.value.status_code == 400
    assert "maximum context length is 32768 tokens" in long.value.message


async def test_large_prompts_are_rendered_like_small_ones(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    engine = fleet.engines["e1"]
    large = await chat(client, engine, messages=body(TEXT * 600)["messages"], max_tokens=1)
    rendered = await client.post(f"{engine.url}{CHAT}/render", json=body(TEXT * 600))
    assert large["usage"]["prompt_tokens"] == len(rendered.json()["token_ids"]) > 10_000


async def test_given_token_ids_stand_for_the_messages(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    engine = fleet.engines["e1"]
    found = await chat(client, engine, kv_transfer_params={"prompt_token_ids": [5, 6, 7]})
    assert found["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_request(
    tokenizer: Path, client: httpx.AsyncClient, stream: bool
) -> None:
    async with emulated(tokenizer, engines=1, speed=0.2) as fleet:
        engine = fleet.engines["e1"]
        request = body(max_tokens=2000, stream=stream)
        asked = asyncio.create_task(client.post(f"{engine.url}{CHAT}", json=request))

        async def is_running() -> bool:
            return await metric(client, engine, "vllm:num_requests_running") == 1

        async def is_free() -> bool:
            usage = await metric(client, engine, "vllm:kv_cache_usage_perc")
            return usage == 0 and not await is_running()

        await until(is_running)
        assert not await is_free()
        asked.cancel()
        await until(is_free)


# -- what a gateway reads ------------------------------------------------------------------


async def test_metrics_tell_a_gateway_of_load_and_hashing(
    tokenizer: Path, client: httpx.AsyncClient
) -> None:
    limits = Limits(blocks=128, max_num_seqs=1)
    async with emulated(tokenizer, engines=1, speed=0.2, limits=limits) as fleet:
        engine = fleet.engines["e1"]
        url = f"{engine.url}{CHAT}"
        asked = [asyncio.create_task(client.post(url, json=body(max_tokens=99))) for _ in range(2)]

        async def is_busy() -> bool:
            page = read_page((await client.get(f"{engine.url}/metrics")).text)
            load = page.loads[0]
            return load.running == 1 and load.waiting == 1 and load.kv_usage > 0

        await until(is_busy)
        facts = read_page((await client.get(f"{engine.url}/metrics")).text).facts
        assert facts is not None
        assert (facts.algorithm, facts.block_size, facts.blocks) == ("sha256_cbor", 32, 128)
        for task in asked:
            task.cancel()


async def test_a_subscriber_knows_the_device_cache_from_replay_and_from_events(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    engine = fleet.engines["e1"]
    early = await chat(client, engine, max_tokens=1)
    index = DeviceIndex()
    restarted: list[EngineKey] = []
    context = zmq.asyncio.Context()
    assert engine.events is not None
    subscriber = Subscriber(
        "e1",
        engine.events,
        engine.replay,
        index,
        context=context,
        on_restart=restarted.append,
    )
    hasher = Hasher("sha256_cbor", 32, "0")

    async def leading(request: dict[str, Any]) -> int:
        rendered = await client.post(f"{engine.url}{CHAT}/render", json=request)
        return index.leading(hasher.chain(rendered.json()["token_ids"])).get(EngineKey("e1", 0), 0)

    try:
        subscriber.start()
        async with asyncio.timeout(10):
            await subscriber.until(lambda status: status.batches > 0)
        assert await leading(body()) == early["usage"]["prompt_tokens"] // 32 * 32
        late = body("Something else. " * 40)
        usage = (await client.post(f"{engine.url}{CHAT}", json=late)).json()["usage"]

        async def is_known() -> bool:
            return await leading(late) == usage["prompt_tokens"] // 32 * 32

        await until(is_known)
        await engine.restart()
        await chat(client, engine, max_tokens=1)
        async with asyncio.timeout(10):
            await subscriber.until(lambda status: status.restarts == 1)

        async def is_flushed() -> bool:
            return await leading(late) == 0 and await leading(body()) > 0

        await until(is_flushed)
        assert restarted == [EngineKey("e1", 0)]
    finally:
        await subscriber.close()
        context.destroy(linger=0)


async def test_lost_events_are_a_gap_that_the_replay_fills(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    engine = fleet.engines["e1"]
    index = DeviceIndex()
    context = zmq.asyncio.Context()
    assert engine.events is not None
    subscriber = Subscriber("e1", engine.events, engine.replay, index, context=context)
    try:
        subscriber.start()
        async with asyncio.timeout(10):
            await subscriber.until(lambda status: status.replays > 0 and status.connected)
            await chat(client, engine, max_tokens=1)
            await subscriber.until(lambda status: status.batches >= 2)
            await client.put(f"{engine.url}/emulator/faults", json={"drop_events": True})
            await chat(client, engine, messages=body("Lost. " * 40)["messages"], max_tokens=1)
            await client.put(f"{engine.url}/emulator/faults", json={})
            await chat(client, engine, messages=body("Heard. " * 40)["messages"], max_tokens=1)
            status = await subscriber.until(lambda status: status.gaps > 0)
            await subscriber.until(lambda status: status.batches >= 5)
        assert status.flushes == 0
    finally:
        await subscriber.close()
        context.destroy(linger=0)


async def test_the_masters_answers_are_mooncakes(fleet: Fleet, client: httpx.AsyncClient) -> None:
    one, other = fleet.engines.values()
    assert fleet.master is not None
    assert fleet.pool is not None
    usage = (await chat(client, one, max_tokens=1))["usage"]
    full = usage["prompt_tokens"] // 32
    await until(lambda: _is(fleet, lambda pool: len(pool) == full))
    ids = (await client.post(f"{one.url}{CHAT}/render", json=body())).json()["token_ids"]
    chain = Hasher("sha256_cbor", 32, "0").chain(ids)
    schema = KeySchema(PoolKeys(model="emulated"), "emulated")
    keys = [schema.first(chain.hex(i)) for i in range(full)]
    url = fleet.master.url
    found = parse_query((await client.get(url + query_path([*keys, "nothing"]))).content)
    assert sorted(found) == sorted(keys)
    segments = parse_segments((await client.get(f"{url}/get_segments_detail")).content)
    holders = {locate(replica.endpoint, segments) for replica in found.values()}
    assert holders == {one.segment}
    assert {segment.name for segment in segments.values()} == {one.segment, other.segment}
    assert (await client.get(f"{url}/get_all_keys")).text.split() == keys
    many = [*keys, *(f"{keys[0]}{i}" for i in range(400))]  # 50 KB in one line
    assert len(parse_query((await client.get(url + query_path(many))).content)) == full
    health = (await client.get(f"{url}/health")).json()
    assert (health["role"], health["service_ready"]) == ("leader", True)
    assert f"master_key_count {full}\n" in (await client.get(f"{url}/metrics")).text


async def test_what_onlookers_ask_for_keeps_nothing_in_the_pool(
    tokenizer: Path, client: httpx.AsyncClient
) -> None:
    async with emulated(tokenizer, engines=1, pool_blocks=12) as fleet:
        engine = fleet.engines["e1"]
        assert fleet.pool is not None
        assert fleet.master is not None
        await chat(client, engine, messages=body("First. " * 60)["messages"], max_tokens=1)
        await until(lambda: _is(fleet, lambda pool: len(pool) > 3))
        first = list(fleet.pool)
        keys = (await client.get(f"{fleet.master.url}/get_all_keys")).text.split()
        await chat(client, engine, messages=body("Then. " * 60)["messages"], max_tokens=1)
        await client.get(fleet.master.url + query_path(keys))
        await chat(client, engine, messages=body("Last. " * 90)["messages"], max_tokens=1)
        await until(lambda: _is(fleet, lambda pool: not set(first) & set(pool)))
        assert len(fleet.pool) == 12


# -- faults --------------------------------------------------------------------------------


async def test_a_hung_engine_goes_on_where_it_stood(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    engine = fleet.engines["e1"]
    request = body(max_tokens=400, stream=True)
    lines = 0
    async with client.stream("POST", f"{engine.url}{CHAT}", json=request) as answer:
        async for line in answer.aiter_lines():
            lines += line.startswith("data: ")
            if lines == 5:
                await client.put(f"{engine.url}/emulator/faults", json={"hang": True})
                with pytest.raises(httpx.ReadTimeout):
                    await client.get(f"{engine.url}/health", timeout=0.1)
                await client.put(f"{engine.url}/emulator/faults", json={})
    assert lines == 402
    assert (await client.get(f"{engine.url}/health")).status_code == 200


async def test_a_reset_breaks_connections_at_once_or_after_chunks(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    engine = fleet.engines["e1"]
    faults = f"{engine.url}/emulator/faults"
    await client.put(faults, json={"reset": True})
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        await chat(client, engine)
    assert (await client.get(f"{engine.url}/health")).status_code == 200
    await client.put(faults, json={"reset_after": 3})
    lines = []
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        async with client.stream("POST", f"{engine.url}{CHAT}", json=body(stream=True)) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
    assert lines == []
    seen = await _raw_stream(engine)
    assert seen.count(b"data: ") == 3


async def _raw_stream(engine: EmulatedEngine) -> bytes:
    """Return what comes of a stream until its connection is broken."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(engine.url.rpartition(":")[2]))
    content = json.dumps(body(stream=True)).encode()
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    seen = b""
    try:
        while piece := await reader.read(65536):
            seen += piece
    except ConnectionResetError:
        pass
    finally:
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()
    return seen


async def test_an_engine_can_answer_errors_and_be_slow(
    tokenizer: Path, client: httpx.AsyncClient
) -> None:
    rates = Rates(prefill_token=0.0, step=0.1)
    faults = {"e2": Faults(slow=4)}
    async with emulated(tokenizer, rates=rates, faults=faults, speed=1.0) as fleet:
        one, slow = fleet.engines.values()
        await client.put(f"{one.url}/emulator/faults", json={"error": 503})
        answer = await client.post(f"{one.url}{CHAT}", json=body())
        assert answer.status_code == answer.json()["error"]["code"] == 503
        assert (await client.get(f"{one.url}/health")).status_code == 200
        await client.put(f"{one.url}/emulator/faults", json={})

        async def seconds(engine: EmulatedEngine) -> float:
            began = time.monotonic()
            await chat(client, engine, max_tokens=1)
            return time.monotonic() - began

        assert 0.1 <= await seconds(one) < 0.4 <= await seconds(slow)


async def test_frozen_metrics_say_what_they_said(fleet: Fleet, client: httpx.AsyncClient) -> None:
    engine = fleet.engines["e1"]
    name = "vllm:prompt_tokens_total"
    await chat(client, engine)
    before = await metric(client, engine, name)
    await client.put(f"{engine.url}/emulator/faults", json={"freeze_metrics": True})
    await chat(client, engine)
    assert await metric(client, engine, name) == before
    await client.put(f"{engine.url}/emulator/faults", json={})
    assert await metric(client, engine, name) == 2 * before


async def test_a_restart_breaks_connections_and_empties_the_cache(
    tokenizer: Path, client: httpx.AsyncClient
) -> None:
    async with emulated(tokenizer, speed=1.0, client_ttl=0.3) as fleet:
        one, other = fleet.engines.values()
        assert fleet.pool is not None
        assert fleet.master is not None
        segments = f"{fleet.master.url}/get_segments_detail"
        first = await chat(client, one, max_tokens=1)
        full = first["usage"]["prompt_tokens"] // 32
        await until(lambda: _is(fleet, lambda pool: len(pool) == full))
        assert cached(await chat(client, one, max_tokens=1)) > 0
        stream = asyncio.create_task(_raw_stream_of(one, max_tokens=3000))

        async def is_running() -> bool:
            return await metric(client, one, "vllm:num_requests_running") == 1

        await until(is_running)
        answer = await client.post(f"{one.url}/emulator/restart")
        assert answer.status_code == 202
        assert b"[DONE]" not in await stream

        async def is_back() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return (await client.get(f"{one.url}/health")).status_code == 200
            return False

        await until(is_back)
        # The dead one's blocks are still listed, beside the new one's empty segment.
        assert len(fleet.pool) == full
        assert len(parse_segments((await client.get(segments)).content)) == 3
        assert await metric(client, one, "vllm:prompt_tokens_total") == 0
        assert cached(await chat(client, one, max_tokens=1, cache_salt="x")) == 0
        await until(lambda: _is(fleet, lambda pool: len(pool.segments) == 2))
        assert one.incarnations == 2
        assert other.incarnations == 1


async def _raw_stream_of(engine: EmulatedEngine, **fields: Any) -> bytes:
    async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
        seen = b""
        with contextlib.suppress(httpx.TransportError):
            async with client.stream(
                "POST", f"{engine.url}{CHAT}", json=body(stream=True, **fields)
            ) as answer:
                async for piece in answer.aiter_raw():
                    seen += piece
        return seen


async def test_a_stopped_engine_refuses_until_the_control_port_starts_it(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    engine = fleet.engines["e2"]
    control = f"{fleet.control_url}/emulator"
    url = engine.url
    assert (await client.post(f"{control}/e2/stop")).json()["alive"] is False
    with pytest.raises(httpx.ConnectError):
        await client.get(f"{url}/health")
    assert [one["alive"] for one in (await client.get(control)).json()] == [True, False, True]
    assert (await client.post(f"{control}/e2/start")).json()["alive"] is True
    assert engine.url == url
    assert (await client.get(f"{url}/health")).status_code == 200
    assert (await client.post(f"{control}/e9/start")).status_code == 404


async def test_the_master_can_hang_fail_forget_and_be_gone(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    one = fleet.engines["e1"]
    assert fleet.master is not None
    assert fleet.pool is not None
    url = fleet.master.url
    faults = f"{url}/emulator/faults"
    await chat(client, one, max_tokens=1)
    await until(lambda: _is(fleet, lambda pool: len(pool) > 0))
    keys = (await client.get(f"{url}/get_all_keys")).text.split()
    await client.put(faults, json={"hang": True})
    with pytest.raises(httpx.ReadTimeout):
        await client.get(url + query_path(keys), timeout=0.1)
    # Engines of the emulator go on without it.
    assert cached(await chat(client, one, max_tokens=1)) > 0
    await client.put(faults, json={"error": 500})
    assert (await client.get(url + query_path(keys))).status_code == 500
    await client.put(faults, json={"empty": True})
    assert parse_query((await client.get(url + query_path(keys))).content) == {}
    await client.put(faults, json={})
    assert len(parse_query((await client.get(url + query_path(keys))).content)) == len(keys)
    await client.post(f"{fleet.control_url}/emulator/master/stop")
    with pytest.raises(httpx.ConnectError):
        await client.get(f"{url}/health")
    await client.post(f"{fleet.control_url}/emulator/master/start")
    assert parse_query((await client.get(url + query_path(keys))).content) == {}
    assert len(parse_segments((await client.get(f"{url}/get_segments_detail")).content)) == 2


async def test_faults_that_do_not_exist_are_named(fleet: Fleet, client: httpx.AsyncClient) -> None:
    url = f"{fleet.engines['e1'].url}/emulator/faults"
    answer = await client.put(url, json={"slwo": 4})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("slwo: no such fault; there are hang, reset")
    assert (await client.get(url)).json() == Faults().model_dump()
    master = f"{fleet.control_url}/emulator/master/faults"
    answer = await client.put(master, json={"slow": 4})
    assert answer.json()["error"] == (
        "slow: not a fault that it can have; there are hang, error, empty"
    )


def test_faults_are_read_from_options() -> None:
    assert parse_option("e2:slow=4,error=503") == ("e2", Faults(slow=4, error=503))
    assert parse_option("e1:hang") == ("e1", Faults(hang=True))
    assert parse_option("e1:drop_events") == ("e1", Faults(drop_events=1))
    assert parse(b'{"drop_events": true}', OF_ENGINE) == Faults(drop_events=1)
    with pytest.raises(FaultError, match="is no fault; write ID:FAULT"):
        parse_option("slow=4")
    with pytest.raises(FaultError, match="empty: not a fault that it can have"):
        parse_option("e1:empty")
    with pytest.raises(FaultError, match="slow: Input should be greater than 0"):
        parse_option("e1:slow=0")


# -- the command -----------------------------------------------------------------------------


@contextlib.contextmanager
def command(tokenizer: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Any]]:
    """Run `mooncake-loadtest emulate`; yield the process and what it says when it is ready."""
    argv = [sys.executable, "-W", "error", "-m", "loadtest", "emulate", "--json"]
    process = subprocess.Popen(
        [*argv, "--tokenizer", str(tokenizer), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        try:
            yield process, json.loads(process.stdout.readline())["ready"]
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_says_where_it_is_and_ends_when_told(
    tokenizer: Path, tmp_path: Path, number: int
) -> None:
    config = tmp_path / "made" / "gateway.yaml"
    with command(tokenizer, "--engines", "3", "--gateway-config", str(config)) as (process, ready):
        assert [engine["id"] for engine in ready["engines"]] == ["e1", "e2", "e3"]
        assert ready["pid"] == process.pid
        url = ready["engines"][2]["url"]
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == ready["model"]
        models = load(config).models
        assert [engine.url for engine in models[0].engines] == [e["url"] for e in ready["engines"]]
        assert models[0].pool is not None
        assert models[0].pool.master == ready["master"]
        assert yaml.safe_load(config.read_text())["debug_headers"] is True
        # A stream under way does not hold it up.
        with httpx.stream("POST", f"{url}{CHAT}", json=body(max_tokens=2000, stream=True)):
            # It would go on for ten seconds.
            process.send_signal(number)
            assert process.wait(timeout=5) == 0
        assert process.stderr is not None
        said = process.stderr.read().decode()
        assert f"engine e3: {url}" in said
        assert "Traceback" not in said


def test_the_command_ends_with_its_parent(tokenizer: Path) -> None:
    argv = [sys.executable, "-m", "loadtest", "emulate", "--json", "--with-parent", "--engines"]
    shell = f"{' '.join(argv)} 1 --tokenizer {tokenizer} & wait"
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = json.loads(parent.stdout.readline())["ready"]["pid"]
        os.kill(pid, 0)
        parent.kill()
        # Its end of the pipe closes when it ends.
        assert parent.stdout.read() == b""


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (["--fault", "e9:hang"], 2, "faults for e9; there are e1, e2, e3, e4 and master"),
        (["--fault", "e1:hung"], 2, "hung: no such fault"),
        (["--speed", "0"], 2, "speed 0.0 is not above 0"),
        (["--hash-algorithm", "md5"], 2, "unknown hash algorithm"),
        (["--tokenizer", "nowhere"], 2, "there is no directory"),
    ],
)
def test_wrong_arguments_are_named(
    tokenizer: Path, options: list[str], status: int, says: str
) -> None:
    done = CliRunner().invoke(app, ["emulate", "--tokenizer", str(tokenizer), *options])
    assert done.exit_code == status
    assert says in done.stderr


def test_a_taken_port_is_named(tokenizer: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        argv = [sys.executable, "-m", "loadtest", "emulate", "--tokenizer", str(tokenizer)]
        done = subprocess.run(
            [*argv, "--base-port", port], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert port in done.stderr
    assert "in use" in done.stderr
