"""`mooncake-gateway`: serve, check, reference."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import policies as _registered  # noqa: F401 - importing it fills the registry of policies
from connector import version
from connector.document import Fault
from gateway.app import reader
from gateway.config import ConfigError, Faulty, Upstream, engine_key
from gateway.prompt.reader import Threads
from gateway.reading import Reading
from gateway.reference import markdown
from gateway.serve import run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="An OpenAI-compatible front door for a fleet of vLLM engines that share a Mooncake pool.",
)
app.callback()(version.options)

ConfigPath = Annotated[
    Path,
    typer.Option("-c", "--config", help="The configuration file.", show_default=True),
]


@app.command()
def serve(config: ConfigPath = Path("gateway.yaml")) -> None:
    """Serve the data plane and the admin listener until SIGTERM or Ctrl-C.

    Point any OpenAI client at http://HOST:PORT/v1. Decisions are shown by
    GET /gateway/decisions on the admin listener, metrics by GET /metrics.
    Environment variables MOONCAKE_GATEWAY_<SECTION>__<KEY> override the file,
    e.g. MOONCAKE_GATEWAY_LISTEN__PORT=8080.
    """
    reading = _read(config)
    if reading.config is None:
        _fail(reading.error([*reading.faults, *faults_beyond(reading)]))
    try:
        run(reading.config, config)
    except Faulty as error:
        _fail(reading.error(error.faults))
    except ConfigError as error:
        _fail(error)


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
