"""Reads a request's body once, keeps its bytes, and decodes it for routing.

The bytes go to the engine as they came. Decoding is for the gateway's own use:
where our decoder is stricter than the engine's (NaN, lone surrogates, huge
numbers) the turn goes on unhashed, and the engine judges it.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.api.errors import ApiError, Fault
from gateway.proxy.relay import Receive

# Fields that reach into the engine: a client's kv_transfer_params can end an engine's process or
# read a stranger's cache, and vLLM copies vllm_xargs into the same place unless they are set; a
# report mode makes the engine announce blocks again, which event readers must not count twice.
_ENGINE_FIELDS = ("kv_transfer_params",)
_ENGINE_XARGS = ("kv_transfer_params", "kv_cache_report_mode")
_FULL_REPORT = b'"vllm_xargs":{"kv_cache_report_mode":"full"}'

_KINDS = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


class ClientLeft(Exception):
    """The client went before its body was whole."""


@dataclass(frozen=True, slots=True)
class Body:
    """A body: its bytes as they came, its fields, and why it cannot be hashed, if so."""

    raw: bytes
    fields: dict[str, Any]
    unreadable: str | None = None


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limit: int) -> bytes:
    """Read the whole body.

    Raises:
        ApiError: TOO_LARGE beyond `limit` bytes, at the first byte that shows it.
        ClientLeft: if the client goes first.
    """
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def decode(raw: bytes) -> Body:
    """Decode a body.

    Raises:
        ApiError: MALFORMED if it is not a JSON object.
    """
    unreadable = None
    # Millions of small values make the collector walk them again and again; none is garbage.
    gc.disable()
    try:
        fields = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        # ValueError covers invalid UTF-8 and, for absurd numbers, Python's digit limit.
        try:
            fields = json.loads(raw)
        except (ValueError, RecursionError):
            raise ApiError(
                Fault.MALFORMED, f"the body is not valid JSON: {error}; send one JSON object, UTF-8"
            ) from error
        unreadable = f"the body is unusual JSON: {error}"
    except RecursionError as error:
        raise ApiError(Fault.MALFORMED, "the body is nested too deeply; flatten it") from error
    finally:
        gc.enable()
    if not isinstance(fields, dict):
        raise ApiError(
            Fault.MALFORMED,
            f"the body must be a JSON object with named fields, not {_KINDS[type(fields)]}",
        )
    return Body(raw, fields, unreadable)


def refuse_engine_fields(fields: dict[str, Any]) -> None:
    """Refuse fields with which a client would speak to an engine's inside.

    Raises:
        ApiError: ENGINE_FIELD, naming the field.
    """
    xargs = fields.get("vllm_xargs")
    found = [name for name in _ENGINE_FIELDS if fields.get(name) is not None]
    if isinstance(xargs, dict):
        found += [f"vllm_xargs.{name}" for name in _ENGINE_XARGS if name in xargs]
    if found:
        raise ApiError(
            Fault.ENGINE_FIELD,
            f"{found[0]} is for the engines' own use and is not accepted from clients; "
            "remove it (the operator may allow it with allow_engine_fields)",
            param=found[0],
        )


def with_full_report(body: Body) -> bytes:
    """Return the body's bytes with a request that the engine announce what it holds of the prompt.

    The field is put in front of the others; nothing is serialised anew. Bodies that
    have a `vllm_xargs` of their own stay as they are.
    """
    if "vllm_xargs" in body.fields:
        return body.raw
    brace = body.raw.index(b"{") + 1
    comma = b"," if body.fields else b""
    return b"".join((body.raw[:brace], _FULL_REPORT, comma, body.raw[brace:]))


def _too_large(limit: int) -> ApiError:
    return ApiError(
        Fault.TOO_LARGE,
        f"the body is larger than {limit} bytes; send a smaller one (the operator sets the limit "
        "with limits.body_bytes)",
    )
