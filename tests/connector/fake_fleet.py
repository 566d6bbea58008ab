"""A fleet of small HTTP servers in the place of vLLM and Mooncake, for life-cycle tests."""

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from connector.fleet import FleetFile

# Started as `python` and as `mooncake_master`; what it should do wrong stands in FAKE.
_PROGRAM = """\
import http.server, json, os, signal, subprocess, sys

arguments = [part for argument in sys.argv[1:] for part in argument.split("=", 1)]
named = dict(zip(arguments, arguments[1:]))
fake = os.environ.get("FAKE", "")
if fake == "die":
    print("ValueError: the first thing that went wrong")
    for line in range(40):
        print("noise", line)
    sys.exit(3)
if fake == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
print("environment", json.dumps(dict(os.environ)))
print("child", child.pid)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if fake == "ill" else 200)
        self.end_headers()

    def do_DELETE(self):
        print("DELETE", self.path)
        self.do_GET()


ports = [int(named[name]) for name in ("--port", "--metrics_port", "--http_metadata_server_port")
         if name in named]
servers = [http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) for port in ports]
for server in servers[1:]:
    __import__("threading").Thread(target=server.serve_forever, daemon=True).start()
servers[0].serve_forever()
"""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for probe in sockets:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in sockets]
    for probe in sockets:
        probe.close()
    return ports


def fake_fleet(
    directory: Path,
    *,
    engines: int = 2,
    metadata: bool = False,
    env: dict[str, dict[str, str]] | None = None,
) -> FleetFile:
    """A fleet whose programs are fakes in `directory`; `env` is further environment by engine."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("python", "mooncake_master"):
        (directory / name).write_text(f"#!{sys.executable}\n{_PROGRAM}")
        (directory / name).chmod(0o755)
    ports = free_ports(3 + 3 * engines)
    segments = metadata
    return FleetFile.model_validate(
        {
            "python": str(directory / "python"),
            "master": {
                "rpc_port": ports[0],
                "http_port": ports[1],
                "metadata_port": ports[2] if metadata else None,
            },
            "engine": {"model": "some/tiny", "device": "cpu", "protocol": "tcp"},
            "engines": [
                {
                    "id": name,
                    "port": ports[3 + 3 * place],
                    "events_port": ports[4 + 3 * place],
                    "replay_port": ports[5 + 3 * place],
                    "segment": f"127.0.0.{2 + place}:17101" if segments else None,
                    "env": (env or {}).get(name, {}),
                }
                for place, name in enumerate("abcdefgh"[:engines])
            ],
        }
    )


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Return when `condition` is true; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def logged(log: Path, word: str) -> str:
    """The rest of the last line in a log that starts with `word`."""
    lines = [line for line in log.read_text().splitlines() if line.startswith(word + " ")]
    return lines[-1].partition(" ")[2]


def without_overrides() -> dict[str, str]:
    """This environment, less what would name another interpreter."""
    return {key: item for key, item in os.environ.items() if key != "MOONCAKE_ENGINE_PYTHON"}
