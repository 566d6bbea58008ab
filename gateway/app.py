"""Puts the rooms together: each is handed its neighbours here, none finds them by itself."""

from __future__ import annotations

import asyncio
import dataclasses
import operator
import time
from collections.abc import Iterator
from typing import Any

import httpx
import zmq.asyncio

import policies as _registered  # noqa: F401 - importing it fills the registry of policies
from connector.blocks import Hasher, HashingError
from connector.model import ModelConfig
from connector.pool import KeySchema, PoolError
from connector.render import TokenizerError
from gateway.api.admin import admin_app
from gateway.api.data import Readiness, data_app
from gateway.api.inference import Inference, Settings
from gateway.config import ConfigError, GatewayConfig, engine_key
from gateway.fleet.engine import Engine
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import RankLoad
from gateway.health import Health
from gateway.index.breaker import State
from gateway.index.device import DeviceIndex
from gateway.index.history import HistoryIndex
from gateway.index.pool import LookupState, PoolIndex
from gateway.index.subscriber import Subscriber, rank_endpoint
from gateway.prompt.reader import Kind, PromptReader, Threads
from gateway.proxy.relay import ATTEMPT_CAUSES, Timeouts
from gateway.proxy.upstream import AiohttpUpstream
from gateway.routing import ModelRoom, Policies, Router
from gateway.telemetry.decisions import Decisions
from gateway.telemetry.metrics import Family, Metrics, count, gauge
from policies.base import EngineKey
from policies.book import Book

# The whole list: no other path reaches an engine.
ROUTES: tuple[tuple[str, Kind], ...] = (
    ("/v1/chat/completions", "chat"),
    ("/v1/completions", "completions"),
)


# What is bound, opened or loaded once.
_AFTER_RESTART = (
    "listen",
    "admin",
    "upstream.connect_timeout",
    "probing",
    "shutdown_grace",
    "decisions_kept",
    "models",
)


class ModelFault(ConfigError):
    """A model's configuration that cannot be used; `where` leads to it from the top."""

    def __init__(self, where: tuple[str | int, ...], message: str) -> None:
        super().__init__(f"{'.'.join(map(str, where))}: {message}")
        self.where = where
        self.message = message


def readers(config: GatewayConfig, threads: Threads) -> dict[str, PromptReader]:
    """Load every model's tokenizer and template.

    Raises:
        ModelFault: for what cannot be loaded, or hashes that cannot be reproduced.
    """
    loaded = {}
    for position, model in enumerate(config.models):
        try:
            loaded[model.name] = PromptReader(model, threads)
        except (TokenizerError, OSError) as error:
            raise ModelFault(("models", position, "tokenizer"), str(error)) from error
        if model.pool is not None:
            try:
                KeySchema(model.pool.key, model.name)
            except PoolError as error:
                raise ModelFault(("models", position, "pool", "key"), str(error)) from error
        if model.hashing.algorithm != "auto":
            try:
                Hasher(model.hashing.algorithm, 16, model.hashing.seed)
            except HashingError as error:
                raise ModelFault(("models", position, "hashing"), str(error)) from error
    return loaded


