"""`serve --emulate`: what it says, what it leaves behind, and switches of policy under load."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.emulate import MARK

CHAT = "/v1/chat/completions"
WORKERS = 12


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Demo:
    """A gateway with its emulated fleet, as a user starts them."""

    process: subprocess.Popen[bytes]
    log: Path
    config: Path
    url: str
    admin: str


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "cache"


def start(directory: Path, cache: Path) -> Demo:
    """Start it as a user does."""
    listen, admin = free_port(), free_port()
    config, log = directory / "gateway.yaml", directory / "log"
    env = os.environ | {
        "MOONCAKE_GATEWAY_LISTEN__PORT": str(listen),
        "MOONCAKE_GATEWAY_ADMIN__PORT": str(admin),
        "XDG_CACHE_HOME": str(cache),
    }
    # A file, not a pipe: one that nobody reads fills up, and holds the process.
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", "--emulate", "3", "-c", str(config)],
            env=env,
            stderr=stderr,
            process_group=0,
        )
    return Demo(process, log, config, f"http://127.0.0.1:{listen}", f"http://127.0.0.1:{admin}")


@pytest.fixture
async def demo(tmp_path: Path, cache: Path) -> AsyncIterator[Demo]:
    made = start(tmp_path, cache)
    process = made.process
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                assert process.poll() is None, made.log.read_text()
                try:
                    ready = (await client.get(f"{made.url}/ready")).json()
                    if ready["ready"] and not ready["degraded"]:
                        break
                except httpx.TransportError:
                    pass  # it does not listen yet
                await asyncio.sleep(0.05)
        yield made
    finally:
        process.kill()
        process.wait()


@dataclass
class Seen:
    """What a client saw of one turn; times are the client's."""

    id: str
    sent_at: float
    ended_at: float = 0.0
    status: int = 0
    whole: bool = False
    last: str = ""


async def work(demo: Demo, number: int, seen: list[Seen], stop: asyncio.Event) -> None:
    """Send streamed turns, one after the other, until told to stop."""
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(base_url=demo.url, timeout=60, trust_env=False) as client:
        for turn in range(10_000):
            if stop.is_set():
                return
            one = Seen(f"worker-{number}-{turn}", loop.time())
            seen.append(one)
            body = {
                "model": "emulated",
                "messages": [{"role": "user", "content": f"{number} says something {turn} " * 9}],
                "stream": True,
                "max_tokens": 8,
            }
            headers = {"X-Request-Id": one.id}
            async with client.stream("POST", CHAT, json=body, headers=headers) as answer:
                one.status = answer.status_code
                async for line in answer.aiter_lines():
                    one.whole = one.whole or line == "data: [DONE]"
                    one.last = line or one.last
            one.ended_at = loop.time()


async def test_policies_are_switched_under_load_and_no_turn_is_lost(demo: Demo) -> None:
    loop = asyncio.get_running_loop()
    seen: list[Seen] = []
    stop = asyncio.Event()
    # From when to when a policy surely acted.
    periods: list[tuple[str, float, float]] = []

    async def acts(policy: str) -> None:
        """Wait until some turns have been sent and answered under a policy that is in force."""
        since, before = loop.time(), len(seen)
        while sum(bool(one.ended_at) for one in seen[before:]) < 3 * WORKERS:
            await asyncio.sleep(0.01)
        periods.append((policy, since, loop.time()))

    def edit(policy: str) -> None:
        content = yaml.safe_load(demo.config.read_text())
        demo.config.write_text(yaml.safe_dump(content | {"policy": policy}))

    async with httpx.AsyncClient(base_url=demo.admin, timeout=60, trust_env=False) as admin:

        async def in_force(policy: str) -> None:
            while (await admin.get("/gateway/policy")).json()["policy"] != policy:
                await asyncio.sleep(0.01)

        workers = [asyncio.create_task(work(demo, n, seen, stop)) for n in range(WORKERS)]
        await acts("pool_aware")
        answer = await admin.put("/gateway/policy", json={"policy": "round_robin"})
        assert answer.status_code == 200
        await acts("round_robin")
        edit("least_requests")
        await in_force("least_requests")
        await acts("least_requests")
        edit("power_of_two")
        demo.process.send_signal(signal.SIGHUP)
        await in_force("power_of_two")
        await acts("power_of_two")
        stop.set()
        await asyncio.gather(*workers)
        records = (await admin.get("/gateway/decisions", params={"limit": 10_000})).json()

    assert [one for one in seen if one.status != 200 or not one.whole] == []
    by_id = {record["id"]: record for record in records}
    assert by_id.keys() == {one.id for one in seen}
    assert {record["ending"] for record in records} == {"done"}
    for policy, since, until in periods:
        turns = [one for one in seen if since <= one.sent_at and one.ended_at <= until]
        assert turns
        assert {by_id[one.id]["policy"] for one in turns} == {policy}


