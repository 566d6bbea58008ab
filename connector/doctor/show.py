"""The report for people: a short table for the model and for each engine, remedies below."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from connector.doctor.report import Finding, Report, Status
from connector.model import ModelConfig

PLAIN_WIDTH = 120
"""Columns where the output is no terminal and nothing says how wide it is."""

_MARKS: dict[Status, tuple[str, str, str]] = {
    "ok": ("✓", "ok", "green"),
    "warn": ("!", "!", "yellow"),
    "fail": ("✗", "x", "red"),
}


def show(console: Console, report: Report, models: Sequence[ModelConfig]) -> None:
    """Print a report; `models` give the engines' order and URLs."""
    for model in models:
        findings = [finding for finding in report.findings if finding.model == model.name]
        if not findings:
            continue
        console.print(Text(f"model {model.name}", style="bold"))
        _part(console, None, [f for f in findings if f.engine is None])
        for engine in model.engines:
            of_engine = [f for f in findings if f.engine == engine.id]
            for rank in sorted({f.rank for f in of_engine}, key=lambda rank: rank or 0):
                title = f"engine {engine.id}" + (f" rank {rank}" if rank is not None else "")
                own = [f for f in of_engine if f.rank == rank]
                _part(console, f"{title}  {engine.url}", own)
        console.print()
    console.print(_sum(report))


def _part(console: Console, title: str | None, findings: Sequence[Finding]) -> None:
    if title and findings:
        console.print(Text(f"  {title}", style="bold"))
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    unicode = console.encoding.lower().startswith("utf")
    for finding in findings:
        mark, plain, colour = _MARKS[finding.status]
        name = finding.check if finding.cause is None else f"{finding.check}: {finding.cause}"
        words = finding.found + (f"; expected: {finding.expected}" if finding.expected else "")
        table.add_row(Text(mark if unicode else plain, style=colour), name, Text(words))
    console.print(Padding(table, (0, 0, 0, 4)))
    remedies = list(dict.fromkeys(f.remedy for f in findings if f.remedy))
    for remedy in remedies:
        advice = Table.grid(padding=(0, 1))
        advice.add_row("→" if unicode else "->", Text(remedy))
        console.print(Padding(advice, (0, 0, 0, 6)))


def _sum(report: Report) -> Text:
    failed, warned, fine = (report.count(status) for status in ("fail", "warn", "ok"))
    if not failed and not warned:
        return Text(f"All is well: {fine} checks.", style="green")
    words = f"{failed} failed, {warned} to be looked at, {fine} well."
    return Text(words, style="red" if failed else "yellow")
