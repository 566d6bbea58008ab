"""An emulated fleet beside the gateway, for `mooncake-gateway serve --emulate N`.

It is a process of its own, the load test's: the gateway knows it only as it
knows any fleet, by a configuration file and over the network. It has its own
process group, so that Ctrl-C reaches the gateway alone, which then lets turns end
before it ends the fleet; and it ends by itself if the gateway is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.config import ConfigError

log = logging.getLogger("gateway.emulate")

MARK = "# Written by `mooncake-gateway serve --emulate`, and written anew by the next one.\n"
_GRACE = 5.0


@dataclass(frozen=True, slots=True)
class Emulated:
    """A running emulated fleet: the configuration for it, and what it said of itself."""

    config: Path
    model: str
    master: str
    control: str
    engines: tuple[str, ...]


@contextlib.contextmanager
def fleet(engines: int, config: Path | None) -> Iterator[Emulated]:
    """Run an emulated fleet of so many engines; its configuration is written to `config`.

    None: into a folder that goes with the fleet.

    Raises:
        ConfigError: if the file is somebody's own, or the fleet cannot start.
    """
    with contextlib.ExitStack() as stack:
        if config is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-gateway-"))
            config = Path(folder) / "gateway.yaml"
        stack.enter_context(_held(config))
        command = [sys.executable, "-m", "loadtest", "emulate", "--engines", str(engines)]
        command += ["--json", "--with-parent", "--gateway-config", str(config)]
        process = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,
            )
        )
        stack.callback(_end, process)
        said = _ready(process)
        config.write_text(MARK + config.read_text(encoding="utf-8"), encoding="utf-8")
        threading.Thread(target=_watch, args=(process,), daemon=True).start()
        yield Emulated(
            config,
            said["model"],
            said["master"],
            said["control"],
            tuple(engine["url"] for engine in said["engines"]),
        )


@contextlib.contextmanager
def _held(config: Path) -> Iterator[None]:
    """Keep the file for this fleet: two that write one configuration would steer each other."""
    try:
        config.parent.mkdir(parents=True, exist_ok=True)
        file = config.open("a+b")
    except OSError as error:
        raise ConfigError(f"{config} cannot be written: {error.strerror}") from error
    with file:
        file.seek(0)
        if (content := file.read()) and not content.startswith(MARK.encode()):
            raise ConfigError(
                f"{config} is a configuration of its own, and --emulate would overwrite it; "
                "leave -c out, or name a file that is not there yet"
            )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another `serve --emulate` uses {config}; end it, or name another file with -c"
            ) from error
        yield


def _ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for the line that says that all of it listens."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if line:
        ready: dict[str, Any] = json.loads(line)["ready"]
        return ready
    assert process.stderr is not None
    said = process.stderr.read().strip()
    raise ConfigError(f"the emulated fleet ended with status {process.wait()}:\n{said}")


def _watch(process: subprocess.Popen[str]) -> None:
    """Log what the fleet says on standard error, and that it has ended."""
    assert process.stderr is not None
    for line in process.stderr:
        log.info("%s", line.rstrip())
    if process.wait() != 0:
        log.error("the emulated fleet has ended with status %s", process.returncode)


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
