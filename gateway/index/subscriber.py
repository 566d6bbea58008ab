"""Owns the hearing of one engine's KV events: order, gaps, replays, restarts.

A publisher numbers its batches from 0 and keeps the last ones (vLLM: 10,000)
for replay. A subscriber applies each batch once and in order, and knows at any
time whether what the index believes of the engine may be believed:

- On connecting it asks the replay from 0, to learn what was cached before it came.
- On a gap, on a new connection and after a silence it asks the replay again,
  from the last batch it applied: getting that same batch back proves that the
  publisher is still the same process and that nothing was missed in between.
- A batch with a number that was passed already but a later time comes from an
  engine that was restarted: it is flushed and learned anew from 0. A batch that
  is merely old (the replay had brought it) is left out.
- What cannot be recovered (no replay, no answer, rolled out of the buffer, a
  payload that cannot be read) flushes the engine: lost removals would otherwise
  be believed for ever.

vLLM's replay socket drops answers that the subscriber is too slow to take
(a ROUTER does), so a hole inside a replay is asked for again as long as that
brings anything on. Everything runs in one task per publisher, and batches are
applied without an await in between: after `close` nothing is applied any more.

Source: vLLM 0.32, `distributed/kv_events.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from connector.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, EventError, decode
from gateway.index.device import DeviceIndex
from policies.base import EngineKey

log = logging.getLogger(__name__)

_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_monitors = itertools.count()


class State(StrEnum):
    """What a subscriber is doing."""

    CONNECTING = "connecting"
    REPLAYING = "replaying"
    LIVE = "live"
    CLOSED = "closed"
    FAILED = "failed"  # a fault of this program; nothing is heard any more


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of a subscriber, in seconds.

    A replay that says nothing for `replay_silence` is given up (vLLM's
    publisher looks for requests ten times a second when idle). After `check`
    without a batch the replay is asked whether there was none; None: never. A
    flood of events is applied for at most `slice` before other tasks get a turn.
    `heartbeat` is ZMQ's; a peer silent for three of them is connected anew.
    `retry` is the wait before sockets that failed are made again.
    """

    replay_silence: float = 2.0
    check: float | None = 30.0
    slice: float = 0.002
    heartbeat: float = 5.0
    retry: float = 1.0


@dataclass(frozen=True, slots=True)
class SubscriberStatus:
    """What a subscriber has done so far. `last_event_at` is on the subscriber's clock.

    `connected` tells of the socket, `state` of the contents. `errors` counts
    messages that could not be read and sockets that failed; `unusable` events
    whose hashes are not those of the prompt (speculative look-ahead); `unknown`
    events of types this gateway has never heard of. `topic` is that of the last
    message heard, at most 128 characters of it. `caught_up` says that what the
    publisher told before has been asked for since the listener's start.
    """

    engine: str
    endpoint: str
    state: State
    connected: bool
    keys: tuple[EngineKey, ...]
    last_seq: int | None
    last_event_at: float | None
    batches: int
    duplicates: int
    gaps: int
    replays: int
    replay_failures: int
    restarts: int
    flushes: int
    errors: int
    unknown: int
    unusable: int
    topic: str
    caught_up: bool


