"""Runs a fleet on this host: a Mooncake master and vLLM engines, as real processes.

A `Stack` is a context manager, for tests and for `mooncake-connector up`:

```python
with Stack(fleet, log_dir=Path("build/logs")) as stack:     # returns when all are healthy
    httpx.get(stack.engine("a").url + "/v1/models")
    stack.kill("a")                                         # as a crash would
    stack.restart("a")
```

Engines start side by side. Nothing outlives the stack, however it ends: leaving
the context, an exception, Ctrl-C, or a SIGKILL of this process (`process.Guard`).
It blocks and belongs to one thread at a time; asynchronous callers use a thread.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

import httpx

from connector.fleet import PYTHON_VARIABLE, FleetFile, gateway_models
from connector.process import Guard, Process, end_all
from connector.settings import EngineSettings

# An exception's last line in a Python log, or an error line of Mooncake's (glog).
_ERROR = re.compile(r"\b[A-Za-z.]*(Error|Exception): |^[EF]\d{4} ")

State = Literal["stopped", "starting", "healthy", "exited"]


class StackError(Exception):
    """The fleet cannot be started, or a part of it ended or did not become healthy."""


class Member:
    """A part of the stack: the master, an engine, or a further command."""

    def __init__(self, name: str, url: str | None, log: Path | None) -> None:
        self.name = name
        """`master`, `engine a`, ..."""
        self.url = url
        """Base URL of its HTTP server, if it has one."""
        self.health = "/health"
        """Path below it that answers 200 when it is healthy."""
        self.log = log
        """File with its output; None: it writes to this process's output."""
        self.process: Process | None = None
        self.healthy_after: float | None = None
        """Seconds from its start until it answered; None before that."""
        self.expected = False
        """Whether it was us who ended it."""

    @property
    def state(self) -> State:
        """Where it stands; `exited` covers whoever ended by itself or was killed."""
        if self.process is None:
            return "stopped"
        if self.process.poll() is not None:
            return "exited"
        return "starting" if self.healthy_after is None else "healthy"

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None

    @property
    def seconds(self) -> float:
        """Seconds since its start, 0 where it never was started."""
        return 0.0 if self.process is None else time.monotonic() - self.process.started

    @property
    def ending(self) -> str:
        """How it ended, for people: `exit status 1` or `SIGKILL`."""
        status = None if self.process is None else self.process.poll()
        if status is None:
            return "running"
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"


