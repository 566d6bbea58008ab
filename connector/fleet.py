"""The fleet file: one master and its engines, as `mooncake-connector up` starts them.

```yaml
python: .venv-engine/bin/python      # the interpreter that has vLLM
master: {rpc_port: 50051, http_port: 9003, metadata_port: 8080}
engine:                              # what the engines have in common
  model: models/qwen3
  device: cpu
  block_size: 32
engines:                             # who they are, and where they differ
  - {id: a, port: 8101, events_port: 5557, replay_port: 6557, segment: "127.0.0.2:17101"}
  - {id: b, port: 8102, events_port: 5558, replay_port: 6558, segment: "127.0.0.3:17102"}
```

Relative paths are taken from where the command runs. The `models:` list of a
gateway in front of the fleet is derived from the same file (`gateway_models`),
so the two cannot disagree.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from connector.model import ModelConfig, Section
from connector.settings import EngineSettings, MasterSettings, SharedSettings

PYTHON_VARIABLE = "MOONCAKE_ENGINE_PYTHON"
"""Environment variable that names the engines' interpreter, over the fleet file's."""


class FleetError(Exception):
    """The fleet file cannot be read, or does not describe a fleet; the message says where."""


class FleetFile(Section):
    """A whole fleet on this host."""

    python: Path = Field(
        Path(".venv-engine/bin/python"),
        description="Interpreter that has vLLM; `mooncake_master` lies beside it. "
        f"{PYTHON_VARIABLE} in the environment names another.",
    )
    master: MasterSettings = Field(default_factory=MasterSettings, description="The master.")
    engine: SharedSettings = Field(
        default_factory=SharedSettings, description="What the engines have in common."
    )
    engines: tuple[EngineSettings, ...] = Field(min_length=1, description="The engines.")

    @model_validator(mode="before")
    @classmethod
    def _share(cls, value: Any) -> Any:
        """Give every engine what the `engine` section says and it does not say itself.

        Dictionaries (`env`, `extra_config`, template arguments) are joined, the
        engine's entries winning; everything else is replaced.
        """
        if not isinstance(value, Mapping) or not isinstance(value.get("engines"), list | tuple):
            return value
        shared = value.get("engine") or {}
        if isinstance(shared, SharedSettings):
            shared = shared.model_dump(exclude_unset=True)
        if not isinstance(shared, Mapping):
            return value
        # A wrong key is reported once and where it stands, not in every engine.
        known = {key: item for key, item in shared.items() if key in SharedSettings.model_fields}
        engines = [
            _join(known, engine) if isinstance(engine, Mapping) else engine
            for engine in value["engines"]
        ]
        return {**value, "engine": shared, "engines": engines}

    @model_validator(mode="after")
    def _unique(self) -> Self:
        for what, taken in (
            ("engine id", [(engine.id, "") for engine in self.engines]),
            ("port", [(port, owner) for _, port, owner in self.ports()]),
            (
                "lookup_rpc_port",
                [
                    (
                        engine.kv_transfer_config()["kv_connector_extra_config"]["lookup_rpc_port"],
                        "",
                    )
                    for engine in self.engines
                ],
            ),
            ("segment", [(e.segment, "") for e in self.engines if e.segment]),
        ):
            owners: defaultdict[object, list[str]] = defaultdict(list)
            for item, owner in taken:
                owners[item].append(owner)
            for item, names in owners.items():
                if len(names) > 1:
                    whose = f" ({', '.join(names)})" if any(names) else ""
                    raise ValueError(f"{what} {item} is given {len(names)} times{whose}")
        return self

    def ports(self) -> Iterator[tuple[str, int, str]]:
        """Every TCP port that the fleet listens on, as (address, port, whose)."""
        master = self.master
        yield master.host, master.rpc_port, "master rpc_port"
        yield master.host, master.http_port, "master http_port"
        if master.metadata_port is not None:
            yield master.host, master.metadata_port, "master metadata_port"
        for engine in self.engines:
            yield engine.host, engine.port, f"engine {engine.id} port"
            if engine.events_port is not None:
                yield "0.0.0.0", engine.events_port, f"engine {engine.id} events_port"
            if engine.replay_port is not None:
                yield "0.0.0.0", engine.replay_port, f"engine {engine.id} replay_port"

    @property
    def interpreter(self) -> Path:
        """The interpreter that has vLLM, absolute; links are kept, as they make the venv."""
        return Path(os.environ.get(PYTHON_VARIABLE) or self.python).expanduser().absolute()

    @property
    def master_binary(self) -> Path:
        """`mooncake_master`, beside the interpreter."""
        return self.interpreter.with_name("mooncake_master")

    def engine_settings(self, engine_id: str) -> EngineSettings:
        """The settings of one engine; `FleetError` where there is none of that id."""
        for engine in self.engines:
            if engine.id == engine_id:
                return engine
        ids = ", ".join(engine.id for engine in self.engines)
        raise FleetError(f"no engine {engine_id!r} in this fleet; it has {ids}")


def load(path: Path) -> FleetFile:
    """Read a fleet file; `FleetError` names every wrong entry by its place."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FleetError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FleetError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise FleetError(f"{path} is not a fleet file: the top level must be a mapping")
    try:
        return FleetFile.model_validate(content)
    except ValidationError as error:
        lines = []
        for wrong in error.errors():
            place = ".".join(str(part) for part in wrong["loc"])
            text = "unknown key" if wrong["type"] == "extra_forbidden" else wrong["msg"]
            lines.append(f"  {place + ': ' if place else ''}{text.removeprefix('Value error, ')}")
        raise FleetError(f"{path} does not describe a fleet:\n" + "\n".join(lines)) from error


