"""A scripted engine (a real HTTP server that does as it is told) and a running gateway."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from aiohttp import web

from gateway.app import Gateway
from gateway.config import GatewayConfig
from gateway.serve import _bind, _server

CHUNK = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
USAGE = (
    b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
ANSWER = (
    b'{"id":"1","choices":[{"index":0,"message":{"role":"assistant","content":"hi"}}],'
    b'"usage":{"prompt_tokens":9,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}'
)
METRICS = """\
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="m"}} 0.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
vllm:cache_config_info{{block_size="{block}",enable_prefix_caching="True",engine="0",\
num_gpu_blocks="512",prefix_caching_hash_algo="{algorithm}"}} 1.0
"""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def plain(request: web.Request) -> web.StreamResponse:
    """Answer as JSON, or as a stream where the body asks for one."""
    body = await request.read()
    if b'"stream":true' in body.replace(b" ", b""):
        return await stream(request, CHUNK, CHUNK, USAGE, DONE)
    return web.Response(body=ANSWER, content_type="application/json")


async def stream(request: web.Request, *pieces: bytes) -> web.StreamResponse:
    """Stream these pieces."""
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for piece in pieces:
        await answer.write(piece)
    await answer.write_eof()
    return answer


@dataclass
class Scripted:
    """An engine that answers as its `handler` says and remembers what it was sent."""

    name: str
    port: int
    handler: Handler = plain
    running: float = 0.0
    block: int = 16
    algorithm: str = "sha256_cbor"
    healthy: bool = True
    page: str | None = None
    listing: bytes | None = None
    card: dict[str, Any] = field(
        default_factory=lambda: {"id": "m", "object": "model", "max_model_len": 4096, "odd": [1]}
    )
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/{tail:.*}", self._infer)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        if self.port == 0:
            self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 500)

    async def _metrics(self, _: web.Request) -> web.Response:
        if self.page is not None:
            return web.Response(text=self.page)
        page = METRICS.format(running=self.running, block=self.block, algorithm=self.algorithm)
        return web.Response(text=page)

    async def _models(self, _: web.Request) -> web.Response:
        if self.listing is not None:
            return web.Response(body=self.listing, content_type="application/json")
        return web.json_response({"object": "list", "data": [self.card]})

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((request.path, headers, await request.read()))
        return await self.handler(request)


@dataclass
class Running:
    """A running gateway and a client for each of its listeners."""

    gateway: Gateway
    client: httpx.AsyncClient
    admin: httpx.AsyncClient
    port: int

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait, looking every few milliseconds, until something is so."""
        while not reached():
            await asyncio.sleep(0.005)

    async def ready(self, engines: int) -> None:
        """Wait until so many engines can take turns."""
        await self.until(lambda: sum(e.usable for e in self.gateway.fleet) == engines)

    def in_flight(self) -> int:
        """Return the number of charges."""
        return sum(
            self.gateway.router.book.in_flight(key)
            for engine in self.gateway.fleet
            for key in engine.keys
        )


def settings(engines: list[Scripted], **overrides: Any) -> GatewayConfig:
    """Return a configuration for these engines, by round robin unless told otherwise."""
    model: dict[str, Any] = {
        "name": "m",
        "exact": False,
        "engines": [{"id": engine.name, "url": engine.url} for engine in engines],
    }
    model |= overrides.pop("model", {})
    given: dict[str, Any] = {
        "listen": {"port": 0},
        "admin": {"port": 0},
        "policy": "round_robin",
        "debug_headers": True,
        "probing": {"interval": 0.05, "timeout": 1.0, "failures": 2},
        "models": [model],
    }
    return GatewayConfig(**(given | overrides))


@contextlib.asynccontextmanager
async def running(config: GatewayConfig, *, trust_env: bool = True) -> AsyncIterator[Running]:
    """Run a gateway in this event loop."""
    with (
        _bind("127.0.0.1", 0, "listen") as data_socket,
        _bind("127.0.0.1", 0, "admin") as admin_socket,
    ):
        gateway = Gateway(config)
        servers = [_server(gateway.data_app, 1), _server(gateway.admin_app, 1)]
        gateway.start()
        tasks = [
            asyncio.create_task(server.serve([bound]))
            for server, bound in zip(servers, (data_socket, admin_socket), strict=True)
        ]
        while not all(server.started for server in servers):
            await asyncio.sleep(0.005)
        port = data_socket.getsockname()[1]
        base = f"http://127.0.0.1:{port}"
        admin_base = f"http://127.0.0.1:{admin_socket.getsockname()[1]}"
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(
                base_url=base, timeout=30, limits=limits, trust_env=trust_env
            ) as client,
            httpx.AsyncClient(base_url=admin_base, timeout=30, trust_env=trust_env) as admin,
        ):
            try:
                yield Running(gateway, client, admin, port)
            finally:
                for server in servers:
                    server.should_exit = server.force_exit = True
                await asyncio.gather(*tasks)
                await gateway.stop()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
