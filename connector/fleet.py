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
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from connector import wording
from connector.document import Document, DocumentError, Fault, Where, holds
from connector.model import ModelConfig, Section
from connector.settings import EngineSettings, MasterSettings, SharedSettings
from connector.tokenizer import download, is_hub_id

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
        return _shared(value)

    @model_validator(mode="after")
    def _unique(self) -> Self:
        wording.collision(self.collisions())
        return self

    def collisions(self) -> Iterator[Fault]:
        """Yield what two engines, or an engine and the master, cannot both have."""
        seen: dict[tuple[str, object, str], Where] = {}
        for kind, value, machine, where in self._taken():
            first = seen.setdefault((kind, value, machine), where)
            if first != where:
                yield Fault(where, f"{kind} {value} is given again", "take another", first)

    def _taken(self) -> Iterator[tuple[str, object, str, Where]]:
        """Yield what is taken, as (kind, value, machine or "" for everywhere, place)."""
        for i, engine in enumerate(self.engines):
            yield "engine id", engine.id, "", ("engines", i, "id")
        hosts = {"master": self.master.host}
        hosts |= {f"engine {engine.id}": engine.host for engine in self.engines}
        for _, port, owner, where in self._listening():
            yield "port", port, _machine(hosts[owner]), where
        for i, engine in enumerate(self.engines):
            extra = engine.kv_transfer_config()["kv_connector_extra_config"]
            where = ("engines", i, "lookup_rpc_port")
            yield "lookup_rpc_port", extra["lookup_rpc_port"], _machine(engine.host), where
        for i, engine in enumerate(self.engines):
            if engine.segment is not None:
                yield "segment", engine.segment, "", ("engines", i, "segment")

    def ports(self) -> Iterator[tuple[str, int, str]]:
        """Every TCP port that the fleet listens on, as (address, port, whose)."""
        for address, port, owner, where in self._listening():
            yield address, port, f"{owner} {where[-1]}"

    def _listening(self) -> Iterator[tuple[str, int, str, Where]]:
        master = self.master
        yield master.host, master.rpc_port, "master", ("master", "rpc_port")
        yield master.host, master.http_port, "master", ("master", "http_port")
        if master.metadata_port is not None:
            yield master.host, master.metadata_port, "master", ("master", "metadata_port")
        for i, engine in enumerate(self.engines):
            owner, at = f"engine {engine.id}", ("engines", i)
            yield engine.host, engine.port, owner, (*at, "port")
            if engine.events_port is not None:
                yield "0.0.0.0", engine.events_port, owner, (*at, "events_port")
            if engine.replay_port is not None:
                address = engine.replay_host.replace("*", "0.0.0.0")
                yield address, engine.replay_port, owner, (*at, "replay_port")

    @property
    def interpreter(self) -> Path:
        """The interpreter that has vLLM, absolute; links are kept, as they make the venv.

        A bare name is sought on the PATH, as a shell does.
        """
        named = str(os.environ.get(PYTHON_VARIABLE) or self.python)
        if "/" not in named and (found := shutil.which(named)):
            return Path(found)
        return Path(named).expanduser().absolute()

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


def _machine(host: str) -> str:
    """Return a name for the machine that an address is of: all loopback addresses are of one."""
    return "localhost" if host.startswith("127.") or host in ("0.0.0.0", "::1") else host


def load(path: Path) -> FleetFile:
    """Read a fleet file; `FleetError` names every wrong entry by its place."""
    try:
        document = Document.read(path, "engines: [...]")
    except DocumentError as error:
        raise FleetError(str(error)) from error
    faults = list(document.faults)
    try:
        fleet = FleetFile.model_validate(document.data)
    except ValidationError as error:
        found = list(wording.faults(error, FleetFile, _shared(document.data)))
        faults += (_at_home(fault, document.data, found) for fault in found)
        fleet = None
    if fleet is None or faults:
        raise FleetError("\n".join(document.say(faults)))
    return fleet


def _at_home(fault: Fault, data: Mapping[str, Any], found: Iterable[Fault]) -> Fault:
    """Return a fault of a value that engines share at the place where the value stands."""
    if fault.where[:1] != ("engines",) or len(fault.where) < 2:
        return fault
    shared = replace(fault, where=("engine", *fault.where[2:]))
    if len(fault.where) > 2 and (
        holds(data, fault.where) or not holds(data, shared.where) or fault.first
    ):
        return fault
    return shared if len(fault.where) > 2 or shared in found else fault


def _shared(value: Any) -> Any:
    """Return a fleet file's content with the `engine` section's settings in every engine."""
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
    if engine.exact:
        section["tokenizer"] = tokenizer_path(engine)
    else:
        section["exact"] = False
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


def tokenizer_path(engine: EngineSettings) -> str:
    """Return what a gateway's configuration names as tokenizer: a path, or the model's name.

    A name that is no directory here is given as it is; `without_tokenizer` tells.
    """
    name = str(engine.tokenizer or engine.model)
    path = Path(name).expanduser().absolute()
    return name if is_hub_id(name) and not path.parent.is_dir() else str(path)


def without_tokenizer(fleet: FleetFile) -> dict[str, str]:
    """Return the models whose tokenizer files are not here, with what to do about each.

    By the tokenizer that `gateway_models` names. The gateway reads these files
    and downloads none, and does without only if it is told to.
    """
    missing: dict[str, str] = {}
    for engine in fleet.engines:
        path = tokenizer_path(engine)
        if engine.exact and not (Path(path) / "tokenizer.json").is_file():
            source = path if is_hub_id(path) else "ORG/NAME"
            directory = Path("models") / Path(path).name if is_hub_id(path) else Path(path)
            missing[path] = (
                f"there is no {path}/tokenizer.json here: download the tokenizer files "
                f"(`{download(source, directory)}`) and name their directory as `tokenizer`, or "
                "set `exact: false` to route by text-block hashes and the gateway's own history"
            )
    return missing


def guessed_ranks(fleet: FleetFile) -> list[str]:
    """Return what to check where `ranks.tp` had to be guessed, since no config.json is here."""
    return [
        f"ranks.tp is taken for {engine.tensor_parallel_size} of engine {engine.id}, as "
        f"{engine.model} has no config.json here; set it to min(tp, KV heads), or 1 for MLA, or "
        "every look-up in the pool may miss"
        for engine in fleet.engines
        if engine.tensor_parallel_size > 1 and not (Path(engine.model) / "config.json").is_file()
    ]


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
