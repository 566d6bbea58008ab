"""How bytes get to an engine and back: one small interface, and aiohttp behind it.

`Upstream.send` ends when the head of the answer is there. Whatever goes wrong
is an `UpstreamError` with one of few causes, which is also what metrics and
decision records show.
"""

from __future__ import annotations

import asyncio
import errno
import io
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import aiohttp
from multidict import CIMultiDict
from yarl import URL

_PIECEWISE = 2**20
_OWN_TROUBLE = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)

Headers = Sequence[tuple[bytes, bytes]]


class Cause(StrEnum):
    """Why an engine gave no (whole) answer."""

    REFUSED = "refused"  # no connection: nothing was sent
    CONNECT_TIMEOUT = "connect timeout"  # likewise
    RESET = "reset"  # the connection broke after the request was (partly) sent
    FIRST_BYTE_TIMEOUT = "first byte timeout"
    IDLE_TIMEOUT = "idle timeout"
    UNAVAILABLE = "answered 503"
    NO_SOCKET = "no socket left here"  # the gateway's own trouble, not the engine's
    BAD_STATUS = "answered no HTTP status"
    UNFINISHED = "ended without its terminal event"


class UpstreamError(Exception):
    """An engine gave no (whole) answer."""

    def __init__(self, cause: Cause, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else str(cause))
        self.cause = cause


class Answer(Protocol):
    """An engine's answer whose head has come."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def headers(self) -> Headers:
        """The headers as they came."""
        ...

    async def read(self) -> bytes:
        """Return the next piece of the body as it came, b"" at its end.

        Raises:
            UpstreamError: RESET if the connection broke.
        """
        ...

    def close(self) -> None:
        """Let go of the connection; one whose answer is not at its end is closed, so that the
        engine stops working for nobody."""
        ...


class Upstream(Protocol):
    """Sends requests to engines."""

    async def send(
        self, method: str, base: str, path: str, headers: Headers, body: bytes
    ) -> Answer:
        """Send one request and return its answer's head.

        Raises:
            UpstreamError: REFUSED, CONNECT_TIMEOUT or RESET.
        """
        ...


class _AiohttpAnswer:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Headers = response.raw_headers

    async def read(self) -> bytes:
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(Cause.RESET, str(error)) from error

    def close(self) -> None:
        # Returns the connection to the pool if the answer was read to its end.
        self._response.close()


class AiohttpUpstream:
    """The data path over aiohttp: bodies untouched in both directions, no redirects, no cookies."""

    def __init__(self, connect_timeout: float) -> None:
        self._session = aiohttp.ClientSession(
            # An engine's uvicorn closes connections idle for 5 s; we close them before it does.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            max_line_size=65536,
            max_field_size=65536,
            read_bufsize=2**18,
        )
        self._urls: dict[tuple[str, str], URL] = {}

    async def send(
        self, method: str, base: str, path: str, headers: Headers, body: bytes
    ) -> Answer:
        """Send one request; see `Upstream.send`."""
        url = self._urls.get((base, path))
        if url is None:
            url = self._urls[base, path] = URL(base + path)
        fields = CIMultiDict((name.decode("latin-1"), _text(value)) for name, value in headers)
        # Large bodies go out in pieces, so that one does not hold up the loop.
        data = io.BytesIO(body) if len(body) > _PIECEWISE else body
        try:
            response = await self._session.request(
                method, url, headers=fields, data=data, allow_redirects=False
            )
        except aiohttp.ServerTimeoutError as error:
            raise UpstreamError(Cause.CONNECT_TIMEOUT, str(error)) from error
        except aiohttp.ClientConnectorError as error:
            own = error.os_error.errno in _OWN_TROUBLE
            raise UpstreamError(Cause.NO_SOCKET if own else Cause.REFUSED, str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(Cause.RESET, str(error)) from error
        if not 200 <= response.status < 600:
            response.close()
            raise UpstreamError(Cause.BAD_STATUS, str(response.status))
        return _AiohttpAnswer(response)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()
        # aiohttp closes transports in callbacks of the next turn of the loop.
        await asyncio.sleep(0)


def _text(value: bytes) -> str:
    """Return a header's value in such a form that aiohttp, which writes UTF-8, sends its bytes."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")