class Stack:
    """A master and its engines as subprocesses. See the module for what it promises."""

    def __init__(
        self,
        fleet: FleetFile,
        *,
        log_dir: Path,
        engines: Iterable[str] | None = None,
        start_timeout: float = 300.0,
        stop_grace: float = 10.0,
        on_change: Callable[[Member], None] | None = None,
    ) -> None:
        """Nothing is started yet.

        `log_dir` receives `master.log`, `engine-ID.log` and the generated Mooncake
        files. `engines` are those that `start` starts (None: all). `on_change` is
        called whenever a member was started, became healthy or was seen to have ended.
        """
        self.fleet = fleet
        self.log_dir = log_dir.absolute()
        self.master = Member("master", fleet.master.url, self.log_dir / "master.log")
        self.engines = {
            engine.id: Member(
                f"engine {engine.id}", engine.url, self.log_dir / f"engine-{engine.id}.log"
            )
            for engine in fleet.engines
        }
        self.commands: list[Member] = []
        """What `run` started beside the fleet."""
        self._wanted = None if engines is None else tuple(engines)
        self._start_timeout = start_timeout
        self._stop_grace = stop_grace
        self._on_change = on_change or (lambda member: None)
        self._guard: Guard | None = None

    @property
    def members(self) -> list[Member]:
        """Everything in the stack, in the order of its start."""
        return [self.master, *self.engines.values(), *self.commands]

    def engine(self, engine_id: str) -> Member:
        """One engine; `FleetError` where there is none of that id."""
        return self.engines[self.fleet.engine_settings(engine_id).id]

    def gateway_config(self) -> list[dict[str, Any]]:
        """The `models:` list of a gateway.yaml for this fleet (`fleet.gateway_models`)."""
        return gateway_models(self.fleet)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the master and the engines and return when all of them are healthy.

        Raises `StackError` when a port is taken, a program is missing, one of them
        ends early (with the end of its log) or none of it is done in time; nothing
        is left running then.
        """
        wanted = tuple(self.engines) if self._wanted is None else self._wanted
        try:
            self.start_master()
            self.start_engines(wanted)
        except BaseException:
            self.stop()
            raise

    def start_master(self) -> None:
        """Start the master and wait until it answers."""
        self._check_ports("master")
        argv = self.fleet.master.argv(self.fleet.master_binary)
        self._launch(self.master, argv, self._environment({}))
        self.wait_healthy([self.master])

    def start_engines(self, engine_ids: Iterable[str] | None = None, *, wait: bool = True) -> None:
        """Start engines side by side (None: all that do not run) and wait until all are healthy."""
        if engine_ids is None:
            ids = [name for name, member in self.engines.items() if not member.running]
        else:
            ids = [self.fleet.engine_settings(name).id for name in engine_ids]
        for engine_id in ids:
            if self.engines[engine_id].running:
                raise StackError(f"engine {engine_id} runs already")
            self._check_ports(f"engine {engine_id}")
        for engine_id in ids:
            self._start_engine(engine_id)
        if wait:
            self.wait_healthy([self.engines[engine_id] for engine_id in ids])

    def _start_engine(self, engine_id: str) -> None:
        settings = self.fleet.engine_settings(engine_id)
        config = self.log_dir / f"engine-{engine_id}.mooncake.json"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(
            json.dumps(settings.mooncake_config(self.fleet.master).as_json(), indent=2) + "\n"
        )
        self._forget_segment(settings)
        env = self._environment(settings.environment(config))
        # The look-up socket's path holds nothing but its number: two fleets of one host
        # would meet in /tmp.
        env["VLLM_RPC_BASE_PATH"] = str(self._guarded().directory)
        self._launch(self.engines[engine_id], settings.argv(self.fleet.interpreter), env)

    def _forget_segment(self, settings: EngineSettings) -> None:
        # An engine that was killed leaves its entries in the HTTP metadata server, which
        # then refuses the next one of that name. The master's own clean-up
        # (enable_metadata_cleanup_on_timeout) misses them in 0.3.13: they are stored
        # under the key as it is quoted in the URL, and it looks for the plain one.
        master = self.fleet.master
        if master.metadata_port is None or settings.segment is None:
            return
        for kind in ("rpc_meta", "ram"):
            key = quote(f"mooncake/{kind}/{settings.segment}", safe="")
            try:
                httpx.delete(f"{master.metadata_server}?key={key}", timeout=5.0, trust_env=False)
            except httpx.TransportError as error:
                raise StackError(
                    f"the master's metadata server does not answer: {error}"
                ) from error

    def wait_healthy(
        self, members: Sequence[Member] | None = None, timeout: float | None = None
    ) -> None:
        """Return when `members` (None: all that are starting) answer on their health path.

        Raises `StackError` when one of them ends first, or after `timeout` seconds
        (None: the stack's own); the members stay as they are.
        """
        waiting = [
            member
            for member in (self.members if members is None else members)
            if member.url is not None and member.state != "stopped"
        ]
        limit = self._start_timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            while True:
                for member in list(waiting):
                    if not member.running:
                        self._on_change(member)
                        raise StackError(_ended_early(member))
                    if member.healthy_after is None and _answers(client, member):
                        member.healthy_after = member.seconds
                        self._on_change(member)
                    if member.healthy_after is not None:
                        waiting.remove(member)
                if not waiting:
                    return
                if time.monotonic() > deadline:
                    raise StackError(_not_in_time(waiting[0], limit))
                time.sleep(0.1)

    def kill(self, engine_id: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to an engine and all its processes; SIGKILL returns when it is gone.

        SIGSTOP and SIGCONT freeze and thaw it.
        """
        self._signal(self.engine(engine_id), number)

    def kill_master(self, number: int = signal.SIGKILL) -> None:
        """The same for the master."""
        self._signal(self.master, number)

    def restart(self, engine_id: str, *, wait: bool = True) -> None:
        """End an engine if it runs, and start it anew."""
        self._end([self.engine(engine_id)])
        self.start_engines([engine_id], wait=wait)

    def restart_master(self) -> None:
        """End the master if it runs, and start it anew: the pool's index is then empty."""
        self._end([self.master])
        self.start_master()

    def run(
        self,
        argv: Sequence[str],
        *,
        name: str = "command",
        url: str | None = None,
        health: str = "/health",
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Member:
        """Start a further command that is ended before the fleet is.

        With `url` it can be waited for (`wait_healthy`) until `health` below it answers 200.

        Without `log` it writes to this process's output; without `env` it has this
        process's environment. Raises `StackError` when somebody else listens at `url`.
        """
        if url is not None:
            at = httpx.URL(url)
            _check_port(at.host, at.port or 80, f"{name}: port")
        member = Member(name, url, log)
        member.health = health
        self.commands.append(member)
        self._launch(member, argv, dict(os.environ if env is None else env))
        return member

    def wait_exit(self) -> Member:
        """Block until a member ends that was not ended by the stack; each is returned once."""
        while True:
            for member in self.members:
                if member.state == "exited" and not member.expected:
                    member.expected = True
                    self._on_change(member)
                    return member
            time.sleep(0.1)

    def stop(self) -> None:
        """End everything: commands, then engines, then the master. Can be called again."""
        try:
            for group in (self.commands, list(self.engines.values()), [self.master]):
                self._end(group)
        except BaseException:  # a second Ctrl-C: no more waiting
            for member in self.members:
                if member.process is not None:
                    member.process.kill()
            raise
        finally:
            guard, self._guard = self._guard, None
            if guard is not None:
                guard.close()

    def _end(self, members: Sequence[Member]) -> None:
        ending = [member for member in members if member.process is not None]
        for member in ending:
            member.expected = True
        end_all([member.process for member in ending if member.process], self._stop_grace)
        for member in ending:
            member.process = member.healthy_after = None
            self._on_change(member)

    def _signal(self, member: Member, number: int) -> None:
        if member.process is None:
            raise StackError(f"{member.name} does not run")
        if number == signal.SIGKILL:
            member.expected = True
            member.process.kill()
        else:
            member.process.signal(number)

    def _guarded(self) -> Guard:
        if self._guard is None:
            self._guard = Guard()
        return self._guard

    def _launch(self, member: Member, argv: Sequence[str], env: Mapping[str, str]) -> None:
        if member.running:
            raise StackError(f"{member.name} runs already")
        if member.log is not None:
            member.log.parent.mkdir(parents=True, exist_ok=True)
            if member.process is None and not member.expected:
                member.log.unlink(missing_ok=True)  # an earlier run's
        if "/" in argv[0] and not os.access(argv[0], os.X_OK):
            raise StackError(
                f"{member.name}: {argv[0]} is not there or not a program; name the interpreter "
                f"that has vLLM (`python:` in the fleet file, or {PYTHON_VARIABLE} in the "
                "environment)"
            )
        member.healthy_after, member.expected = None, False
        member.process = Process(argv, guard=self._guarded(), env=env, log=member.log)
        self._on_change(member)

    def _environment(self, own: Mapping[str, str]) -> dict[str, str]:
        # What belongs to the interpreter that runs this must not reach the engines' one.
        foreign = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        env = {key: value for key, value in os.environ.items() if key not in foreign}
        env["PATH"] = f"{self.fleet.interpreter.parent}{os.pathsep}{env.get('PATH', os.defpath)}"
        env["PYTHONUNBUFFERED"] = "1"  # the end of a log is what explains a death
        return {**env, **own}

    def _check_ports(self, whose: str) -> None:
        for host, port, owner in self.fleet.ports():
            if owner.startswith(whose + " "):
                _check_port(host, port, owner)


def _check_port(host: str, port: int, owner: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StackError(
                    f"{owner} {port} is in use on {host}; end what listens there "
                    f"(`ss -ltnp 'sport = :{port}'` names it) or take another port"
                ) from error
            raise StackError(f"{owner}: cannot listen on {host}:{port}: {error}") from error


def _answers(client: httpx.Client, member: Member) -> bool:
    try:
        return client.get(f"{member.url}{member.health}").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False  # not listening yet; whether it still runs is looked at elsewhere


def _ended_early(member: Member) -> str:
    assert member.process is not None
    return (
        f"{member.name} ended before it was healthy ({member.ending}, "
        f"after {member.seconds:.0f} s){_log_of(member)}"
    )


def _not_in_time(member: Member, limit: float) -> str:
    return f"{member.name} was not healthy after {limit:.0f} s{_log_of(member)}"


def _log_of(member: Member) -> str:
    if member.process is None or member.log is None:
        return ""
    lines = member.process.output().splitlines()
    if not lines:
        return f"; it wrote nothing to {member.log}"
    tail = lines[-20:]
    # What went wrong first is often far above: an engine's end is a heap of tracebacks.
    first = next((line for line in lines if _ERROR.search(line)), None)
    if first is not None and first not in tail:
        tail = [first, "...", *tail]
    indented = "\n".join(f"  | {line}" for line in tail)
    return f"; from {member.log}:\n{indented}"
