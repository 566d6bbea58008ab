"""What clients get, and engines are sent, whatever happens between: scripted engines, real HTTP."""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import pytest
from aiohttp import web
from scripted import ANSWER, CHUNK, DONE, USAGE, Scripted, free_port, running, settings, stream

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = BODY | {"stream": True}


def head(content: bytes) -> bytes:
    """Return a raw request with this body."""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: " + str(len(content)).encode() + b"\r\n\r\n" + content
    )


async def test_body_reaches_the_engine_byte_for_byte(engines: list[Scripted]) -> None:
    raw = (
        b'{ "model" : "m",\n\t"zzz": {"a": [1.0, 1e400, -0]}, "messages":[{"role":"user",'
        b'"content":"\\u00e9\\ud83d\\ude00 \xc3\xa9","odd":null}],  "cache_salt":"s" }  '
    )
    async with running(settings(engines)) as up:
        await up.ready(2)
        answer = await up.client.post(CHAT, content=raw)
    assert answer.status_code == 200
    assert answer.content == ANSWER
    (path, headers, body) = next(e.requests[0] for e in engines if e.requests)
    assert (path, body) == (CHAT, raw)
    assert headers["x-request-id"] == answer.headers["x-request-id"]


async def test_client_headers_and_answer_headers_pass_but_those_of_the_hop(
    engines: list[Scripted],
) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text="{}", headers={"X-Engine-Says": "yes", "X-Request-Id": "engine"})

    for engine in engines:
        engine.handler = handler
    async with running(settings(engines)) as up:
        await up.ready(2)
        sent = {
            "Authorization": "Bearer client",
            "X-Stainless-Lang": "python",
            "X-Name": "né".encode(),
            "X-data-parallel-rank": "7",
            "X-Request-Id": "mine-1",
        }
        answer = await up.client.post(CHAT, json=BODY, headers=sent)
    (_, headers, _) = next(e.requests[0] for e in engines if e.requests)
    assert headers["authorization"] == "Bearer client"
    assert headers["x-stainless-lang"] == "python"
    assert headers["x-name"] == "né"
    assert headers["x-request-id"] == "mine-1"
    assert "x-data-parallel-rank" not in headers
    assert answer.headers["x-engine-says"] == "yes"
    assert answer.headers.get_list("x-request-id") == ["mine-1"]


async def test_engine_key_replaces_the_clients(
    engines: list[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "sekrit")
    async with running(settings(engines, upstream={"api_key_env": "ENGINE_KEY"})) as up:
        await up.ready(2)
        await up.client.post(CHAT, json=BODY, headers={"Authorization": "Bearer client"})
    (_, headers, _) = next(e.requests[0] for e in engines if e.requests)
    assert headers["authorization"] == "Bearer sekrit"


async def test_stream_passes_untouched_and_usage_is_read(engines: list[Scripted]) -> None:
    async with running(settings(engines)) as up:
        await up.ready(2)
        answer = await up.client.post(CHAT, json=STREAM)
        assert answer.content == CHUNK + CHUNK + USAGE + DONE
        (record,) = (await up.admin.get("/gateway/decisions")).json()
    assert record["reported"] == {"prompt": 9, "cached": 4, "output": 2}
    assert record["ending"] == "done"
    assert record["ttft_seconds"] > 0


async def test_stream_cut_at_every_byte_is_identical(engines: list[Scripted]) -> None:
    whole = 'data: {"c":"\N{GRINNING FACE}é\N{CJK UNIFIED IDEOGRAPH-4E2D}"}\n\n'.encode() + DONE
    cuts = iter(range(1, len(whole)))

    async def handler(request: web.Request) -> web.StreamResponse:
        cut = next(cuts)
        return await stream(request, whole[:cut], whole[cut:])

    for engine in engines:
        engine.handler = handler
    async with running(settings(engines)) as up:
        await up.ready(2)
        for _ in range(1, len(whole)):
            answer = await up.client.post(CHAT, json=STREAM)
            assert answer.content == whole


@pytest.mark.parametrize(
    ("status", "headers"),
    [(400, {}), (401, {}), (404, {}), (422, {}), (429, {"Retry-After": "7"}), (500, {})],
)
async def test_an_engines_error_passes_through(
    engines: list[Scripted], status: int, headers: dict[str, str]
) -> None:
    text = '{"error" : {"message": "the engine says no"}}'

    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=status, text=text, headers=headers)

    for engine in engines:
        engine.handler = handler
    async with running(settings(engines)) as up:
        await up.ready(2)
        answer = await up.client.post(CHAT, json=STREAM)
        assert up.in_flight() == 0
        (record,) = (await up.admin.get("/gateway/decisions")).json()
    assert (answer.status_code, answer.text) == (status, text)
    assert record["ending"] == ("refused" if status < 500 else "failed")
    assert answer.headers.get("retry-after") == headers.get("Retry-After")
    assert sum(len(e.requests) for e in engines) == 1, "never asked twice"


