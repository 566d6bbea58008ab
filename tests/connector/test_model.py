"""The `models:` section: what is filled in, what is refused, and what the refusal says."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from connector.model import EngineConfig, Hashing, ModelConfig, PoolConfig

ENGINE = {"id": "a", "url": "http://127.0.0.1:8101"}
MODEL: dict[str, Any] = {"name": "qwen3", "tokenizer": "models/qwen3", "engines": [ENGINE]}


def test_a_short_model_is_filled_in() -> None:
    model = ModelConfig.model_validate(MODEL)
    assert model.exact
    assert model.pool is None
    assert (model.hashing.algorithm, model.hashing.block_size, model.hashing.seed) == (
        "auto",
        "auto",
        None,
    )
    assert model.engines[0].role == "both"


def test_the_example_of_the_design() -> None:
    model = ModelConfig.model_validate(
        MODEL
        | {
            "hashing": {"algorithm": "auto", "block_size": "auto", "seed": "0"},
            "pool": {
                "master": "http://127.0.0.1:9003",
                "key": {
                    "model": "tiny-qwen3",
                    "cache_prefix": "",
                    "ranks": {"tp": 1, "pcp": 1, "dcp": 1, "pp": 1},
                    "groups": [0],
                    "template": "default",
                },
            },
            "engines": [
                ENGINE
                | {
                    "events": "tcp://127.0.0.1:5557",
                    "replay": "tcp://127.0.0.1:6557",
                    "segments": ["127.0.0.2:17101"],
                }
            ],
        }
    )
    assert model.pool is not None
    assert model.pool.key.model == "tiny-qwen3"
    assert model.engines[0].segments == ("127.0.0.2:17101",)


def test_a_seed_that_yaml_read_as_a_number_is_text() -> None:
    assert Hashing.model_validate({"seed": 0}).seed == "0"
    with pytest.raises(ValidationError, match="seed"):
        Hashing.model_validate({"seed": True})


def test_urls_lose_their_last_slash_and_must_be_http() -> None:
    assert EngineConfig.model_validate({"id": "a", "url": "http://h:1/"}).url == "http://h:1"
    assert PoolConfig.model_validate({"master": "https://h/"}).master == "https://h"
    for section, fields in (
        (EngineConfig, {"id": "a", "url": "h:1"}),
        (PoolConfig, {"master": "h"}),
    ):
        with pytest.raises(ValidationError, match="not an http:// or https:// URL"):
            section.model_validate(fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer": None}, "set `exact: false`"),
        ({"engines": []}, "at least 1"),
        ({"engines": [ENGINE, ENGINE]}, "'a' is given again"),
        ({"engines": [ENGINE | {"replay": "tcp://h:1"}]}, "without `events`"),
        ({"engines": [ENGINE | {"id": "a b"}]}, "write letters, digits"),
        ({"engines": [ENGINE | {"segments": ["h"]}]}, "write HOST:PORT"),
        ({"hashing": {"algorithm": "md5"}}, "sha256_cbor"),
        ({"hashing": {"block_size": 0}}, "greater than or equal to 1"),
        ({"pool": {"master": "http://h", "deadline": 0}}, "greater than 0"),
        ({"pool": {"master": "http://h", "key": {"groups": []}}}, "at least 1"),
        ({"pool": {"master": "http://h", "key": {"ranks": {"tp": 0}}}}, "greater than or equal"),
        ({"tokeniser": "x"}, "tokeniser"),
    ],
)
def test_what_is_refused_says_why(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ModelConfig.model_validate(MODEL | change)


def test_a_model_without_a_tokenizer_must_say_that_it_is_not_exact() -> None:
    assert not ModelConfig.model_validate(MODEL | {"tokenizer": None, "exact": False}).exact


def test_a_model_does_not_change() -> None:
    model = ModelConfig.model_validate(MODEL)
    with pytest.raises(ValidationError, match="frozen"):
        model.name = "other"  # type: ignore[misc]
