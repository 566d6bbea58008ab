"""Looking blocks up in the pool keeps none of them alive (must show 4)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import Ports, fleet_file

from connector.blocks import Chain
from connector.model import PoolConfig, PoolKeys
from connector.pool import KeySchema
from connector.stack import Stack
from gateway.index.pool import LookupState, PoolIndex

SIZE = 64 * 1024
SEGMENT = 64 * 2**20
GROUP = 200  # blocks of each group: together 60% of the segment


class PoolClient:
    """A client that lends memory to the pool and puts objects into it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, *command: Any) -> Any:
        """Have a command done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("ANSWER"):
                return json.loads(line.removeprefix("ANSWER"))
        raise AssertionError("the client has ended")


@contextlib.contextmanager
def pool_client(interpreter: Path) -> Iterator[PoolClient]:
    """Run a client."""
    script = Path(__file__).with_name("pool_client.py")
    with subprocess.Popen(
        [str(interpreter), str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield PoolClient(process)
        finally:
            process.kill()


@pytest.fixture
def master(interpreter: Path, tmp_path: Path, ports: Ports) -> Iterator[Stack]:
    """A master of its own, without engines."""
    fleet = fleet_file(interpreter, tmp_path, [{"id": "none"}], ports)
    with Stack(fleet, log_dir=tmp_path, engines=[]) as running:
        yield running


def chain(name: str) -> Chain:
    """Return a chain of blocks that nobody has computed."""
    digests = [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(GROUP)]
    return Chain(32, 32, b"".join(digests))


async def test_looked_up_keys_survive_eviction_no_better_than_untouched_ones(
    master: Stack, interpreter: Path, ports: Ports
) -> None:
    schema = KeySchema(PoolKeys(model="tiny"), "tiny")
    chains = {name: chain(name) for name in ("looked up", "untouched", "leased")}
    keys = {
        name: [schema.first(digest.hex()) for digest in blocks] for name, blocks in chains.items()
    }
    settings = master.fleet.master
    pool = PoolIndex(PoolConfig(master=settings.url, deadline=5.0), schema)
    with pool_client(interpreter) as client:
        address = f"{settings.host}:{settings.rpc_port}"
        assert (
            await asyncio.to_thread(
                client.ask, "setup", f"127.0.0.9:{ports.next()}", address, SEGMENT
            )
            == 0
        )
        # The groups alternate, so that none is older than another.
        mixed = [key for row in zip(*keys.values(), strict=True) for key in row]
        assert set(await asyncio.to_thread(client.ask, "put", mixed, SIZE)) == {0}

        for _ in range(3):
            answer = await pool.lookup(chains["looked up"])
            assert (answer.state, answer.blocks) == (LookupState.OK, GROUP)
            assert await pool.verify(chains["looked up"]) == GROUP
        # What vLLM itself does, and a router must not: this asks with a lease.
        assert set(await asyncio.to_thread(client.ask, "exist", keys["leased"])) == {1}

        pressure = [f"pressure {i}" for i in range(SEGMENT // SIZE)]
        await asyncio.to_thread(client.ask, "put", pressure, SIZE)
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"{settings.url}/get_all_keys")).text
    await pool.close()
    left = set(text.split())
    survived = {name: sum(key in left for key in group) / GROUP for name, group in keys.items()}
    assert survived["untouched"] < 0.7, f"there was pressure: {survived}"
    assert survived["leased"] > 0.9, f"a lease would have shown: {survived}"
    assert abs(survived["looked up"] - survived["untouched"]) <= 0.05, survived
