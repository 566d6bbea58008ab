"""A vLLM engine and a Mooncake master as the doctor sees them, in this process.

They answer what real ones answer to its questions, and can be told to differ.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio
from aiohttp import web

from connector.doctor.recipes import Recipe
from connector.events import Batch, BlockStored, encode
from connector.render import Renderer

END = b"\xff" * 8
USUAL = Recipe("sha256_cbor", 16, "0")


@dataclass
class FakeMaster:
    """Knows `keys`, and `segments` by name."""

    keys: set[str] = field(default_factory=set)
    segments: tuple[str, ...] = ()
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    url: str = ""
    paths: list[str] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        if given := self.answers.get(request.path):
            return web.Response(status=given[0], text=given[1])
        match request.path:
            case "/health":
                return web.json_response({"role": "leader", "service_ready": True})
            case "/get_segments_detail":
                listed = [
                    {"segment_name": name, "te_endpoint": name, "status": "OK"}
                    for name in self.segments
                ]
                return web.json_response({"segments": listed})
            case "/batch_query_keys":
                value = {"transport_endpoint_": "s"}
                data = {
                    key: {"ok": key in self.keys, "values": [value] if key in self.keys else None}
                    for key in request.query["keys"].split(",")
                }
                return web.json_response({"success": True, "data": data})
            case "/get_all_keys":
                return web.Response(text="\n".join(self.keys))
        return web.Response(status=404)


class Publisher:
    """One rank's event and replay sockets."""

    def __init__(self, context: zmq.asyncio.Context, port: int, replay_port: int) -> None:
        self.sent: list[bytes] = []
        self.lie = False  # whether the replay brings other bytes than were published
        self._pub = context.socket(zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        self._pub.bind(f"tcp://127.0.0.1:{port}")
        self._router.bind(f"tcp://127.0.0.1:{replay_port}")
        self._task = asyncio.create_task(self._replay())

    async def publish(self, event: BlockStored, rank: int) -> None:
        payload = encode(Batch(1.0, [event], rank))
        self.sent.append(payload)
        seq = (len(self.sent) - 1).to_bytes(8, "big")
        await self._pub.send_multipart([b"kv", seq, payload])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._pub.close(linger=0)
        self._router.close(linger=0)

    async def _replay(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            for seq, payload in enumerate(self.sent):
                if seq >= int.from_bytes(start, "big"):
                    said = payload.replace(b"GPU", b"gpu") if self.lie else payload
                    number = seq.to_bytes(8, "big")
                    await self._router.send_multipart([client, b"", b"kv", number, said])
            await self._router.send_multipart([client, b"", b"", END, b""])


@dataclass
class FakeEngine:
    """Serves `name`; hashes by `recipe`, and says so but for its seed."""

    renderer: Renderer
    name: str = "m"
    recipe: Recipe = USUAL
    ranks: int = 1
    master: FakeMaster | None = None
    labels: dict[str, str] = field(default_factory=dict)  # of cache_config_info, above its own
    tells_hashing: bool = True
    tells_cached: bool = True
    tells_salt: bool = True
    lookahead: Any = None
    events_on: bool = True
    publishes: bool = True
    caches: bool = True
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)  # by path, above its own
    key: str | None = None  # the API key it wants
    url: str = ""
    ports: list[int] = field(default_factory=list)  # events of each rank, then replay of each
    chats: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # rank, body

    def __post_init__(self) -> None:
        self._seen: set[tuple[int, str]] = set()
        self._hits = {"device": 0, "pool": 0}
        self.publishers: list[Publisher] = []

    @property
    def events(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[0]}"

    @property
    def replay(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[self.ranks]}"

    def section(self, engine_id: str, **fields: Any) -> dict[str, Any]:
        """Return the engine's section of a right configuration."""
        right = {"id": engine_id, "url": self.url, "events": self.events, "replay": self.replay}
        return right | fields

    async def handle(self, request: web.Request) -> web.Response:
        authorised = request.path == "/health" or not self.key
        if not authorised and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if given := self.answers.get(request.path):
            return web.Response(status=given[0], text=given[1])
        body = await request.json() if request.can_read_body else {}
        match request.path:
            case "/health":
                return web.Response()
            case "/version":
                return web.json_response({"version": "0.32.0"})
            case "/v1/models":
                card = {"id": self.name, "max_model_len": 4096}
                return web.json_response({"data": [card]})
            case "/metrics":
                return web.Response(text=self._metrics())
            case "/kv_event_sources":
                return web.json_response(self._sources())
            case "/v1/chat/completions/render":
                return web.json_response({"token_ids": self.renderer.chat(body).token_ids})
            case "/tokenize":
                if "messages" in body:
                    return web.json_response({"tokens": self.renderer.chat(body).token_ids})
                special = body["add_special_tokens"]
                ids = self.renderer.encode(body["prompt"], add_special_tokens=special)
                return web.json_response({"tokens": ids})
            case "/detokenize":
                text = self.renderer.tokenizer.decode(body["tokens"], skip_special_tokens=False)
                return web.json_response({"prompt": text})
            case "/v1/chat/completions":
                return web.json_response(await self._chat(request, body))
        return web.Response(status=404)

    async def _chat(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        rank = int(request.headers.get("X-data-parallel-rank", 0))
        self.chats.append((rank, body))
        ids = self.renderer.chat(body).token_ids
        salt, size = body["cache_salt"], self.recipe.block_size
        chain = self.recipe.chain(ids, salt)
        keys = {f"m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{d.hex()}" for d in chain}
        most = (len(ids) - 1) // size * size
        cached = 0
        if self.caches and (rank, salt) in self._seen:
            cached = most
            self._hits["device"] += most
        elif self.caches and self.master is not None and keys <= self.master.keys:
            cached = most
            self._hits["pool"] += most
        self._seen.add((rank, salt))
        if self.master is not None:
            self.master.keys |= keys
        if not cached and self.publishes and self.publishers:
            # In two events, as a long prompt is computed in pieces.
            half = len(chain) // 2
            for start, end in ((0, half), (half, len(chain))):
                event = BlockStored(
                    block_hashes=list(chain.ids[start:end]),
                    parent_block_hash=chain.ids[start - 1] if start else None,
                    token_ids=ids[start * size : end * size],
                    block_size=size,
                    medium="GPU",
                    extra_keys=[(salt,) if i == 0 else None for i in range(start, end)]
                    if self.tells_salt
                    else None,
                    group_idx=0,
                    lookahead_token_ids=self.lookahead,
                )
                await self.publishers[rank].publish(event, rank)
        details = {"cached_tokens": cached} if self.tells_cached and cached else None
        return {"usage": {"prompt_tokens": len(ids), "prompt_tokens_details": details}}

    def _metrics(self) -> str:
        labels = {
            "block_size": str(self.recipe.block_size),
            "prefix_caching_hash_algo": self.recipe.algorithm,
            "enable_prefix_caching": "True",
        } | self.labels
        told = ",".join(f'{name}="{value}"' for name, value in labels.items())
        lines = [
            f"vllm:prefix_cache_hits_total {self._hits['device']}",
            f"vllm:external_prefix_cache_hits_total {self._hits['pool']}",
        ]
        if self.tells_hashing:
            lines.append(f"vllm:cache_config_info{{{told}}} 1.0")
        return "\n".join(lines) + "\n"

    def _sources(self) -> dict[str, Any]:
        return {
            str(rank): {
                "enable_kv_cache_events": self.events_on,
                "publisher": "zmq" if self.events_on else "null",
                "endpoint": f"tcp://*:{self.ports[rank]}",
                "replay_endpoint": f"tcp://*:{self.ports[self.ranks + rank]}",
            }
            for rank in range(self.ranks)
        }


@contextlib.asynccontextmanager
async def running(
    *servers: FakeEngine | FakeMaster, ports: list[int] | None = None
) -> AsyncIterator[None]:
    """Run engines and masters; `ports` are free ones, two for each rank of each engine."""
    context = zmq.asyncio.Context()
    free = iter(ports or ())
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        for server in servers:
            runner = web.AppRunner(_app(server))
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            if isinstance(server, FakeEngine):
                server.ports = [next(free) for _ in range(2 * server.ranks)]
                for rank in range(server.ranks if server.events_on else 0):
                    own = server.ports[rank], server.ports[server.ranks + rank]
                    publisher = Publisher(context, *own)
                    stack.push_async_callback(publisher.close)
                    server.publishers.append(publisher)
        yield


def _app(server: FakeEngine | FakeMaster) -> web.Application:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    return app
