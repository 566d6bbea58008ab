"""Which conversation a request belongs to.

In this order: the headers and fields with which agent clients name it, else the
conversation's own beginning (its messages up to the first of the user's, or the
first kilobyte of a completion's prompt). The key is opaque, scoped by the
client's credentials, and holds nothing that was sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

_HEADERS = (b"x-session-id", b"x-session-affinity", b"thread-id", b"session-id")
_FIELDS = ("session_id", "prompt_cache_key")
_BEGINNING = 1024


def session_key(headers: Mapping[bytes, bytes], fields: Mapping[str, Any]) -> str:
    """Return `<source>:<16 hex digits>`; requests with equal keys are one conversation's."""
    source, value = _find(headers, fields)
    digest = xxhash.xxh3_64(headers.get(b"authorization", b""))
    digest.update(b"\0")
    digest.update(value)
    return f"{source}:{digest.hexdigest()}"


def _find(headers: Mapping[bytes, bytes], fields: Mapping[str, Any]) -> tuple[str, bytes]:
    for name in _HEADERS:
        if value := headers.get(name):
            return name.decode(), value
    for field in _FIELDS:
        text = fields.get(field)
        if isinstance(text, str) and text:
            return field, text.encode("utf-8", "surrogatepass")
    return "prefix", _beginning(fields)


def _beginning(fields: Mapping[str, Any]) -> bytes:
    messages = fields.get("messages")
    if not isinstance(messages, list):
        prompt = fields.get("prompt")
        return repr(prompt[:_BEGINNING] if isinstance(prompt, str | list) else prompt).encode(
            "utf-8", "surrogatepass"
        )
    opening = []
    for message in messages:
        opening.append(message)
        if isinstance(message, dict) and message.get("role") == "user":
            break
    try:
        return msgspec.json.encode(opening)
    except (UnicodeEncodeError, msgspec.MsgspecError, TypeError):
        # Lone surrogates, or integers wider than 64 bits.
        return repr(opening).encode("utf-8", "surrogatepass")
