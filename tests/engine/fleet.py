"""The real fleet of the engine tests: one master, three engines, a gateway in front.

`a` and `b` serve `tiny` (sha256_cbor, blocks of 32) and share the pool; `c`
serves `tiny-64` (sha256, blocks of 64) under a cache prefix of its own.
"""

from __future__ import annotations

import contextlib
import re
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
import zmq
from prometheus_client.parser import text_string_to_metric_families

from connector.events import BlockStored, decode
from connector.fleet import FleetFile
from connector.stack import Stack

CHAT = "/v1/chat/completions"
END_OF_REPLAY = b"\xff" * 8


class Ports:
    """Free ports, held until the moment they are handed out, each only once."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def next(self) -> int:
        """Return a free port."""
        while True:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port: int = probe.getsockname()[1]
            if port not in self._given:
                self._given.add(port)
                return port


def fleet_file(python: Path, model: Path, engines: Sequence[dict[str, Any]], ports: Ports) -> Any:
    """Return a fleet of CPU engines on free ports, with distinct segments."""
    return FleetFile.model_validate(
        {
            "python": str(python),
            "master": {
                "rpc_port": ports.next(),
                "http_port": ports.next(),
            },
            "engine": {
                "model": str(model),
                "device": "cpu",
                "dtype": "float32",
                "protocol": "tcp",
                "max_model_len": 8192,
                "max_num_seqs": 8,
                "num_blocks": 512,
                "global_segment_size": "256MB",
                "local_buffer_size": "64MB",
                "extra_args": ["--enforce-eager", "--enable-scale-out"],
            },
            "engines": [
                {
                    "port": ports.next(),
                    "events_port": ports.next(),
                    "replay_port": ports.next(),
                    "segment": f"127.0.0.{2 + i}:{ports.next()}",
                    **engine,
                }
                for i, engine in enumerate(engines)
            ],
        }
    )


@dataclass
class Front:
    """A running gateway in front of the fleet, and what tests ask it and the fleet."""

    stack: Stack
    url: str
    admin: str
    client: httpx.Client

    def policy(self, name: str) -> None:
        """Let a policy act."""
        self.client.put(f"{self.admin}/gateway/policy", json={"policy": name}).raise_for_status()

    def chat(self, body: dict[str, Any], **headers: str) -> Turn:
        """Send one turn; it must be answered."""
        answer = self.client.post(f"{self.url}{CHAT}", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return Turn(answer)

    def explain(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return what the gateway knows of a body."""
        answer = self.client.post(f"{self.admin}/gateway/explain", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def engine_url(self, engine: str) -> str:
        """Return an engine's own URL."""
        url = self.stack.engine(engine).url
        assert url is not None
        return url

    def rendered(self, engine: str, body: dict[str, Any]) -> list[int]:
        """Return the engine's own token ids of a chat."""
        answer = self.client.post(f"{self.engine_url(engine)}{CHAT}/render", json=body)
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["token_ids"]
        return ids

    def events(self, engine: str) -> list[BlockStored]:
        """Return every block that the engine's replay says was stored on its device."""
        settings = self.stack.fleet.engine_settings(engine)
        stored: list[BlockStored] = []
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.rcvtimeo = 10_000
            dealer.connect(f"tcp://127.0.0.1:{settings.replay_port}")
            dealer.send_multipart([b"", bytes(8)])
            while True:
                _, _, seq, payload = dealer.recv_multipart()
                if seq == END_OF_REPLAY:
                    return stored
                batch = decode(payload)
                stored += [
                    event
                    for event in batch.events
                    if isinstance(event, BlockStored) and (event.medium or "").upper() == "GPU"
                ]

    def pool_keys(self) -> set[str]:
        """Return every key that the master knows."""
        text = self.client.get(f"{self.stack.fleet.master.url}/get_all_keys").text
        return set(text.split())

    def metric(self, engine: str, name: str) -> float:
        """Return the sum over a metric's series on an engine."""
        text = self.client.get(f"{self.engine_url(engine)}/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        )

    def until_pooled(self, body: dict[str, Any]) -> dict[str, Any]:
        """Wait until all full blocks of a prompt are in the pool; return its explanation."""
        return until(
            lambda: self.explain(body),
            lambda found: (
                sum(span["tokens"] for span in found["residency"]["pool"])
                == len(found["hashes"]) * found["block_size"]
            ),
        )


@dataclass
class Turn:
    """An answered turn: where it went, what was expected there, what the engine had."""

    answer: httpx.Response

    @property
    def engine(self) -> str:
        return self.answer.headers["x-gateway-engine"]

    @property
    def expected(self) -> dict[str, int]:
        pairs = re.findall(r"(\w+)=(\d+)", self.answer.headers["x-gateway-expected-cached"])
        return {source: int(tokens) for source, tokens in pairs}

    @property
    def prompt_tokens(self) -> int:
        tokens: int = self.answer.json()["usage"]["prompt_tokens"]
        return tokens

    @property
    def cached(self) -> int:
        details = self.answer.json()["usage"]["prompt_tokens_details"]
        return details["cached_tokens"] if details else 0

    @property
    def text(self) -> str:
        return self.answer.json()["choices"][0]["message"]["content"] or ""


def until(look: Callable[[], Any], reached: Callable[[Any], bool], seconds: float = 30.0) -> Any:
    """Look at a foreign process again and again until something is so."""
    deadline = time.monotonic() + seconds
    while not reached(found := look()):
        assert time.monotonic() < deadline, f"not reached in {seconds} s; last seen: {found}"
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def front(stack: Stack, directory: Path, ports: Ports, **settings: Any) -> Iterator[Front]:
    """Run a gateway in front of a running stack."""
    listen, admin = ports.next(), ports.next()
    config: dict[str, Any] = {
        "listen": {"port": listen},
        "admin": {"port": admin},
        "debug_headers": True,
        "models": stack.gateway_config(),
        **settings,
    }
    path = directory / f"gateway-{listen}.yaml"
    path.write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{listen}"
    member = stack.run(
        [sys.executable, "-W", "error", "-m", "gateway", "serve", "-c", str(path)],
        name="gateway",
        url=url,
        log=directory / f"gateway-{listen}.log",
    )
    stack.wait_healthy([member])
    with httpx.Client(timeout=120, trust_env=False) as client:
        made = Front(stack, url, f"http://127.0.0.1:{admin}", client)
        until(lambda: client.get(f"{url}/ready").json(), lambda r: r["ready"] and not r["degraded"])
        yield made


def prompt(seed: str, words: int) -> str:
    """Return text that no other seed's shares a block with."""
    lines = [f"{seed} step {i}: read the file, change line {i * 7} and run" for i in range(words)]
    return "\n".join(lines)


@contextlib.contextmanager
def tap(url: str) -> Iterator[tuple[str, bytearray]]:
    """Listen before an engine; yield the address and what clients have sent through it."""
    host, _, port = url.removeprefix("http://").partition(":")
    heard = bytearray()

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((host, int(port))) as there:
                back = threading.Thread(target=self._pump, args=(there, self.request))
                back.start()
                self._pump(self.request, there, heard)
                back.join()

        def _pump(
            self, source: socket.socket, sink: socket.socket, copy: bytearray | None = None
        ) -> None:
            while piece := source.recv(65536):
                if copy is not None:
                    copy += piece
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Relay) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", heard
        finally:
            server.shutdown()
            thread.join()
