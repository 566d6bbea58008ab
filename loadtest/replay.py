"""Plays recorded conversations against an OpenAI-compatible URL, and notes what each turn hit.

One turn at a time, in the trace's order and without its pauses: what is compared
is where turns went and what was cached there, not how fast a loaded fleet is.
A run's own system message keeps its blocks apart from every other run's, so each
run starts cold.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import httpx
from rich.table import Table

from loadtest.trace.lmcache import Row

_EXPECTED = re.compile(r"(\w+)=(\d+)")


class ReplayError(Exception):
    """A turn was not answered; the text says which, and what came instead."""


@dataclass(frozen=True, slots=True)
class Hit:
    """What one turn hit. Tokens; `seconds` from request to whole answer.

    `engine`, `device` and `pool` are the gateway's word (its debug headers);
    `cached` is the engine's own count.
    """

    session: str
    turn: int
    engine: str
    prompt: int
    device: int
    pool: int
    cached: int
    seconds: float


def replay(
    rows: Iterable[Row], client: httpx.Client, model: str, *, run: str, max_tokens: int = 4
) -> Iterator[Hit]:
    """Send every row as one chat turn and yield what it hit.

    Raises:
        ReplayError: if a turn is not answered with 200.
    """
    turns: dict[str, int] = {}
    for row in rows:
        turn = turns[row.session_id] = turns.get(row.session_id, 0) + 1
        body = {
            "model": model,
            "messages": [
                {"role": "system", "content": f"Run {run}."},
                {"role": "user", "content": row.input},
            ],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        began = time.perf_counter()
        answer = client.post(
            "/v1/chat/completions", json=body, headers={"X-Session-ID": f"{run}/{row.session_id}"}
        )
        seconds = time.perf_counter() - began
        if answer.status_code != 200:
            raise ReplayError(
                f"turn {turn} of session {row.session_id}: {answer.status_code} {answer.text[:500]}"
            )
        usage = answer.json()["usage"]
        expected = dict(_EXPECTED.findall(answer.headers.get("x-gateway-expected-cached", "")))
        yield Hit(
            session=row.session_id,
            turn=turn,
            engine=answer.headers.get("x-gateway-engine", "?"),
            prompt=usage["prompt_tokens"],
            device=int(expected.get("device", 0)),
            pool=int(expected.get("pool", 0)),
            cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            seconds=seconds,
        )


def side_by_side(runs: dict[str, Sequence[Hit]]) -> Table:
    """Return a table of what each turn hit in each run of the same rows, and the sums."""
    table = Table("session", "turn", "prompt")
    for name in runs:
        table.add_column(f"{name}: engine")
        for what in ("device", "pool", "cached"):
            table.add_column(what, justify="right")
    for same in zip(*runs.values(), strict=True):
        row = [same[0].session[:8], str(same[0].turn), str(same[0].prompt)]
        for hit in same:
            row += [hit.engine, str(hit.device), str(hit.pool), str(hit.cached)]
        table.add_row(*row)
    table.add_section()
    sums = ["all", "", str(sum(hit.prompt for hit in next(iter(runs.values()))))]
    for hits in runs.values():
        sums.append("")
        sums += [
            str(sum(getattr(hit, what) for hit in hits)) for what in ("device", "pool", "cached")
        ]
    table.add_row(*sums)
    return table