async def test_503_goes_to_the_next_engine_and_passes_when_all_say_so(
    engines: list[Scripted],
) -> None:
    async def busy(_: web.Request) -> web.Response:
        return web.Response(status=503, text='{"error":"full"}')

    engines[0].handler = busy
    async with running(settings(engines)) as up:
        await up.ready(2)
        answers = [await up.client.post(CHAT, json=BODY) for _ in range(4)]
        assert [a.status_code for a in answers] == [200] * 4
        assert {a.headers["x-gateway-engine"] for a in answers} == {"b"}
        engines[1].handler = busy
        last = await up.client.post(CHAT, json=BODY)
        assert up.in_flight() == 0
    assert (last.status_code, last.text) == (503, '{"error":"full"}')
    assert last.headers["retry-after"] == "1"


async def test_a_dead_engine_costs_no_request(engines: list[Scripted]) -> None:
    config = settings(engines, probing={"interval": 60, "timeout": 1, "failures": 2})
    async with running(config) as up:
        await up.ready(2)
        await engines[0].stop()
        answers = [await up.client.post(CHAT, json=BODY) for _ in range(4)]
        records = (await up.admin.get("/gateway/decisions")).json()
    assert [a.status_code for a in answers] == [200] * 4
    assert {a.headers["x-gateway-engine"] for a in answers} == {"b"}
    failed = [attempt for r in records for attempt in r["attempts"] if attempt["failed"]]
    assert {(a["engine"], a["failed"]) for a in failed} == {("a", "refused")}
    assert len(failed) == 1, "once it could not be reached it stands behind"


