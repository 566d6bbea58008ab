"""What this process says of its own fitness: why no turn can be placed, and what is degraded.

Faults that some room notices at the moment they arise are in its log already.
The others are states that only a look from above can see (an engine's events
that never match its turns, a segment that the master does not list): `watch`
looks for them regularly, logs each when it has stood for two looks, and again
when it has gone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping

from connector.blocks import Chain
from gateway.fleet.engine import Engine, State
from gateway.fleet.fleet import Fleet
from gateway.index.device import DeviceIndex
from gateway.index.evidence import Evidence
from gateway.index.pool import PoolIndex
from gateway.index.subscriber import Subscriber
from gateway.routing import ModelRoom
from gateway.telemetry.decisions import Record
from policies.base import Ending, EngineKey, Outcome

log = logging.getLogger("gateway.health")

_NAMED = 8  # segments that are named in a line, at most
# What an engine saves reaches the master within this many seconds, by far.
_POOL_SETTLE = 5.0

_DOCTOR = "run mooncake-connector doctor -c FILE"


class Health:
    """Looks at all rooms; changes none."""

    def __init__(
        self,
        rooms: Mapping[str, ModelRoom],
        fleet: Fleet,
        device: DeviceIndex,
        subscribers: Mapping[EngineKey, Subscriber],
        clock: Callable[[], float],
    ) -> None:
        self._rooms = rooms
        self._fleet = fleet
        self._device = device
        self._subscribers = subscribers
        self._clock = clock
        self._events: Evidence[EngineKey] = Evidence()
        self._keys: Evidence[str] = Evidence(settle=_POOL_SETTLE)
        self._partial: set[str] = set()  # models of whose blocks the pool has some objects only
        self._counted: dict[EngineKey, tuple[int, int]] = {}  # prompt tokens: ours, the engine's
        self._standing: dict[str, bool] = {}  # line -> whether it is in the log

    # -- what rooms tell ---------------------------------------------------------

    def turn_ended(self, outcome: Outcome, chain: Chain, record: Record) -> None:
        """Take a turn for evidence if the engine must have stored the last block of its prompt."""
        if not (record.exact and len(chain) >= 2 and outcome.ending is Ending.DONE):
            return
        key, usage, now = outcome.decision.key, outcome.usage, self._clock()
        if usage is not None and usage.cached is not None:
            stored = usage.cached < chain.tokens  # else it was there, and nobody announced it
        else:
            stored = True
        if usage is not None and usage.prompt != record.prompt_tokens:
            self._counted[key] = (record.prompt_tokens, usage.prompt)
        else:
            self._counted.pop(key, None)
        if not stored:
            return
        if self._events.wanted(key) and self._listens(key):
            if self._device.announced(key, chain):
                self._events.confirmed(key)
            else:
                self._events.turn(key, chain, now)
        if self._rooms[record.model].pool is not None and self._keys.wanted(record.model):
            if outcome.decision.turn.pool:
                self._keys.confirmed(record.model)
            else:
                self._keys.turn(record.model, chain, now)

    def forget(self, key: EngineKey) -> None:
        """Judge an engine's events anew: it has been started anew."""
        self._events.forget(key)
        self._counted.pop(key, None)

    # -- looking -----------------------------------------------------------------

    async def watch(self, interval: float) -> None:
        """Look every `interval` seconds, for ever."""
        while True:
            await asyncio.sleep(interval)
            try:
                await self.look()
            except Exception:
                log.exception("a look at the gateway's own health failed")

    async def look(self) -> None:
        """Seek what waits to be confirmed, and log what has come to stay or gone."""
        now = self._clock()
        for engine in self._fleet:
            for key in engine.keys:
                self._seek_events(key, now)
        for name, room in self._rooms.items():
            if room.pool is not None:
                await self._seek_keys(name, room.pool, now)
                if self._unseen(name, room.pool):
                    room.pool.look_again()
        lines = set(self.noticed())
        for gone in [line for line in self._standing if line not in lines]:
            if self._standing.pop(gone):
                log.info("no longer so: %s", gone)
        for line in lines:
            if self._standing.get(line) is False:
                log.warning("degraded: %s", line)
            self._standing[line] = line in self._standing

    def _seek_events(self, key: EngineKey, now: float) -> None:
        for case in self._events.waiting(key):
            if not self._listens(key):
                return
            if self._device.announced(key, case.chain):
                self._events.confirmed(key)
                return
            self._events.unconfirmed(key, case, now)

    async def _seek_keys(self, model: str, pool: PoolIndex, now: float) -> None:
        for case in self._keys.waiting(model):
            found = await pool.objects(case.chain)
            if found is None:
                return
            if found == pool.width:
                self._keys.confirmed(model)
                self._partial.discard(model)
                return
            if found:
                self._partial.add(model)
            self._keys.unconfirmed(model, case, now)

    def _listens(self, key: EngineKey) -> bool:
        """Tell whether an engine's events are heard, and are of blocks that could be ours."""
        subscriber = self._subscribers.get(key)
        if subscriber is None or self._fleet.engine(key.engine).mismatch:
            return False
        status = subscriber.status()
        return status.connected and not status.unusable

    # -- what is wrong -----------------------------------------------------------

    def degraded(self) -> Iterator[str]:
        """Yield what works with less than it should know, in words that name the remedy."""
        yield from self._told()
        yield from self.noticed()

    def _told(self) -> Iterator[str]:
        """Yield what the rooms themselves have logged."""
        for engine in self._fleet:
            if engine.state is not State.READY:
                yield f"engine {engine.id} is {engine.state}" + (
                    f": {engine.error}" if engine.error else ""
                )
            elif engine.mismatch:
                yield f"engine {engine.id} gets no cache credit: {engine.mismatch}"
            if engine.metrics_error:
                yield f"engine {engine.id}: its /metrics cannot be read: {engine.metrics_error}"
        for name, room in self._rooms.items():
            if room.hashing_error:
                yield f"model {name}: prompts are hashed approximately: {room.hashing_error}"
            if room.pool is not None and (trouble := room.pool.trouble):
                yield f"model {name}: {trouble}"

    def noticed(self) -> Iterator[str]:
        """Yield what only a look from above can see."""
        for engine in self._fleet:
            if engine.usable:
                yield from self._events_lines(engine)
        for name, room in self._rooms.items():
            if room.config.exact and self._fleet.candidates(name) and not self._fleet.hashing(name):
                yield (
                    f"model {name}: no engine says how it hashes (vllm:cache_config_info on "
                    "/metrics), so prompts are hashed approximately; set hashing.algorithm and "
                    "hashing.block_size if the engines cannot say"
                )
            if room.pool is not None:
                yield from self._pool_lines(name, room.pool)

    def _events_lines(self, engine: Engine) -> Iterator[str]:
        for key in engine.keys:
            subscriber = self._subscribers.get(key)
            if subscriber is None:
                continue
            status = subscriber.status()
            if not status.connected:
                yield (
                    f"engine {key}: its KV events at {subscriber.endpoint} are not connected; its "
                    "device cache is not known"
                )
            elif not status.caught_up:
                yield (
                    f"engine {key}: what its KV events told before is being asked for at "
                    f"{subscriber.replay}; its device cache is not known yet"
                )
            elif other := self._named_by(status.topic, engine):
                yield (
                    f"engine {key}: the KV events at {subscriber.endpoint} have the topic "
                    f"{status.topic!r}, so they are engine {other}'s; mend its `events` and "
                    "`replay`"
                )
            elif self._events.silent(key):
                counts = self._counted.get(key)
                yield (
                    f"KV events of engine {key} never name the blocks of its own turns: "
                    "hashing.seed, hashing.algorithm or the tokenizer differ from the engine's, "
                    f"or `events` is another engine's; {_DOCTOR}"
                ) + (
                    f" (it counted {counts[1]} prompt tokens where {counts[0]} were rendered here)"
                    if counts
                    else ""
                )

    def _named_by(self, topic: str, engine: Engine) -> str | None:
        """Return the other engine that a topic of the form `kv@ID` or `kv@ID@MODEL` names."""
        _, _, rest = topic.partition("@")
        name = rest.partition("@")[0]
        others = {e.id for e in self._fleet if e.id != engine.id}
        return name if name in others else None

    def _pool_lines(self, model: str, pool: PoolIndex) -> Iterator[str]:
        mounted = sorted({segment.name for segment in pool.segments.values()})
        shown = ", ".join(mounted[:_NAMED]) + (", ..." if len(mounted) > _NAMED else "")
        for engine, segment in self._unmounted(model, pool):
            yield (
                f"segment {segment} of engine {engine.id} is not mounted; "
                f"mounted: {shown or 'none'}"
            )
        if self._keys.silent(model):
            if model in self._partial:
                why = (
                    "of the objects of this gateway's blocks only some were ever found at the "
                    "pool's master: check pool.key.ranks and pool.key.groups"
                )
            else:
                why = (
                    "no pool key of this gateway's turns was ever found at the pool's master: "
                    "check pool.key, and hashing"
                )
            yield f"model {model}: {why}; {_DOCTOR}"

    def _unmounted(self, model: str, pool: PoolIndex) -> Iterator[tuple[Engine, str]]:
        """Yield segments that are missing from a list which is newer than their engine's start."""
        at = pool.refreshed_at
        if at is None or pool.refresh_error is not None:
            return
        # With HTTP metadata an endpoint is a segment's name.
        names = {*pool.segments, *(segment.name for segment in pool.segments.values())}
        for engine in self._fleet.of(model):
            if engine.state is State.READY and at > engine.since:
                yield from ((engine, s) for s in engine.config.segments if s not in names)

    def _unseen(self, model: str, pool: PoolIndex) -> bool:
        """Tell whether the list lacks a segment, or is older than an engine's start."""
        at = pool.refreshed_at
        older = at is not None and any(
            engine.state is State.READY and at <= engine.since and engine.config.segments
            for engine in self._fleet.of(model)
        )
        return older or any(itertools.islice(self._unmounted(model, pool), 1))