def gateway_models(fleet: FleetFile) -> list[dict[str, Any]]:
    """The `models:` list of a gateway.yaml for this fleet, checked against `ModelConfig`.

    `FleetError` where engines that serve the same name differ in what must be one
    for a model (hashing, tokenizer, template, keys).
    """
    by_name: defaultdict[str, list[EngineSettings]] = defaultdict(list)
    for engine in fleet.engines:
        by_name[engine.name].append(engine)
    models = []
    for name, engines in by_name.items():
        model = _model_section(fleet.master, engines[0])
        for engine in engines[1:]:
            other = _model_section(fleet.master, engine)
            for key in model.keys() | other.keys():
                if model.get(key) != other.get(key):
                    raise FleetError(
                        f"engines {engines[0].id} and {engine.id} both serve {name!r} but differ "
                        f"in {key}: {model.get(key)} and {other.get(key)}"
                    )
        model["engines"] = [_engine_section(engine) for engine in engines]
        ModelConfig.model_validate(model)
        models.append(model)
    return models


def _model_section(master: MasterSettings, engine: EngineSettings) -> dict[str, Any]:
    section: dict[str, Any] = {"name": engine.name}
    directory = engine.tokenizer or Path(engine.model)
    if directory.is_dir():
        section["tokenizer"] = str(directory.absolute())
    else:
        section["exact"] = False  # a model by name: its files are not known to be here
    if engine.chat_template is not None:
        section["chat_template"] = str(engine.chat_template.absolute())
    if engine.chat_template_content_format != "auto":
        section["chat_template_content_format"] = engine.chat_template_content_format
    if engine.default_chat_template_kwargs:
        section["default_chat_template_kwargs"] = engine.default_chat_template_kwargs
    section["hashing"] = {
        "algorithm": engine.hash_algorithm,
        "block_size": engine.block_size,
        "seed": engine.seed,
    }
    section["pool"] = {
        "master": master.url,
        "client_ttl": master.client_ttl + 2.0,  # it notices within a second or so
        "key": {
            "model": engine.model_basename,
            "cache_prefix": engine.cache_prefix,
            "ranks": {"tp": _storing_ranks(engine), "pcp": 1, "dcp": 1, "pp": 1},
        },
    }
    return section


def _engine_section(engine: EngineSettings) -> dict[str, Any]:
    section: dict[str, Any] = {"id": engine.id, "url": engine.url}
    if engine.events_port is not None:
        section["events"] = f"tcp://{engine.host}:{engine.events_port}"
    if engine.replay_port is not None:
        section["replay"] = f"tcp://{engine.host}:{engine.replay_port}"
    if engine.segment is not None:
        section["segments"] = [engine.segment]
    return section


def _storing_ranks(engine: EngineSettings) -> int:
    """How many tensor-parallel ranks put objects of their own into the pool.

    vLLM's store connector lets one rank store for MLA, min(tp, KV heads) for GQA.
    """
    config = Path(engine.model) / "config.json"
    if engine.tensor_parallel_size == 1 or not config.is_file():
        return engine.tensor_parallel_size
    content = json.loads(config.read_bytes())
    content = content.get("text_config", content)
    if content.get("kv_lora_rank"):
        return 1
    heads = content.get("num_key_value_heads") or content.get("num_attention_heads")
    return min(engine.tensor_parallel_size, heads) if heads else engine.tensor_parallel_size


def _join(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    joined = {**shared, **own}
    for key, value in shared.items():
        if isinstance(value, Mapping) and isinstance(own.get(key), Mapping):
            joined[key] = {**value, **own[key]}
    return joined
