"""The `mooncake-connector` command: run a fleet, show it, examine it, make a tiny model."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn
from urllib.parse import urlsplit

import typer
import yaml
from rich.console import Console
from rich.live import Live
from rich.table import Table

from connector import tiny_model, version
from connector.doctor.cli import doctor
from connector.fleet import (
    FleetError,
    FleetFile,
    gateway_models,
    guessed_ranks,
    load,
    without_tokenizer,
)
from connector.reference import fleet_markdown
from connector.stack import Member, Stack, StackError

app = typer.Typer(
    name="mooncake-connector",
    help="Run vLLM engines that share a Mooncake pool, see what they are handed, and prove that "
    "a gateway's configuration fits them (`doctor`).\n\n"
    "A fleet file names one Mooncake master and the engines; `docs/fleet.md`, or `reference` "
    "here, describes it, `examples/real/fleet.yaml` is one that runs on two cores without a GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.callback()(version.options)

FleetArgument = Annotated[
    Path, typer.Argument(metavar="FLEET.yaml", help="The fleet file.", show_default=False)
]

GATEWAY_LISTEN = {"host": "127.0.0.1", "port": 8000}
GATEWAY_ADMIN = {"host": "127.0.0.1", "port": 9100}
"""Where a gateway listens that is started with the configuration written here."""

EXIT_FAILED = 1
"""The fleet did not start, or a part of it that it needs has ended."""
EXIT_USAGE = 2
"""The fleet file or an argument is wrong."""
EXIT_INTERRUPTED = 130
"""Ctrl-C, as a shell reports it; 143 is SIGTERM."""


@app.command()
def up(
    fleet_file: FleetArgument,
    log_dir: Annotated[
        Path, typer.Option(help="Where logs and the generated Mooncake files go.")
    ] = Path("build/fleet"),
    gateway_config: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.yaml",
            help="Write a gateway.yaml for this fleet: port 8000, admin on 9100, debug headers on.",
        ),
    ] = None,
    then: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Run a command once all is healthy; when it ends, so does everything.",
        ),
    ] = None,
    then_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where COMMAND answers 200 once it is ready; waited for."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that the engines may take to start.")
    ] = 300.0,
) -> None:
    """Start the master and the engines, and keep them until Ctrl-C.

    Engines start side by side. When one ends later it is said, and the rest runs on.
    Everything is ended with this command, however it ends. Ctrl-C exits with 130,
    SIGTERM with 143, a failed start with 1, a wrong fleet file with 2; with --then
    the command's own status is passed on.
    """
    fleet = _load(fleet_file)
    console = Console(stderr=True, highlight=False)
    if gateway_config is not None:
        _write_gateway_config(fleet, gateway_config)
        console.print(f"wrote {gateway_config}")
    on_terminal = console.is_terminal
    stack = Stack(
        fleet,
        log_dir=log_dir,
        start_timeout=timeout,
        on_change=(lambda member: None) if on_terminal else _line_printer(console),
    )
    with _terminable(), _no_traceback(console):
        try:
            display = Live(_Overview(stack), console=console) if on_terminal else nullcontext()
            with display:
                stack.start()
            _say_where(console, stack)
            if then is None:
                console.print("Ctrl-C ends all of it.")
                status = _watch(console, stack, None)
            else:
                base, health = _split_url(then_url)
                command = stack.run(shlex.split(then), name="command", url=base, health=health)
                if base is not None:
                    stack.wait_healthy([command])
                    _say_how(console, stack, base, gateway_config is not None)
                status = _watch(console, stack, command)
        finally:
            stack.stop()
    raise typer.Exit(status)


@app.command("tiny-model")
def make_tiny_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to make.")],
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 2,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 64,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads.")] = 2,
    head_dim: Annotated[
        int, typer.Option(help="Size of a head; what vLLM's CPU kernels take.")
    ] = 32,
    vocab: Annotated[int, typer.Option(help="Entries of the vocabulary.")] = 4096,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Make a small Qwen3 with random weights, a tokenizer and a chat template.

    For tests and demonstrations: vLLM serves it like any model, and it answers
    nonsense. Takes a few seconds; a directory that was made with the same
    parameters is left alone.
    """
    started = time.monotonic()
    try:
        shape = tiny_model.Shape(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=vocab,
            seed=seed,
        )
        made = tiny_model.write(directory, shape)
    except tiny_model.TinyModelError as error:
        _fail(str(error), EXIT_USAGE)
    except OSError as error:
        _fail(f"cannot write {directory}: {error.strerror or error}", EXIT_FAILED)
    seconds = time.monotonic() - started
    typer.echo(f"made {directory} in {seconds:.1f} s" if made else f"{directory} is there already")


@app.command()
def config(fleet_file: FleetArgument) -> None:
    """Print what the master and every engine are handed, without starting anything.

    Command lines and environments can be pasted into a shell or a unit file; the
    `models:` list belongs into the gateway.yaml of a gateway in front of the fleet.
    Where a model's tokenizer files are not here, a warning says how to get them.
    """
    fleet = _load(fleet_file)
    models = _gateway_models(fleet)
    typer.echo("# master")
    typer.echo(shlex.join(fleet.master.argv(fleet.master_binary)))
    for engine in fleet.engines:
        file = Path(f"engine-{engine.id}.mooncake.json")
        typer.echo(f"\n# engine {engine.id}: {file}")
        typer.echo(json.dumps(engine.mooncake_config(fleet.master).as_json(), indent=2))
        typer.echo(f"# engine {engine.id}: environment and command")
        for name, value in engine.environment(file).items():
            typer.echo(f"{name}={shlex.quote(value)} \\")
        typer.echo(shlex.join(engine.argv(fleet.interpreter)))
    typer.echo("\n# gateway.yaml")
    typer.echo(_gateway_yaml(fleet, {"models": models}), nl=False)