def rank_endpoint(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank: vLLM counts ports up from the base."""
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}" if rank else endpoint


@dataclass(slots=True)
class _Applied:
    """The last batch applied; its payload is its identity, for it holds the time."""

    seq: int
    ts: float
    payload: bytes


class _Lost(Exception):
    """Batches between the last applied and the next known are gone."""


class _Restarted(Exception):
    """The publisher is another process than the one heard before."""


class Subscriber:
    """Feeds the index from one publisher: one engine, or one data-parallel rank of it.

    `rank` is used where batches name no rank themselves. `on_restart` is called
    for each key of the engine when a restart was noticed, after its blocks were
    flushed. The `context` stays the caller's.
    """

    def __init__(
        self,
        engine: str,
        endpoint: str,
        replay: str | None,
        index: DeviceIndex,
        *,
        context: zmq.asyncio.Context,
        rank: int = 0,
        on_restart: Callable[[EngineKey], None] | None = None,
        timing: Timing = Timing(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.endpoint = endpoint
        self.replay = replay
        self._index = index
        self._context = context
        self._rank = rank
        self._on_restart = on_restart
        self._timing = timing
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._state = State.CONNECTING
        self._connected = False
        self._last: _Applied | None = None
        self._last_event_at: float | None = None
        self._keys: dict[EngineKey, None] = {}
        self._batches = 0
        self._duplicates = 0
        self._gaps = 0
        self._replays = 0
        self._replay_failures = 0
        self._restarts = 0
        self._flushes = 0
        self._errors = 0
        self._unknown = 0
        self._unusable = 0
        self._topic = b""
        self._caught_up = False

    def start(self) -> None:
        """Begin to listen, in a task of its own. A closed subscriber stays closed."""
        if self._state is State.CLOSED:
            raise RuntimeError(f"the subscriber of {self.engine} is closed")
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"kv-events {self.engine}")
            self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop listening and remove from the index what this publisher has told."""
        self._to(State.CLOSED)
        self._connected = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for key in self._keys:
            self._index.forget(key)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the listener of %s broke down", self.engine, exc_info=error)
            self._connected = False
            self._flush("nothing is heard of it any more")
            self._to(State.FAILED)

    def status(self) -> SubscriberStatus:
        """Return what has happened so far."""
        return SubscriberStatus(
            engine=self.engine,
            endpoint=self.endpoint,
            state=self._state,
            connected=self._connected,
            keys=tuple(self._keys),
            last_seq=self._last.seq if self._last else None,
            last_event_at=self._last_event_at,
            batches=self._batches,
            duplicates=self._duplicates,
            gaps=self._gaps,
            replays=self._replays,
            replay_failures=self._replay_failures,
            restarts=self._restarts,
            flushes=self._flushes,
            errors=self._errors,
            unknown=self._unknown,
            unusable=self._unusable,
            topic=self._topic.decode("utf-8", "replace"),
            caught_up=self._caught_up,
        )

    async def until(self, reached: Callable[[SubscriberStatus], bool]) -> SubscriberStatus:
        """Wait until a status satisfies `reached`, and return it."""
        while True:
            status = self.status()
            if reached(status):
                return status
            self._changed.clear()
            await self._changed.wait()

    # -- the socket ------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._listen()
            except (zmq.ZMQError, OSError) as error:
                self._failed(f"its socket failed: {error}")
                self._connected = False
                self._to(State.CONNECTING)
                await asyncio.sleep(self._timing.retry)

    async def _listen(self) -> None:
        """Hear one SUB socket, which reconnects by itself, until it fails."""
        socket = self._context.socket(zmq.SUB)
        # ZMQ's own name for a monitor is drawn from a file descriptor and can
        # collide with that of a socket just closed.
        monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED,
            f"inproc://kv-events-monitor-{next(_monitors)}",
        )
        try:
            self._prepare(socket)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(self.endpoint)
            heard = asyncio.ensure_future(socket.recv_multipart())
            seen = asyncio.ensure_future(monitor.recv_multipart())
            while True:
                await asyncio.wait(
                    {heard, seen}, timeout=self._timing.check, return_when=asyncio.FIRST_COMPLETED
                )
                if not heard.done() and not seen.done():
                    if self._connected and self.replay is not None:
                        await self._catch_up(doubt=False)
                    continue
                # The monitor first: data of a new connection is to be judged as such.
                while seen.done():
                    event = parse_monitor_message(seen.result())["event"]
                    seen = asyncio.ensure_future(monitor.recv_multipart())
                    await self._connection(up=event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
                began = time.perf_counter()
                while heard.done():
                    frames = heard.result()
                    heard = asyncio.ensure_future(socket.recv_multipart())
                    await self._heard(frames)
                    if time.perf_counter() - began > self._timing.slice:
                        await asyncio.sleep(0)
                        break
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    def _prepare(self, socket: zmq.asyncio.Socket) -> None:
        """Set what makes a silently dead peer noticed, and a lost one sought again."""
        beat = max(1, int(self._timing.heartbeat * 1000))
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 100_000)  # vLLM's own high-water mark
        socket.setsockopt(zmq.HEARTBEAT_IVL, beat)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * beat)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        if "[" in self.endpoint:
            socket.setsockopt(zmq.IPV6, 1)

    async def _connection(self, *, up: bool) -> None:
        self._connected = up
        if not up:
            self._to(State.CONNECTING)
        elif self.replay is None:
            # A restart while away shows in the next batch's number.
            self._caught_up = True
            self._to(State.LIVE)
        else:
            await self._catch_up(doubt=True)

    # -- order -----------------------------------------------------------------

    async def _heard(self, frames: list[bytes]) -> None:
        """Apply a live batch, or find out what became of those before it."""
        if len(frames) != 3 or len(frames[1]) != 8:
            self._failed(f"a message of {len(frames)} frames is not [topic, seq, payload]")
            return
        self._topic = frames[0][:128]
        seq, payload = int.from_bytes(frames[1], "big"), frames[2]
        last = self._last
        if last is None and not self._connected:
            # The monitor is slower than the data: what came before is still to be learned.
            await self._catch_up(doubt=True)
        elif last is not None and seq > last.seq + 1:
            self._gaps += 1
            log.info("%s: events %d to %d are missing", self.engine, last.seq + 1, seq - 1)
            await self._catch_up(doubt=True)
        elif last is not None and seq <= last.seq and self._later(payload, last):
            self._restarted()
            await self._catch_up(doubt=True)
        last = self._last
        if last is not None and seq <= last.seq:
            self._duplicates += 1
            self._notify()
            return
        if last is not None and seq > last.seq + 1:
            self._flush(f"events {last.seq + 1} to {seq - 1} are lost")
        self._apply(seq, payload)

    async def _catch_up(self, *, doubt: bool) -> None:
        """Apply what the replay has beyond the last batch applied.

        With `doubt` there is a reason to think that something was missed, and
        no answer means that what is known cannot be believed.
        """
        if self.replay is None:
            return
        self._to(State.REPLAYING)
        try:
            while True:
                before = self._last
                try:
                    complete = await self._replay_from(self._last)
                except _Restarted:
                    self._restarted()
                    continue
                except _Lost as lost:
                    self._flush(str(lost))
                    self._last = None
                    continue
                if complete:
                    break
                if self._last is before:
                    self._replay_failures += 1
                    log.warning("%s: no answer from the replay at %s", self.engine, self.replay)
                    if doubt:
                        self._flush("the replay did not answer")
                        self._last = None  # go on with whatever comes next
                    break
            self._caught_up = True
        finally:
            self._to(State.LIVE if self._connected else State.CONNECTING)

    async def _replay_from(self, last: _Applied | None) -> bool:
        """Ask the replay once, from `last` on, and apply what it brings in order.

        Returns False when the answer broke off or had a hole. Raises _Restarted
        when the publisher does not know `last`, _Lost when it no longer does.
        """
        assert self.replay is not None
        self._replays += 1
        # A socket of its own for each request: late answers to an earlier one
        # would be taken for answers to this.
        socket = self._context.socket(zmq.DEALER)
        try:
            self._prepare(socket)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(self.replay)
            start = last.seq if last else 0
            # Goes out once the socket is connected; if it never is, the silence tells.
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            began = time.perf_counter()
            first, whole = True, True
            while True:
                async with asyncio.timeout(self._timing.replay_silence):
                    frames = await socket.recv_multipart()
                if len(frames) != 4 or len(frames[2]) != 8:
                    self._failed(f"a replay answer of {len(frames)} frames")
                    return False
                if frames[2] == _END_OF_REPLAY:
                    if first and last is not None:
                        raise _Restarted
                    return whole
                seq, payload = int.from_bytes(frames[2], "big"), frames[3]
                if first and last is not None:
                    if seq > last.seq:
                        raise _Lost(f"the replay begins at {seq}, the last heard was {last.seq}")
                    if payload != last.payload:
                        raise _Restarted
                elif self._last is None or seq == self._last.seq + 1:
                    self._apply(seq, payload)
                else:
                    whole = False  # answers were dropped; the rest cannot be applied in order
                first = False
                if time.perf_counter() - began > self._timing.slice:
                    await asyncio.sleep(0)
                    began = time.perf_counter()
        except TimeoutError:
            return False
        finally:
            socket.close(linger=0)

    def _later(self, payload: bytes, last: _Applied) -> bool:
        """Tell whether a batch that bears a passed number is from after the last one."""
        try:
            return decode(payload).ts > last.ts
        except EventError as error:
            self._failed(f"an event batch cannot be read: {error}")
            return False

    # -- the index -------------------------------------------------------------

    def _apply(self, seq: int, payload: bytes) -> None:
        try:
            batch = decode(payload)
        except EventError as error:
            self._failed(f"event batch {seq} cannot be read: {error}")
            self._flush(f"event batch {seq} is lost")
            self._last = _Applied(seq, self._last.ts if self._last else 0.0, payload)
            return
        self._last = _Applied(seq, batch.ts, payload)
        self._last_event_at = self._clock()
        self._batches += 1
        self._unknown += batch.unknown
        self._tell(batch)
        self._notify()

    def _tell(self, batch: Batch) -> None:
        key = EngineKey(self.engine, self._rank if batch.dp_rank is None else batch.dp_rank)
        self._keys[key] = None
        for event in batch.events:
            match event:
                case BlockStored():
                    if event.lookahead_token_ids:
                        self._unusable += 1
                        if _is_round(self._unusable):
                            log.error(
                                "%s hashes look-ahead tokens of speculative decoding into its "
                                "blocks: they match no prompt, and it gets no credit for them",
                                self.engine,
                            )
                    else:
                        self._index.store(key, event)
                case BlockRemoved():
                    self._index.remove(key, event)
                case AllBlocksCleared():
                    self._index.flush(key)

    def _restarted(self) -> None:
        self._restarts += 1
        self._flush("it was restarted")
        self._last = None
        if self._on_restart is not None:
            for key in self._keys:
                self._on_restart(key)

    def _flush(self, why: str) -> None:
        self._flushes += 1
        log.info("%s: its device blocks are forgotten: %s", self.engine, why)
        for key in self._keys:
            self._index.flush(key)
        self._notify()

    # -- what is told of it ----------------------------------------------------

    def _failed(self, what: str) -> None:
        self._errors += 1
        if _is_round(self._errors):
            log.warning("%s at %s: %s (%d so far)", self.engine, self.endpoint, what, self._errors)
        self._notify()

    def _to(self, state: State) -> None:
        if self._state is not State.CLOSED:
            self._state = state
        self._notify()

    def _notify(self) -> None:
        self._changed.set()


def _is_round(count: int) -> bool:
    """Tell whether to log an event that may come in floods: at the 1st, 2nd, 4th, 8th..."""
    return count & (count - 1) == 0
