"""Recorded conversations through the real stack under two policies (must show 6)."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import httpx
import pytest
from fleet import Front
from rich.console import Console

from loadtest.hits import Hit, side_by_side, summarise
from loadtest.replay import Player
from loadtest.trace.lmcache import read, turns
from loadtest.trace.turn import Turn

ROOT = Path(__file__).parents[2]
VARIABLE = "MOONCAKE_TRACES"
TRACE = "lmcache_taubench.jsonl.gz"
SESSIONS = 6


@pytest.fixture
def recorded() -> list[Turn]:
    """Return the first conversations of the trace, turns interleaved as they were recorded."""
    folder = Path(os.environ.get(VARIABLE) or ROOT.parent / "shared/traces")
    path = folder / TRACE
    if not path.exists():
        pytest.skip(
            f"{path} is not there; it does not ship with the project ({VARIABLE} names its folder)"
        )
    every = read(path)
    first = list(dict.fromkeys(row.session_id for row in every))[:SESSIONS]
    return turns(row for row in every if row.session_id in first)


def apart(run: str, recorded: list[Turn]) -> list[Turn]:
    """Return the turns with blocks that no other run's turns have: each run starts cold."""
    system = {"role": "system", "content": f"Run {run}."}
    return [
        dataclasses.replace(
            turn, session=f"{run}/{turn.session}", messages=(system, *turn.messages)
        )
        for turn in recorded
    ]


@pytest.mark.traces
async def test_a_recorded_conversation_under_two_policies(
    gateway: Front, recorded: list[Turn], capsys: pytest.CaptureFixture[str]
) -> None:
    runs: dict[str, list[Hit]] = {}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=120, trust_env=False) as client:
        for policy in ("round_robin", "pool_aware"):
            gateway.policy(policy)
            player = Player(client, "tiny", max_tokens=4)
            hits = runs[policy] = []
            await player.play(apart(policy, recorded), hits.append)
    with capsys.disabled():
        Console(width=120).print(side_by_side(runs))

    for policy, hits in runs.items():
        assert len(hits) == len(recorded)
        assert not [hit for hit in hits if hit.error]
        short = [hit for hit in hits if (hit.cached or 0) < (hit.expected or 0)]
        assert not short, f"{policy}: expected more than the engine had: {short}"
    sums = {
        policy: (total.device, total.pool, total.cached)
        for policy, total in ((policy, summarise(hits)) for policy, hits in runs.items())
    }
    robin, aware = sums["round_robin"], sums["pool_aware"]
    assert aware[0] > 1.2 * robin[0], f"more from the device: {sums}"
    assert aware[1] < 0.5 * robin[1], f"less from the pool: {sums}"
    assert aware[2] >= 0.95 * robin[2], f"and as much in all: {sums}"
