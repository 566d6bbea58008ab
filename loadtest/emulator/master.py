"""The pool's master: what Mooncake's answers over HTTP, from the model of the pool.

Looking takes no lease and moves nothing, as `/batch_query_keys` does with the
real one.

Source: answers of `mooncake_master` 0.3.13.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from connector.pool import KeySchema
from loadtest.emulator import control
from loadtest.emulator.faults import NO_FAULTS, OF_MASTER, Faults
from loadtest.emulator.listener import Handler, Listener, application
from loadtest.emulator.settings import Settings
from loadtest.emulator.wire import encode
from loadtest.pool import Pool, Segment

_TOKEN_BYTES = 1024
_FIRST_PORT = 15_000
_TEXT = "text/plain; version=0.0.4"
_ABSENT = {
    "ok": False,
    "error": "OBJECT_NOT_FOUND",
    "values": None,
    "disk_values": None,
    "local_disk_values": None,
    "nof_values": None,
}


class Master:
    """The master of a fleet's pool."""

    def __init__(
        self, settings: Settings, pool: Pool, schema: KeySchema, faults: Faults = NO_FAULTS
    ) -> None:
        self.faults = faults
        self.possible = OF_MASTER
        self._settings = settings
        self._pool = pool
        # What surrounds the hash in every key.
        self._before, self._after = schema.first("\0").split("\0")
        self._listener = Listener(settings.host, settings.master_port)
        self._moving = asyncio.Event()
        self._alive = False
        self._endpoints: dict[Segment, str] = {}
        self.set_faults(faults)

    @property
    def url(self) -> str:
        """Base URL."""
        return self._listener.url

    def status(self) -> dict[str, Any]:
        """Return what the control listener says of it."""
        return {
            "id": "master",
            "url": self.url,
            "alive": self._alive,
            "keys": len(self._pool),
            "evictions": self._pool.evictions,
            "faults": self.faults.model_dump(),
        }

    async def start(self) -> None:
        """Open the port, where it is closed."""
        if not self._alive:
            self._alive = True
            await self._listener.open(self._application())

    async def stop(self) -> None:
        """End as a process that is killed; without a master its index is gone."""
        if self._alive:
            self._alive = False
            await self._listener.close()
            self._pool.clear()

    async def restart(self) -> None:
        """Stop and start: all keys are gone, living engines mount their segments again."""
        await self.stop()
        await self.start()

    def set_faults(self, faults: Faults) -> None:
        """Put faults in force, in place of those before."""
        self.faults = faults
        if faults.hang:
            self._moving.clear()
        else:
            self._moving.set()

    # -- its routes ------------------------------------------------------------

    def _application(self) -> web.Application:
        def may_fail(handler: Handler) -> Handler:
            async def answer(request: web.Request) -> web.StreamResponse:
                await self._moving.wait()
                if self.faults.error is not None:
                    return web.Response(status=self.faults.error, text="emulated fault")
                self._pool.expire(asyncio.get_running_loop().time())
                return await handler(request)

            return answer

        def says(text: str) -> Handler:
            async def answer(request: web.Request) -> web.StreamResponse:
                return web.Response(text=text)

            return may_fail(answer)

        def tells(content: object) -> Handler:
            async def answer(request: web.Request) -> web.StreamResponse:
                return _json(content)

            return may_fail(answer)

        health = {
            "status": "ok",
            "role": "leader",
            "ha_state": "serving",
            "service_ready": True,
            "leader_address": None,
            "view_version": None,
        }
        events = dict.fromkeys(
            ("published_batches", "published_events", "dropped_events", "skipped_unparsed_keys"), 0
        )
        return application(
            web.get("/batch_query_keys", may_fail(self._query)),
            web.get("/get_all_keys", may_fail(self._keys)),
            web.get("/get_segments_detail", may_fail(self._segments)),
            web.get("/get_all_segments", may_fail(self._segment_names)),
            web.get("/metrics", may_fail(self._metrics)),
            web.get("/metrics/summary", may_fail(self._summary)),
            web.get("/health", tells(health)),
            web.get("/role", says("leader")),
            web.get("/ha_status", says("serving")),
            web.get(
                "/leader",
                tells({"present": False, "leader_address": None, "view_version": None}),
            ),
            web.get("/kv_events/status", tells({"enabled": False, **events})),
            *control.routes(self),
            not_found=lambda: web.Response(status=404, body=b"404 Not Found"),
        )

    async def _query(self, request: web.Request) -> web.StreamResponse:
        keys = [key for key in request.query.get("keys", "").split(",") if key]
        if not keys:
            error = "No keys provided. Use ?keys=key1,key2,..."
            return _json({"success": False, "error": error}, status=400)
        return _json({"success": True, "data": {key: self._entry(key) for key in keys}})

    def _entry(self, key: str) -> dict[str, Any]:
        block = self._block(key)
        segment = None if block is None or self.faults.empty else self._pool.where(block)
        if segment is None:
            return _ABSENT
        buffer = {
            "size_": self._block_bytes,
            "buffer_address_": 0x7F0000000000 + zlib.crc32(key.encode()),
            "protocol_": "tcp",
            "transport_endpoint_": self._endpoint(segment),
        }
        return _ABSENT | {"ok": True, "error": None, "values": [buffer]}

    async def _keys(self, request: web.Request) -> web.StreamResponse:
        lines = [f"{key}\n" for key in self._all_keys()]
        return web.Response(body="".join(lines).encode(), headers={"Content-Type": _TEXT})

    async def _segments(self, request: web.Request) -> web.StreamResponse:
        capacity = self._capacity
        listed = []
        for segment in self._pool.segments:
            used = len(segment.held) * self._block_bytes
            endpoint = self._endpoint(segment)
            listed.append(
                {
                    "segment_name": segment.name,
                    "segment_id": f"{zlib.crc32(endpoint.encode())}-0",
                    "client_id": f"{zlib.crc32(endpoint.encode())}-1",
                    "base_address": "0x7f0000000000",
                    "size_bytes": capacity,
                    "size_human": f"{capacity / 1024**3:.2f} GiB",
                    "te_endpoint": endpoint,
                    "protocol": "tcp",
                    "status": "OK",
                    "allocator_used_bytes": used,
                    "allocator_capacity_bytes": capacity,
                    "allocator_usage_percent": 100 * used / capacity,
                }
            )
        return _json({"total_segments": len(listed), "segments": listed})

    async def _segment_names(self, request: web.Request) -> web.StreamResponse:
        text = "".join(f"{segment.name}\n" for segment in self._pool.segments)
        return web.Response(body=text.encode(), headers={"Content-Type": _TEXT})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        pool, size = self._pool, self._block_bytes
        families: list[tuple[str, str, dict[str, int]]] = [
            ("master_allocated_bytes", "gauge", {"": len(pool) * size}),
            ("master_total_capacity_bytes", "gauge", {"": len(pool.segments) * self._capacity}),
            (
                "segment_allocated_bytes",
                "gauge",
                {f'{{segment="{one.name}"}}': len(one.held) * size for one in pool.segments},
            ),
            (
                "segment_total_capacity_bytes",
                "gauge",
                {f'{{segment="{one.name}"}}': self._capacity for one in pool.segments},
            ),
            ("master_key_count", "gauge", {"": len(pool)}),
            ("master_active_clients", "gauge", {"": self._clients}),
            ("master_evicted_key_count", "counter", {"": pool.evictions}),
        ]
        lines = []
        for name, kind, samples in families:
            lines.append(f"# TYPE {name} {kind}")
            lines += [f"{name}{labels} {value}" for labels, value in samples.items()]
        body = "\n".join([*lines, ""]).encode()
        return web.Response(body=body, headers={"Content-Type": _TEXT})

    async def _summary(self, request: web.Request) -> web.StreamResponse:
        text = (
            "role=leader, state=serving, service_ready=true, "
            f"master={{Keys: {len(self._pool)} | Clients: {self._clients}}}"
        )
        return web.Response(body=text.encode(), headers={"Content-Type": _TEXT})

    # -- names and sizes -------------------------------------------------------

    @property
    def _block_bytes(self) -> int:
        return self._settings.limits.block_size * _TOKEN_BYTES

    @property
    def _capacity(self) -> int:
        """Bytes of each segment: together they are the pool."""
        return -(-self._pool.blocks // self._settings.engines) * self._block_bytes

    @property
    def _clients(self) -> int:
        return sum(segment.dead_since is None for segment in self._pool.segments)

    def _endpoint(self, segment: Segment) -> str:
        """Return where a segment is reached; another place with each of its incarnations."""
        found = self._endpoints.get(segment)
        if found is None:
            host = segment.name.rpartition(":")[0]
            found = f"{host}:{_FIRST_PORT + len(self._endpoints) % 40_000}"
            self._endpoints[segment] = found
        return found

    def _block(self, key: str) -> bytes | None:
        if not (key.startswith(self._before) and key.endswith(self._after)):
            return None
        try:
            return bytes.fromhex(key[len(self._before) : len(key) - len(self._after)])
        except ValueError:
            return None

    def _all_keys(self) -> Iterator[str]:
        if self.faults.empty:
            return
        for block in self._pool:
            assert isinstance(block, bytes)
            yield f"{self._before}{block.hex()}{self._after}"


def _json(content: object, status: int = 200) -> web.Response:
    body = encode(content)
    return web.Response(body=body, status=status, content_type="application/json")
