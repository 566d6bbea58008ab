"""The `replay` command: its arguments, and the status that it ends with."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer

from loadtest.hits import Hit, summarise
from loadtest.replay import DEFAULT_MAX_TOKENS, Player, ReplayError, first_model
from loadtest.replay_output import JsonLines, Printer, TextLines, progress
from loadtest.trace.chat import Answers
from loadtest.trace.conversations import Format, read
from loadtest.trace.lines import TraceError
from loadtest.trace.turn import Turn

EXIT_FAILED = 1
"""A turn failed, or the URL does not say what it serves."""
EXIT_USAGE = 2
"""The file or an argument cannot be used."""
EXIT_INTERRUPTED = 130
"""Ctrl-C, as a shell reports it."""


def replay(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Conversations; plain or .gz.", show_default=False),
    ],
    url: Annotated[
        str, typer.Option(help="The gateway or engine; with or without /v1.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="The model to ask.", show_default="first of /v1/models")
    ] = None,
    format_: Annotated[
        Format, typer.Option("--format", help="Of the file; auto goes by its first line.")
    ] = "auto",
    answers: Annotated[
        Answers,
        typer.Option(
            help="What later turns of a conversation have in their history: the recorded answers, "
            "where there are any, or the engine's own."
        ),
    ] = "recorded",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest answer, in tokens.",
            show_default=f"the request's, else {DEFAULT_MAX_TOKENS}",
        ),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(min=1, help="Sessions at once; 1 plays the turns in the file's order."),
    ] = 1,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Play the first N turns.", show_default="all")
    ] = None,
    session: Annotated[
        list[str] | None,
        typer.Option(help="Play this session only; may be repeated.", show_default="all"),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable with the API key to send."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a turn may take.")] = 600.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object per turn, then `summary`.")
    ] = False,
) -> None:
    """Play a file of conversations and print what each turn hit.

    FILE has a JSON object per line: a conversation (`session`, `messages`), played
    turn by turn; a chat request's body (has a `model`; `session` or `session_id` if
    it has one); or a row of an LMCache agent trace. The gateway's debug headers say
    which engine a turn went to and what was expected to be cached there, the
    engine's usage what was.

    Exits with 0 if every turn was answered, 1 if one failed, 2 if the file or an
    argument cannot be used, 130 on Ctrl-C.
    """
    options = Options(
        file=file,
        format_=format_,
        url=url,
        model=model,
        max_tokens=max_tokens,
        concurrency=concurrency,
        limit=limit,
        sessions=tuple(session or ()),
        answers=answers,
        api_key_env=api_key_env,
        timeout=timeout,
        as_json=as_json,
    )
    try:
        status = run(options)
    except UsageError as error:
        typer.echo(f"mooncake-loadtest: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from error
    except ReplayError as error:
        typer.echo(f"mooncake-loadtest: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from error
    raise typer.Exit(status)


class UsageError(Exception):
    """An argument or the file cannot be used; the text says what would be right."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command's arguments. `timeout` in seconds; None is: not given."""

    file: Path
    format_: Format
    url: str
    model: str | None
    max_tokens: int | None
    concurrency: int
    limit: int | None
    sessions: tuple[str, ...]
    answers: Answers
    api_key_env: str | None
    timeout: float
    as_json: bool


def run(options: Options) -> int:
    """Play the file, print what each turn hit and the sums; return the exit status.

    Raises:
        UsageError: before anything was sent.
        loadtest.replay.ReplayError: if a model is not named and the URL names none.
    """
    turns = choose(options)
    client = _client(options)
    printer: Printer = JsonLines() if options.as_json else TextLines(turns)
    hits: list[Hit] = []
    began, interrupted = time.monotonic(), False
    with progress(len(turns), hits) as tick:

        def note(hit: Hit) -> None:
            hits.append(hit)
            printer.turn(hit)
            tick()

        async def play() -> None:
            async with client:
                model = options.model or await first_model(client)
                player = Player(
                    client, model, max_tokens=options.max_tokens, timeout=options.timeout
                )
                await player.play(turns, note, concurrency=options.concurrency)

        try:
            asyncio.run(play())
        except KeyboardInterrupt:
            interrupted = True
    summary = summarise(hits)
    printer.summary(summary, planned=len(turns), seconds=time.monotonic() - began)
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if summary.failed else 0


def choose(options: Options) -> list[Turn]:
    """Read the turns that are to be played.

    Raises:
        UsageError: if the file cannot be read, or has no such session.
    """
    try:
        turns = read(options.file, options.format_, options.answers)
    except TraceError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"cannot read {options.file}: {error.strerror or error}") from error
    if options.sessions:
        there = dict.fromkeys(turn.session for turn in turns)
        missing = [name for name in options.sessions if name not in there]
        if missing:
            known = ", ".join(list(there)[:10]) + (", ..." if len(there) > 10 else "")
            raise UsageError(f"{options.file} has no session {missing[0]!r}; it has {known}")
        turns = [turn for turn in turns if turn.session in options.sessions]
    return turns[: options.limit]


def _client(options: Options) -> httpx.AsyncClient:
    headers = {}
    if options.api_key_env is not None:
        key = os.environ.get(options.api_key_env)
        if not key:
            raise UsageError(f"--api-key-env: {options.api_key_env} is not set in the environment")
        headers["Authorization"] = f"Bearer {key}"
    base = options.url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise UsageError(f"--url: {options.url!r} is no http:// or https:// URL")
    try:
        # Reached directly, whatever proxy the environment names: a proxy's cache or delay would
        # be taken for the gateway's. The whole turn has a time limit, single reads have none.
        return httpx.AsyncClient(
            base_url=base,
            headers=headers,
            timeout=httpx.Timeout(None, connect=min(options.timeout, 10.0)),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
    except httpx.InvalidURL as error:
        raise UsageError(f"--url: {options.url!r}: {error}") from error
