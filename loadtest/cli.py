"""`mooncake-loadtest`: emulate, replay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from connector import version
from loadtest import replay_command
from loadtest.emulator import command
from loadtest.emulator.faults import FaultError, Faults, parse_option
from loadtest.emulator.settings import Settings
from loadtest.engine import Limits

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Emulates engines, and plays conversations against a gateway.",
)
app.callback()(version.options)

app.command()(replay_command.replay)


@app.command()
def emulate(
    engines: Annotated[int, typer.Option(min=1, help="Engines, with ids e1 to eN.")] = 4,
    model: Annotated[str, typer.Option(help="Served model name.")] = "emulated",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory with tokenizer.json and the chat template; without it a small one is "
            "made in the cache directory (a few seconds, once).",
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a prefix block.")] = 32,
    blocks: Annotated[int, typer.Option(min=2, help="Blocks of an engine's device cache.")] = 4096,
    pool_blocks: Annotated[int, typer.Option(min=1, help="Blocks of the pool.")] = 65536,
    max_model_len: Annotated[
        int, typer.Option(min=2, help="Longest sequence in tokens; at most what the cache holds.")
    ] = 32768,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests in one step.")] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens in one step: the largest chunk of a prompt.")
    ] = 2048,
    hash_algorithm: Annotated[
        str, typer.Option(help="sha256, sha256_cbor, xxhash or xxhash_cbor.")
    ] = "sha256_cbor",
    seed: Annotated[str, typer.Option(help="Seed of the hashes (`PYTHONHASHSEED`).")] = "0",
    speed: Annotated[float, typer.Option(help="So many times as fast as the model's rates.")] = 1.0,
    host: Annotated[str, typer.Option(help="Address of all listeners.")] = "127.0.0.1",
    base_port: Annotated[
        int, typer.Option(help="Port of e1; the others follow. 0 takes free ones.")
    ] = 0,
    master_port: Annotated[int, typer.Option(help="Port of the master; 0 takes a free one.")] = 0,
    control_port: Annotated[
        int, typer.Option(help="Port of the faults' listener; 0 takes a free one.")
    ] = 0,
    client_ttl: Annotated[
        float, typer.Option(min=0, help="Seconds that a dead engine's blocks stay listed.")
    ] = 10.0,
    events: Annotated[bool, typer.Option(help="Publish KV events.")] = True,
    pool: Annotated[bool, typer.Option(help="Share a pool, with a master.")] = True,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID:FAULT[=VALUE]",
            help="A fault from the start, e.g. e2:slow=4 or master:hang; may be repeated. "
            "docs/emulator.md lists them.",
        ),
    ] = None,
    gateway_config: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.yaml",
            help="Write a gateway.yaml for this fleet: port 8000, admin on 9100, debug headers on.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON when all of it listens.")
    ] = False,
    with_parent: Annotated[
        bool, typer.Option("--with-parent", help="End when the process that started it ends.")
    ] = False,
) -> None:
    """Run emulated vLLM engines, and the master of the pool that they share.

    No GPU and no model: an engine's cache, its scheduling and its times are a
    model's; its HTTP answers, KV events and metrics are those of vLLM. Answers
    are words drawn by the prompt. Ctrl-C and SIGTERM end all of it with status
    0; ports that are taken with 1, wrong arguments with 2.
    """
    try:
        faults: dict[str, Faults] = dict(parse_option(text) for text in fault or ())
        settings = Settings(
            tokenizer=tokenizer or command.default_tokenizer(),
            engines=engines,
            model=model,
            host=host,
            base_port=base_port,
            master_port=master_port,
            control_port=control_port,
            limits=Limits(block_size, blocks, max_num_seqs, max_num_batched_tokens),
            algorithm=hash_algorithm,
            seed=seed,
            speed=speed,
            max_model_len=max_model_len,
            pool_blocks=pool_blocks if pool else None,
            client_ttl=client_ttl,
            events=events,
            faults=faults,
        )
    except (FaultError, ValueError) as error:
        _fail(str(error))
    command.run(settings, gateway_config=gateway_config, as_json=as_json, with_parent=with_parent)


def _fail(message: str) -> NoReturn:
    typer.echo(f"mooncake-loadtest: {message}", err=True)
    raise typer.Exit(command.EXIT_USAGE)


def main() -> None:
    """Entry point of the command."""
    app()
