"""Traces are read whole or refused with their line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from loadtest.trace.lmcache import TraceError, read

ROWS = [
    {"timestamp": 1, "input": "hi", "output": "", "session_id": "s"},
    {"timestamp": 2, "input": "hi\n\nthere", "output": "é", "session_id": "t"},
]


def text(rows: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_rows_come_in_order(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace.{suffix}"
    mixed = text(ROWS[::-1])
    path.write_bytes(gzip.compress(mixed) if suffix.endswith("gz") else mixed)
    rows = read(path)
    assert [row.input for row in rows] == ["hi", "hi\n\nthere"]
    assert rows[1].session_id == "t"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (text(ROWS)[:-9], r"trace.jsonl:2: "),
        (text([{"timestamp": "x"}]), r"trace.jsonl:1: .*`int`.*timestamp"),
        (b"\n" + text(ROWS).replace(b'"session_id": "t"', b'"sid": 1'), r":3: .*session_id"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=says):
        read(path)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(text(ROWS * 1000))[:60])
    with pytest.raises(TraceError, match="damaged"):
        read(path)
