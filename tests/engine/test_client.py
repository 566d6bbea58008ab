"""The official OpenAI client through the gateway; unknown fields to the engine (must show 5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from fleet import Front, Ports, front, prompt, tap

MESSAGES: Any = [
    {"role": "system", "content": prompt("client", 10)},
    {"role": "user", "content": "Say something."},
]


@pytest.fixture
def client(gateway: Front) -> Any:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_whole_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"


def test_streams_equal_whole_answers_and_carry_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, temperature=0
    )
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_completions_and_models(client: openai.OpenAI, gateway: Front) -> None:
    answer = client.completions.create(model="tiny", prompt="Once upon", max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    chunks = list(
        client.completions.create(model="tiny", prompt="Once upon", max_tokens=4, stream=True)
    )
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {model.id for model in client.models.list()} == {"tiny", "tiny-64"}
    engines_own = gateway.client.get(f"{gateway.engine_url('a')}/v1/models").json()["data"][0]
    through = gateway.client.get(f"{gateway.url}/v1/models").json()["data"][0]
    assert through.keys() == engines_own.keys()
    assert through["max_model_len"] == engines_own["max_model_len"] == 8192


def test_an_engines_own_errors_pass_through(client: openai.OpenAI, gateway: Front) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "temperature": -1}
    through = gateway.client.post(f"{gateway.url}/v1/chat/completions", json=body)
    direct = gateway.client.post(f"{gateway.engine_url('a')}/v1/chat/completions", json=body)
    assert (through.status_code, through.content) == (direct.status_code, direct.content)
    assert through.status_code == 400
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)


def test_kv_transfer_params_never_reach_an_engine(gateway: Front) -> None:
    for fields in (
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
    ):
        body = {"model": "tiny", "messages": MESSAGES} | fields
        answer = gateway.client.post(f"{gateway.url}/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "engine_internal_field"


def test_a_body_with_unknown_fields_reaches_the_engine_byte_for_byte(
    gateway: Front, ports: Ports, tmp_path: Path
) -> None:
    raw = (
        b'{ "model":"tiny",  "max_tokens": 3,\n "a_field_nobody_knows": {"deep":[1, 2.50, null]},'
        b' "messages":[{"role":"user","content":"caf\\u00e9 \xc3\xa9", "odd": true}]  }'
    )
    (tiny,) = [model for model in gateway.stack.gateway_config() if model["name"] == "tiny"]
    with tap(gateway.engine_url("a")) as (url, heard):
        tapped = tiny | {"engines": [{"id": "tapped", "url": url}]}
        with front(gateway.stack, tmp_path, ports, models=[tapped]) as up:
            answer = up.client.post(
                f"{up.url}/v1/chat/completions",
                content=raw,
                headers={"Content-Type": "application/json"},
            )
    assert answer.status_code == 200, answer.text
    assert b"\r\n\r\n" + raw in bytes(heard)
