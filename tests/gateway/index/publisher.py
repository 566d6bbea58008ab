"""A publisher of KV events that behaves on the wire as vLLM's does, and can be told to fail.

Batches are numbered from 0 per publisher and kept for replay; replay answers
come from a ROUTER as `[b"", topic, seq, payload]` and end with a seq of eight
0xff. The event socket is an XPUB, a PUB that tells of subscriptions, so that
tests can wait for them. Times are those of one counter shared by all
publishers: whoever publishes later has the later time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Self

import zmq
import zmq.asyncio

from connector.events import AnyEvent, Batch, BlockRemoved, BlockStored, encode

END = b"\xff" * 8
_time = itertools.count(1_795_970_000)


def stored(
    *blocks: int,
    medium: str | None = "GPU",
    group: int | None = None,
    block_size: int = 4,
    lookahead: object = None,
) -> BlockStored:
    return BlockStored(
        block_hashes=list(blocks),
        parent_block_hash=None,
        token_ids=[],
        block_size=block_size,
        medium=medium,
        group_idx=group,
        lookahead_token_ids=lookahead,
    )


def removed(*blocks: int, medium: str | None = "GPU", group: int | None = None) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(blocks), medium=medium, group_idx=group)


class Publisher:
    """One engine process's publisher. `port`s of 0 are drawn by the system."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        port: int = 0,
        replay_port: int = 0,
        buffer: int = 10_000,
        rank: int | None = 0,
        topic: bytes = b"",
    ) -> None:
        self._topic = topic
        self.asked: list[int] = []  # the seqs from which replays were asked
        self.drop: set[int] = set()  # seqs that the next replay loses on its way
        self.drop_end = False  # whether the next replay loses its end marker
        self.mute = False  # whether replays are answered at all
        self._rank = rank
        self._next = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._pub = context.socket(zmq.XPUB)
        self._router = context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 100_000)
        self.port = self._bind(self._pub, port)
        self.replay_port = self._bind(self._router, replay_port)
        self._task = asyncio.create_task(self._answer())

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def replay(self) -> str:
        return f"tcp://127.0.0.1:{self.replay_port}"

    async def subscribed(self) -> Self:
        """Wait until a subscriber has come."""
        frame = await self._pub.recv()
        return self if frame[:1] == b"\x01" else await self.subscribed()

    async def publish(self, *events: AnyEvent) -> int:
        """Number, send and keep a batch; return its seq."""
        return await self.send(self.keep(events))

    def lose(self, *events: AnyEvent) -> int:
        """Number and keep a batch, but let it get lost on the way to subscribers."""
        self.keep(events)
        return self._next - 1

    def keep(self, events: Sequence[AnyEvent]) -> bytes:
        payload = encode(Batch(float(next(_time)), list(events), self._rank))
        self._buffer.append((self._next, payload))
        self._next += 1
        return payload

    async def broken(self, payload: bytes) -> int:
        """Number, send and keep a payload that is none."""
        self._buffer.append((self._next, payload))
        self._next += 1
        return await self.send(payload)

    async def send(self, payload: bytes, seq: int | None = None) -> int:
        seq = self._next - 1 if seq is None else seq
        await self._pub.send_multipart([self._topic, seq.to_bytes(8, "big"), payload])
        return seq

    async def again(self, seq: int) -> None:
        """Send a batch once more, as a subscriber sees it that had it from the replay."""
        await self.send(next(p for s, p in self._buffer if s == seq), seq)

    async def frames(self, *frames: bytes) -> None:
        """Send any message."""
        await self._pub.send_multipart(list(frames))

    async def stop(self) -> None:
        """End, as a process that was killed. A second call does nothing."""
        if self._pub.closed:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._pub.close(linger=0)
        self._router.close(linger=0)
        # ZMQ closes in the background; who comes after wants the ports.
        for port in (self.port, self.replay_port):
            while await _listens(port):
                await asyncio.sleep(0.005)

    async def _answer(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            if self.mute:
                continue
            drop, self.drop = self.drop, set()
            for seq, payload in list(self._buffer):
                if seq >= self.asked[-1] and seq not in drop:
                    await self._router.send_multipart(
                        [client, b"", b"", seq.to_bytes(8, "big"), payload]
                    )
            if self.drop_end:
                self.drop_end = False
            else:
                await self._router.send_multipart([client, b"", b"", END, b""])

    @staticmethod
    def _bind(socket: zmq.asyncio.Socket, port: int) -> int:
        socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return False
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return True
