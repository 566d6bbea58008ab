"""`mooncake-gateway`: serve, check, reference."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import policies as _registered  # noqa: F401 - importing it fills the registry of policies
from connector import version
from connector.document import Fault
from gateway.app import reader
from gateway.config import ConfigError, Faulty, Upstream, engine_key
from gateway.emulate import Emulated, fleet
from gateway.prompt.reader import Threads
from gateway.reading import Reading
from gateway.reference import markdown
from gateway.serve import Serving, run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="An OpenAI-compatible front door for a fleet of vLLM engines that share a Mooncake pool.",
)
app.callback()(version.options)

# Long enough for some prefix blocks.
_LONG = "Read the file, change its third line and run the tests. " * 8

ConfigPath = Annotated[
    Path,
    typer.Option("-c", "--config", help="The configuration file.", show_default=True),
]


@app.command()
def serve(
    config: Annotated[
        Path | None,
        typer.Option("-c", "--config", help="The configuration file.  [default: gateway.yaml]"),
    ] = None,
    emulate: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Serve N emulated engines and an emulated pool, which are started beside the "
            "gateway: no GPU, no model. The configuration for them is written to --config.",
        ),
    ] = None,
) -> None:
    """Serve the data plane and the admin listener until SIGTERM or Ctrl-C.

    Point any OpenAI client at http://HOST:PORT/v1. Decisions are shown by
    GET /gateway/decisions on the admin listener, metrics by GET /metrics.
    Environment variables MOONCAKE_GATEWAY_<SECTION>__<KEY> override the file,
    e.g. MOONCAKE_GATEWAY_LISTEN__PORT=8080.
    """
    if emulate is None:
        _serve(config or Path("gateway.yaml"))
        return
    try:
        with fleet(emulate, config) as emulated:
            _serve(emulated.config, lambda data, admin: _introduce(emulated, data, admin))
    except ConfigError as error:
        _fail(error)


def _serve(config: Path, on_serving: Serving | None = None) -> None:
    reading = _read(config)
    if reading.config is None:
        _fail(reading.error([*reading.faults, *faults_beyond(reading)]))
    try:
        run(reading.config, config, on_serving)
    except Faulty as error:
        _fail(reading.error(error.faults))
    except ConfigError as error:
        _fail(error)


def _introduce(emulated: Emulated, data: str, admin: str) -> None:
    """Say what was started and what to try."""
    body = {"model": emulated.model, "messages": [{"role": "user", "content": _LONG}]}
    engines = ", ".join(emulated.engines)
    conversations, replay = Path("examples/conversations.jsonl"), ""
    if conversations.exists():
        command = Path(sys.argv[0]).with_name("mooncake-loadtest")
        replay = f"  {command} replay {conversations} --url {data}    # some conversations\n"
    typer.echo(
        f"""
{len(emulated.engines)} emulated engines ({engines})
and an emulated pool master ({emulated.master}) run beside the gateway.
It serves {data}, with its admin listener at {admin},
by the configuration {emulated.config}. Try, in another terminal:

  curl -i {data}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{json.dumps(body)}'

Send it twice: the headers say where it went (x-gateway-engine) and how much of it was
there (x-gateway-expected-cached), `cached_tokens` in the answer what the engine found.

  curl -s '{admin}/gateway/decisions?limit=1' | python3 -m json.tool    # why it went there
  curl -s -X PUT {admin}/gateway/policy -H 'Content-Type: application/json' \\
    -d '{{"policy": "round_robin"}}'                              # another policy
{replay}  curl -s -X POST {emulated.control}/emulator/e2/stop   # lose one; start: it is back

Answers are words drawn at random. docs/emulator.md has more faults. Ctrl-C ends all of it.
""",
        err=True,
    )


@app.command()
def check(config: ConfigPath = Path("gateway.yaml")) -> None:
    """Validate a configuration without starting anything.

    Reads the file, the tokenizers and templates it names, and the environment
    variables it refers to. Exits with 0 if it can be used, else with 2 and a
    line for each fault: file, line, key, what is wrong and what would be right.
    """
    reading = _read(config)
    found = [*reading.faults, *faults_beyond(reading)]
    if found or reading.config is None:
        _fail(reading.error(found))
    settings = reading.config
    engines = sum(len(model.engines) for model in settings.models)
    typer.echo(
        f"{config}: ok: {len(settings.models)} model(s), {engines} engine(s), "
        f"policy {settings.policy}"
    )


@app.command()
def reference() -> None:
    """Print the configuration reference (docs/configuration.md) as Markdown."""
    typer.echo(markdown(), nl=False)


def _read(path: Path) -> Reading:
    try:
        return Reading(path)
    except ConfigError as error:
        _fail(error)


def faults_beyond(reading: Reading) -> list[Fault]:
    """Return the faults of what the file names: tokenizers, templates, variables.

    What can be judged is judged even where the file itself has faults.
    """
    found: list[Fault] = []
    threads = Threads()
    for position, model in reading.models.items():
        try:
            reader(position, model, threads)
        except Faulty as error:
            found += error.faults
    threads.shutdown()
    upstream = reading.data.get("upstream")
    variable = upstream.get("api_key_env") if isinstance(upstream, dict) else None
    if isinstance(variable, str):
        try:
            engine_key(Upstream(api_key_env=variable))
        except Faulty as error:
            found += error.faults
    return found


def _fail(error: ConfigError) -> NoReturn:
    typer.echo(f"mooncake-gateway: the configuration cannot be used:\n{error}", err=True)
    sys.exit(2)


def main() -> None:
    """Run the command line."""
    app()
