"""Reads of a gateway.yaml what the doctor needs: `models`, and where the engines' key is.

The other sections are the gateway's and are not judged here; `mooncake-gateway
check` does. Faults of `models` are told as it tells them: file, line, key, what
is wrong.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from connector.model import ModelConfig

Where = tuple[str | int, ...]


class ConfigUnreadable(Exception):
    """A configuration that cannot be used; its text has a line per fault."""


class Configured(NamedTuple):
    """The models, and the name of the variable that holds the engines' key (None: none)."""

    models: tuple[ModelConfig, ...]
    api_key_env: str | None


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    models: tuple[ModelConfig, ...] = Field(min_length=1)


def read(path: Path) -> Configured:
    """Read a gateway.yaml; relative paths in it are taken from its folder.

    Raises ConfigUnreadable.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigUnreadable(f"{path}: cannot be read: {error}") from error
    try:
        data = yaml.safe_load(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigUnreadable(f"{path}: is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigUnreadable(f"{path}: must be a mapping of settings, e.g. `models: [...]`")
    try:
        models = _File.model_validate(data).models
    except ValidationError as error:
        raise ConfigUnreadable("\n".join(_faults(path, node, error))) from error
    upstream = data.get("upstream")
    variable = upstream.get("api_key_env") if isinstance(upstream, dict) else None
    return Configured(
        tuple(_rooted(model, path.parent) for model in models),
        variable if isinstance(variable, str) else None,
    )


def _rooted(model: ModelConfig, folder: Path) -> ModelConfig:
    paths = {"tokenizer": model.tokenizer, "chat_template": model.chat_template}
    return model.model_copy(update={key: folder / path for key, path in paths.items() if path})


def _faults(path: Path, node: yaml.Node | None, error: ValidationError) -> Iterator[str]:
    for fault in error.errors():
        where = tuple(fault["loc"])
        line, depth = _place(node, where)
        message = str(fault["msg"]).removeprefix("Value error, ")
        if fault["type"] == "missing":
            message, depth = "is required", len(where)
        elif fault["type"] == "extra_forbidden":
            message = "unknown key" + _nearest(where)
        elif fault["type"] != "value_error":
            message += f" (given: {repr(fault['input'])[:60]})"
        # What a union tried stands behind the key; only what is in the file counts.
        key = ".".join(map(str, where[:depth]))
        yield f"{path}:{line}: {key}: {message}"


def _place(node: yaml.Node | None, where: Where) -> tuple[int, int]:
    """Return the line of the deepest part of `where` that the file has, and its depth."""
    line = 1
    for depth, part in enumerate(where):
        marks: Mapping[Any, tuple[yaml.Node, yaml.Node]] = {}
        if isinstance(node, yaml.MappingNode):
            marks = {key.value: (key, value) for key, value in node.value}
        elif isinstance(node, yaml.SequenceNode):
            marks = dict(enumerate((value, value) for value in node.value))
        if part not in marks:
            return line, depth
        mark, node = marks[part]
        line = mark.start_mark.line + 1
    return line, len(where)


def _nearest(where: Where) -> str:
    """Return a hint at the known key that an unknown one is likest to."""
    section: type[BaseModel] | None = _File
    for part in where[:-1]:
        if isinstance(part, str) and section is not None:
            field = section.model_fields.get(part)
            section = _section(field.annotation) if field else None
    known = list(section.model_fields) if section else []
    close = difflib.get_close_matches(str(where[-1]), known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""


def _section(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section, get_args(annotation))), None)
