"""`gateway.yaml`: every setting, its default and meaning; errors that name line and remedy.

The `models:` section is defined in `connector/model.py`, since the connector's
tools read it too. Environment variables `MOONCAKE_GATEWAY_<SECTION>__<KEY>`
override the file.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from connector.model import ModelConfig, Section
from policies import base

ENV_PREFIX = "MOONCAKE_GATEWAY_"


class Listen(Section):
    """The data plane's listener."""

    host: str = Field("127.0.0.1", description="Address to bind.")
    port: int = Field(8000, ge=0, le=65535, description="Port to bind; 0 takes a free one.")


class Admin(Section):
    """The admin listener: metrics, decisions, policy. Keep it off public networks."""

    host: str = Field("127.0.0.1", description="Address to bind.")
    port: int = Field(9100, ge=0, le=65535, description="Port to bind; 0 takes a free one.")


class Upstream(Section):
    """How engines are spoken to. Times in seconds."""

    connect_timeout: float = Field(
        5.0, gt=0, description="Connecting to an engine; then the next candidate is tried."
    )
    first_byte_timeout: float | None = Field(
        None,
        gt=0,
        description="From sending a request to the first byte of its answer; null: no limit, "
        "since a long JSON answer sends nothing until it is whole.",
    )
    idle_timeout: float = Field(
        300.0, gt=0, description="Between two pieces of an answer; there is no total limit."
    )
    api_key_env: str | None = Field(
        None,
        description="Environment variable that holds the engines' API key. Set: it replaces the "
        "client's Authorization. Null: the client's is passed on.",
    )


class Limits(Section):
    """What a client may send."""

    body_bytes: int = Field(
        64 * 2**20, ge=1024, description="Largest request body; a larger one is answered 413."
    )


class Probing(Section):
    """How engines are watched. Times in seconds."""

    interval: float = Field(1.0, gt=0, description="Between two probes of an engine.")
    timeout: float = Field(2.0, gt=0, description="For one probe.")
    failures: int = Field(2, ge=1, description="Failed probes in a row that make an engine down.")


