"""Real engines, started once for all engine tests.

Without the engines' environment these tests are skipped with the command that
makes it; under CI that is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from fleet import Front, Ports, fleet_file, front

from connector.fleet import PYTHON_VARIABLE
from connector.stack import Stack
from connector.tiny_model import Shape, write

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs real engines; their start counts as the first test's time."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(600))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under CI a skipped engine test is a failure, unless it wants a trace that is not ours."""
    report = yield
    foreign = item.get_closest_marker("traces")
    if report.skipped and os.environ.get("CI") and not foreign and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"engine tests may not be skipped under CI: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def interpreter() -> Path:
    """Return the interpreter that has vLLM and Mooncake."""
    path = Path(os.environ.get(PYTHON_VARIABLE) or ROOT / ".venv-engine/bin/python")
    if not path.exists():
        why = f"{path} is not there: `make test` makes it, or set {PYTHON_VARIABLE}"
        if os.environ.get("CI"):
            pytest.fail(f"engine tests may not be skipped under CI: {why}")
        pytest.skip(why)
    return path


@pytest.fixture(scope="session")
def ports() -> Ports:
    return Ports()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a small random model."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write(directory, Shape())
    return directory


@pytest.fixture(scope="session")
def stack(
    interpreter: Path, model: Path, ports: Ports, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """Start the master and the engines."""
    engines = [
        {"id": "a"},
        {"id": "b"},
        {
            "id": "c",
            "served_name": "tiny-64",
            "hash_algorithm": "sha256",
            "block_size": 64,
            "cache_prefix": "other",
            "num_blocks": 256,
        },
    ]
    fleet = fleet_file(interpreter, model, engines, ports)
    with Stack(fleet, log_dir=tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture(scope="session")
def gateway(
    stack: Stack, ports: Ports, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    """Start a gateway in front of all engines."""
    with front(stack, tmp_path_factory.mktemp("gateway"), ports) as running:
        yield running
