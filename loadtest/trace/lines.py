"""Reads files of JSON lines, plain or gzipped, and names what cannot be read by its line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path


class TraceError(ValueError):
    """A line that is not what the format asks for; the text names file, line and field."""


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1 on.

    Raises:
        TraceError: if a compressed file is damaged.
        OSError: if the file cannot be read.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"{path}: the compressed file is damaged: {error}") from error
