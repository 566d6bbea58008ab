"""The life of a placed request, from its first attempt to its end. This file owns it.

    trying --head of an answer--> answering --last byte--> done
       |  \\                          |
       |   no answer: next target    breaks off: error event, aborted end
       no target left: failed        (nothing is ever sent twice)

    client gone, at any time --> left: the engine's connection is closed at once

Whatever the way out, `Errand.ended` is called exactly once. A request goes to
the next target only while the client has been sent nothing, and only for the
causes in `_RETRIES`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.proxy.upstream import Answer, Cause, Headers, Upstream, UpstreamError
from gateway.proxy.usage import Tail
from gateway.telemetry.log import MeantAbort
from policies.base import Ending, Usage

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# How often each cause may send a request on to the next target; None: as often as there are
# targets. A request that broke a connection may be what broke the engine: it gets one more.
_RETRIES: dict[Cause, int | None] = {
    Cause.REFUSED: None,
    Cause.CONNECT_TIMEOUT: None,
    Cause.UNAVAILABLE: None,
    Cause.RESET: 1,
    Cause.BAD_STATUS: 1,
    Cause.FIRST_BYTE_TIMEOUT: 0,
    Cause.NO_SOCKET: 0,
}
# What can become of an attempt that gave no answer.
ATTEMPT_CAUSES = tuple(_RETRIES)
_UNREACHABLE = (Cause.REFUSED, Cause.CONNECT_TIMEOUT, Cause.RESET)

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# Written anew for the engine: the first two by the client library, the third is answered by the
# server library, the last belongs to the gateway (a client does not choose its engine).
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-data-parallel-rank"}

# Control characters, which no server library sends on.
_UNSENDABLE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")

CLIENT_LEFT = 499


class Target(Protocol):
    """Where one attempt goes."""

    @property
    def url(self) -> str:
        """The engine's base URL."""
        ...

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers for this engine alone."""
        ...


class Errand(Protocol):
    """The decision that is carried out, as the relay sees it."""

    @property
    def targets(self) -> Sequence[Target]:
        """The engines to try, in order."""
        ...

    def trying(self, index: int) -> None:
        """An attempt at `targets[index]` begins."""
        ...

    def failed(self, index: int, cause: str, detail: str, *, unreachable: bool) -> None:
        """That attempt gave no answer; `detail` is for operators' eyes."""
        ...

    def first_token(self) -> None:
        """The first byte of a stream has come."""
        ...

    def ended(self, ending: Ending, status: int, usage: Usage | None) -> None:
        """The request has ended, having been answered with `status`."""
        ...


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What is sent to the engine, and what is added to its answer."""

    method: str
    path: str
    headers: Headers
    body: bytes
    answer_headers: Callable[[], Headers]
    error_event: Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds to wait for the first byte of an answer (None: for ever), and between two pieces."""

    first_byte: float | None
    idle: float


class ClientStalled(Exception):
    """The client has read nothing for as long as an engine may send nothing."""


class StreamBroken(MeantAbort):
    """The answer broke off after the client had been sent some of it; the end must be an abort."""


def forwarded(
    headers: Headers, *, request_id: str, api_key: str | None
) -> list[tuple[bytes, bytes]]:
    """Return a client's headers as an engine gets them."""
    hop = _named_for_the_hop(headers)
    kept = [
        (name, value)
        for name, value in headers
        if name not in _NOT_FORWARDED
        and name not in hop
        and name != b"x-request-id"
        and not (api_key and name == b"authorization")
    ]
    kept.append((b"x-request-id", request_id.encode("latin-1")))
    if api_key:
        kept.append((b"authorization", b"Bearer " + api_key.encode("latin-1")))
    return kept