async def test_a_frozen_master_slows_turns_by_its_deadline_and_then_by_nothing(
    demo: Demo,
) -> None:
    master = yaml.safe_load(demo.config.read_text())["models"][0]["pool"]["master"]
    faults = f"{master}/emulator/faults"
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:

        async def play(name: str, turns: int) -> list[dict[str, Any]]:
            for turn in range(turns):
                content = f"{name} {turn} says what it has to say. " * 12
                body = {"model": "emulated", "messages": [{"role": "user", "content": content}]}
                headers = {"X-Request-Id": f"{name}-{turn}"}
                answer = await client.post(f"{demo.url}{CHAT}", json=body, headers=headers)
                assert answer.status_code == 200
            found = await client.get(f"{demo.admin}/gateway/decisions", params={"limit": turns})
            records: list[dict[str, Any]] = found.json()[::-1]
            assert [record["id"] for record in records] == [f"{name}-{i}" for i in range(turns)]
            return records

        async def degraded() -> list[str]:
            lines: list[str] = (await client.get(f"{demo.url}/ready")).json()["degraded"]
            return lines

        await play("first", 3)
        # The emulated master shares its process with the engines: now and then it is late itself.
        before = [r for r in await play("before", 8) if r["pool_state"] == "ok"]
        await client.put(faults, json={"hang": True})
        tripping = await play("tripping", 3)
        resting = [r for r in await play("resting", 8) if r["pool_state"] == "breaker"]
        assert any("pool" in line for line in await degraded())
        await client.put(faults, json={})
        while await degraded():
            await asyncio.sleep(0.05)
        after = await play("after", 8)

    assert before, "the master was asked, and answered"
    assert not [r for r in tripping if r["pool_state"] == "ok"]
    tripping = [r for r in tripping if r["pool_state"] == "deadline"]
    assert "ok" in {record["pool_state"] for record in after}
    # The least of several is what the gateway itself adds, however busy the machine is.
    assert min(record["pool_seconds"] for record in tripping) < 0.03
    assert min(record["pool_seconds"] for record in resting) < 0.001
    normal = statistics.median(record["seconds"] for record in before)
    assert statistics.median(record["seconds"] for record in resting) < 2 * normal + 0.02


async def test_it_says_what_it_started_and_ctrl_c_ends_all_of_it(demo: Demo) -> None:
    assert demo.config.read_text().startswith(MARK)
    fleet = yaml.safe_load(demo.config.read_text())["models"][0]["engines"]
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        for engine in fleet:
            assert (await client.get(f"{engine['url']}/health")).status_code == 200
        body = {"model": "emulated", "messages": [{"role": "user", "content": "again " * 90}]}
        answers = [await client.post(f"{demo.url}{CHAT}", json=body) for _ in range(2)]
        counts = answers[1].json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert answers[0].headers["x-gateway-engine"] == answers[1].headers["x-gateway-engine"]
        assert answers[1].headers["x-gateway-expected-cached"] == f"device={counts},pool=0"
        assert counts > 0
        demo.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(demo.process.wait)
        said = demo.log.read_text()
        assert demo.process.returncode == 0, said
        for what in ("curl", demo.url, demo.admin, "/gateway/decisions", str(demo.config)):
            assert what in said
        assert "Traceback" not in said
        for engine in fleet:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"{engine['url']}/health")


async def test_the_fleet_ends_with_a_gateway_that_is_killed(demo: Demo) -> None:
    fleet = yaml.safe_load(demo.config.read_text())["models"][0]["engines"]
    demo.process.kill()
    async with httpx.AsyncClient(trust_env=False) as client:
        for engine in fleet:
            while True:
                try:
                    await client.get(f"{engine['url']}/health")
                except httpx.TransportError:
                    break
                await asyncio.sleep(0.05)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    config = tmp_path / "mine.yaml"
    config.write_text("policy: pool_aware\n")
    yield config
    assert config.read_text() == "policy: pool_aware\n"


def test_a_configuration_of_the_users_own_is_not_overwritten(own: Path) -> None:
    command = [sys.executable, "-m", "gateway", "serve", "--emulate", "1", "-c", str(own)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "would overwrite it" in done.stderr


async def test_one_configuration_is_for_one_fleet(demo: Demo) -> None:
    before = demo.config.read_text()
    command = [sys.executable, "-m", "gateway", "serve", "--emulate", "1", "-c", str(demo.config)]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "another `serve --emulate` uses" in done.stderr
    assert demo.config.read_text() == before


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gateway", "serve", "--emulate", "1", "-c", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{tmp_path} cannot be written: Is a directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_ends_the_fleet_too(tmp_path: Path, cache: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = os.environ | {
            "MOONCAKE_GATEWAY_LISTEN__PORT": str(taken.getsockname()[1]),
            "XDG_CACHE_HOME": str(cache),
        }
        config = tmp_path / "gateway.yaml"
        command = [sys.executable, "-m", "gateway", "serve", "--emulate", "1", "-c", str(config)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2
    assert "cannot listen on" in done.stderr
    url = yaml.safe_load(config.read_text())["models"][0]["engines"][0]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url['url']}/health", trust_env=False)
