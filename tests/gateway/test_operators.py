"""What those who run a gateway see of it: readiness, logs, metrics, engines; and clients do not."""

from __future__ import annotations

import logging
import re

import pytest
from aiohttp import web
from scripted import CHUNK, DONE, Scripted, free_port, running, settings, stream

from gateway.api.errors import Fault

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = BODY | {"stream": True}
ADDRESS = re.compile(r"127\.0\.0\.1|:\d{4,5}")


def value(page: str, name: str, **labels: str) -> float | None:
    """Return a sample of a metrics page, None if it is not there."""
    for line in page.splitlines():
        head, _, number = line.rpartition(" ")
        if head.partition("{")[0] == f"mooncake_gateway_{name}" and labels == dict(
            re.findall(r'(\w+)="([^"]*)"', head)
        ):
            return float(number)
    return None


# -- what clients are told -----------------------------------------------------


async def test_clients_of_dead_engines_learn_no_address(
    engines: list[Scripted], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    quiet = {"interval": 60, "timeout": 1, "failures": 2}
    async with running(settings(engines, probing=quiet)) as up:
        await up.ready(2)
        for engine in engines:
            await engine.stop()
        answer = await up.client.post(CHAT, json=BODY)
        (record,) = (await up.admin.get("/gateway/decisions")).json()
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (502, Fault.ENGINE_FAILED)
    assert answer.headers["retry-after"] == "1"
    assert re.search(r"the last one tried, [ab]: refused", error["message"])
    assert not ADDRESS.search(answer.text)
    for attempt in record["attempts"]:
        assert attempt["failed"] == "refused"
        assert ADDRESS.search(attempt["detail"])
    (line,) = [r for r in caplog.records if r.name == "gateway.access"]
    assert ADDRESS.search(vars(line)["fields"]["trouble"])


async def test_clients_without_an_engine_learn_states_and_operators_the_causes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dead = Scripted("a", free_port())
    async with running(settings([dead])) as up:
        await up.until(lambda: up.gateway.fleet.engine("a").error is not None)
        answer = await up.client.post(CHAT, json=BODY)
    assert answer.json()["error"]["message"] == (
        "no engine of model 'm' can take a request now: a is starting"
    )
    (line,) = [r for r in caplog.records if r.name == "gateway.access"]
    assert "a is starting (ConnectError" in vars(line)["fields"]["trouble"]


# -- metrics -------------------------------------------------------------------


async def test_only_turns_whose_engine_counted_are_compared(engines: list[Scripted]) -> None:
    async with running(settings(engines[:1])) as up:
        await up.ready(1)
        await up.client.post(CHAT, json=STREAM)

        async def silent(request: web.Request) -> web.StreamResponse:
            return await stream(request, CHUNK, DONE)

        engines[0].handler = silent
        for _ in range(2):
            await up.client.post(CHAT, json=STREAM)
        page = (await up.admin.get("/metrics")).text
    assert value(page, "compared_turns_total", model="m") == 1
    assert value(page, "uncompared_turns_total", model="m") == 2
    assert value(page, "reported_cached_tokens_total", model="m") == 4
