"""Kills a stack's process groups when the process that started them is gone.

Run as a script, `python guard.py PARENT_PID GRACE_SECONDS DIRECTORY`, by
`process.py`; standard library only, so that it is up at once. Its input says
which groups to care for, a line each: `+PGID` from now on, `-PGID` no more. When
the input ends or the parent changes, whatever is still listed gets SIGTERM, and
SIGKILL after the grace; the directory (sockets, scratch) is removed.

A parent that was killed with SIGKILL cannot clean up, and PR_SET_PDEATHSIG would
not do: it is sent when the *thread* that forked ends, and grandchildren (vLLM's
engine process) never get it.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time


def main() -> None:
    """Watch until the parent is gone, then clean up."""
    parent, grace, directory = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it must outlive whoever is being stopped
    groups = _watch(parent)
    _end(groups, grace)
    shutil.rmtree(directory, ignore_errors=True)


def _watch(parent: int) -> set[int]:
    groups: set[int] = set()
    rest = b""
    while os.getppid() == parent:
        # The parent's own forks may hold the pipe open after it died: hence the time-out.
        if not select.select([0], [], [], 0.5)[0]:
            continue
        data = os.read(0, 4096)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            group = int(line[1:])
            if line.startswith(b"+"):
                groups.add(group)
            else:
                groups.discard(group)
    return groups


def _end(groups: set[int], grace: float) -> None:
    left = {group for group in groups if _send(group, signal.SIGTERM)}
    for group in left:
        _send(group, signal.SIGCONT)  # a stopped process takes no other signal
    deadline = time.monotonic() + grace
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = {group for group in left if _send(group, 0)}
    for group in left:
        _send(group, signal.SIGKILL)


def _send(group: int, number: int) -> bool:
    """Whether the group was there to get the signal."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main()
