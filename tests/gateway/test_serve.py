"""The process: what it says, what signals do."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import yaml
from aiohttp import web
from scripted import CHUNK, DONE, Scripted, settings

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


class Process:
    """A `mooncake-gateway serve` in a process of its own, on free ports."""

    def __init__(self, process: asyncio.subprocess.Process, path: Path) -> None:
        self.process = process
        self.path = path
        self.lines: list[dict[str, object]] = []
        self.base = self.admin = ""

    async def until(self, message: str) -> dict[str, object]:
        """Read the log up to a line that matches."""
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            entry = json.loads(line)
            self.lines.append(entry)
            if re.search(message, str(entry["message"])):
                return entry
        raise AssertionError(f"ended without {message!r}: {self.lines}")


@pytest.fixture
async def served(engines: list[Scripted], tmp_path: Path) -> AsyncIterator[Process]:
    config = settings(engines, shutdown_grace=5).model_dump(mode="json", exclude_defaults=True)
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "serve", "-c", str(path),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    up = Process(process, path)
    entry = await up.until("^serving on")
    up.base, up.admin = re.findall(r"http://[\d.:]+", str(entry["message"]))
    async with httpx.AsyncClient() as client:
        while (await client.get(f"{up.base}/ready")).status_code != 200:
            await asyncio.sleep(0.02)
    yield up
    if process.returncode is None:
        process.kill()
    await process.wait()


async def test_sigterm_lets_requests_end(served: Process, engines: list[Scripted]) -> None:
    began, release = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(CHUNK)
        began.set()
        await release.wait()
        await answer.write(DONE)
        return answer

    for engine in engines:
        engine.handler = slow
    async with httpx.AsyncClient(timeout=30) as client:
        call = asyncio.create_task(client.post(f"{served.base}/v1/chat/completions", json=BODY))
        await began.wait()
        served.process.send_signal(signal.SIGTERM)
        await served.until("^shutting down")
        refused = False
        while not refused:
            try:
                await client.get(f"{served.base}/health", headers={"Connection": "close"})
            except httpx.TransportError:
                # Refused, or closed where it stood in the queue of the closing listener.
                refused = True
        release.set()
        assert (await call).content == CHUNK + DONE
    await served.until("^stopped")
    assert await served.process.wait() == 0


async def test_second_signal_ends_at_once(served: Process, engines: list[Scripted]) -> None:
    began = asyncio.Event()

    async def forever(_: web.Request) -> web.StreamResponse:
        began.set()
        await asyncio.sleep(60)
        return web.Response()

    for engine in engines:
        engine.handler = forever
    async with httpx.AsyncClient(timeout=30) as client:
        call = asyncio.create_task(client.post(f"{served.base}/v1/chat/completions", json=BODY))
        await began.wait()
        served.process.send_signal(signal.SIGINT)
        await served.until("^shutting down")
        served.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(4):
            assert await served.process.wait() == 0
        answer = (await asyncio.gather(call, return_exceptions=True))[0]
        assert not isinstance(answer, BaseException)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_engine")
        assert answer.headers["retry-after"] == "1"
        await served.until("^stopped")
    assert not [line for line in served.lines if "exception" in line]


async def test_what_the_grace_does_not_suffice_for_is_told_so(
    served: Process, engines: list[Scripted]
) -> None:
    waiting, streaming = asyncio.Event(), asyncio.Event()

    async def forever(request: web.Request) -> web.StreamResponse:
        if b"stream this" not in await request.read():
            waiting.set()
            await asyncio.sleep(60)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(CHUNK)
        streaming.set()
        await asyncio.sleep(60)
        return answer

    for engine in engines:
        engine.handler = forever
    async with httpx.AsyncClient(timeout=30) as client:
        url = f"{served.base}/v1/chat/completions"
        calls = [
            asyncio.create_task(client.post(url, json=BODY)),
            asyncio.create_task(
                client.post(
                    url, json=BODY | {"messages": [{"role": "u", "content": "stream this"}]}
                )
            ),
        ]
        await asyncio.gather(waiting.wait(), streaming.wait())
        served.process.send_signal(signal.SIGTERM)
        answer, cut = await asyncio.gather(*calls, return_exceptions=True)
    assert not isinstance(answer, BaseException)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_engine")
    assert isinstance(cut, httpx.RemoteProtocolError), "an aborted end, never a clean one"
    await served.until("^stopped")
    assert not [line for line in served.lines if "exception" in line]


async def test_a_stream_that_an_engine_breaks_is_no_fault_of_the_gateway(
    served: Process, engines: list[Scripted]
) -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(CHUNK)
        assert request.transport is not None
        request.transport.abort()
        return answer

    for engine in engines:
        engine.handler = broken
    async with httpx.AsyncClient(timeout=30) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(f"{served.base}/v1/chat/completions", json=BODY)
    entry = await served.until("chat/completions")
    assert (entry["logger"], entry["level"]) == ("gateway.access", "warning")
    served.process.send_signal(signal.SIGTERM)
    await served.until("^stopped")
    assert not [line for line in served.lines if line["level"] == "error"]


async def test_log_lines_are_json_and_name_the_request(served: Process) -> None:
    async with httpx.AsyncClient() as client:
        headers = {"X-Request-Id": "find-me", "Authorization": "Bearer sekrit"}
        await client.post(f"{served.base}/v1/chat/completions", json=BODY, headers=headers)
    entry = await served.until("^/v1/chat/completions 200")
    assert entry["request_id"] == "find-me"
    assert entry["engine"] in ("a", "b")
    assert entry["reported"] == {"prompt": 9, "cached": 4, "output": 2}
    assert "sekrit" not in json.dumps(served.lines)


async def test_a_taken_port_is_said_plainly(tmp_path: Path, engines: list[Scripted]) -> None:
    config = settings(engines, listen={"port": engines[0].port})
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "serve", "-c", str(path),
        stderr=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONWARNINGS": "error"},
    )  # fmt: skip
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"cannot listen on 127.0.0.1:" in errors
    assert b"Traceback" not in errors


async def test_a_changed_file_is_reloaded_without_dropping_a_request(served: Process) -> None:
    config = yaml.safe_load(served.path.read_text())
    stopping = asyncio.Event()
    seen: list[tuple[int, str]] = []

    async def load(client: httpx.AsyncClient) -> None:
        while not stopping.is_set():
            answer = await client.post(f"{served.base}/v1/chat/completions", json=BODY)
            seen.append((answer.status_code, answer.headers["x-gateway-policy"]))

    async def until_acting(client: httpx.AsyncClient, policy: str) -> None:
        while (await client.get(f"{served.admin}/gateway/policy")).json()["policy"] != policy:
            await asyncio.sleep(0.01)

    async with httpx.AsyncClient(timeout=30) as client:
        workers = [asyncio.create_task(load(client)) for _ in range(8)]
        # As editors do it: a new file in the place of the old one.
        new = served.path.with_suffix(".new")
        new.write_text(yaml.safe_dump(config | {"policy": "random"}))
        new.rename(served.path)
        await until_acting(client, "random")
        mark = len(seen) + len(workers)  # those under way were decided before
        while len(seen) < mark + 50:
            await asyncio.sleep(0.01)
        put = await client.put(f"{served.admin}/gateway/policy", json={"policy": "least_requests"})
        assert put.status_code == 200
        # A reload that leaves `policy` alone leaves the one set by hand.
        served.path.write_text(yaml.safe_dump(config | {"policy": "random", "seed": 5}))
        await served.until("^the configuration is reloaded")
        while (await client.get(f"{served.admin}/gateway/config")).json()["seed"] != 5:
            await asyncio.sleep(0.01)
        assert (await client.get(f"{served.admin}/gateway/policy")).json()["policy"] == (
            "least_requests"
        )
        stopping.set()
        await asyncio.gather(*workers)
    assert {status for status, _ in seen} == {200}
    assert {policy for _, policy in seen[mark : mark + 50]} == {"random"}


async def test_sighup_reloads_and_a_bad_file_changes_nothing(served: Process) -> None:
    good = served.path.read_text()
    async with httpx.AsyncClient(timeout=30) as client:
        served.path.write_text(good + "polcy: random\n")
        await served.until("^the configuration is not reloaded: .*did you mean 'policy'")
        ready = (await client.get(f"{served.base}/ready")).json()
        assert ready["ready"] is True
        assert "the changed configuration cannot be used" in ready["degraded"][0]
        assert (await client.post(f"{served.base}/v1/chat/completions", json=BODY)).is_success
        served.path.write_text(good + "upstream: {api_key_env: NO_SUCH_KEY}\n")
        line = good.count("\n") + 1
        await served.until(
            f"^the configuration is not reloaded: .*:{line}: upstream.api_key_env: .*is not set"
        )
        served.path.write_text(good.replace("debug_headers: true", "debug_headers: false"))
        await served.until("^the configuration is reloaded")
        answer = await client.post(f"{served.base}/v1/chat/completions", json=BODY)
        assert "x-gateway-engine" not in answer.headers
        assert (await client.get(f"{served.base}/ready")).json()["degraded"] == []
        served.process.send_signal(signal.SIGHUP)
        entry = await served.until("^the configuration is reloaded")
        assert "SIGHUP" in str(entry["message"])
        page = (await client.get(f"{served.admin}/metrics")).text
    assert 'mooncake_gateway_config_reloads_total{result="refused"} 2.0' in page
    assert 'mooncake_gateway_config_reloads_total{result="applied"} 2.0' in page


async def test_what_needs_a_restart_is_said(served: Process) -> None:
    config = yaml.safe_load(served.path.read_text())
    config["probing"]["interval"] = 7.0
    served.path.write_text(yaml.safe_dump(config))
    await served.until("^changed, but in force only after a restart: probing$")


async def test_a_link_put_in_the_files_place_is_followed_from_then_on(served: Process) -> None:
    text = served.path.read_text()
    there = served.path.parent / "real" / "gateway.yaml"
    there.parent.mkdir()
    there.write_text(text.replace("debug_headers: true", "debug_headers: false"))
    served.path.unlink()
    served.path.symlink_to(there)
    await served.until("^the configuration is reloaded")
    # The watch moves to the other folder, which takes a moment that nothing tells of.
    async with asyncio.timeout(20):
        reloaded = asyncio.create_task(served.until("^the configuration is reloaded"))
        content = there.read_text()
        while not reloaded.done():
            content += "# once more\n"
            there.write_text(content)
            await asyncio.wait({reloaded}, timeout=0.1)
        await reloaded


async def test_a_file_that_is_gone_is_named_until_it_is_back(served: Process) -> None:
    text = served.path.read_text()
    served.path.unlink()
    await served.until("cannot be read any more; the configuration in force stays")
    async with httpx.AsyncClient(timeout=30) as client:
        ready = (await client.get(f"{served.base}/ready")).json()
        assert "cannot be read any more" in ready["degraded"][0]
        served.path.write_text(text)
        await served.until("^the configuration is reloaded")
        assert (await client.get(f"{served.base}/ready")).json()["degraded"] == []
