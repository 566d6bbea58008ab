"""Reads any of the formats that can be played, found out by the first line if not told."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from loadtest.trace import chat, lmcache
from loadtest.trace.lines import TraceError, lines
from loadtest.trace.turn import Turn

Format = Literal["auto", "chat", "lmcache"]


def read(path: Path, format_: Format = "auto", answers: chat.Answers = "recorded") -> list[Turn]:
    """Read a file of conversations as turns, in the order in which they are to be played.

    Raises:
        TraceError: if the file holds no turn, or a line cannot be read.
        OSError: if the file cannot be read.
    """
    known = _format(path) if format_ == "auto" else format_
    if known == "lmcache":
        if answers == "own":
            raise TraceError(f"{path}: own answers have no place in an lmcache trace's texts")
        found = lmcache.turns(lmcache.read(path))
    else:
        found = chat.read(path, answers)
    if not found:
        raise TraceError(f"{path}: holds no conversation")
    return found


def _format(path: Path) -> Literal["chat", "lmcache"]:
    for number, line in lines(path):
        try:
            keys = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).keys()
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        if "messages" in keys:
            return "chat"
        if "input" in keys:
            return "lmcache"
        raise TraceError(
            f"{path}:{number}: neither a chat (`messages`) nor a row of an lmcache trace (`input`)"
        )
    raise TraceError(f"{path}: holds no conversation")
