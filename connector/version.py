"""`--version`, alike in every command of the distribution: `app.callback()(version.options)`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

DISTRIBUTION = "mooncake-gateway"


def installed() -> str:
    """Return the distribution's version, or `unknown` where it runs without being installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown (not installed)"


def _show(context: typer.Context, asked: bool) -> None:
    if asked:
        typer.echo(f"{context.info_name} {installed()}")
        raise typer.Exit


def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Take the options that stand before any subcommand."""
