"""The `mooncake-loadtest` command. Each subcommand's work is in a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadtest import replay_command
from loadtest.replay import DEFAULT_MAX_TOKENS, ReplayError
from loadtest.trace.chat import Answers
from loadtest.trace.conversations import Format

app = typer.Typer(
    name="mooncake-loadtest",
    help="Traffic for a gateway or an engine, and what it shows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback()
def _several() -> None:
    """Keep the subcommand's name on the command line even while there is only one."""


@app.command()
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
    options = replay_command.Options(
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
        status = replay_command.run(options)
    except replay_command.UsageError as error:
        typer.echo(f"mooncake-loadtest: {error}", err=True)
        raise typer.Exit(replay_command.EXIT_USAGE) from error
    except ReplayError as error:
        typer.echo(f"mooncake-loadtest: {error}", err=True)
        raise typer.Exit(replay_command.EXIT_FAILED) from error
    raise typer.Exit(status)


def main() -> None:
    """Entry point of the command."""
    app()
