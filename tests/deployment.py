"""The deployment files as their readers see them: docker-compose.yml, Dockerfile, the examples."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import yaml
from dockerfile_parse import DockerfileParser

from connector.fleet import FleetFile, load

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples/compose"
MOUNTED = "/etc/mooncake-gateway"
MODEL = "/models/qwen3-0.6b"

Instruction = tuple[str, str]


def compose() -> dict[str, Any]:
    """Return docker-compose.yml with merges, anchors and `${NAME:-default}` resolved."""
    text = (ROOT / "docker-compose.yml").read_text()
    resolved: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))
    return resolved


def service(name: str) -> dict[str, Any]:
    """Return one service."""
    found: dict[str, Any] = compose()["services"][name]
    return found


def stages() -> dict[str, list[Instruction]]:
    """Return the Dockerfile's instructions by stage, in order."""
    parsed = DockerfileParser(fileobj=io.BytesIO((ROOT / "Dockerfile").read_bytes()))
    found: dict[str, list[Instruction]] = {"": []}
    name = ""
    for entry in parsed.structure:
        if entry["instruction"] == "FROM":
            name = entry["value"].split(" AS ")[1]
            found[name] = []
        found[name].append((entry["instruction"], entry["value"]))
    return found


def values(stage: str, instruction: str) -> list[str]:
    """Return the values of one kind of instruction in a stage."""
    return [value for kind, value in stages()[stage] if kind == instruction]


def argv(name: str) -> list[str]:
    """Return what runs in a service: the image's entry point and the service's command."""
    entry = service(name)
    [entrypoint] = values(entry["build"]["target"], "ENTRYPOINT")
    return [*json.loads(entrypoint), *entry["command"]]


def fleet(model: str | Path = MODEL) -> FleetFile:
    """Return the examples' fleet, its model where this machine has it."""
    file = load(EXAMPLES / "fleet.yaml")
    return FleetFile.model_validate(
        file.model_dump(exclude_unset=True)
        | {
            "engines": [
                engine.model_dump(exclude_unset=True) | {"model": str(model)}
                for engine in file.engines
            ]
        }
    )