@app.command()
def reference() -> None:
    """Print the reference of the fleet file (docs/fleet.md) as Markdown."""
    typer.echo(fleet_markdown(), nl=False)


app.command()(doctor)


def main() -> None:
    """Entry point of the command."""
    app()


def _load(path: Path) -> FleetFile:
    try:
        return load(path)
    except FleetError as error:
        _fail(f"the fleet file cannot be used:\n{error}", EXIT_USAGE)


def _gateway_models(fleet: FleetFile) -> list[dict[str, Any]]:
    try:
        models = gateway_models(fleet)
    except FleetError as error:
        _fail(str(error), EXIT_USAGE)
    warnings = [
        f"the gateway cannot be exact for {name} yet: {remedy}"
        for name, remedy in without_tokenizer(fleet).items()
    ]
    for warning in [*warnings, *guessed_ranks(fleet)]:
        typer.echo(f"mooncake-connector: warning: {warning}", err=True)
    return models


def _write_gateway_config(fleet: FleetFile, path: Path) -> None:
    content = {
        "listen": GATEWAY_LISTEN,
        "admin": GATEWAY_ADMIN,
        "policy": "pool_aware",
        "debug_headers": True,
        "log": {"format": "text"},
        "models": _gateway_models(fleet),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_gateway_yaml(fleet, content), encoding="utf-8")
    except OSError as error:
        _fail(f"cannot write {path}: {error.strerror or error}", EXIT_FAILED)


def _gateway_yaml(fleet: FleetFile, content: object) -> str:
    """Return a gateway's configuration; a tokenizer that is not there says what to do about it."""
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000)
    for name, remedy in without_tokenizer(fleet).items():
        line = f"  tokenizer: {name}\n"
        text = text.replace(line, f"  # TODO: {remedy}\n{line}")
    return text


def _watch(console: Console, stack: Stack, command: Member | None) -> int:
    """Say who ends; returns the status to exit with once the command or everything has ended."""
    while True:
        ended = stack.wait_exit()
        if ended is command:
            assert ended.process is not None
            status = ended.process.poll()
            assert status is not None
            return status if status >= 0 else 128 - status
        log = "" if ended.log is None else f"; its log is {ended.log}"
        console.print(f"{ended.name} has ended ({ended.ending}){log}", style="red")
        if not any(member.running for member in stack.engines.values()):
            console.print("no engine is left", style="red")
            return EXIT_FAILED


def _split_url(url: str | None) -> tuple[str | None, str]:
    """Base and path of the URL that tells when the command is ready."""
    if url is None:
        return None, ""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}", parts.path or "/health"


def _say_where(console: Console, stack: Stack) -> None:
    console.print(f"Mooncake master: {stack.master.url}")
    for engine_id, member in stack.engines.items():
        served = stack.fleet.engine_settings(engine_id).name
        console.print(f"{member.name}: {member.url} serves {served}")
    console.print(f"logs: {stack.log_dir}")


# Long enough for several prefix blocks, so that asking it again shows a hit.
_QUESTION = (
    "You are a coding agent in a large repository. Read the failing test, find the function that "
    "it calls, explain in one paragraph why the test fails, and then write the smallest change "
    "that makes it pass without changing the test itself. Do not touch generated files. When you "
    "are done, run the whole test suite and report what you have seen, file by file."
)


def _say_how(console: Console, stack: Stack, url: str, is_gateway: bool) -> None:
    body = {
        "model": stack.fleet.engines[0].name,
        "messages": [{"role": "user", "content": _QUESTION}],
        "max_tokens": 16,
    }
    console.print("\nTry it, twice: the second time its prefix blocks are cached.")
    console.print(
        f"  curl -i {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}",
        soft_wrap=True,
    )
    if is_gateway:
        host, port = GATEWAY_ADMIN.values()
        console.print(f"See how it decided: http://{host}:{port}/gateway/decisions")
    console.print("Ctrl-C ends all of it.\n")


def _line_printer(console: Console) -> Callable[[Member], None]:
    def show(member: Member) -> None:
        match member.state:
            case "starting":
                console.print(f"{member.name}: starting")
            case "healthy":
                console.print(f"{member.name}: healthy after {member.healthy_after:.1f} s")
            case "exited":
                console.print(f"{member.name}: ended ({member.ending})")
            case "stopped":
                console.print(f"{member.name}: stopped")

    return show


class _Overview:
    """A table of the stack's members that is drawn anew while they start."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for member in self._stack.members:
            match member.state:
                case "stopped":
                    row = ("[dim]waiting", "")
                case "starting":
                    row = ("[yellow]starting", f"{member.seconds:.0f} s")
                case "healthy":
                    row = ("[green]healthy", f"after {member.healthy_after:.1f} s")
                case "exited":
                    row = ("[red]ended", member.ending)
            table.add_row(member.name, *row)
        return table


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind like Ctrl-C, so that the fleet is ended in order."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _no_traceback(console: Console) -> Iterator[None]:
    try:
        yield
    except (StackError, FleetError) as error:
        _fail(str(error), EXIT_FAILED)
    except OSError as error:
        _fail(f"cannot start the fleet: {error}", EXIT_FAILED)
    except KeyboardInterrupt:
        console.print("interrupted; everything was ended")
        sys.exit(EXIT_INTERRUPTED)


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"mooncake-connector: {message}", err=True)
    raise typer.Exit(status)
