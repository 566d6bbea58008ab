"""`mooncake-loadtest replay` against a real gateway before scripted engines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from scripted import CHUNK, DONE, USAGE, Running, Scripted, plain, running, settings, stream

EXAMPLE = Path(__file__).parents[2] / "examples/conversations.jsonl"


@pytest.fixture
async def engines() -> AsyncIterator[list[Scripted]]:
    started = [Scripted(name, 0) for name in "ab"]
    for engine in started:
        await engine.start()
    yield started
    for engine in started:
        await engine.stop()


@pytest.fixture
async def gateway(engines: list[Scripted]) -> AsyncIterator[Running]:
    async with running(settings(engines)) as up:
        await up.ready(2)
        yield up


async def begin(
    *arguments: object, env: dict[str, str] | None = None
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest", "replay", *map(str, arguments),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200", **(env or {})},
    )  # fmt: skip


async def replay(
    *arguments: object, env: dict[str, str] | None = None
) -> tuple[int | None, str, str]:
    process = await begin(*arguments, env=env)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


def at(gateway: Running) -> str:
    return f"http://127.0.0.1:{gateway.port}"


def bodies(*engines: Scripted) -> list[dict[str, Any]]:
    return [json.loads(body) for engine in engines for _, _, body in engine.requests]


async def test_what_each_turn_hit(gateway: Running, engines: list[Scripted]) -> None:
    status, out, err = await replay(EXAMPLE, "--url", at(gateway) + "/v1", "--limit", 6, "--json")
    assert (status, err) == (0, "")
    *turns, last = map(json.loads, out.splitlines())
    assert [(t["session"], t["turn"]) for t in turns] == [
        *(("eta-jumps", number) for number in range(1, 6)),
        ("solver-slow", 1),
    ]
    assert [turn["engine"] for turn in turns] == ["a", "b"] * 3  # round robin
    for turn in turns:
        assert (turn["status"], turn["prompt"], turn["cached"]) == (200, 9, 4)
        assert turn["expected"] == turn["device"] + turn["pool"]
        assert 0 < turn["ttft"] < turn["seconds"]
        assert turn["error"] is None
    summary = last["summary"]
    expected = sum(turn["expected"] for turn in turns)
    assert (summary["turns"], summary["failed"]) == (6, 0)
    assert (summary["prompt_tokens"], summary["cached_tokens"]) == (54, 24)
    assert summary["cached_share"] == pytest.approx(4 / 9)
    assert summary["expected_device_tokens"] + summary["expected_pool_tokens"] == expected
    assert summary["overrated_tokens"] - summary["underrated_tokens"] == expected - 24
    assert summary["ttft_seconds"].keys() == {"p50", "p90", "p99"}


async def test_what_is_sent(gateway: Running, engines: list[Scripted]) -> None:
    engines[0].card["id"] = engines[1].card["id"] = "m"
    arguments = (EXAMPLE, "--url", at(gateway), "--session", "api-timeout", "--max-tokens", 7)
    status, _, _ = await replay(*arguments, "--api-key-env", "KEY", env={"KEY": "sekrit"})
    assert status == 0
    sent = sorted(bodies(*engines), key=lambda body: len(body["messages"]))
    recorded = json.loads(EXAMPLE.read_text().splitlines()[3])["messages"]
    assert [body["messages"] for body in sent] == [recorded[:n] for n in (2, 4, 6, 8)]
    for body in sent:
        assert (body["model"], body["max_tokens"], body["stream"]) == ("m", 7, True)
        assert body["stream_options"] == {"include_usage": True}
    headers = [headers for engine in engines for _, headers, _ in engine.requests]
    assert {(h["x-session-id"], h["authorization"]) for h in headers} == {
        ("api-timeout", "Bearer sekrit")
    }


async def test_own_answers_go_into_the_history(gateway: Running, engines: list[Scripted]) -> None:
    arguments = ("--session", "api-timeout", "--answers", "own", "--limit", 2)
    status, _, _ = await replay(EXAMPLE, "--url", at(gateway), *arguments)
    assert status == 0
    longest = max((body["messages"] for body in bodies(*engines)), key=len)
    assert longest[2] == {"role": "assistant", "content": "xx"}  # what the engine streamed


async def test_requests_keep_their_fields(
    gateway: Running, engines: list[Scripted], tmp_path: Path
) -> None:
    path = tmp_path / "requests.jsonl"
    body = {"model": "elsewhere", "messages": [{"role": "user", "content": "hé"}]}
    body |= {"session": "sö", "max_completion_tokens": 3, "top_p": 0.5}
    path.write_text(json.dumps(body) + "\n")
    status, out, _ = await replay(path, "--url", at(gateway), "--json")
    assert status == 0
    assert json.loads(out.splitlines()[0])["session"] == "sö"
    [sent] = bodies(*engines)
    assert (sent["model"], sent["max_completion_tokens"], sent["top_p"]) == ("m", 3, 0.5)
    assert not {"max_tokens", "session"} & sent.keys()


async def test_sessions_run_at_once(gateway: Running, engines: list[Scripted]) -> None:
    together = asyncio.Event()
    under_way: set[str] = set()

    async def gather(request: web.Request) -> web.StreamResponse:
        under_way.add(request.headers["x-session-id"])
        if len(under_way) == 4:
            together.set()
        await together.wait()
        return await plain(request)

    for engine in engines:
        engine.handler = gather
    status, out, _ = await replay(EXAMPLE, "--url", at(gateway), "--concurrency", 4, "--json")
    assert status == 0
    order: dict[str, list[int]] = {}
    for line in out.splitlines()[:-1]:
        turn = json.loads(line)
        order.setdefault(turn["session"], []).append(turn["turn"])
    assert {len(numbers) for numbers in order.values()} == {4, 5}
    assert all(numbers == sorted(numbers) for numbers in order.values())


async def test_failed_turns_are_named_and_stop_no_other(
    gateway: Running, engines: list[Scripted]
) -> None:
    async def moody(request: web.Request) -> web.StreamResponse:
        count = len(json.loads(await request.read())["messages"])
        if count == 2:
            return web.json_response({"error": {"message": "too long for me"}}, status=400)
        if count == 4:
            return await stream(request, CHUNK)  # without an end
        if count == 6:
            return await stream(request, CHUNK, b"data: nonsense\n\n", DONE)
        return await stream(request, CHUNK, USAGE, DONE)

    for engine in engines:
        engine.handler = moody
    status, out, _ = await replay(EXAMPLE, "--url", at(gateway), "--session", "eta-jumps")
    assert status == 1
    assert "session eta-jumps, turn 1 failed: too long for me" in out
    assert "session eta-jumps, turn 2 failed: the engine's answer broke off" in out
    assert "session eta-jumps, turn 3 failed: an event of the stream cannot be read" in out
    assert "5 turns in" in out
    assert "3 failed" in out
    assert "reported cached           8  44.4%" in out


async def test_slow_turns_are_given_up(gateway: Running, engines: list[Scripted]) -> None:
    async def never(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    engines[0].handler = engines[1].handler = never
    arguments = ("--url", at(gateway), "--limit", 1, "--timeout", 0.3)
    status, out, _ = await replay(EXAMPLE, *arguments)
    assert status == 1
    assert "turn 1 failed: not answered in 0.3 s" in out


async def test_ctrl_c_sums_up_what_ran(gateway: Running, engines: list[Scripted]) -> None:
    async def second_hangs(request: web.Request) -> web.StreamResponse:
        if len(json.loads(await request.read())["messages"]) > 2:
            await asyncio.Event().wait()
        return await plain(request)

    engines[0].handler = engines[1].handler = second_hangs
    process = await begin(EXAMPLE, "--url", at(gateway))
    await gateway.until(lambda: sum(len(engine.requests) for engine in engines) == 2)
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert process.returncode == 130
    assert b"1 of 18 turns in" in out
    assert b"Traceback" not in err


async def test_an_engine_by_itself_says_neither_engine_nor_expectation(
    engines: list[Scripted],
) -> None:
    async def without(request: web.Request) -> web.StreamResponse:
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
        return await stream(request, CHUNK, usage, DONE)

    engines[0].handler = without
    status, out, _ = await replay(EXAMPLE, "--url", engines[0].url, "--limit", 2)
    assert status == 0
    assert "2 turns without cached tokens: start the engines with" in out
    assert "2 turns without engine and expectation: set debug_headers: true" in out


@pytest.mark.parametrize(
    ("content", "arguments", "status", "says"),
    [
        ("\n{}\n", (), 2, "talk.jsonl:2: neither a chat"),
        (None, (), 2, "cannot read"),
        (EXAMPLE.read_text(), ("--session", "nobody"), 2, "no session 'nobody'; it has eta-jumps"),
        (EXAMPLE.read_text(), ("--api-key-env", "NOT_SET"), 2, "NOT_SET is not set"),
        (EXAMPLE.read_text(), ("--url", "localhost:8000"), 2, "is no http:// or https:// URL"),
        (
            EXAMPLE.read_text(),
            ("--url", "http://127.0.0.1:1"),
            1,
            "for its models: All connection",
        ),
    ],
)
async def test_what_cannot_begin_is_said(
    tmp_path: Path, content: str | None, arguments: tuple[str, ...], status: int, says: str
) -> None:
    path = tmp_path / "talk.jsonl"
    if content is not None:
        path.write_text(content)
    ended, out, err = await replay(path, *arguments)
    assert (ended, out) == (status, "")
    assert says in err
    assert "Traceback" not in err
