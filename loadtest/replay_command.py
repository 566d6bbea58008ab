"""The `replay` command behind its arguments: what it prints, and the status it ends with."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from loadtest.hits import Hit, Summary, summarise
from loadtest.replay import Player, first_model
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

_PROGRESS_SECONDS = 10.0
_WIDEST = 24


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
    printer: Printer = _Json() if options.as_json else _Lines(turns)
    hits: list[Hit] = []
    began, interrupted = time.monotonic(), False
    with _progress(len(turns), hits) as tick:

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


class Printer(Protocol):
    """Shows turns as they end, and the sums."""

    def turn(self, hit: Hit) -> None:
        """Show a turn."""
        ...

    def summary(self, summary: Summary, *, planned: int, seconds: float) -> None:
        """Show the sums."""
        ...


class _Json:
    def turn(self, hit: Hit) -> None:
        self._line({**asdict(hit), "expected": hit.expected})

    def summary(self, summary: Summary, *, planned: int, seconds: float) -> None:
        self._line({"summary": {**summary.as_json(), "planned": planned, "seconds": seconds}})

    def _line(self, content: dict[str, Any]) -> None:
        typer.echo(json.dumps(content, ensure_ascii=False))


class _Lines:
    def __init__(self, turns: list[Turn]) -> None:
        self._width = max(7, min(_WIDEST, max(len(turn.session) for turn in turns)))
        self._begun = False

    def turn(self, hit: Hit) -> None:
        if not self._begun:
            self._begun = True
            self._row(
                "session", "turn", "status", "prompt", "cached", "hit", "TTFT", "total",
                "engine", "expected",
            )  # fmt: skip
        expected = "-" if hit.device is None else f"device={hit.device},pool={hit.pool or 0}"
        share = f"{hit.cached / hit.prompt:.0%}" if hit.cached is not None and hit.prompt else "-"
        self._row(
            hit.session[: self._width], hit.turn, _or_dash(hit.status), _or_dash(hit.prompt),
            _or_dash(hit.cached), share, _seconds(hit.ttft), _seconds(hit.seconds),
            hit.engine or "-", expected,
        )  # fmt: skip
        if hit.error is not None:
            typer.echo(f"  session {hit.session}, turn {hit.turn} failed: {hit.error}")

    def _row(self, session: str, *cells: object) -> None:
        turn, status, prompt, cached, share, ttft, total, engine, expected = cells
        typer.echo(
            f"{session:<{self._width}} {turn:>4} {status:>6} {prompt:>7} {cached:>7} {share:>5} "
            f"{ttft:>8} {total:>8}  {engine:<8} {expected}"
        )

    def summary(self, summary: Summary, *, planned: int, seconds: float) -> None:
        played = str(planned) if summary.turns == planned else f"{summary.turns} of {planned}"
        typer.echo(f"\n{played} turns in {seconds:.1f} s, {summary.failed} failed")
        answered = summary.turns - summary.failed
        if not answered:
            return
        typer.echo(f"prompt tokens    {summary.prompt:>10,}")
        if summary.share is not None:
            typer.echo(f"reported cached  {summary.cached:>10,}  {summary.share:.1%}")
        if summary.without_expected < answered:
            expected = summary.device + summary.pool
            typer.echo(
                f"expected cached  {expected:>10,}  device {summary.device:,}, "
                f"pool {summary.pool:,}; overrated {summary.overrated:,}, "
                f"underrated {summary.underrated:,}"
            )
        if summary.ttft:
            marks = ", ".join(f"{mark} {time:.3f} s" for mark, time in summary.ttft.items())
            typer.echo(f"TTFT             {marks}")
        if summary.without_cached:
            typer.echo(
                f"{summary.without_cached} turns without cached tokens: start the engines with "
                "--enable-prompt-tokens-details"
            )
        if summary.without_expected:
            typer.echo(
                f"{summary.without_expected} turns without engine and expectation: set "
                "debug_headers: true in gateway.yaml"
            )


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


@contextmanager
def _progress(total: int, hits: list[Hit]) -> Iterator[Callable[[], None]]:
    """Yield what is to be called at every turn's end; it shows on standard error how far we are.

    Where the turns' own lines go to the same terminal, they are the progress.
    """
    console = Console(stderr=True, highlight=False)
    if console.is_terminal and not Console().is_terminal:
        columns = (TextColumn("turns"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # Lines printed meanwhile belong to standard output, wherever that goes.
        with Progress(*columns, console=console, redirect_stdout=False) as progress:
            task = progress.add_task("turns", total=total)
            yield lambda: progress.advance(task)
        return
    said = time.monotonic()

    def tick() -> None:
        nonlocal said
        if not console.is_terminal and time.monotonic() - said > _PROGRESS_SECONDS:
            said = time.monotonic()
            failed = sum(hit.error is not None for hit in hits)
            console.print(f"{len(hits)} of {total} turns, {failed} failed")

    yield tick
