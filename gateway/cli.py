"""`mooncake-gateway`: serve, check, reference."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import policies as _registered  # noqa: F401 - importing it fills the registry of policies
from gateway.app import ModelFault, readers
from gateway.config import ConfigError, GatewayConfig, engine_key, fault_at, load
from gateway.prompt.reader import Threads
from gateway.reference import markdown
from gateway.serve import run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="An OpenAI-compatible front door for a fleet of vLLM engines that share a Mooncake pool.",
)

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
    settings = _load(config)
    try:
        run(settings, config)
    except ModelFault as fault:
        _fail(fault_at(config, fault.where, fault.message))
    except ConfigError as error:
        _fail(error)


@app.command()
def check(config: ConfigPath = Path("gateway.yaml")) -> None:
    """Validate a configuration without starting anything.

    Reads the file, the tokenizers and templates it names, and the environment
    variables it refers to. Exits with 0 if it can be used, else with 2 and a
    line for each fault: file, line, key, what is wrong and what would be right.
    """
    settings = _load(config)
    threads = Threads()
    try:
        readers(settings, threads)
        engine_key(settings.upstream)
    except ModelFault as fault:
        _fail(fault_at(config, fault.where, fault.message))
    except ConfigError as error:
        _fail(error)
    finally:
        threads.shutdown()
    engines = sum(len(model.engines) for model in settings.models)
    typer.echo(
        f"{config}: ok: {len(settings.models)} model(s), {engines} engine(s), "
        f"policy {settings.policy}"
    )


@app.command()
def reference() -> None:
    """Print the configuration reference (docs/configuration.md) as Markdown."""
    typer.echo(markdown(), nl=False)


def _load(path: Path) -> GatewayConfig:
    try:
        return load(path)
    except ConfigError as error:
        _fail(error)


def _fail(error: ConfigError) -> NoReturn:
    typer.echo(f"mooncake-gateway: the configuration cannot be used:\n{error}", err=True)
    sys.exit(2)


def main() -> None:
    """Run the command line."""
    app()