async def test_an_engine_that_dies_before_its_first_token_costs_no_request(
    engines: list[Scripted],
) -> None:
    async def die(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        assert request.transport is not None
        request.transport.abort()
        return answer

    engines[0].handler = die
    async with running(settings(engines)) as up:
        await up.ready(2)
        answers = [await up.client.post(CHAT, json=STREAM) for _ in range(2)]
    assert [a.content for a in answers] == [CHUNK + CHUNK + USAGE + DONE] * 2


async def test_a_poisonous_request_breaks_at_most_two_engines(engines: list[Scripted]) -> None:
    third = Scripted("c", 0)
    await third.start()

    async def die(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    fleet = [*engines, third]
    for engine in fleet:
        engine.handler = die
    async with running(settings(fleet)) as up:
        await up.ready(3)
        answer = await up.client.post(CHAT, json=BODY)
        assert up.in_flight() == 0
    await third.stop()
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "engine_failed"
    assert sum(len(e.requests) for e in fleet) == 2


@pytest.mark.parametrize("pieces", [(CHUNK, CHUNK[:20]), (CHUNK,)])
async def test_a_break_in_mid_stream_is_an_error_event_and_an_aborted_end(
    engines: list[Scripted], pieces: tuple[bytes, ...]
) -> None:
    async def die(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for piece in pieces:
            await answer.write(piece)
        assert request.transport is not None
        request.transport.close()
        return answer

    for engine in engines:
        engine.handler = die
    async with running(settings(engines)) as up:
        await up.ready(2)
        got = b""
        async with up.client.stream("POST", CHAT, json=STREAM) as answer:
            broke = False
            try:
                async for piece in answer.aiter_raw():
                    got += piece
            except httpx.RemoteProtocolError:
                broke = True
        assert broke
        assert up.in_flight() == 0
    assert got.startswith(b"".join(pieces))
    event = got.removeprefix(b"".join(pieces)).strip()
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "engine_failed"
    assert sum(len(e.requests) for e in engines) == 1, "nothing is replayed"


async def test_a_clean_end_without_done_is_an_error(engines: list[Scripted]) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, CHUNK)

    for engine in engines:
        engine.handler = handler
    async with running(settings(engines)) as up:
        await up.ready(2)
        with pytest.raises(httpx.RemoteProtocolError):
            await up.client.post(CHAT, json=STREAM)


@pytest.mark.parametrize("phase", ["before headers", "in mid-stream"])
async def test_a_client_that_leaves_ends_the_engines_work(
    engines: list[Scripted], phase: str
) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            if phase == "in mid-stream":
                await answer.prepare(request)
                await answer.write(CHUNK)
            began.set()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.set()
            raise
        return answer

    for engine in engines:
        engine.handler = handler
    async with running(settings(engines)) as up:
        await up.ready(2)
        body = json.dumps(STREAM if phase == "in mid-stream" else BODY).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", up.port)
        writer.write(head(body))
        await began.wait()
        assert up.in_flight() == 1
        writer.close()
        async with asyncio.timeout(5):
            await ended.wait()
        await up.until(lambda: up.in_flight() == 0)
        (record,) = (await up.admin.get("/gateway/decisions")).json()
    assert (record["ending"], record["status"]) == ("left", 499)


async def test_first_byte_timeout_is_504_and_idle_timeout_breaks_the_stream(
    engines: list[Scripted],
) -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        if request.path == CHAT:
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(request)
            await answer.write(CHUNK)
        await asyncio.sleep(60)
        return web.Response()

    for engine in engines:
        engine.handler = hang
    upstream = {"first_byte_timeout": 0.2, "idle_timeout": 0.2}
    async with running(settings(engines, upstream=upstream)) as up:
        await up.ready(2)
        slow = await up.client.post("/v1/completions", json={"model": "m", "prompt": "x"})
        assert (slow.status_code, slow.json()["error"]["code"]) == (504, "engine_timeout")
        with pytest.raises(httpx.RemoteProtocolError):
            await up.client.post(CHAT, json=STREAM)
        assert up.in_flight() == 0


async def test_an_idle_engine_connection_that_closed_costs_no_request(
    engines: list[Scripted],
) -> None:
    closing = [True]

    async def once(request: web.Request) -> web.StreamResponse:
        answer = web.Response(body=ANSWER, content_type="application/json")
        if closing[0]:
            # The next request finds the kept-alive connection closed under it.
            assert request.transport is not None
            asyncio.get_running_loop().call_later(0.01, request.transport.abort)
        return answer

    for engine in engines:
        engine.handler = once
    async with running(settings(engines[:1])) as up:
        await up.ready(1)
        for _ in range(5):
            assert (await up.client.post(CHAT, json=BODY)).status_code == 200
            await asyncio.sleep(0.02)


async def test_random_aborts_leave_every_counter_at_zero(engines: list[Scripted]) -> None:
    chance = random.Random(7)

    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for _ in range(chance.randint(0, 3)):
            await answer.write(CHUNK)
            await asyncio.sleep(chance.random() * 0.004)
        if chance.random() < 0.2:
            assert request.transport is not None
            request.transport.abort()
        await answer.write(DONE)
        return answer

    for engine in engines:
        engine.handler = handler

    async def one(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        whole = head(json.dumps(STREAM).encode())
        writer.write(whole[: chance.randint(1, len(whole))] if chance.random() < 0.1 else whole)
        await asyncio.sleep(chance.random() * 0.02)
        writer.close()

    async with running(settings(engines)) as up:
        await up.ready(2)
        for _ in range(20):
            await asyncio.gather(*(one(up.port) for _ in range(25)))
        await up.until(lambda: up.in_flight() == 0)
        assert up.gateway.router.book.totals() == type(up.gateway.router.book.totals())(
            *(0 for _ in up.gateway.router.book.totals())
        )


async def test_no_engine_is_503_with_its_reason() -> None:
    dead = Scripted("a", free_port())
    async with running(settings([dead])) as up:
        answer = await up.client.post(CHAT, json=BODY)
        ready = await up.client.get("/ready")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "a is starting" in answer.json()["error"]["message"]
    assert ready.status_code == 503


def usage(text: bytes) -> bytes:
    return b'{"id":"1","choices":[],"usage":' + text + b"}"


@pytest.mark.parametrize(
    "answer",
    [
        usage(b'{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":-4}}'),
        usage(b'{"prompt_tokens":9,"completion_tokens":-2}'),
        usage(b'{"prompt_tokens":9,"completion_tokens":' + b"9" * 400 + b"}"),
        usage(b'{"prompt_tokens":9.5}'),
        usage(b'{"prompt_tokens":9,"x":' + b"[" * 5000 + b"]" * 5000 + b"}"),
        usage(b'{"prompt_tokens":9,"x":"\xff"}'),
        b"not JSON at all",
        b"",
    ],
)
async def test_whatever_usage_an_answer_holds_it_passes_whole(
    engines: list[Scripted], answer: bytes
) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=answer, content_type="application/json")

    for engine in engines:
        engine.handler = handler
    async with running(settings(engines)) as up:
        await up.ready(2)
        got = await up.client.post(CHAT, json=BODY)
        assert (got.status_code, got.content) == (200, answer)
        assert up.in_flight() == 0


@pytest.mark.parametrize(
    "end", [b"data:[DONE]\n\n", DONE + b": bye\n\n", DONE.replace(b"\n", b"\r\n")]
)
async def test_every_form_of_the_terminal_event_counts(engines: list[Scripted], end: bytes) -> None:
    pieces = (CHUNK, USAGE, end)
    if b"\r" in end:
        pieces = (CHUNK.replace(b"\n", b"\r\n"), USAGE.replace(b"\n", b"\r\n"), end)

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, *pieces)

    for engine in engines:
        engine.handler = handler
    async with running(settings(engines)) as up:
        await up.ready(2)
        assert (await up.client.post(CHAT, json=STREAM)).content == b"".join(pieces)
        (record,) = (await up.admin.get("/gateway/decisions")).json()
    assert record["reported"] == {"prompt": 9, "cached": 4, "output": 2}


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"204 No Content\r\ncontent-length: 5", 204),
        (b"304 Not Modified\r\ncontent-length: 50", 304),
        (b"600 Odd\r\ncontent-length: 0", 502),
        (b"999 Odd\r\ncontent-length: 0", 502),
        (b"200 OK\r\nx-odd: a\x01b\r\ncontent-length: 0", 200),
        (b"200 OK\r\nconnection: x-hop\r\nx-hop: 1\r\ncontent-length: 0", 200),
    ],
)
async def test_odd_heads_of_engines_get_a_proper_answer(
    engines: list[Scripted], head: bytes, status: int
) -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 " + head + b"\r\n\r\n")
        request.transport.close()
        return web.Response()

    for engine in engines:
        engine.handler = handler
    async with running(settings(engines)) as up:
        await up.ready(2)
        answer = await up.client.post(CHAT, json=BODY)
        assert up.in_flight() == 0
    assert answer.status_code == status
    assert "x-odd" not in answer.headers
    assert "x-hop" not in answer.headers


async def test_headers_that_a_client_names_for_the_hop_stay_here(engines: list[Scripted]) -> None:
    async with running(settings(engines)) as up:
        await up.ready(2)
        sent = {"Connection": "keep-alive, x-secret", "X-Secret": "1", "X-Other": "2"}
        await up.client.post(CHAT, json=BODY, headers=sent)
    (_, headers, _) = next(e.requests[0] for e in engines if e.requests)
    assert headers["x-other"] == "2"
    assert "x-secret" not in headers


async def test_a_client_that_stops_reading_gives_its_charge_back(engines: list[Scripted]) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        while True:
            await answer.write(CHUNK * 1000)

    for engine in engines:
        engine.handler = endless
    async with running(settings(engines, upstream={"idle_timeout": 0.3})) as up:
        await up.ready(2)
        _, writer = await asyncio.open_connection("127.0.0.1", up.port)
        writer.write(head(json.dumps(STREAM).encode()))
        await up.until(lambda: up.in_flight() == 1)
        await up.until(lambda: up.in_flight() == 0)
        (record,) = (await up.admin.get("/gateway/decisions")).json()
        writer.close()
    assert record["ending"] == "left"
