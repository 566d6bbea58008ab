"""Keys of the pool taken apart: the part that is not as configured is named."""

from __future__ import annotations

from typing import Any

import pytest

from connector.doctor.keys import block_id, differences
from connector.model import PoolKeys
from connector.pool import KeySchema

DIGEST = "ab" * 24 + "0123456789abcdef"


def found(configured: dict[str, Any], there: dict[str, Any], digest: str = DIGEST) -> list[str]:
    """Return the causes for a configuration and what the engine really spells."""
    named = KeySchema(PoolKeys.model_validate(there), "org/served").objects(digest)
    keys = PoolKeys.model_validate(configured)
    return [part.cause for part in differences(keys, "org/served", DIGEST, named)]


@pytest.mark.parametrize(
    ("configured", "there", "causes"),
    [
        ({}, {}, []),
        ({"cache_prefix": "blue"}, {"cache_prefix": "blue"}, []),
        ({"cache_prefix": "blue"}, {}, ["cache-prefix"]),
        ({}, {"cache_prefix": "a@b"}, ["cache-prefix"]),
        ({}, {"model": "other"}, ["model"]),
        ({"model": "a/other"}, {"model": "b/other"}, []),
        ({}, {"store_namespace": "-v2"}, ["namespace"]),
        ({"store_namespace": "-v1"}, {"store_namespace": "-v2"}, ["namespace"]),
        ({"store_namespace": "-v1"}, {}, ["namespace"]),
        ({"model": "x", "store_namespace": "-v"}, {"model": "y", "store_namespace": "-v"},
         ["model"]),
        ({"ranks": {"tp": 4}}, {"ranks": {"tp": 2}}, ["tp-ranks"]),
        ({}, {"ranks": {"tp": 2, "pp": 2}}, ["tp-ranks", "pp-ranks"]),
        ({"ranks": {"tp": 2, "dcp": 2}}, {"ranks": {"tp": 2, "dcp": 2}}, []),
        ({"ranks": {"tp": 2}}, {"ranks": {"tp": 2, "dcp": 2}}, ["dcp-ranks"]),
        ({}, {"groups": [0, 1]}, ["groups"]),
        ({"cache_prefix": "p", "model": "m"}, {}, ["cache-prefix", "model"]),
        ({"template": "{model}-{hash}"}, {}, ["template"]),
        ({}, {"template": "{model}-{hash}"}, ["template"]),
    ],
)  # fmt: skip
def test_the_differing_part_is_named(
    configured: dict[str, Any], there: dict[str, Any], causes: list[str]
) -> None:
    assert found(configured, there) == causes


def test_a_hash_that_is_spelled_otherwise() -> None:
    assert found({}, {}, digest=DIGEST[-16:]) == ["hash"]
    assert block_id(DIGEST.upper()) == "0123456789abcdef"


def test_remedies_name_key_and_value() -> None:
    named = KeySchema(PoolKeys(cache_prefix="blue", model="big"), "m").objects(DIGEST)
    prefix, model = differences(PoolKeys(), "m", DIGEST, named)
    assert (prefix.found, prefix.expected) == (
        "the keys in the pool have cache_prefix 'blue'",
        "no cache_prefix",
    )
    assert 'set `pool.key.cache_prefix: "blue"`' in prefix.remedy
    assert "set `pool.key.model: big`" in model.remedy
