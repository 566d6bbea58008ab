"""Every error that the gateway itself answers: one table of statuses, in OpenAI's shape.

An engine's own answer is never turned into one of these; it passes through.
A client that left is logged as 499 and answered nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from gateway.proxy.relay import Send


class Fault(StrEnum):
    """What can be wrong; the value is the `code` of the answer."""

    MALFORMED = "malformed_request"
    ENGINE_FIELD = "engine_internal_field"
    UNKNOWN_POLICY = "unknown_policy"
    MODEL_NOT_FOUND = "model_not_found"
    ROUTE_NOT_FOUND = "route_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    TOO_LARGE = "request_too_large"
    REJECTED = "rejected_by_policy"
    INTERNAL = "internal_error"
    ENGINE_FAILED = "engine_failed"
    NO_ENGINE = "no_engine"
    ENGINE_TIMEOUT = "engine_timeout"


class _Row(NamedTuple):
    status: int
    type: str
    retry_after: int | None = None


_TABLE = {
    Fault.MALFORMED: _Row(400, "invalid_request_error"),
    Fault.ENGINE_FIELD: _Row(400, "invalid_request_error"),
    Fault.UNKNOWN_POLICY: _Row(400, "invalid_request_error"),
    Fault.MODEL_NOT_FOUND: _Row(404, "not_found_error"),
    Fault.ROUTE_NOT_FOUND: _Row(404, "not_found_error"),
    Fault.METHOD_NOT_ALLOWED: _Row(405, "invalid_request_error"),
    Fault.TOO_LARGE: _Row(413, "invalid_request_error"),
    Fault.REJECTED: _Row(429, "rate_limit_error", retry_after=1),
    Fault.INTERNAL: _Row(500, "internal_error"),
    Fault.ENGINE_FAILED: _Row(502, "engine_error", retry_after=1),
    Fault.NO_ENGINE: _Row(503, "overloaded_error", retry_after=1),
    Fault.ENGINE_TIMEOUT: _Row(504, "timeout_error"),
}


class ApiError(Exception):
    """An answer of the gateway's own; `detail` is what the log says in place of the message."""

    def __init__(
        self,
        fault: Fault,
        message: str,
        param: str | None = None,
        *,
        detail: str | None = None,
    ) -> None:
        super().__init__(message)
        self.fault = fault
        self.param = param
        self.detail = detail or message

    @property
    def status(self) -> int:
        """The HTTP status."""
        return _TABLE[self.fault].status

    @property
    def body(self) -> bytes:
        """The answer's body."""
        return error_body(self.fault, str(self), self.param)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The answer's headers."""
        headers = [(b"content-type", b"application/json")]
        retry_after = _TABLE[self.fault].retry_after
        if retry_after is not None:
            headers.append((b"retry-after", str(retry_after).encode()))
        if self.fault is Fault.TOO_LARGE:
            # The rest of the body is not read.
            headers.append((b"connection", b"close"))
        return headers


def error_body(fault: Fault, message: str, param: str | None = None) -> bytes:
    """Return an error in OpenAI's shape."""
    return msgspec.json.encode(
        {
            "error": {
                "message": message,
                "type": _TABLE[fault].type,
                "param": param,
                "code": str(fault),
            }
        }
    )


def error_event(message: str) -> bytes:
    """Return the event that tells a client of an OpenAI stream that it broke off."""
    return b"data: " + error_body(Fault.ENGINE_FAILED, message) + b"\n\n"


async def answer_error(
    send: Send, error: ApiError, extra: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """Send an error as the whole answer."""
    body = error.body
    length = (b"content-length", str(len(body)).encode())
    headers = [*error.headers, length, *extra]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
