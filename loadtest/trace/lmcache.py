"""Reads LMCache agent traces: real text, one JSON object a line.

`{"timestamp": microseconds, "input": str, "output": str, "session_id": str}`;
`input` is the whole dialogue so far as one text, so a row replays as one chat
turn whose user content is `input`. Source: LMCache/lmcache-agent-trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from loadtest.trace.lines import TraceError, lines
from loadtest.trace.turn import Turn


class Row(msgspec.Struct, frozen=True):
    """One request. `timestamp` is in microseconds since the epoch."""

    timestamp: int
    input: str
    output: str
    session_id: str


def read(path: Path) -> list[Row]:
    """Read a trace, plain or gzipped, in the order of time (its lines are not quite).

    Raises:
        TraceError: for a line that is not a row.
        OSError: if the file cannot be read.
    """
    rows: list[Row] = []
    for number, line in lines(path):
        try:
            rows.append(msgspec.json.decode(line, type=Row))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceError(f"{path}:{number}: {error}") from error
    return sorted(rows, key=lambda row: row.timestamp)


def turns(rows: Iterable[Row]) -> list[Turn]:
    """Return each row as a turn, numbered within its session."""
    count: Counter[str] = Counter()
    made = []
    for row in rows:
        count[row.session_id] += 1
        message = {"role": "user", "content": row.input}
        made.append(Turn(row.session_id, count[row.session_id], (message,), {"temperature": 0}))
    return made
