"""Reads the engine's own token counts from an answer that is relayed, without holding it.

Only the answer's tail is kept: vLLM writes `usage` behind the choices of a JSON
answer, and in the last event before `[DONE]` of a stream that was asked for it
(`stream_options.include_usage`, or the engine's `--enable-force-include-usage`).
"""

from __future__ import annotations

import re

import msgspec

from policies.base import Usage

_TAIL = 16_384
# A JSON answer up to this size is decoded whole, fields other than usage skipped.
_WHOLE = 4 * 2**20
# More tokens than any prompt has.
_MOST = 2**40
_BETWEEN = re.compile(rb"\r?\n\r?\n")
_DONE = re.compile(rb"(?:^|\n)data: ?\[DONE\]\s*(?:\n|$)")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Counts(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Carrier(msgspec.Struct):
    usage: _Counts | None = None


_decoder = msgspec.json.Decoder(_Carrier)


class Tail:
    """The last bytes of an answer that goes by, and what they say."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._keep = _TAIL if stream else _WHOLE
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> None:
        """Look at the next piece."""
        self._pieces.append(piece)
        self._size += len(piece)
        # Joining only when twice too much has gathered keeps this linear.
        if self._size > 2 * self._keep:
            joined = b"".join(self._pieces)[-self._keep :]
            self._pieces, self._size = [joined], len(joined)

    def bytes(self) -> bytes:
        """Return what is kept."""
        return b"".join(self._pieces)

    def finished(self) -> bool:
        """Tell whether a stream has sent its terminal event."""
        return _DONE.search(self.bytes()[-_TAIL:]) is not None

    def between_events(self) -> bool:
        """Tell whether a stream stands at an event boundary."""
        kept = self.bytes()[-4:]
        return not kept or kept.endswith((b"\n\n", b"\r\n\r\n"))

    def usage(self) -> Usage | None:
        """Return the engine's counts, None where the answer holds none."""
        kept = self.bytes()
        if not self._stream:
            return _usage(kept)
        for event in reversed(_BETWEEN.split(kept)):
            if b'"usage"' in event:
                found = _usage(event.strip().removeprefix(b"data:"))
                if found:
                    return found
        return None


def _usage(text: bytes) -> Usage | None:
    try:
        counts = _decoder.decode(text).usage
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # Cut off in the middle, or an answer of another shape: there are no counts in it.
        return None
    if counts is None:
        return None
    cached = counts.prompt_tokens_details.cached_tokens if counts.prompt_tokens_details else None
    if not all(
        0 <= n < _MOST for n in (counts.prompt_tokens, counts.completion_tokens, cached or 0)
    ):
        return None  # no count of anything
    return Usage(prompt=counts.prompt_tokens, cached=cached, output=counts.completion_tokens)
