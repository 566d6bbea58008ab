"""The `doctor` command: arguments, exit status, what it prints."""

from __future__ import annotations

import ast
import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fake_fleet import free_ports
from rich.console import Console
from typer.testing import CliRunner

from connector.cli import app
from connector.doctor.report import Finding, Report
from connector.doctor.show import show
from connector.model import EngineConfig, ModelConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration whose only engine is not there."""
    path = tmp_path / "gateway.yaml"
    (port,) = free_ports(1)
    path.write_text(
        f"models:\n- {{name: m, exact: false, engines: [{{id: a, url: 'http://127.0.0.1:{port}'}}]}}"
    )
    return path


def call(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_help_teaches() -> None:
    status, output, _ = call("--help")
    words = " ".join(output.replace("│", " ").split())
    assert status == 0
    assert "Exits with 0 if nothing failed" in words
    assert "three requests per engine" in words


def test_a_dead_engine_fails(file: Path) -> None:
    status, output, _ = call("-c", file)
    assert status == 1
    words = " ".join(output.split())
    assert "✗ engine: unreachable nothing serves HTTP at" in words
    assert "→ start the engine, or correct `url` of engine a" in words
    assert "1 failed, 0 to be looked at, 0 well." in words


def test_json_is_one_document(file: Path) -> None:
    status, output, _ = call("-c", file, "--json")
    document = json.loads(output)
    assert status == 1
    assert document["status"] == "fail"
    assert document["counts"] == {"ok": 0, "warn": 0, "fail": 1}
    (found,) = document["findings"]
    assert set(found) == {
        "check", "status", "model", "engine", "rank", "cause", "found", "expected", "remedy"
    }  # fmt: skip
    assert (found["check"], found["cause"], found["engine"]) == ("engine", "unreachable", "a")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "n"), "no model 'n' in the configuration; there are m"),
        (("--engine", "aa"), "no engine 'aa' in the configuration; did you mean 'a'?"),
        (("--api-key-env", "NOT_SET_ANYWHERE"), "NOT_SET_ANYWHERE is to hold the engines' API key"),
        (("--timeout", "0"), "Invalid value for '--timeout'"),
    ],
)
def test_wrong_arguments_exit_with_2(file: Path, arguments: tuple[str, ...], words: str) -> None:
    status, output, errors = call("-c", file, *arguments)
    assert (status, output) == (2, "")
    assert words in " ".join(errors.replace("│", " ").split())


def test_an_unreadable_configuration_exits_with_2(tmp_path: Path) -> None:
    status, _, errors = call("-c", tmp_path / "none.yaml")
    assert status == 2
    assert "the configuration cannot be used" in errors
    assert "none.yaml: cannot be read" in errors


def test_ctrl_c_exits_with_130(file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        text = (
            "models:\n- name: m\n  exact: false\n  engines:\n  - id: a\n    url: http://127.0.0.1:"
        )
        file.write_text(f"{text}{mute.getsockname()[1]}\n")
        with subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "connector", "doctor", "-c", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as process:
            mute.settimeout(60)
            connection, _ = mute.accept()
            with connection:
                process.send_signal(signal.SIGINT)
                output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output == ""
    assert errors == "mooncake-connector: interrupted; nothing is left running\n"


def test_every_cause_is_documented() -> None:
    said = set()
    for path in (ROOT / "connector" / "doctor").glob("*.py"):
        for call_ in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(call_, ast.Call)
                and isinstance(call_.func, ast.Attribute)
                and call_.func.attr in ("warn", "fail")
            ):
                said |= {a.value for a in call_.args[:2] if isinstance(a, ast.Constant)}
    documented = (ROOT / "docs" / "doctor.md").read_text()
    assert len(said) > 40
    assert [name for name in sorted(said) if f"`{name}`" not in documented] == []


def test_without_unicode_marks_are_words() -> None:
    class Latin(Console):
        encoding = "latin-1"

    console = Latin(width=100, record=True, file=io.StringIO())
    engine = EngineConfig(id="a", url="http://h:1")
    model = ModelConfig(name="m", exact=False, engines=(engine,))
    findings = [
        Finding("engine", "ok", "m", "it answers", "a", 1),
        Finding("usage", "warn", "m", "it tells nothing", "a", 1, "unreported", "more", "do it"),
        Finding("usage", "warn", "m", "it tells less", "a", 1, "size", "more", "do it"),
    ]
    show(console, Report(findings), [model])
    words = " ".join(console.export_text().split())
    assert "engine a rank 1 http://h:1" in words
    assert "ok engine it answers" in words
    assert "! usage: unreported it tells nothing; expected: more" in words
    assert words.count("-> do it") == 1
    assert words.endswith("0 failed, 2 to be looked at, 1 well.")
