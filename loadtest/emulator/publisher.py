"""Publishes one engine's KV events as vLLM does: numbered batches, kept for replay.

Batches go out on a PUB socket as `[topic, seq, payload]`, numbered from 0 per
incarnation. A ROUTER answers a DEALER's `[b"", first seq]` with the batches that
are kept, `[b"", topic, seq, payload]` each, and an end marker.

Source: vLLM 0.32, `distributed/kv_events.py`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Sequence

import zmq
import zmq.asyncio

from connector.events import AnyEvent, Batch, encode

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
BUFFER_STEPS = 10_000
HWM = 100_000
_BIND_TRIES = 500
_BIND_PAUSE = 0.01


class Publisher:
    """One incarnation's publisher; ports of 0 are drawn by the system.

    `drop` is the share of batches that are numbered and kept, but not sent.
    """

    def __init__(self, topic: str, host: str, port: int = 0, replay_port: int = 0) -> None:
        self.topic = topic
        self.host = host
        self.port = port
        self.replay_port = replay_port
        self.drop = 0.0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_STEPS)
        self._next = 0
        self._chance = random.Random(topic)
        self._context = zmq.asyncio.Context()
        self._plain = zmq.Context(self._context)
        self._pub: zmq.Socket[bytes] | None = None
        self._replays: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind the sockets. Raises OSError where a port stays taken."""
        self._pub = self._plain.socket(zmq.PUB)
        self._pub.set_hwm(HWM)
        self.port = await _bind(self._pub, self.host, self.port)
        router = self._context.socket(zmq.ROUTER)
        self.replay_port = await _bind(router, self.host, self.replay_port)
        self._replays = asyncio.create_task(self._answer(router), name=f"replay {self.topic}")

    async def stop(self) -> None:
        """Close the sockets at once, as a process that is killed."""
        if self._replays is not None:
            self._replays.cancel()
            await asyncio.gather(self._replays, return_exceptions=True)
        if self._pub is not None:
            self._pub.close(linger=0)
        self._context.destroy(linger=0)

    def publish(self, events: Sequence[AnyEvent]) -> None:
        """Number, keep and send the events of one step."""
        assert self._pub is not None
        payload = encode(Batch(time.time(), list(events), 0))
        seq = self._next
        self._next += 1
        self._buffer.append((seq, payload))
        if self.drop and self._chance.random() < self.drop:
            return
        self._pub.send_multipart((self.topic.encode(), seq.to_bytes(8, "big"), payload))

    def source(self) -> dict[str, object]:
        """Return what `/kv_event_sources` says of it."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "buffer_steps": BUFFER_STEPS,
            "hwm": HWM,
            "max_queue_size": HWM,
            "topic": self.topic,
        }

    async def _answer(self, router: zmq.asyncio.Socket) -> None:
        topic = self.topic.encode()
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, first = frames
            start = int.from_bytes(first, "big")
            for seq, payload in list(self._buffer):
                if seq >= start:
                    number = seq.to_bytes(8, "big")
                    await router.send_multipart([client, b"", topic, number, payload])
            await router.send_multipart([client, b"", b"", END_OF_REPLAY, b""])


async def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> int:
    """Bind, and return the port. ZMQ lets go of a closed socket's port a little later."""
    for _ in range(_BIND_TRIES):
        try:
            socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            await asyncio.sleep(_BIND_PAUSE)
        else:
            endpoint: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
            return int(endpoint.rpartition(":")[2])
    raise OSError(f"port {port} on {host} is taken")