class Gateway:
    """All rooms of one process. Made inside a running event loop."""

    def __init__(self, config: GatewayConfig) -> None:
        """Put everything together without starting anything.

        Raises:
            ConfigError: if the configuration cannot be used.
        """
        api_key = engine_key(config.upstream)
        self.config = config
        self.draining = False
        self._threads = Threads()
        # Engines are reached directly, whatever proxy the environment names.
        self._client = httpx.AsyncClient(trust_env=False)
        self._zmq = zmq.asyncio.Context()
        self.metrics = Metrics()
        self.device = DeviceIndex()
        self.fleet = Fleet(config.models, self._client, config.probing, time.monotonic, api_key)
        prompts = readers(config, self._threads)
        self.rooms = {
            model.name: ModelRoom(model, prompts[model.name], _pool(model))
            for model in config.models
        }
        self.router = Router(
            self.rooms,
            self.fleet,
            self.device,
            HistoryIndex(),
            Book(),
            Policies(config.policy, config.policies, config.seed),
            Decisions(config.decisions_kept),
            self.metrics,
            policy_header=config.policy_header,
        )
        self.fleet.listeners += [self.router, self]
        self.subscribers: dict[EngineKey, Subscriber] = {}
        self.health = Health(
            self.rooms, self.fleet, self.device, self.subscribers, self.router.clock
        )
        self.router.on_ended.append(self.health.turn_ended)
        self._watching: asyncio.Task[None] | None = None
        self.upstream = AiohttpUpstream(config.upstream.connect_timeout)
        settings = _settings(config, api_key)
        self._inference = [
            Inference(route, kind, self.router, self.upstream, self.metrics, settings)
            for route, kind in ROUTES
        ]
        self.reload_error: str | None = None
        self.metrics.add_source(self._families)
        self.data_app = data_app(self._inference, self.router, self.fleet, self.readiness)
        self.admin_app = admin_app(self.router, lambda: self.config, self.engine_rows)

    def start(self) -> None:
        """Begin to watch engines, events and pools."""
        self.fleet.start()
        for engine in self.fleet:
            self._subscribe(engine)
        for room in self.rooms.values():
            if room.pool is not None:
                room.pool.start()
        self._watching = asyncio.create_task(
            self.health.watch(self.config.probing.interval), name="health"
        )

    def apply(self, new: GatewayConfig) -> list[str]:
        """Let a changed configuration take effect from the next request on.

        Returns the changed keys that take effect only after a restart. A policy
        set through the admin API stays unless `policy` itself has changed.

        Raises:
            ConfigError, policies.base.PolicyError: if it cannot be used; then
                nothing has changed.
        """
        api_key = engine_key(new.upstream)
        self.router.policies.reconfigure(new.policies, new.seed)
        if new.policy != self.config.policy:
            self.router.policies.act(new.policy)
        self.router.policy_header = new.policy_header
        settings = _settings(new, api_key)
        for route in self._inference:
            route.settings = settings
        later = [
            key
            for key in _AFTER_RESTART
            if operator.attrgetter(key)(new) != operator.attrgetter(key)(self.config)
        ]
        self.config = new
        return later

    async def stop(self) -> None:
        """Stop everything and close all connections."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.fleet.stop()
        self.router.close()
        for subscriber in self.subscribers.values():
            await subscriber.close()
        for room in self.rooms.values():
            if room.pool is not None:
                await room.pool.close()
        await self.upstream.close()
        await self._client.aclose()
        self._zmq.term()
        self._threads.shutdown()

    # What the fleet tells (gateway.fleet.fleet.Listener).

    def engine_up(self, engine: Engine) -> None:
        """Judge its events anew; a subscriber itself notices what became of its engine."""
        for key in engine.keys:
            self.health.forget(key)

    def engine_down(self, engine: Engine) -> None:
        """Nothing to do: a subscriber itself notices."""

    def engine_reported(self, engine: Engine) -> None:
        """Listen to every data-parallel rank that has shown up."""
        self._subscribe(engine)

    def readiness(self) -> Readiness:
        """Return why no turn can be placed, and what is degraded."""
        reasons, degraded = [], list(self.health.degraded())
        if self.reload_error:
            degraded.insert(
                0,
                "the changed configuration cannot be used, the earlier one is in force: "
                f"{self.reload_error}",
            )
        if self.draining:
            reasons.append("the gateway is shutting down")
        idle = [name for name in self.rooms if not self.fleet.candidates(name)]
        lines = [self.router.why_no_engine(name) for name in idle]
        # One model without engines does not take the others off the network.
        (reasons if len(idle) == len(self.rooms) else degraded).extend(lines)
        return Readiness(reasons, degraded)

    def engine_rows(self) -> list[dict[str, Any]]:
        """Return what is known of every engine, for `/gateway/engines`."""
        return [self._engine_row(engine) for engine in self.fleet]

    def _engine_row(self, engine: Engine) -> dict[str, Any]:
        now = self.router.clock()
        facts = engine.facts
        # What an engine that is gone said last is no load of now.
        loads = engine.loads if engine.usable and engine.loads_at is not None else {}
        return {
            "id": engine.id,
            "model": engine.model,
            "url": engine.config.url,
            "role": engine.config.role,
            "state": str(engine.state),
            "seconds_in_state": now - engine.since,
            "error": engine.error,
            "segments": list(engine.config.segments),
            "hashing": facts and {"algorithm": facts.algorithm, "block_size": facts.block_size},
            "mismatch": engine.mismatch,
            "load_age_seconds": None if engine.loads_at is None else now - engine.loads_at,
            "ranks": {
                str(key): {
                    **_load_row(loads.get(key.rank)),
                    "in_flight": self.router.book.in_flight(key),
                    "device_blocks": self.device.size(key),
                    "events": self._events_row(key, now),
                }
                for key in engine.keys
            },
        }

    def _events_row(self, key: EngineKey, now: float) -> dict[str, Any] | None:
        subscriber = self.subscribers.get(key)
        if subscriber is None:
            return None
        row = dataclasses.asdict(subscriber.status())
        at = row.pop("last_event_at")
        del row["engine"], row["keys"]
        return row | {"seconds_since_event": None if at is None else now - at}

    def _families(self) -> Iterator[Family]:
        self._expect_counters()
        up = gauge("engine_up", "1 if the engine can take turns.", ("model", "engine"))
        flight = gauge("in_flight", "Turns that this gateway has under way.", ("model", "engine"))
        blocks = gauge("device_blocks", "Device blocks known of the engine.", ("model", "engine"))
        for engine in self.fleet:
            up.add_metric((engine.model, engine.id), float(engine.usable))
            for key in engine.keys:
                labels = (engine.model, str(key))
                flight.add_metric(labels, self.router.book.in_flight(key))
                blocks.add_metric(labels, self.device.size(key))
        connected = gauge("events_connected", "1 if KV events are connected.", ("engine",))
        batches = count("event_batches", "KV-event batches applied.", ("engine",))
        gaps = count("event_gaps", "Gaps seen in an engine's KV events.", ("engine",))
        restarts = count("engine_restarts", "Restarts seen in KV events.", ("engine",))
        flushes = count("event_flushes", "Flushes of an engine's device index.", ("engine",))
        errors = count("event_errors", "KV-event messages that could not be read.", ("engine",))
        for key, subscriber in self.subscribers.items():
            engine_id, status = str(key), subscriber.status()
            connected.add_metric((engine_id,), float(status.connected))
            batches.add_metric((engine_id,), status.batches)
            gaps.add_metric((engine_id,), status.gaps)
            restarts.add_metric((engine_id,), status.restarts)
            flushes.add_metric((engine_id,), status.flushes)
            errors.add_metric((engine_id,), status.errors)
        open_breaker = gauge("pool_breaker_open", "1 if the master is not asked.", ("model",))
        asked = count("pool_keys_asked", "Keys asked of the master.", ("model",))
        holes = count("pool_holes", "Holes found in pool runs.", ("model",))
        for name, room in self.rooms.items():
            if room.pool is not None:
                open_breaker.add_metric((name,), float(room.pool.breaker.state is not State.CLOSED))
                asked.add_metric((name,), room.pool.counters.keys_asked)
                holes.add_metric((name,), room.pool.counters.holes)
        reports = count("device_reports", "Reports of cached prefixes that were asked for.", ())
        reports.add_metric((), self.device.reported)
        yield reports
        yield from (up, flight, blocks, connected, batches, gaps, restarts, flushes, errors)
        yield from (open_breaker, asked, holes)

    def _restarted(self, key: EngineKey) -> None:
        self.router.engine_restarted(key)
        self.health.forget(key)

    def _expect_counters(self) -> None:
        """Have every counter of what is configured now in the page, at 0 until its first event."""
        for name, room in self.rooms.items():
            self.metrics.expect_model(name, [] if room.pool is None else list(LookupState))
        policy = self.router.policies.acting
        for engine in self.fleet:
            for key in engine.keys:
                self.metrics.expect_engine(engine.model, str(key), policy, ATTEMPT_CAUSES)

    def _subscribe(self, engine: Engine) -> None:
        config = engine.config
        if config.events is None:
            return
        for key in engine.keys:
            # Ranks beyond the first have ports of their own, which only TCP endpoints tell.
            if key not in self.subscribers and (not key.rank or "tcp://" in config.events):
                subscriber = self.subscribers[key] = Subscriber(
                    key.engine,
                    rank_endpoint(config.events, key.rank),
                    config.replay and rank_endpoint(config.replay, key.rank),
                    self.device,
                    context=self._zmq,
                    rank=key.rank,
                    on_restart=self._restarted,
                )
                subscriber.start()


def _load_row(load: RankLoad | None) -> dict[str, Any]:
    if load is None:
        return dict.fromkeys(("running", "waiting", "kv_usage"))
    return {"running": load.running, "waiting": load.waiting, "kv_usage": load.kv_usage}


def _settings(config: GatewayConfig, api_key: str | None) -> Settings:
    return Settings(
        body_bytes=config.limits.body_bytes,
        debug_headers=config.debug_headers,
        allow_engine_fields=config.allow_engine_fields,
        api_key=api_key,
        timeouts=Timeouts(config.upstream.first_byte_timeout, config.upstream.idle_timeout),
        access_log=config.log.access,
    )


def _pool(model: ModelConfig) -> PoolIndex | None:
    if model.pool is None or not model.exact:
        return None
    return PoolIndex(model.pool, KeySchema(model.pool.key, model.name))
