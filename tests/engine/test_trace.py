"""Recorded conversations through the real stack under two policies (must show 6)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fleet import Front
from rich.console import Console

from loadtest.replay import Hit, replay, side_by_side
from loadtest.trace.lmcache import Row, read

ROOT = Path(__file__).parents[2]
VARIABLE = "MOONCAKE_TRACES"
TRACE = "lmcache_taubench.jsonl.gz"
SESSIONS = 6


@pytest.fixture
def rows() -> list[Row]:
    """Return the first conversations of the trace, turns interleaved as they were recorded."""
    folder = Path(os.environ.get(VARIABLE) or ROOT.parent / "shared/traces")
    path = folder / TRACE
    if not path.exists():
        pytest.skip(
            f"{path} is not there; it does not ship with the project ({VARIABLE} names its folder)"
        )
    every = read(path)
    first = list(dict.fromkeys(row.session_id for row in every))[:SESSIONS]
    return [row for row in every if row.session_id in first]


@pytest.fixture
def client(gateway: Front) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=120, trust_env=False) as made:
        yield made


@pytest.mark.traces
def test_a_recorded_conversation_under_two_policies(
    gateway: Front, client: httpx.Client, rows: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    runs: dict[str, list[Hit]] = {}
    for policy in ("round_robin", "pool_aware"):
        gateway.policy(policy)
        runs[policy] = list(replay(rows, client, "tiny", run=policy))
    with capsys.disabled():
        Console(width=120).print(side_by_side(runs))

    for policy, hits in runs.items():
        assert len(hits) == len(rows)
        short = [hit for hit in hits if hit.cached < hit.device + hit.pool]
        assert not short, f"{policy}: expected more than the engine had: {short}"
    sums = {
        policy: tuple(sum(getattr(h, what) for h in hits) for what in ("device", "pool", "cached"))
        for policy, hits in runs.items()
    }
    robin, aware = sums["round_robin"], sums["pool_aware"]
    assert aware[0] > 1.2 * robin[0], f"more from the device: {sums}"
    assert aware[1] < 0.5 * robin[1], f"less from the pool: {sums}"
    assert aware[2] >= 0.95 * robin[2], f"and as much in all: {sums}"
