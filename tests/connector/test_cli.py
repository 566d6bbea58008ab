"""`mooncake-connector`: what it prints and how it exits."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from fake_fleet import alive, fake_fleet, free_ports, wait_until, without_overrides
from typer.testing import CliRunner

from connector.cli import app
from connector.model import ModelConfig


@pytest.fixture
def fleet_file(tmp_path: Path) -> Path:
    return written(tmp_path)


def written(tmp_path: Path, env: dict[str, dict[str, str]] | None = None) -> Path:
    path = tmp_path / "fleet.yaml"
    fleet = fake_fleet(tmp_path / "bin", env=env)
    path.write_text(yaml.safe_dump(json.loads(fleet.model_dump_json(exclude_unset=True))))
    return path


@contextmanager
def up(*arguments: str | Path, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "connector", "up", *map(str, arguments)]
    env = without_overrides() | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if words in line:
            return seen
    raise AssertionError(f"{words!r} was not written, but:\n{seen}")


def call(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def leaders(directory: Path) -> Sequence[int]:
    """Every process that was started from the directory's programs."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it ended meanwhile
        if str(directory / "bin").encode() in command:
            found.append(int(entry.name))
    return found


def test_help_teaches() -> None:
    status, output = call("--help")
    assert status == 0
    assert all(word in output for word in ("up", "tiny-model", "config", "fleet"))
    status, output = call("up", "--help")
    assert "Ctrl-C exits with 130" in " ".join(output.replace("│", " ").split())


def test_version() -> None:
    status, output = call("--version")
    assert status == 0
    assert output.split()[-1] == importlib.metadata.version("mooncake-gateway")


def test_the_reference_in_the_docs_is_what_the_command_prints() -> None:
    written = Path(__file__).parents[2] / "docs" / "fleet.md"
    assert call("reference") == (0, written.read_text())


def test_config_prints_what_is_handed(fleet_file: Path, tmp_path: Path) -> None:
    status, output = call("config", fleet_file)
    assert status == 0
    assert f"{tmp_path}/bin/mooncake_master --rpc_address=127.0.0.1" in output
    assert "PYTHONHASHSEED=0 \\" in output
    assert '"kv_load_failure_policy":"recompute"' in output
    models = yaml.safe_load(output.partition("# gateway.yaml\n")[2])["models"]
    assert ModelConfig.model_validate(models[0]).name == "tiny"


def test_config_says_what_to_do_without_tokenizer_files(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("engines:\n- {id: a, port: 8101, model: org/tiny}\n")
    result = CliRunner().invoke(app, ["config", str(path)])
    assert result.exit_code == 0
    assert "warning: the gateway cannot be exact for org/tiny yet" in result.stderr
    assert "hf download org/tiny config.json tokenizer.json" in result.stderr
    written = result.stdout.partition("# gateway.yaml\n")[2]
    assert re.search(r"# TODO: .*hf download org/tiny .*\n  tokenizer: org/tiny\n", written)
    [model] = yaml.safe_load(written)["models"]
    assert ModelConfig.model_validate(model).exact


@pytest.mark.parametrize("command", ["up", "config"])
def test_wrong_fleet_file_is_a_usage_error(tmp_path: Path, command: str) -> None:
    status, output = call(command, tmp_path / "none.yaml")
    assert status == 2
    assert "cannot be read" in output
    assert "Traceback" not in output


def test_tiny_model(tmp_path: Path) -> None:
    status, output = call("tiny-model", tmp_path / "m", "--vocab", "300", "--layers", "1")
    assert (status, output.startswith("made ")) == (0, True)
    assert call("tiny-model", tmp_path / "m", "--vocab", "300", "--layers", "1") == (
        0,
        f"{tmp_path / 'm'} is there already\n",
    )
    status, output = call("tiny-model", tmp_path / "m", "--kv-heads", "3")
    assert status == 2
    assert "do not divide" in output


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_up_until_a_signal(
    fleet_file: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    with up(fleet_file, "--gateway-config", "out/gateway.yaml", cwd=tmp_path) as process:
        seen = read_until(process, "Ctrl-C ends all of it")
        assert "engine b: healthy after" in seen
        assert len(leaders(tmp_path)) >= 3
        gateway = yaml.safe_load((tmp_path / "out" / "gateway.yaml").read_text())
        assert gateway["debug_headers"] is True
        assert gateway["listen"] == {"host": "127.0.0.1", "port": 8000}
        assert [engine["id"] for engine in gateway["models"][0]["engines"]] == ["a", "b"]
        os.kill(process.pid, number)
        rest, _ = process.communicate(timeout=20)
        assert process.returncode == status
        assert "Traceback" not in rest
    assert leaders(tmp_path) == []
    assert (tmp_path / "build" / "fleet" / "engine-a.log").exists()


def test_up_says_why_it_failed(tmp_path: Path) -> None:
    fleet_file = written(tmp_path, env={"a": {"FAKE": "die"}})
    with up(fleet_file, cwd=tmp_path) as process:
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "the first thing that went wrong" in output
    assert "Traceback" not in output
    assert leaders(tmp_path) == []


def test_up_says_who_ended_and_runs_on(fleet_file: Path, tmp_path: Path) -> None:
    with up(fleet_file, cwd=tmp_path) as process:
        read_until(process, "Ctrl-C ends all of it")
        first, second = (
            pid for pid in leaders(tmp_path) if b"vllm" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(first, signal.SIGKILL)
        read_until(process, "has ended (SIGKILL)")
        assert alive(second)
        os.kill(second, signal.SIGKILL)
        read_until(process, "no engine is left")
        assert process.wait(20) == 1


def test_up_then_passes_the_commands_status_on(fleet_file: Path, tmp_path: Path) -> None:
    with up(fleet_file, "--then", "sh -c 'echo it runs; exit 7'", cwd=tmp_path) as process:
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 7
    assert "it runs" in output
    assert leaders(tmp_path) == []


def test_up_then_waits_and_shows_how_to_ask(fleet_file: Path, tmp_path: Path) -> None:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    server = f"{tmp_path}/bin/python --port {port}"
    options = ("--then", server, "--then-url", f"{url}/ready", "--gateway-config", "gateway.yaml")
    with up(fleet_file, *options, cwd=tmp_path) as process:
        seen = read_until(process, "Ctrl-C ends all of it")
        assert f"curl -i {url}/v1/chat/completions" in seen
        assert "http://127.0.0.1:9100/gateway/decisions" in seen
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(20) == 130
    wait_until(lambda: not leaders(tmp_path))
