"""An emulated fleet: engines, master, control port, and how a gateway is told of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any, Self

from connector.blocks import Hasher
from connector.model import ModelConfig, PoolKeys
from connector.pool import KeySchema
from connector.render import Renderer
from loadtest.emulator.control import Member, control
from loadtest.emulator.engine import EmulatedEngine, Prompts
from loadtest.emulator.faults import MASTER, NO_FAULTS
from loadtest.emulator.listener import Listener
from loadtest.emulator.master import Master
from loadtest.emulator.settings import Settings, segment_name
from loadtest.pool import Pool

# Listeners of a gateway that is started with the configuration written here.
GATEWAY_LISTEN = {"host": "127.0.0.1", "port": 8000}
GATEWAY_ADMIN = {"host": "127.0.0.1", "port": 9100}


class Fleet:
    """Runs while it is entered. Raises OSError on entering where a port is taken.

    Making one raises TokenizerError where the tokenizer cannot be read, and
    HashingError or PoolError for hashes and keys that cannot be computed.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        hasher = Hasher(settings.algorithm, settings.limits.block_size, settings.seed)
        hashing = {
            "algorithm": settings.algorithm,
            "block_size": settings.limits.block_size,
            "seed": settings.seed,
        }
        # A model needs an engine to be one; they get their ports later.
        self._config: dict[str, Any] = {
            "name": settings.model,
            "tokenizer": str(settings.tokenizer.absolute()),
            "hashing": hashing,
        }
        config = ModelConfig.model_validate(
            self._config | {"engines": [{"id": "e1", "url": "http://127.0.0.1:1"}]}
        )
        prompts = Prompts(settings, Renderer(config), hasher)
        self._keys = {"model": settings.model, "cache_prefix": settings.cache_prefix}
        self.pool: Pool | None = None
        self.master: Master | None = None
        if settings.pool_blocks is not None:
            self.pool = Pool(settings.pool_blocks, client_ttl=settings.client_ttl)
            schema = KeySchema(PoolKeys.model_validate(self._keys), settings.model)
            faults = settings.faults.get(MASTER, NO_FAULTS)
            self.master = Master(settings, self.pool, schema, faults)
        self.engines = {
            engine_id: EmulatedEngine(
                engine_id,
                prompts,
                port=settings.base_port + i if settings.base_port else 0,
                pool=self.pool,
                segment=segment_name(i) if self.pool is not None else None,
                faults=settings.faults.get(engine_id, NO_FAULTS),
            )
            for i, engine_id in enumerate(settings.ids)
        }
        members: dict[str, Member] = dict(self.engines)
        if self.master is not None:
            members[MASTER] = self.master
        self._members = members
        self._control = Listener(settings.host, settings.control_port)
        self._stack = AsyncExitStack()

    @property
    def control_url(self) -> str:
        """Base URL of the control port."""
        return self._control.url

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for member in self._members.values():
                await member.start()
                stack.push_async_callback(member.stop)
            await self._control.open(control(self._members))
            stack.push_async_callback(self._control.close)
            expiry = asyncio.create_task(self._expire(), name="pool expiry")
            stack.callback(expiry.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def gateway_models(self) -> list[dict[str, Any]]:
        """Return the `models:` list of a gateway.yaml for this fleet."""
        engines = []
        for engine in self.engines.values():
            section: dict[str, Any] = {"id": engine.id, "url": engine.url}
            if engine.events is not None:
                section |= {"events": engine.events, "replay": engine.replay}
            if engine.segment is not None:
                section["segments"] = [engine.segment]
            engines.append(section)
        model = dict(self._config)
        if self.master is not None:
            model["pool"] = {
                "master": self.master.url,
                "client_ttl": self.settings.client_ttl + 2,
                "key": self._keys,
            }
        model["engines"] = engines
        ModelConfig.model_validate(model)
        return [model]

    def gateway_config(self) -> dict[str, Any]:
        """Return the content of a gateway.yaml for this fleet."""
        return {
            "listen": GATEWAY_LISTEN,
            "admin": GATEWAY_ADMIN,
            "policy": "pool_aware",
            "debug_headers": True,
            "log": {"format": "text"},
            "models": self.gateway_models(),
        }

    def ready(self) -> dict[str, Any]:
        """Return where everything is."""
        return {
            "model": self.settings.model,
            "tokenizer": str(self.settings.tokenizer.absolute()),
            "master": None if self.master is None else self.master.url,
            "control": self.control_url,
            "engines": [
                {
                    "id": engine.id,
                    "url": engine.url,
                    "events": engine.events,
                    "replay": engine.replay,
                    "segments": [] if engine.segment is None else [engine.segment],
                }
                for engine in self.engines.values()
            ],
        }

    async def _expire(self) -> None:
        """Unmount the segments of the dead when their time is up."""
        loop = asyncio.get_running_loop()
        while self.pool is not None:
            self.pool.expire(loop.time())
            await asyncio.sleep(min(1.0, self.settings.client_ttl / 4 + 0.01))