class Relay:
    """Carries one request out."""

    def __init__(
        self, errand: Errand, outgoing: Outgoing, upstream: Upstream, timeouts: Timeouts
    ) -> None:
        self._errand = errand
        self._outgoing = outgoing
        self._upstream = upstream
        self._timeouts = timeouts
        self._tail: Tail | None = None
        self._ending = Ending.FAILED
        self._ended = False
        self.status = 0
        self.started = False

    async def run(self, receive: Receive, send: Send) -> None:
        """Relay until the answer, or the client's patience, has ended.

        Raises:
            UpstreamError: no engine gave an answer, and the client has been sent nothing.
            StreamBroken: the client has been sent an answer that is not whole.
        """
        answering = asyncio.ensure_future(self._relay(send))
        leaving = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                try:
                    answering.result()
                except ClientStalled as error:
                    self._ending, self.status = Ending.LEFT, CLIENT_LEFT
                    raise StreamBroken("the client has stopped reading") from error
            else:
                self._ending, self.status = Ending.LEFT, CLIENT_LEFT
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
            self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            usage = self._tail.usage() if self._tail else None
            self._errand.ended(self._ending, self.status, usage)

    async def _relay(self, send: Send) -> None:
        answer, piece = await self._answer()
        try:
            await self._pass_on(answer, piece, send)
        finally:
            answer.close()

    async def _answer(self) -> tuple[Answer, bytes]:
        """Ask one target after another; return the answer to pass on and its first piece.

        An engine sends the head of a stream before it has computed anything, so
        an answer has begun only with its body's first piece. A 503 is passed on
        only if no other target has a better answer.
        """
        unavailable: tuple[Answer, bytes] | None = None
        retried: dict[Cause, int] = {}
        last: UpstreamError | None = None
        for index, target in enumerate(self._errand.targets):
            self._errand.trying(index)
            try:
                answer, piece = await self._ask(target)
                if unavailable is not None:
                    unavailable[0].close()
                    unavailable = None
                if answer.status != 503:
                    return answer, piece
                unavailable = answer, piece
                raise UpstreamError(Cause.UNAVAILABLE)
            except UpstreamError as error:
                last = error
                self._errand.failed(
                    index,
                    str(error.cause),
                    str(error),
                    unreachable=error.cause in _UNREACHABLE,
                )
                allowed = _RETRIES.get(error.cause, 0)
                done = retried[error.cause] = retried.get(error.cause, 0) + 1
                if allowed is not None and done > allowed:
                    break
        if unavailable is not None:
            return unavailable
        assert last is not None, "a placement has at least one target"
        self.status = 504 if last.cause is Cause.FIRST_BYTE_TIMEOUT else 502
        raise last

    async def _ask(self, target: Target) -> tuple[Answer, bytes]:
        own = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in target.headers]
        try:
            async with asyncio.timeout(self._timeouts.first_byte):
                answer = await self._upstream.send(
                    self._outgoing.method,
                    target.url,
                    self._outgoing.path,
                    [*self._outgoing.headers, *own],
                    self._outgoing.body,
                )
                try:
                    return answer, await answer.read()
                except BaseException:
                    answer.close()
                    raise
        except TimeoutError as error:
            raise UpstreamError(Cause.FIRST_BYTE_TIMEOUT) from error

    async def _next(self, answer: Answer) -> bytes:
        try:
            async with asyncio.timeout(self._timeouts.idle):
                return await answer.read()
        except TimeoutError as error:
            raise UpstreamError(Cause.IDLE_TIMEOUT) from error

    async def _pass_on(self, answer: Answer, piece: bytes, send: Send) -> None:
        headers, stream, encoded = _answer_headers(answer)
        headers += self._outgoing.answer_headers()
        self.status, self.started = answer.status, True
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        tail = Tail(stream=stream)
        if not encoded:
            self._tail = tail
        if stream and piece and answer.status < 400:
            self._errand.first_token()
        try:
            while piece:
                tail.feed(piece)
                try:
                    async with asyncio.timeout(self._timeouts.idle):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                except TimeoutError as error:
                    raise ClientStalled from error
                piece = await self._next(answer)
            if stream and not encoded and answer.status == 200 and not tail.finished():
                raise UpstreamError(Cause.UNFINISHED)
        except UpstreamError as error:
            if stream and not encoded:
                gap = b"" if tail.between_events() else b"\n\n"
                event = self._outgoing.error_event(
                    f"the engine's answer broke off ({error.cause}); what came is incomplete"
                )
                await send({"type": "http.response.body", "body": gap + event, "more_body": True})
            raise StreamBroken(str(error)) from error
        if answer.status < 400:
            self._ending = Ending.DONE
        elif answer.status < 500:
            self._ending = Ending.REFUSED
        # Before the client knows that it has everything: its next turn finds this one settled.
        self._end()
        await send({"type": "http.response.body", "body": b""})


def _named_for_the_hop(headers: Headers) -> set[bytes]:
    """Return the names that `Connection` lists, which concern this hop alone."""
    return {
        token.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for token in value.split(b",")
    }


def _answer_headers(answer: Answer) -> tuple[list[tuple[bytes, bytes]], bool, bool]:
    """Return the headers to pass on, whether it is a stream of events, and whether compressed."""
    kept: list[tuple[bytes, bytes]] = []
    names = dict(answer.headers)
    hop = _named_for_the_hop(answer.headers)
    kind = next((v for k, v in names.items() if k.lower() == b"content-type"), b"").lower()
    stream = kind.startswith(b"text/event-stream")
    encoded, retry_after = False, False
    for raw, value in answer.headers:
        name = raw.lower()
        if name in _HOP_BY_HOP or name in hop or name == b"x-request-id":
            continue
        if _UNSENDABLE.search(value):
            continue
        # A stream may get an error event at its end; these two statuses have no body to measure.
        if name == b"content-length" and (stream or answer.status in (204, 304)):
            continue
        if name == b"content-encoding":
            encoded = value.lower() != b"identity"
        elif name == b"retry-after":
            retry_after = True
        kept.append((name, value))
    # Without it one agent gives up at once and another asks thirty times in half a minute.
    if answer.status in (429, 503) and not retry_after:
        kept.append((b"retry-after", b"1"))
    return kept, stream, encoded


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
