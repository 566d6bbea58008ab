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


async def test_counters_begin_at_zero_and_have_no_birthdays(engines: list[Scripted]) -> None:
    async with running(settings(engines)) as up:
        await up.ready(2)
        page = (await up.admin.get("/metrics")).text
        await up.admin.put("/gateway/policy", json={"policy": "random"})
        switched = (await up.admin.get("/metrics")).text
    for ending in ("done", "refused", "failed", "left"):
        assert value(page, "endings_total", model="m", engine="a", ending=ending) == 0
    assert value(page, "decisions_total", model="m", policy="round_robin", engine="b") == 0
    assert value(page, "failed_attempts_total", engine="a", cause="refused") == 0
    assert value(page, "uncompared_turns_total", model="m") == 0
    assert value(page, "config_reloads_total", result="refused") == 0
    assert value(page, "decisions_total", model="m", policy="random", engine="b") is None
    assert value(switched, "decisions_total", model="m", policy="random", engine="b") == 0
    assert "_created" not in switched


async def test_the_load_of_an_engine_that_is_gone_is_not_shown_as_current(
    engines: list[Scripted],
) -> None:
    engines[0].running = 5.0
    async with running(settings(engines)) as up:
        await up.ready(2)
        await up.until(lambda: up.gateway.fleet.engine("a").loads[0].running == 5)
        before, _ = (await up.admin.get("/gateway/engines")).json()
        await engines[0].stop()
        await up.ready(1)
        after, _ = (await up.admin.get("/gateway/engines")).json()
    assert (before["ranks"]["a"]["running"], before["load_age_seconds"] < 10) == (5, True)
    assert (after["state"], after["ranks"]["a"]["running"]) == ("down", None)
    assert after["ranks"]["a"]["kv_usage"] is None
    assert after["load_age_seconds"] > 0


# -- the admin listener --------------------------------------------------------


async def test_a_switch_of_policy_is_logged_with_who_and_what(
    engines: list[Scripted], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running(settings(engines)) as up:
        put = await up.admin.put("/gateway/policy", content=b'{"policy": "random"}')
    assert (put.status_code, put.json()["policy"]) == (200, "random"), "no Content-Type is JSON"
    (line,) = [vars(r)["fields"] for r in caplog.records if r.name == "gateway.admin"]
    assert (line["from"], line["to"]) == ("round_robin", "random")
    assert line["peer"].startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code", "says"),
    [
        ("GET", "/nothing", None, 404, "route_not_found", "no such route"),
        ("DELETE", "/gateway/policy", None, 405, "method_not_allowed", "with GET or PUT"),
        ("POST", "/metrics", None, 405, "method_not_allowed", "send it with GET"),
        ("GET", "/gateway/decisions?limit=x", None, 400, "malformed_request", "`limit`"),
        ("GET", "/gateway/decisions?limit=0", None, 400, "malformed_request", "`limit`"),
        ("PUT", "/gateway/policy", b"", 400, "malformed_request", "not valid JSON"),
        ("PUT", "/gateway/policy", b"random", 400, "malformed_request", "not valid JSON"),
        ("PUT", "/gateway/policy", b"NaN", 400, "malformed_request", "JSON object"),
        ("PUT", "/gateway/policy", b"[1e999]", 400, "malformed_request", "JSON object"),
        ("PUT", "/gateway/policy", b"{}", 400, "malformed_request", "`policy`"),
        ("PUT", "/gateway/policy", b'{"policy":NaN}', 400, "malformed_request", "`policy`"),
        ("PUT", "/gateway/policy", b'{"policy":1e999}', 400, "malformed_request", "`policy`"),
        ("PUT", "/gateway/policy", b'{"policy":{"a":NaN}}', 400, "malformed_request", "`policy`"),
        ("PUT", "/gateway/policy", b'{"policy":"\\ud800"}', 400, "unknown_policy", "no policy"),
        ("PUT", "/gateway/policy", b'{"\\ud800":1}', 400, "malformed_request", "unknown key"),
        ("PUT", "/gateway/policy", b'{"pollicy":"random"}', 400, "malformed_request", "NAME"),
        ("PUT", "/gateway/policy", b'{"policy":"rand"}', 400, "unknown_policy", "did you mean"),
        ("PUT", "/gateway/policy", b'{"policy":"\xff"}', 400, "malformed_request", "JSON"),
        ("POST", "/gateway/explain", b'{"model":NaN}', 400, "malformed_request", "`model`"),
    ],
)
async def test_the_admin_listener_answers_errors_in_openais_shape(
    engines: list[Scripted],
    method: str,
    path: str,
    content: bytes | None,
    status: int,
    code: str,
    says: str,
) -> None:
    async with running(settings(engines)) as up:
        answer = await up.admin.request(method, path, content=content)
        acting = up.gateway.router.policies.acting
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert says in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert acting == "round_robin"
