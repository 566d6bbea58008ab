"""A master that speaks Mooncake's HTTP from a dictionary, and can be told to fail."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class FakeMaster:
    """`keys` maps a key to its tier and endpoint; `segments` an endpoint to a segment's name."""

    keys: dict[str, tuple[str, str]] = field(default_factory=dict)
    segments: dict[str, str] = field(default_factory=dict)
    status: int = 200
    body: bytes | None = None
    delays: list[float] = field(default_factory=list)  # of the next queries, in seconds
    frozen: bool = False
    queries: list[list[str]] = field(default_factory=list)
    lists: int = 0
    paths: set[str] = field(default_factory=set)
    url: str = ""

    async def start(self) -> None:
        self._stopping = asyncio.Event()
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        # A real master takes queries of megabytes.
        self._runner = web.AppRunner(app, max_line_size=1 << 22, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        self._stopping.set()
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.paths.add(request.path)
        if request.path == "/get_segments_detail":
            self.lists += 1
            return self._say(
                {
                    "total_segments": len(self.segments),
                    "segments": [
                        {
                            "segment_name": name,
                            "segment_id": "1",
                            "client_id": "2",
                            "size_bytes": 1 << 20,
                            "te_endpoint": endpoint,
                            "protocol": "tcp",
                            "status": "OK",
                            "allocator_used_bytes": 0,
                            "allocator_capacity_bytes": 1 << 20,
                        }
                        for endpoint, name in self.segments.items()
                    ],
                }
            )
        if request.path != "/batch_query_keys":
            return web.Response(status=404)
        keys = request.query["keys"].split(",")
        self.queries.append(keys)
        delay = self.delays.pop(0) if self.delays else 0.0
        if self.frozen or delay:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if self.frozen else delay):
                    await self._stopping.wait()
        return self._say({"success": True, "data": {key: self._entry(key) for key in keys}})

    def _say(self, answer: object) -> web.Response:
        if self.body is not None or self.status != 200:
            return web.Response(status=self.status, body=self.body)
        return web.json_response(answer)

    def _entry(self, key: str) -> dict[str, object]:
        entry: dict[str, object] = dict.fromkeys(
            ("error", "values", "disk_values", "local_disk_values", "nof_values")
        )
        if key not in self.keys:
            return {"ok": False} | entry | {"error": "OBJECT_NOT_FOUND"}
        tier, endpoint = self.keys[key]
        buffer = {
            "size_": 1,
            "buffer_address_": 1,
            "protocol_": "tcp",
            "transport_endpoint_": endpoint,
        }
        local = {"client_id": "1-2", "object_size": 1, "transport_endpoint": endpoint}
        kind, value = {
            "memory": ("values", buffer),
            "ssd": ("local_disk_values", local),
            "disk": ("disk_values", {"file_path": "/x", "object_size": 1}),
        }[tier]
        return {"ok": True} | entry | {kind: [value]}
