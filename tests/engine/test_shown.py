"""What a gateway says of itself before real engines: nothing when all is well, and causes else."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from fleet import Front, Ports, front, prompt, until

from connector.stack import Stack

MODEL = "tiny"


def turns(gateway: Front, seed: str, count: int) -> set[str]:
    """Send turns of several blocks, round about; return the engines that answered."""
    gateway.policy("round_robin")
    bodies: list[dict[str, Any]] = [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt(f"{seed} {i}", 8)}],
            "max_tokens": 2,
        }
        for i in range(count)
    ]
    return {gateway.chat(body).engine for body in bodies}


def degraded(gateway: Front) -> list[str]:
    lines: list[str] = gateway.client.get(f"{gateway.url}/ready").json()["degraded"]
    return lines


def test_turns_of_a_right_configuration_prove_it(gateway: Front) -> None:
    assert turns(gateway, "right", 8) == {"a", "b"}
    rows = gateway.client.get(f"{gateway.admin}/gateway/engines").json()
    assert all(row["ranks"][row["id"]]["events"]["connected"] for row in rows)
    page = gateway.client.get(f"{gateway.admin}/metrics").text
    assert "mooncake_gateway_compared_turns_total" in page
    # Other turns' time goes by until what they stored would be missed.
    ends = time.monotonic() + 8.0
    while time.monotonic() < ends:
        turns(gateway, f"right {ends - time.monotonic()}", 2)
        assert degraded(gateway) == []


@pytest.mark.parametrize("wrong", ["seed", "key"])
def test_a_wrong_configuration_is_named_by_what_turns_show(
    stack: Stack, ports: Ports, tmp_path: Path, wrong: str
) -> None:
    models = [model for model in stack.gateway_config() if model["name"] == MODEL]
    for model in models:
        if wrong == "seed":
            model["hashing"] = {**model.get("hashing", {}), "seed": "41"}
        else:
            model["pool"] = {**model["pool"], "key": {"model": "another"}}
    with front(stack, tmp_path, ports, models=models) as gateway:
        turns(gateway, f"wrong {wrong}", 8)
        lines = until(
            lambda: degraded(gateway), lambda found: len(found) == (3 if wrong == "seed" else 1)
        )
    assert sum("no pool key of this gateway's turns" in line for line in lines) == 1
    named = [engine for engine in "ab" if f"KV events of engine {engine} never" in " ".join(lines)]
    assert named == (["a", "b"] if wrong == "seed" else [])
