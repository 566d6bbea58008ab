"""How `replay` shows turns, sums and progress: lines for people, JSON lines for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from loadtest.hits import Hit, Summary
from loadtest.trace.turn import Turn

_PROGRESS_SECONDS = 10.0
_WIDEST = 24


class Printer(Protocol):
    """Shows turns as they end, and the sums."""

    def turn(self, hit: Hit) -> None:
        """Show a turn."""
        ...

    def summary(self, summary: Summary, *, planned: int, seconds: float) -> None:
        """Show the sums."""
        ...


class JsonLines:
    """A JSON object per turn, then `{"summary": ...}`."""

    def turn(self, hit: Hit) -> None:
        """Show a turn."""
        self._line({**asdict(hit), "expected": hit.expected})

    def summary(self, summary: Summary, *, planned: int, seconds: float) -> None:
        """Show the sums."""
        self._line({"summary": {**summary.as_json(), "planned": planned, "seconds": seconds}})

    def _line(self, content: dict[str, Any]) -> None:
        typer.echo(json.dumps(content, ensure_ascii=False))


class TextLines:
    """A table that grows by a line per turn, for people."""

    def __init__(self, turns: list[Turn]) -> None:
        self._width = max(7, min(_WIDEST, max(len(turn.session) for turn in turns)))
        self._begun = False

    def turn(self, hit: Hit) -> None:
        """Show a turn."""
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
        """Show the sums."""
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
def progress(total: int, hits: list[Hit]) -> Iterator[Callable[[], None]]:
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
