"""The life cycle of a fleet's processes, with small servers in the place of vLLM."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from fake_fleet import alive, fake_fleet, free_ports, logged, wait_until

from connector.fleet import PYTHON_VARIABLE, FleetError, FleetFile
from connector.stack import Member, Stack, StackError


@pytest.fixture(autouse=True)
def _own_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)


@pytest.fixture
def fleet(tmp_path: Path) -> FleetFile:
    return fake_fleet(tmp_path / "bin")


def pids(stack: Stack) -> list[int]:
    """The leaders, and the child that every fake starts."""
    found = []
    for member in stack.members:
        assert member.process is not None
        assert member.log is not None
        log = member.log
        wait_until(lambda log=log: "child " in log.read_text())
        found += [member.process.pid, int(logged(log, "child"))]
    return found


def test_starts_everything_and_ends_everything(fleet: FleetFile, tmp_path: Path) -> None:
    changes: list[tuple[str, str]] = []

    def note(member: Member) -> None:
        changes.append((member.name, member.state))

    with Stack(fleet, log_dir=tmp_path / "logs", on_change=note) as stack:
        assert [member.state for member in stack.members] == ["healthy"] * 3
        running = pids(stack)
        assert all(alive(pid) for pid in running)
        scratch = stack._guard.directory if stack._guard else None
    assert not any(alive(pid) for pid in running)
    assert [member.state for member in stack.members] == ["stopped"] * 3
    assert scratch is not None
    assert not scratch.exists()
    assert changes[:2] == [("master", "starting"), ("master", "healthy")]
    # Both engines are started before either is waited for.
    assert changes[2:4] == [("engine a", "starting"), ("engine b", "starting")]
    assert changes[-1] == ("master", "stopped")


def test_engines_get_their_settings_and_nothing_of_this_interpreter(
    fleet: FleetFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", "/of/the/gateway")
    monkeypatch.setenv("PYTHONPATH", "/of/the/gateway/too")
    with Stack(fleet, log_dir=tmp_path / "logs", engines=["b"]) as stack:
        log = stack.engine("b").log
        assert log is not None
        env = json.loads(logged(log, "environment"))
        assert stack.engine("a").state == "stopped"
        assert Path(env["VLLM_RPC_BASE_PATH"]).is_dir()
    assert env["PYTHONHASHSEED"] == "0"
    assert not {"VIRTUAL_ENV", "PYTHONPATH"} & env.keys()
    mooncake = json.loads(Path(env["MOONCAKE_CONFIG_PATH"]).read_text())
    assert mooncake["master_server_address"] == fleet.master.address


def test_early_death_names_the_first_error_and_ends_the_rest(tmp_path: Path) -> None:
    fleet = fake_fleet(tmp_path / "bin", env={"b": {"FAKE": "die"}})
    stack = Stack(fleet, log_dir=tmp_path / "logs")
    with pytest.raises(StackError, match="engine b ended before it was healthy") as caught:
        stack.start()
    message = str(caught.value)
    assert "exit status 3" in message
    assert "the first thing that went wrong" in message
    assert "noise 39" in message
    assert "noise 5\n" not in message
    assert [member.state for member in stack.members] == ["stopped"] * 3


def test_never_healthy_is_given_up(tmp_path: Path) -> None:
    fleet = fake_fleet(tmp_path / "bin", engines=1, env={"a": {"FAKE": "ill"}})
    with pytest.raises(StackError, match="engine a was not healthy after 1 s"):
        Stack(fleet, log_dir=tmp_path / "logs", start_timeout=0.6).start()


def test_taken_port_is_found_before_anything_starts(fleet: FleetFile, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", fleet.engines[1].replay_port or 0))
        other.listen()
        stack = Stack(fleet, log_dir=tmp_path / "logs")
        with pytest.raises(StackError, match=r"engine b replay_port \d+ is in use"):
            stack.start()
    assert not (tmp_path / "logs" / "engine-a.log").exists()


def test_missing_interpreter_says_what_to_set(fleet: FleetFile, tmp_path: Path) -> None:
    lost = fleet.model_copy(update={"python": tmp_path / "nowhere" / "python"})
    with pytest.raises(StackError, match=PYTHON_VARIABLE):
        Stack(lost, log_dir=tmp_path / "logs").start()


def test_interpreter_of_the_environment_wins(
    fleet: FleetFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "other" / "python"))
    assert fleet.interpreter == tmp_path / "other" / "python"
    assert fleet.master_binary == tmp_path / "other" / "mooncake_master"


def test_kill_takes_the_whole_group_and_restart_brings_it_back(
    fleet: FleetFile, tmp_path: Path
) -> None:
    with Stack(fleet, log_dir=tmp_path / "logs") as stack:
        _, _, engine, child, *_ = pids(stack)
        stack.kill("a")
        assert stack.engine("a").state == "exited"
        assert stack.engine("a").ending == "SIGKILL"
        wait_until(lambda: not alive(child))
        assert stack.engine("b").state == "healthy"

        stack.restart("a")
        assert stack.engine("a").state == "healthy"
        process = stack.engine("a").process
        assert process is not None
        assert process.pid != engine
        with pytest.raises(FleetError, match="no engine 'z'"):
            stack.kill("z")


def test_an_engine_that_ends_takes_its_children_along(fleet: FleetFile, tmp_path: Path) -> None:
    with Stack(fleet, log_dir=tmp_path / "logs", engines=["a"]) as stack:
        process = stack.engine("a").process
        log = stack.engine("a").log
        assert process is not None
        assert log is not None
        child = int(logged(log, "child"))
        os.kill(process.pid, signal.SIGKILL)  # the leader alone, as the kernel would
        assert stack.wait_exit() is stack.engine("a")
        wait_until(lambda: not alive(child))


def test_stubborn_and_stopped_ones_are_ended_too(tmp_path: Path) -> None:
    fleet = fake_fleet(tmp_path / "bin", env={"a": {"FAKE": "stubborn"}})
    stack = Stack(fleet, log_dir=tmp_path / "logs", stop_grace=0.2)
    with stack:
        running = pids(stack)
        stack.kill("b", signal.SIGSTOP)
        started = time.monotonic()
    assert not any(alive(pid) for pid in running)
    assert time.monotonic() - started < 5


def test_an_interrupt_while_stopping_kills_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fake_fleet(tmp_path / "bin", engines=1, env={"a": {"FAKE": "stubborn"}})
    stack = Stack(fleet, log_dir=tmp_path / "logs", stop_grace=60)
    stack.start()
    running = pids(stack)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("connector.process.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stack.stop()
    monkeypatch.undo()
    wait_until(lambda: not any(alive(pid) for pid in running))
    assert {member.state for member in stack.members} == {"exited"}


def test_killed_parent_leaves_no_orphans(fleet: FleetFile, tmp_path: Path) -> None:
    (tmp_path / "fleet.json").write_text(fleet.model_dump_json())
    program = """
        import os, sys
        from pathlib import Path
        from connector.fleet import FleetFile
        from connector.stack import Stack

        here = Path(sys.argv[1])
        fleet = FleetFile.model_validate_json((here / "fleet.json").read_text())
        with Stack(fleet, log_dir=here / "logs") as stack:
            if os.fork() == 0:          # holds copies of all the parent's pipes
                os.execvp("sleep", ["sleep", "1000"])
            print(*(member.process.pid for member in stack.members), stack._guard.directory)
            sys.stdout.flush()
            sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        *leaders, scratch = parent.stdout.readline().split()
        logs = [tmp_path / "logs" / name for name in ("master.log", "engine-a.log", "engine-b.log")]
        running = [int(pid) for pid in leaders] + [int(logged(log, "child")) for log in logs]
        assert all(alive(pid) for pid in running)
        os.kill(parent.pid, signal.SIGKILL)
        wait_until(lambda: not any(alive(pid) for pid in running))
        wait_until(lambda: not Path(scratch).exists())
        os.killpg(parent.pid, signal.SIGKILL)  # the test's own sleeper


