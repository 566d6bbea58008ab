"""The `doctor` command."""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.status import Status

from connector.doctor.config import ConfigUnreadable, read
from connector.doctor.report import Report
from connector.doctor.run import Saying, examine
from connector.doctor.show import PLAIN_WIDTH, show
from connector.model import ModelConfig

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def doctor(
    config: Annotated[
        Path, typer.Option("-c", "--config", metavar="FILE", help="The gateway's configuration.")
    ] = Path("gateway.yaml"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document with all findings.")
    ] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Examine this model only; may be repeated."),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            help="Examine this engine only; may be repeated. One alone cannot show that the pool "
            "is shared.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="S", min=0.1, help="Longest wait for any single answer.")
    ] = 15.0,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Variable that holds the engines' API key, where it is not the one that "
            "`upstream.api_key_env` names.",
        ),
    ] = None,
) -> None:
    """Prove that a gateway's configuration and its engines agree, or say where not.

    Sends every engine a short chat that nobody has sent before (one token is
    generated, three requests per engine) and compares what becomes of it with
    the `models` section of gateway.yaml: token ids, block hashes, KV events and
    their replay, keys in the pool, cached tokens. What differs is named, with
    what is expected, what was found and what to do. The gateway need not run;
    the engines must.

    Exits with 0 if nothing failed (warnings may remain), 1 if something did,
    2 for a wrong argument or a configuration that cannot be read, 130 on Ctrl-C.
    """
    try:
        configured = read(config)
    except ConfigUnreadable as error:
        _refuse(f"the configuration cannot be used:\n{error}")
    models = configured.models
    _known(model or (), [m.name for m in models], "model")
    _known(engine or (), [e.id for m in models for e in m.engines], "engine")
    key = _key(api_key_env or configured.api_key_env)
    try:
        report = _examined(models, model or (), engine or (), timeout, key)
    except KeyboardInterrupt:
        typer.echo("mooncake-connector: interrupted; nothing is left running", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if not report.findings:
        _refuse("no engine of --engine is one of --model")
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        show(_console(), report, models)
    raise typer.Exit(EXIT_FAILED if report.status == "fail" else 0)


def _examined(
    models: Sequence[ModelConfig],
    only: Sequence[str],
    engines: Sequence[str],
    seconds: float,
    api_key: str | None,
) -> Report:
    errors = Console(stderr=True)
    waiting: AbstractContextManager[Status | None] = (
        errors.status("examining") if errors.is_terminal else nullcontext()
    )
    with waiting as status:
        saying: Saying = status.update if status is not None else lambda what: None
        return asyncio.run(
            examine(
                models,
                only=only,
                engines=engines,
                seconds=seconds,
                api_key=api_key,
                saying=saying,
            )
        )


def _console() -> Console:
    narrow = sys.stdout.isatty() or os.environ.get("COLUMNS")
    return Console(highlight=False, width=None if narrow else PLAIN_WIDTH)


def _known(given: Sequence[str], known: Sequence[str], what: str) -> None:
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
            _refuse(f"no {what} {name!r} in the configuration; {hint}")


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        _refuse(f"{variable} is to hold the engines' API key, and is not set; export it")
    if not key.isascii() or not key.isprintable():
        _refuse(f"the key in {variable} does not fit into a header")
    return key


def _refuse(message: str) -> NoReturn:
    typer.echo(f"mooncake-connector: {message}", err=True)
    raise typer.Exit(EXIT_USAGE)
