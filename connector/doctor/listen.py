"""Hears an engine's KV events and their replay, and finds a probe's blocks in them."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from connector.doctor.ask import reason
from connector.events import BlockStored, EventError, decode

_END_OF_REPLAY = b"\xff" * 8
_KEPT = 10_000
"""Messages that a listener remembers: more than a probe's time brings."""
_CONNECT_SECONDS = 5.0
_monitors = itertools.count()


class Message(NamedTuple):
    """One batch as it came, and the device blocks that it says were stored."""

    topic: bytes
    seq: int
    payload: bytes
    stored: tuple[BlockStored, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """What an engine says of its own publisher (`GET /kv_event_sources`)."""

    enabled: bool
    endpoint: str
    replay_endpoint: str | None

    @classmethod
    def read(cls, said: object) -> Self | None:
        """Read one rank's entry; None for what is none."""
        if not isinstance(said, dict):
            return None
        replay = said.get("replay_endpoint")
        return cls(
            enabled=bool(said.get("enable_kv_cache_events")) and said.get("publisher") != "null",
            endpoint=str(said.get("endpoint", "")),
            replay_endpoint=replay if isinstance(replay, str) else None,
        )


@dataclass(frozen=True, slots=True)
class Published:
    """A probe's blocks as the events tell them, from the first on, of one cache group."""

    seqs: tuple[int, ...]
    topic: str
    hashes: list[int]
    token_ids: list[int]
    block_size: int
    lookahead: bool


def rank_endpoint(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank: vLLM counts ports up from the base."""
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}" if rank and port.isdecimal() else endpoint


def dialled(endpoint: str, url: str) -> str:
    """Return where to dial for an endpoint that an engine binds: its URL's host for a `*`."""
    host = urlsplit(url).hostname or "HOST"
    host = f"[{host}]" if ":" in host else host
    for every in ("*", "0.0.0.0", "[::]"):
        endpoint = endpoint.replace(f"//{every}:", f"//{host}:")
    return endpoint


def published(messages: Iterable[Message], salt: str, ids: Sequence[int]) -> Published | None:
    """Find the blocks of a salted prompt; `ids` are its token ids, as far as they are known."""
    chains: dict[int, Published] = {}
    for message in messages:
        for event in message.stored:
            group = event.group_idx or 0
            before = chains.get(group)
            if before is None and _starts(event, salt, ids):
                before = Published(
                    (), message.topic.decode(errors="replace"), [], [], event.block_size, False
                )
            elif before is None or event.parent_block_hash != before.hashes[-1]:
                continue
            chains[group] = Published(
                (*before.seqs, message.seq),
                before.topic,
                before.hashes + event.block_hashes,
                before.token_ids + event.token_ids,
                before.block_size,
                before.lookahead or bool(event.lookahead_token_ids),
            )
    return chains[min(chains)] if chains else None


def _starts(event: BlockStored, salt: str, ids: Sequence[int]) -> bool:
    if event.parent_block_hash is not None or not event.block_hashes:
        return False
    if event.extra_keys and event.extra_keys[0]:
        return salt in event.extra_keys[0]
    # Engines whose events carry no extra keys: a probe's first words are its own.
    return bool(ids) and event.token_ids == list(ids[: len(event.token_ids)])


class Listener:
    """Subscribes to one events endpoint for as long as it is open; `async with`."""

    def __init__(
        self, context: zmq.asyncio.Context, endpoint: str, heard: asyncio.Condition
    ) -> None:
        self.endpoint = endpoint
        self.messages: deque[Message] = deque(maxlen=_KEPT)
        self.unreadable = 0
        self._heard = heard
        self._socket = _socket(context, zmq.SUB, endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_DISCONNECTED,
            f"inproc://doctor-monitor-{next(_monitors)}",
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    async def connect(self, seconds: float) -> str | None:
        """Begin to listen; returns why not, in a few words, or None."""
        seconds = min(seconds, _CONNECT_SECONDS)
        if (why := await dial(self.endpoint, seconds)) is not None:
            return why
        try:
            self._socket.connect(self.endpoint)
            async with asyncio.timeout(seconds):
                event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
        except zmq.ZMQError as error:
            return str(error)
        except TimeoutError:
            return "something accepts the connection, but does not speak ZMQ"
        if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return "what listens there is no publisher of events (an HTTP or a replay port?)"
        self._task = asyncio.create_task(self._listen(), name=f"listen {self.endpoint}")
        return None

    async def _listen(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            message = _message(frames)
            if message is None:
                self.unreadable += 1
            elif message.stored:
                self.messages.append(message)
            async with self._heard:
                self._heard.notify_all()


async def replay(
    context: zmq.asyncio.Context, endpoint: str, start: int, seconds: float
) -> list[Message] | str:
    """Ask for the batches from number `start` on; returns why not, where none of it comes."""
    if (why := await dial(endpoint, min(seconds, _CONNECT_SECONDS))) is not None:
        return why
    socket = _socket(context, zmq.DEALER, endpoint)
    socket.setsockopt(zmq.RCVHWM, 0)
    messages: list[Message] = []
    try:
        socket.connect(endpoint)
        async with asyncio.timeout(seconds):
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                _, *frames = await socket.recv_multipart()
                if len(frames) == 3 and frames[1] == _END_OF_REPLAY:
                    return messages
                message = _message(frames)
                if message is None:
                    return f"an answer of {len(frames) + 1} frames is not a replay's"
                messages.append(message)
    except zmq.ZMQError as error:
        return str(error)
    except TimeoutError:
        return f"something accepts the connection, but no replay ended within {seconds:g} s"
    finally:
        socket.close(linger=0)


async def dial(endpoint: str, seconds: float) -> str | None:
    """Try a TCP endpoint before ZMQ does, which never says why it cannot connect."""
    if not endpoint.startswith("tcp://"):
        return None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return f"no connection within {seconds:g} s"
    except (OSError, OverflowError) as error:
        return reason(error)
    writer.close()
    return None


def _message(frames: Sequence[bytes]) -> Message | None:
    if len(frames) != 3 or len(frames[1]) != 8:
        return None
    try:
        events = decode(frames[2]).events
    except EventError:
        return None
    stored = tuple(
        event
        for event in events
        if isinstance(event, BlockStored) and (event.medium or "GPU").upper() == "GPU"
    )
    return Message(frames[0], int.from_bytes(frames[1], "big"), frames[2], stored)


def _socket(context: zmq.asyncio.Context, kind: int, endpoint: str) -> zmq.asyncio.Socket:
    socket: Any = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    return socket  # type: ignore[no-any-return]
