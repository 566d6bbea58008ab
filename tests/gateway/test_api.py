"""The surface: routes, errors, readiness, policy, decisions, metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted import Scripted, running, settings

from connector.tiny_model import Shape, write

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


COMPLETIONS = "/v1/completions"
MESSAGE = b'{"role":"user","content":"hi"}'
LIMIT = 4096


def chat(messages: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"m","messages":' + messages + more + b"}"


@pytest.mark.parametrize(
    ("request_line", "content", "status", "code", "param", "says", "remedy"),
    [
        # Malformed JSON.
        (CHAT, b"", 400, "malformed_request", None, "not valid JSON", "send one JSON object"),
        (CHAT, b"{", 400, "malformed_request", None, "not valid JSON", "send one JSON object"),
        (CHAT, b"\xff\xfe", 400, "malformed_request", None, "not valid JSON", "UTF-8"),
        (CHAT, b"hello", 400, "malformed_request", None, "not valid JSON", "JSON object"),
        (CHAT, b"[]", 400, "malformed_request", None, "not an array", "must be a JSON object"),
        (CHAT, b'"hi"', 400, "malformed_request", None, "not a string", "must be a JSON object"),
        (CHAT, b"null", 400, "malformed_request", None, "not null", "must be a JSON object"),
        (CHAT, b"NaN", 400, "malformed_request", None, "not a number", "must be a JSON object"),
        (CHAT, b"[" * LIMIT, 400, "malformed_request", None, "the body is", ""),
        # Wrong types, empty and missing fields.
        (CHAT, chat(b"[]"), 400, "malformed_request", "messages", "is empty", "at least one"),
        (CHAT, chat(b'"hi"'), 400, "malformed_request", "messages", "is no list", "at least one"),
        (CHAT, chat(b"{}"), 400, "malformed_request", "messages", "is no list", "at least one"),
        (CHAT, b'{"model":"m"}', 400, "malformed_request", "messages", "is missing", "at least"),
        (CHAT, chat(b"[7]"), 400, "malformed_request", "messages[0]", "must be", "an object"),
        (
            CHAT, chat(b'[{"role":7,"content":"x"}]'),
            400, "malformed_request", "messages[0].role", "must be", "a string",
        ),
        (
            CHAT, chat(b'[{"role":"user","content":7}]'),
            400, "malformed_request", "messages[0].content", "must be a string", "list of parts",
        ),
        (
            CHAT, chat(b"[" + MESSAGE + b"]", b',"tools":7'),
            400, "malformed_request", "tools", "must be", "a list",
        ),
        (
            CHAT, b'{"model":7,"messages":[{}]}',
            400, "malformed_request", "model", "must be a string", "served: 'm'",
        ),
        (COMPLETIONS, b'{"model":"m"}', 400, "malformed_request", "prompt", "is missing", "ids"),
        (
            COMPLETIONS, b'{"model":"m","prompt":7}',
            400, "malformed_request", "prompt", "must be a string", "token ids",
        ),
        # What there is not.
        (
            CHAT, b'{"model":"n","messages":[{}]}',
            404, "model_not_found", "model", "no model 'n'", "served: 'm'",
        ),
        ("/v1/embeddings", b"{}", 404, "route_not_found", None, "no such route", "/docs lists"),
        ("/v1/chat/completions/", b"{}", 404, "route_not_found", None, "no such route", "/docs"),
        (f"GET {CHAT}", None, 405, "method_not_allowed", None, "take GET", "with POST"),
        ("DELETE /v1/models", None, 405, "method_not_allowed", None, "take DELETE", "with GET"),
        # Too large.
        (
            CHAT, b" " * (LIMIT + 1),
            413, "request_too_large", None, f"{LIMIT} bytes", "limits.body_bytes",
        ),
        # What is the engines' own.
        (
            CHAT, chat(b"[" + MESSAGE + b"]", b',"kv_transfer_params":{"do_remote_prefill":true}'),
            400, "engine_internal_field", "kv_transfer_params", "not accepted", "remove it",
        ),
        (
            CHAT, chat(b"[" + MESSAGE + b"]", b',"vllm_xargs":{"kv_transfer_params":"x"}'),
            400, "engine_internal_field", "vllm_xargs.kv_transfer_params", "not accepted", "remove",
        ),
    ],
)  # fmt: skip
async def test_bad_input_gets_a_clear_error_in_openais_shape(
    engines: list[Scripted],
    tmp_path: Path,
    request_line: str,
    content: bytes | None,
    status: int,
    code: str,
    param: str | None,
    says: str,
    remedy: str,
) -> None:
    write(tmp_path / "tiny", Shape())
    exact = {"exact": True, "tokenizer": tmp_path / "tiny"}
    method, _, path = request_line.rpartition(" ")
    async with running(settings(engines, model=exact, limits={"body_bytes": LIMIT})) as up:
        await up.ready(2)
        answer = await up.client.request(method or "POST", path, content=content)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert says in error["message"]
    assert remedy in error["message"]
    assert param is None or f"{param}" in error["message"]
    assert path not in (CHAT, COMPLETIONS) or status == 405 or answer.headers["x-request-id"]
    assert not any(engine.requests for engine in engines)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params"),
        ({"vllm_xargs": {"kv_cache_report_mode": "full"}}, "vllm_xargs.kv_cache_report_mode"),
    ],
)
async def test_engine_internal_fields_are_refused_unless_allowed(
    engines: list[Scripted], fields: dict[str, Any], param: str
) -> None:
    async with running(settings(engines)) as up:
        await up.ready(2)
        refused = await up.client.post(CHAT, json=BODY | fields)
        harmless = await up.client.post(CHAT, json=BODY | {"kv_transfer_params": None})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "engine_internal_field"
    assert refused.json()["error"]["param"] == param
    assert harmless.status_code == 200
    async with running(settings(engines, allow_engine_fields=True)) as up:
        await up.ready(2)
        assert (await up.client.post(CHAT, json=BODY | fields)).status_code == 200


async def test_body_limit_is_exact(engines: list[Scripted]) -> None:
    limit = 4096
    shell = json.dumps(BODY | {"pad": ""}).encode()

    def body(size: int) -> bytes:
        return shell.replace(b'"pad": ""', b'"pad": "' + b"x" * (size - len(shell)) + b'"')

    async with running(settings(engines, limits={"body_bytes": limit})) as up:
        await up.ready(2)
        fits = await up.client.post(CHAT, content=body(limit))
        exceeds = await up.client.post(CHAT, content=body(limit + 1))

        async def chunks() -> Any:
            yield body(limit + 1)

        chunked = await up.client.post(CHAT, content=chunks())
    assert fits.status_code == 200
    assert [exceeds.status_code, chunked.status_code] == [413, 413]
    assert exceeds.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("megabytes", [1, 16, 60])
async def test_large_bodies_pass(engines: list[Scripted], megabytes: int) -> None:
    body = BODY | {"pad": "x" * megabytes * 2**20}
    async with running(settings(engines)) as up:
        await up.ready(2)
        answer = await up.client.post(CHAT, json=body)
    assert answer.status_code == 200
    (_, _, sent) = next(e.requests[0] for e in engines if e.requests)
    assert json.loads(sent) == body


async def test_unknown_routes_and_methods_never_reach_an_engine(engines: list[Scripted]) -> None:
    async with running(settings(engines)) as up:
        await up.ready(2)
        for method, path, status, code in [
            ("POST", "/v1/load_lora_adapter", 404, "route_not_found"),
            ("POST", "/v1/chat/completions/", 404, "route_not_found"),
            ("POST", "/v1/../v1/x", 404, "route_not_found"),
            ("GET", "/metrics", 404, "route_not_found"),
            ("POST", "/reset_prefix_cache", 404, "route_not_found"),
            ("GET", CHAT, 405, "method_not_allowed"),
            ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ]:
            answer = await up.client.request(method, path)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (status, code), path
    assert not any(engine.requests for engine in engines)


async def test_models_keep_every_field(engines: list[Scripted]) -> None:
    async with running(settings(engines)) as up:
        await up.ready(2)
        listing = (await up.client.get("/v1/models")).json()
        one = (await up.client.get("/v1/models/m")).json()
        none = await up.client.get("/v1/models/nobody")
    assert listing == {"object": "list", "data": [engines[0].card]}
    assert one == engines[0].card
    assert none.status_code == 404


async def test_unusual_json_goes_on_unhashed(engines: list[Scripted]) -> None:
    raw = b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}],"temperature":NaN}'
    async with running(settings(engines)) as up:
        await up.ready(2)
        answer = await up.client.post(CHAT, content=raw)
        (record,) = (await up.admin.get("/gateway/decisions")).json()
    assert answer.status_code == 200
    assert next(e.requests[0] for e in engines if e.requests)[2] == raw
    assert record["exact"] is False


async def test_debug_headers_are_off_unless_asked_for(engines: list[Scripted]) -> None:
    async with running(settings(engines, debug_headers=False)) as up:
        await up.ready(2)
        answer = await up.client.post(CHAT, json=BODY)
    assert not [name for name in answer.headers if name.startswith("x-gateway")]
    async with running(settings(engines)) as up:
        await up.ready(2)
        answer = await up.client.post(CHAT, json=BODY)
    assert answer.headers["x-gateway-policy"] == "round_robin"
    assert answer.headers["x-gateway-expected-cached"] == "device=0,pool=0"


async def test_policy_is_switched_by_put_and_named_by_header(engines: list[Scripted]) -> None:
    async with running(settings(engines, policy_header=True)) as up:
        await up.ready(2)
        before = (await up.admin.get("/gateway/policy")).json()
        assert before["policy"] == "round_robin"
        assert "pool_aware" in before["available"]
        put = await up.admin.put("/gateway/policy", json={"policy": "session_affinity"})
        assert put.json()["policy"] == "session_affinity"
        headers = {"X-Session-ID": "one"}
        went = {
            (await up.client.post(CHAT, json=BODY, headers=headers)).headers["x-gateway-engine"]
            for _ in range(6)
        }
        assert len(went) == 1
        named = await up.client.post(
            CHAT, json=BODY, headers=headers | {"X-Gateway-Policy": "random"}
        )
        assert named.headers["x-gateway-policy"] == "random"
        wrong = await up.admin.put("/gateway/policy", json={"policy": "round_robbin"})
        assert wrong.status_code == 400
        assert "did you mean 'round_robin'" in wrong.json()["error"]["message"]
        unknown = await up.client.post(CHAT, json=BODY, headers={"X-Gateway-Policy": "nope"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "unknown_policy")
    async with running(settings(engines)) as up:
        await up.ready(2)
        refused = await up.client.post(CHAT, json=BODY, headers={"X-Gateway-Policy": "random"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_policy")


async def test_explain_decides_nothing(engines: list[Scripted]) -> None:
    async with running(settings(engines)) as up:
        await up.ready(2)
        found = (await up.admin.post("/gateway/explain", json=BODY)).json()
        again = (await up.admin.post("/gateway/explain", json=BODY)).json()
        assert up.in_flight() == 0
        assert (await up.admin.get("/gateway/decisions")).json() == []
        assert (await up.admin.post("/gateway/explain", content=b"{")).status_code == 400
    assert found["rankings"] == again["rankings"]
    assert set(found["rankings"]) >= {"round_robin", "random", "least_requests", "pool_aware"}
    assert len(found["rankings"]["pool_aware"]) == 2
    assert found["exact"] is False
    assert not any(engine.requests for engine in engines)


async def test_metrics_count_and_leak_nothing(engines: list[Scripted]) -> None:
    async with running(settings(engines)) as up:
        await up.ready(2)
        headers = {"Authorization": "Bearer sekrit", "X-Session-ID": "tenant-7"}
        await up.client.post(CHAT, json=BODY, headers=headers)
        await up.client.post(CHAT, content=b"{")
        page = (await up.admin.get("/metrics")).text
        records = (await up.admin.get("/gateway/decisions")).text
        rows = (await up.admin.get("/gateway/engines")).json()
        config = (await up.admin.get("/gateway/config")).json()
        data_plane = await up.client.get("/metrics")
    assert 'mooncake_gateway_requests_total{route="/v1/chat/completions",status="200"} 1.0' in page
    assert 'mooncake_gateway_requests_total{route="/v1/chat/completions",status="400"} 1.0' in page
    assert 'mooncake_gateway_reported_cached_tokens_total{model="m"} 4.0' in page
    assert 'mooncake_gateway_engine_up{engine="a",model="m"} 1.0' in page
    for text in (page, records):
        assert "sekrit" not in text
        assert "tenant-7" not in text
    assert [row["state"] for row in rows] == ["ready", "ready"]
    assert rows[0]["hashing"] == {"algorithm": "sha256_cbor", "block_size": 16}
    assert config["policy"] == "round_robin"
    assert data_plane.status_code == 404


async def test_engines_that_disagree_are_named(engines: list[Scripted]) -> None:
    engines[1].block = 64
    async with running(settings(engines)) as up:
        await up.ready(2)
        ready = (await up.client.get("/ready")).json()
        rows = (await up.admin.get("/gateway/engines")).json()
    assert ready["ready"] is True
    assert "engine b gets no cache credit: its blocks hold 64 tokens" in ready["degraded"][0]
    assert rows[0]["mismatch"] is None
    assert "--block-size" in rows[1]["mismatch"]


async def test_engines_that_do_not_say_how_they_hash_are_named(
    engines: list[Scripted], tmp_path: Path
) -> None:
    write(tmp_path / "tiny", Shape())
    for engine in engines:
        engine.algorithm = "unheard-of"
    exact = {"exact": True, "tokenizer": tmp_path / "tiny"}
    async with running(settings(engines, model=exact)) as up:
        await up.ready(2)
        ready = (await up.client.get("/ready")).json()
        answer = await up.client.post(CHAT, json=BODY)
        (record,) = (await up.admin.get("/gateway/decisions")).json()
    assert ready["ready"] is True
    assert "no engine says how it hashes" in ready["degraded"][0]
    assert answer.status_code == 200
    assert record["inexact_reason"] == "the engines' hashing is not known (yet)"


async def test_a_conversation_returns_to_its_engine_by_own_history(
    engines: list[Scripted], tmp_path: Path
) -> None:
    write(tmp_path / "tiny", Shape())
    exact = {"exact": True, "tokenizer": tmp_path / "tiny"}
    async with running(settings(engines, model=exact, policy="pool_aware")) as up:
        await up.ready(2)
        homes: dict[int, set[str]] = {}
        talks = {i: [{"role": "user", "content": f"talk {i} " * 40}] for i in range(8)}
        for _ in range(4):
            for i, messages in talks.items():
                body = {"model": "m", "messages": messages}
                answer = await up.client.post(CHAT, json=body)
                homes.setdefault(i, set()).add(answer.headers["x-gateway-engine"])
                messages += [
                    {"role": "assistant", "content": "hi"},
                    {"role": "user", "content": "and then? " * 20},
                ]
        (last, *_) = (await up.admin.get("/gateway/decisions")).json()
    assert all(len(engines) == 1 for engines in homes.values()), homes
    assert last["exact"] is True
    assert last["expected"]["device"] > 100


async def test_engine_states_show_in_readiness(engines: list[Scripted]) -> None:
    async with running(settings(engines)) as up:
        await up.ready(2)
        assert (await up.client.get("/ready")).json()["degraded"] == []
        engines[1].healthy = False
        await up.ready(1)
        ready = await up.client.get("/ready")
        assert ready.status_code == 200
        assert ready.json()["degraded"] == ["engine b is down: ValueError: /health answered 500"]
        engines[1].healthy = True
        await up.ready(2)


async def test_openapi_lists_the_plain_routes(engines: list[Scripted]) -> None:
    async with running(settings(engines)) as up:
        schema = (await up.client.get("/openapi.json")).json()
    assert {CHAT, "/v1/completions", "/v1/models", "/health", "/ready"} <= set(schema["paths"])


async def test_the_openai_client(engines: list[Scripted]) -> None:
    async with running(settings(engines)) as up:
        await up.ready(2)
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{up.port}/v1", api_key="k", max_retries=0
        ) as client:
            messages: Any = BODY["messages"]
            whole = await client.chat.completions.create(model="m", messages=messages)
            assert whole.choices[0].message.content == "hi"
            chunks = await client.chat.completions.create(model="m", messages=messages, stream=True)
            text = [c.choices[0].delta.content async for c in chunks if c.choices]
            assert text == ["x", "x"]
            with pytest.raises(openai.NotFoundError, match="there is no model"):
                await client.chat.completions.create(model="n", messages=messages)


@pytest.mark.parametrize(
    "page",
    [
        'vllm:num_requests_running{engine="0"} +Inf\nvllm:num_requests_waiting{engine="0"} NaN\n',
        'vllm:num_requests_running{engine="99999999999"} -5\n',
        'vllm:cache_config_info{prefix_caching_hash_algo="sha256",block_size="0"} 1\n',
        "vllm:num_requests_running{{{{ \x01\n",
        "<html>",
        "",
    ],
)
async def test_whatever_metrics_an_engine_shows_it_stays_in_service(
    engines: list[Scripted], page: str
) -> None:
    async with running(settings(engines)) as up:
        await up.ready(2)
        engines[0].page = page
        await up.until(lambda: not engines[0].page or up.gateway.fleet.engine("a").failures == 0)
        asked = up.gateway.fleet.engine("a").probes
        await up.until(lambda: up.gateway.fleet.engine("a").probes > asked + 2)
        assert up.gateway.fleet.engine("a").usable
        assert {(await up.client.post(CHAT, json=BODY)).status_code for _ in range(2)} == {200}
        assert (await up.admin.get("/gateway/engines")).status_code == 200
        engines[0].page = None
        engines[0].running = 3.0
        await up.until(lambda: up.gateway.fleet.engine("a").loads[0].running == 3)


@pytest.mark.parametrize(
    "listing", [b"<html>", b"[]", b'{"data":["m"]}', b'{"data":null}', b"\xff"]
)
async def test_an_odd_model_list_spoils_nothing(engines: list[Scripted], listing: bytes) -> None:
    engines[0].listing = listing
    async with running(settings(engines)) as up:
        await up.ready(2)
        assert (await up.client.get("/v1/models")).json()["data"] == [engines[1].card]


async def test_an_engine_that_serves_another_model_gets_no_turns(engines: list[Scripted]) -> None:
    engines[0].card = {"id": "other", "object": "model"}
    async with running(settings(engines)) as up:
        await up.ready(1)
        await up.until(lambda: up.gateway.fleet.engine("a").error is not None)
        ready = (await up.client.get("/ready")).json()
        went = [
            (await up.client.post(CHAT, json=BODY)).headers["x-gateway-engine"] for _ in range(4)
        ]
    assert "it serves 'other', not 'm'" in ready["degraded"][0]
    assert set(went) == {"b"}


async def test_the_environments_proxy_is_not_for_engines(
    engines: list[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    config = settings(engines)
    async with running(config, trust_env=False) as up:
        await up.ready(2)
        assert (await up.client.post(CHAT, json=BODY)).status_code == 200


async def test_head_serves_load_balancers(engines: list[Scripted]) -> None:
    async with running(settings(engines)) as up:
        await up.ready(2)
        assert [(await up.client.head(path)).status_code for path in ("/health", "/ready")] == [
            200
        ] * 2


async def test_names_are_not_echoed_at_any_length(engines: list[Scripted]) -> None:
    async with running(settings(engines)) as up:
        await up.ready(2)
        answer = await up.client.post(CHAT, json=BODY | {"model": "x" * 100_000})
    assert answer.status_code == 404
    assert len(answer.content) < 500
