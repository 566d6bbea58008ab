"""Plays turns against an OpenAI-compatible URL, and notes what each turn hit.

Turns of a session are played in order, one at a time and without its pauses:
what is looked at is where turns went and what was cached there, not how fast a
loaded fleet is. Answers are streamed, and asked for their usage.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import httpx
import httpx_sse
import msgspec

from loadtest.hits import Hit
from loadtest.trace.turn import Own, Turn

DEFAULT_MAX_TOKENS = 64
"""Of answers whose turn sets no bound of its own."""

_EXPECTED = re.compile(r"(\w+)=(\d+)")
_BOUNDS = ("max_tokens", "max_completion_tokens")
_MOST_TEXT = 300
_MODELS_SECONDS = 10.0


class ReplayError(Exception):
    """The URL does not say what it serves; the text says why."""


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Card(msgspec.Struct):
    id: str


class _Listing(msgspec.Struct):
    data: list[_Card]


class _Failed(Exception):
    """The turn was not answered whole; the text says why."""


class _Answer:
    """What is known so far of an answer under way."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.headers = httpx.Headers()
        self.status: int | None = None
        self.ttft: float | None = None
        self.usage: _Usage | None = None
        self.text: list[str] = []

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began


async def first_model(client: httpx.AsyncClient) -> str:
    """Return the first of `/v1/models`.

    Raises:
        ReplayError: if it cannot be had.
    """
    try:
        answer = await client.get("/v1/models", timeout=_MODELS_SECONDS)
        answer.raise_for_status()
        cards = msgspec.json.decode(answer.content, type=_Listing).data
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ReplayError(
            f"cannot ask {client.base_url} for its models: {_words(error)}"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ReplayError(
            f"/v1/models of {client.base_url} is no list of models ({error}); name one with --model"
        ) from error
    if not cards:
        raise ReplayError(f"/v1/models of {client.base_url} lists no model; name one with --model")
    return cards[0].id


class Player:
    """Sends turns and remembers the answers that later turns build on.

    `max_tokens` bounds every answer, None those only whose turn sets no bound.
    A turn may take `timeout` seconds from request to last byte.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        *,
        max_tokens: int | None = None,
        timeout: float = 600.0,
    ) -> None:
        self._client = client
        self._model = model
        self._max_tokens = max_tokens
        self._timeout = timeout
        self._answers: dict[tuple[str, int], str] = {}

    async def play(
        self, turns: Sequence[Turn], on_hit: Callable[[Hit], None], *, concurrency: int = 1
    ) -> None:
        """Play turns and tell `on_hit` of each as it ends; a failed one does not stop the others.

        One at a time they are played in the order given; otherwise so many
        sessions at once, each in its own order.
        """
        lanes: Iterable[Sequence[Turn]] = [turns]
        if concurrency > 1:
            sessions: defaultdict[str, list[Turn]] = defaultdict(list)
            for turn in turns:
                sessions[turn.session].append(turn)
            lanes = sessions.values()
        waiting = iter(lanes)

        async def work() -> None:
            for lane in waiting:
                for turn in lane:
                    on_hit(await self.turn(turn))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())

    async def turn(self, turn: Turn) -> Hit:
        """Play one turn."""
        answer, error = _Answer(), None
        try:
            async with asyncio.timeout(self._timeout):
                await self._ask(turn, answer)
        except TimeoutError:
            error = f"not answered in {self._timeout:g} s"
        except (_Failed, httpx.HTTPError, httpx_sse.SSEError) as failure:
            error = _words(failure)
        if error is None:
            self._answers[turn.session, turn.number] = "".join(answer.text)
        expected = dict(_EXPECTED.findall(answer.headers.get("x-gateway-expected-cached", "")))
        usage = answer.usage
        details = usage.prompt_tokens_details if usage else None
        return Hit(
            session=turn.session,
            turn=turn.number,
            status=answer.status,
            seconds=answer.seconds,
            error=error,
            prompt=usage.prompt_tokens if usage else None,
            cached=details.cached_tokens if details else None,
            engine=answer.headers.get("x-gateway-engine"),
            device=int(expected["device"]) if "device" in expected else None,
            pool=int(expected["pool"]) if "pool" in expected else None,
            ttft=answer.ttft,
        )

    def _body(self, turn: Turn) -> dict[str, Any]:
        body = {
            **turn.body,
            "model": self._model,
            "messages": list(self._messages(turn)),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._max_tokens is not None:
            for name in _BOUNDS:
                body.pop(name, None)
            body["max_tokens"] = self._max_tokens
        elif all(body.get(name) is None for name in _BOUNDS):
            body["max_tokens"] = DEFAULT_MAX_TOKENS
        return body

    def _messages(self, turn: Turn) -> Iterable[Any]:
        for message in turn.messages:
            if isinstance(message, Own):
                # A turn that failed has left none; its question stays without.
                text = self._answers.get((turn.session, message.turn))
                if text is not None:
                    yield {"role": "assistant", "content": text}
            else:
                yield message

    async def _ask(self, turn: Turn, answer: _Answer) -> None:
        async with httpx_sse.aconnect_sse(
            self._client,
            "POST",
            "/v1/chat/completions",
            content=msgspec.json.encode(self._body(turn)),
            headers={"Content-Type": "application/json", "X-Session-ID": _header(turn.session)},
        ) as source:
            response = source.response
            answer.status, answer.headers = response.status_code, response.headers
            if response.status_code != 200:
                raise _Failed(_error_text(await response.aread()))
            ended = False
            async for event in source.aiter_sse():
                if event.data == "[DONE]":
                    ended = True
                    break
                _take(answer, event.data)
        if not ended:
            raise _Failed("the stream broke off before its end")


def _take(answer: _Answer, data: str) -> None:
    try:
        event = msgspec.json.decode(data, type=_Event)
    except msgspec.MsgspecError as error:
        raise _Failed(f"an event of the stream cannot be read: {error}") from error
    if event.error is not None:
        raise _Failed(_error_text(data.encode()))
    if event.choices and answer.ttft is None:
        answer.ttft = answer.seconds
    if event.usage is not None:
        answer.usage = event.usage
    answer.text += [
        choice.delta.content
        for choice in event.choices
        if choice.index == 0 and choice.delta and choice.delta.content
    ]


def _error_text(body: bytes) -> str:
    """Return the message of an error in OpenAI's shape, or the beginning of anything else."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found = None
    error = found.get("error") if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    text = message if isinstance(message, str) else body.decode("utf-8", "replace")
    return text[:_MOST_TEXT]


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _header(session: str) -> str:
    """Return a session's name as a header may hold it, still one name per session."""
    return session if session.isascii() and session.isprintable() else ascii(session)
