"""`mooncake-loadtest emulate`: runs an emulated fleet until it is told to end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import typer
import uvloop
import yaml
from rich.console import Console

from connector import tiny_model
from connector.blocks import HashingError
from connector.pool import PoolError
from connector.tokenizer import TokenizerError
from loadtest.emulator.fleet import Fleet
from loadtest.emulator.settings import Settings

EXIT_FAILED = 1
EXIT_USAGE = 2
_PARENT_LOOK = 0.2


def default_tokenizer() -> Path:
    """Return the directory of the tokenizer for where none is named; make it if need be."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    version = f"py{sys.version_info.major}{sys.version_info.minor}"
    directory = Path(base) / "mooncake-gateway" / f"tiny-{tiny_model.FORMAT}-{version}"
    try:
        tiny_model.write(directory)
    except tiny_model.TinyModelError as error:
        _fail(str(error), EXIT_FAILED)
    except OSError as error:
        _fail(
            f"cannot write a tokenizer to {directory}: {error.strerror or error}; set "
            "XDG_CACHE_HOME to a directory that can be written to, or name one with --tokenizer",
            EXIT_FAILED,
        )
    return directory


def run(
    settings: Settings, *, gateway_config: Path | None, as_json: bool, with_parent: bool
) -> None:
    """Run a fleet until SIGINT or SIGTERM, or until the parent ends. Exits on errors."""
    parent = os.getppid() if with_parent else None
    # Prompts come one by one; several threads for one cost more than they give.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if settings.context < settings.max_model_len:
        settings = replace(settings, max_model_len=settings.context)
    try:
        fleet = Fleet(settings)
    except (TokenizerError, HashingError, PoolError, ValueError) as error:
        _fail(str(error), EXIT_USAGE)
    try:
        uvloop.run(_serve(fleet, gateway_config, as_json=as_json, parent=parent))
    except OSError as error:
        _fail(f"cannot start: {error.strerror or error}", EXIT_FAILED)


async def _serve(
    fleet: Fleet, gateway_config: Path | None, *, as_json: bool, parent: int | None
) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    async with fleet:
        if gateway_config is not None:
            _write(gateway_config, fleet)
        _say(fleet, gateway_config)
        if as_json:
            ready = fleet.ready() | {
                "pid": os.getpid(),
                "gateway_config": None if gateway_config is None else str(gateway_config),
            }
            typer.echo(json.dumps({"ready": ready}))
            sys.stdout.flush()
        if parent is not None:
            _watch(parent, ended)
        await ended.wait()


def _watch(parent: int, ended: asyncio.Event) -> None:
    # Linux could signal the parent's end, but takes that of the thread that
    # started this process for it.
    if os.getppid() == parent:
        asyncio.get_running_loop().call_later(_PARENT_LOOK, _watch, parent, ended)
    else:
        ended.set()


def _write(path: Path, fleet: Fleet) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(fleet.gateway_config(), sort_keys=False, allow_unicode=True)
    path.write_text(text, encoding="utf-8")


def _say(fleet: Fleet, gateway_config: Path | None) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    settings = fleet.settings
    limits = settings.limits
    for engine in fleet.engines.values():
        events = f", events {engine.events}" if engine.events else ""
        console.print(f"engine {engine.id}: {engine.url}{events}")
    if fleet.master is not None:
        console.print(f"master: {fleet.master.url}")
    console.print(
        f"model {settings.model}: {limits.blocks} blocks of {limits.block_size} tokens per engine, "
        f"{settings.algorithm}, seed {settings.seed}"
    )
    console.print(f"faults: {fleet.control_url}/emulator")
    if gateway_config is not None:
        console.print(f"wrote {gateway_config}")
    console.print("Ctrl-C ends all of it.")


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"mooncake-loadtest: {message}", err=True)
    raise typer.Exit(status)
