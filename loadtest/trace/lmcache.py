"""Reads LMCache agent traces: real text, one JSON object a line.

`{"timestamp": microseconds, "input": str, "output": str, "session_id": str}`;
`input` is the whole dialogue so far as one text, so a row replays as one chat
turn whose user content is `input`. Source: LMCache/lmcache-agent-trace.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import msgspec


class Row(msgspec.Struct, frozen=True):
    """One request. `timestamp` is in microseconds since the epoch."""

    timestamp: int
    input: str
    output: str
    session_id: str


class TraceError(ValueError):
    """A line that is not a row of such a trace; the text names file, line and field."""


def read(path: Path) -> list[Row]:
    """Read a trace, plain or gzipped, in the order of time (its lines are not quite).

    Raises:
        TraceError: for a line that is not a row.
        OSError: if the file cannot be read.
    """
    rows: list[Row] = []
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            rows.append(msgspec.json.decode(line, type=Row))
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path}:{number}: {error}") from error
    return sorted(rows, key=lambda row: row.timestamp)


def _lines(path: Path) -> Iterator[bytes]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        try:
            yield from file
        except (EOFError, gzip.BadGzipFile) as error:
            raise TraceError(f"{path}: the compressed file is damaged: {error}") from error
