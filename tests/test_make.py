"""What `make real` says when it is ended by Ctrl-C."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

STUB = f"""\
#!{sys.executable}
import signal, sys
if sys.argv[1] == "up":
    try:
        print("it runs", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        print("interrupted; everything was ended")
        sys.exit(130)
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("to_all", [True, False], ids=["as a terminal does", "to the fleet alone"])
def test_an_interrupt_is_no_error(tmp_path: Path, to_all: bool) -> None:
    stub = tmp_path / "mooncake-connector"
    stub.write_text(STUB)
    stub.chmod(0o755)
    (tmp_path / "installed").touch()
    settings = [f"GATEWAY={tmp_path}/installed", f"ENGINE={tmp_path}/installed"]
    settings += [f"BIN={tmp_path}", f"REAL={tmp_path}"]
    # Under `make test` it would be a make below that one, which says more.
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    with subprocess.Popen(
        ["make", "real", *settings],
        env=env,
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            while "it runs" not in process.stdout.readline():
                assert process.poll() is None
            if to_all:
                os.killpg(process.pid, signal.SIGINT)
            else:
                [fleet] = [
                    int(entry.name)
                    for entry in Path("/proc").glob("[0-9]*")
                    if (entry / "cmdline").exists()
                    and (entry / "cmdline").read_bytes().split(b"\0")[1:2] == [bytes(stub)]
                ]
                os.kill(fleet, signal.SIGINT)
            rest = process.stdout.read()
            status = process.wait(20)
        finally:
            process.kill()
    assert rest.splitlines() == ["interrupted; everything was ended"]
    assert status == (-signal.SIGINT if to_all else 0)