def test_restarted_engine_is_forgotten_by_the_metadata_server(tmp_path: Path) -> None:
    fleet = fake_fleet(tmp_path / "bin", engines=1, metadata=True)
    with Stack(fleet, log_dir=tmp_path / "logs") as stack:
        assert stack.master.log is not None
        assert (
            logged(stack.master.log, "DELETE") == "/metadata?key=mooncake%2Fram%2F127.0.0.2%3A17101"
        )


def test_further_command_is_waited_for_and_ended_first(fleet: FleetFile, tmp_path: Path) -> None:
    with Stack(fleet, log_dir=tmp_path / "logs", engines=["a"]) as stack:
        [port] = free_ports(1)
        server = stack.run(
            [str(tmp_path / "bin" / "python"), "--port", str(port)],
            name="extra",
            url=f"http://127.0.0.1:{port}",
            log=tmp_path / "extra.log",
        )
        stack.wait_healthy([server])
        assert server.state == "healthy"
        short = stack.run(["sh", "-c", "exit 7"], name="short")
        assert stack.wait_exit() is short
        assert short.ending == "exit status 7"
    assert [member.state for member in stack.members] == ["stopped"] * 5


def test_a_strangers_answer_is_not_taken_for_the_commands(fleet: FleetFile, tmp_path: Path) -> None:
    with Stack(fleet, log_dir=tmp_path / "logs", engines=["a"]) as stack:
        with pytest.raises(StackError, match=r"gate: port \d+ is in use"):
            stack.run(["sleep", "1000"], name="gate", url=stack.engine("a").url)
        assert stack.commands == []


def test_engines_can_be_started_later(fleet: FleetFile, tmp_path: Path) -> None:
    with Stack(fleet, log_dir=tmp_path / "logs", engines=[]) as stack:
        assert [member.state for member in stack.members] == ["healthy", "stopped", "stopped"]
        stack.start_engines(wait=False)
        stack.wait_healthy()
        assert [member.state for member in stack.members] == ["healthy"] * 3
        with pytest.raises(StackError, match="runs already"):
            stack.start_engines(["a"])