class Log(Section):
    """The gateway's own log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level that is written."
    )
    format: Literal["json", "text"] = Field("json", description="One JSON object a line, or text.")
    access: bool = Field(True, description="One line for every request.")


class GatewayConfig(BaseSettings):
    """The whole configuration of `mooncake-gateway serve`."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_parse_none_str="null",
    )

    listen: Listen = Field(Listen(), description="The data plane's listener.")
    admin: Admin = Field(Admin(), description="The admin listener.")
    policy: str = Field("pool_aware", description="The acting policy's name.")
    policies: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Options by policy name."
    )
    policy_header: bool = Field(
        False, description="Whether a request may name its policy in X-Gateway-Policy."
    )
    seed: int = Field(0, description="Seed of the policies' chance.")
    debug_headers: bool = Field(
        False,
        description="Answer with X-Gateway-Engine, X-Gateway-Policy and "
        "X-Gateway-Expected-Cached. They tell tenants what others have cached.",
    )
    allow_engine_fields: bool = Field(
        False,
        description="Let clients send engine-internal fields such as kv_transfer_params. A "
        "malformed one ends an engine's process; another reads a stranger's cache.",
    )
    upstream: Upstream = Field(Upstream(), description="How engines are spoken to.")
    limits: Limits = Field(Limits(), description="What a client may send.")
    probing: Probing = Field(Probing(), description="How engines are watched.")
    log: Log = Field(Log(), description="The gateway's own log.")
    shutdown_grace: float = Field(
        30.0, ge=0, le=86_400, description="Seconds that requests under way may take after SIGTERM."
    )
    decisions_kept: int = Field(
        1000, ge=1, le=100_000, description="Decisions that /gateway/decisions remembers."
    )
    models: tuple[ModelConfig, ...] = Field(min_length=1, description="The served models.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Let the environment override the file, which arrives as keyword arguments."""
        return env_settings, init_settings

    @field_validator("policy")
    @classmethod
    def _policy_exists(cls, value: str) -> str:
        base.options(value)
        return value

    @field_validator("policies")
    @classmethod
    def _options_fit(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, options in value.items():
            base.create(name, options)
        return value

    @model_validator(mode="after")
    def _unique(self) -> Self:
        names = [model.name for model in self.models]
        if twice := _repeated(names):
            raise ValueError(f"model {twice!r} occurs twice; names must be unique")
        ids = [engine.id for model in self.models for engine in model.engines]
        if twice := _repeated(ids):
            raise ValueError(f"engine id {twice!r} occurs in two models; ids must be unique")
        return self


class ConfigError(Exception):
    """A configuration that cannot be used; its text names file, line, key and remedy."""


def load(path: Path) -> GatewayConfig:
    """Read and validate a configuration file; relative paths in it are taken from its folder.

    Raises:
        ConfigError: with one line per fault.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        data = yaml.safe_load(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be a mapping of settings, e.g. `models: [...]`")
    try:
        config = GatewayConfig(**{str(key): value for key, value in data.items()})
    except SettingsError as error:
        raise ConfigError(
            f"the environment: {error}: a section is set as JSON, or key by key with "
            f"{ENV_PREFIX}<SECTION>__<KEY>"
        ) from error
    except ValidationError as error:
        raise ConfigError("\n".join(_faults(path, node, error))) from error
    return config.model_copy(
        update={"models": tuple(_rooted(model, path.parent) for model in config.models)}
    )


def fault_at(path: Path, where: tuple[str | int, ...], message: str) -> ConfigError:
    """Return an error about the value at `where` that shows only when the value is used."""
    node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    line, _ = _line(node, where)
    return ConfigError(f"{path}:{line}: {'.'.join(map(str, where))}: {message}")


def engine_key(upstream: Upstream) -> str | None:
    """Return the engines' API key from the environment.

    Raises:
        ConfigError: if the configuration names a variable that is not set.
    """
    if upstream.api_key_env is None:
        return None
    key = os.environ.get(upstream.api_key_env)
    if not key:
        raise ConfigError(
            f"upstream.api_key_env names {upstream.api_key_env!r}, which is not set; "
            "export it, or remove the setting to pass the clients' keys on"
        )
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"the key in {upstream.api_key_env!r} does not fit into a header")
    return key


def _rooted(model: ModelConfig, folder: Path) -> ModelConfig:
    paths = {"tokenizer": model.tokenizer, "chat_template": model.chat_template}
    return model.model_copy(
        update={key: folder / path for key, path in paths.items() if path is not None}
    )


def _repeated(names: list[str]) -> str | None:
    return next((name for name in names if names.count(name) > 1), None)


def _faults(path: Path, node: yaml.Node | None, error: ValidationError) -> Iterator[str]:
    """Yield a line per key at fault: what a fault deeper in causes above is left out."""
    found = error.errors()
    said: dict[tuple[int, str], list[str]] = {}
    for fault in found:
        where = tuple(fault["loc"])
        if any(len(f["loc"]) > len(where) and f["loc"][: len(where)] == where for f in found):
            continue
        line, key, message = _describe(node, fault)
        said.setdefault((line, key), []).append(message)
    for (line, key), messages in sorted(said.items()):
        yield f"{path}:{line}: {key + ': ' if key else ''}{', or: '.join(messages)}"


def _describe(node: yaml.Node | None, fault: Mapping[str, Any]) -> tuple[int, str, str]:
    where = tuple(fault["loc"])
    # Unions put the tried branch's name behind the key; only what stands in the file counts.
    line, depth = _line(node, where)
    known = where[:depth] if fault["type"] != "missing" else where
    key = ".".join(str(part) for part in known)
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        fields = list(_fields(where[:-1]))
        close = difflib.get_close_matches(str(where[-1]), fields, n=1)
        message = "unknown key"
        message += f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(fields)}"
        key = ".".join(str(part) for part in where)
    elif fault["type"] == "missing":
        message = "is required"
    elif fault["type"] not in ("value_error", "extra_forbidden"):
        message += f" (given: {_short(fault['input'])})"
    return line, key, message


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _line(node: yaml.Node | None, where: tuple[str | int, ...]) -> tuple[int, int]:
    """Return the line of the deepest part of `where` that the file holds, and its depth."""
    line, depth = 1, 0
    for part in where:
        below: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(part):
                    line, below = key.start_mark.line + 1, value
        elif (
            isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value)
        ):
            below = node.value[part]
            line = below.start_mark.line + 1
        if below is None:
            break
        node, depth = below, depth + 1
    return line, depth


def _fields(where: tuple[str | int, ...]) -> Iterator[str]:
    """Yield the known keys of the section at `where`."""
    section: type[BaseModel] | None = GatewayConfig
    for part in where:
        if isinstance(part, int) or section is None:
            continue
        info = section.model_fields.get(part)
        section = _section_in(info.annotation) if info else None
    if section:
        yield from section.model_fields


def _section_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, (_section_in(part) for part in get_args(annotation))), None)
