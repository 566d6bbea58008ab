"""One subprocess in a session of its own, that cannot outlive whoever started it.

A `Process` leads its own process group: signals reach whatever it has started,
a terminal's Ctrl-C does not reach it, and when the leader ends the rest of the
group is killed. A `Guard` does the same for all of them when this process is
killed without a chance to clean up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from connector import guard as _guard_script

# The child waits for a line before it becomes the command, so that the guard knows of
# it first; when this process dies in between, the line never comes and it ends.
_GATE = 'read -r go || exit 125; exec "$@" </dev/null'


class Guard:
    """A helper process that ends the process groups named to it when this process dies."""

    def __init__(self, grace: float = 5.0) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fleet-"))
        """Scratch for sockets, with a short path; removed with the guard."""
        script = (sys.executable, "-I", "-S", _guard_script.__file__)
        self._process = subprocess.Popen(
            [*script, str(os.getpid()), str(grace), str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        """Care for a process group from now on."""
        self._tell(f"+{group}\n")

    def release(self, group: int) -> None:
        """Care for it no more: it has ended."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the guard; groups that are still watched are ended by it first."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()


class Process:
    """A running (or ended) command; `OSError` when it cannot be started."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        guard: Guard,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        """Start `argv` with exactly `env` (None: this process's); output is appended to `log`
        (None: this process's own output)."""
        self.argv = list(argv)
        self.log = log
        self.started = time.monotonic()
        """When it was started, on the monotonic clock."""
        self._guard = guard
        self._log_offset = log.stat().st_size if log is not None and log.exists() else 0
        output = None if log is None else log.open("ab")
        try:
            self._popen = subprocess.Popen(
                ["/bin/sh", "-c", _GATE, "sh", *self.argv],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                env=None if env is None else dict(env),
                start_new_session=True,
            )
        finally:
            if output is not None:
                output.close()
        self.pid = self._popen.pid
        """Process id of the leader, and id of its group."""
        try:
            guard.watch(self.pid)
            assert self._popen.stdin is not None
            self._popen.stdin.write(b"\n")
            self._popen.stdin.close()
        except BrokenPipeError as error:
            self.kill()
            raise OSError("the guard or the command ended before it was let go") from error

    def poll(self) -> int | None:
        """Exit status of the leader (minus the signal's number if one ended it), None while it
        runs. What is left of its group is killed when it is first seen to have ended."""
        if self._popen.returncode is not None:
            return self._popen.returncode
        # Not reaped yet, so that the group's id cannot become a stranger's.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return self._reap()

    def signal(self, number: int) -> None:
        """Send a signal to the whole group; nothing when it has ended."""
        if self.poll() is None:
            os.killpg(self.pid, number)

    def terminate(self) -> None:
        """Ask the leader to end (SIGTERM), even where it was stopped."""
        if self.poll() is None:
            # The leader alone: it ends its own children in its own order.
            os.kill(self.pid, signal.SIGTERM)
            os.killpg(self.pid, signal.SIGCONT)

    def kill(self) -> int:
        """End the whole group now; exit status of the leader."""
        if self._popen.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._reap()
        return self._popen.wait()

    def output(self, limit: int = 1_000_000) -> str:
        """What it wrote to its log since its start, the last `limit` bytes; empty without a log."""
        if self.log is None:
            return ""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_offset, size - limit))
            return file.read().decode(errors="replace")

    def _reap(self) -> int:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        os.killpg(self.pid, signal.SIGKILL)  # the zombie still holds the group's id
        status = self._popen.wait()
        if self._popen.stdin is not None and not self._popen.stdin.closed:
            self._popen.stdin.close()
        self._guard.release(self.pid)
        return status


def end_all(processes: Sequence[Process], grace: float) -> None:
    """SIGTERM to all, SIGKILL to those that are still there after `grace` seconds.

    Whatever interrupts the wait (a second Ctrl-C) kills them at once and is raised on.
    """
    try:
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + grace
        left = [process for process in processes if process.poll() is None]
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            left = [process for process in left if process.poll() is None]
    finally:
        for process in processes:
            process.kill()
