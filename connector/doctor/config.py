"""Reads of a gateway.yaml what the doctor needs: `models`, and where the engines' key is.

The other sections are the gateway's and are not judged here; `mooncake-gateway
check` does. Faults of `models` are told as it tells them: file, line, key, what
is wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from connector import wording
from connector.document import Document, DocumentError
from connector.model import ModelConfig


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
        document = Document.read(path, "models: [...]")
    except DocumentError as error:
        raise ConfigUnreadable(str(error)) from error
    found = list(document.faults)
    models: tuple[ModelConfig, ...] = ()
    try:
        models = _File.model_validate(document.data).models
    except ValidationError as error:
        found += wording.faults(error, _File, document.data)
    if found:
        raise ConfigUnreadable("\n".join(document.say(found)))
    upstream = document.data.get("upstream")
    variable = upstream.get("api_key_env") if isinstance(upstream, dict) else None
    return Configured(
        tuple(_rooted(model, path.parent) for model in models),
        variable if isinstance(variable, str) else None,
    )


def _rooted(model: ModelConfig, folder: Path) -> ModelConfig:
    paths = {"tokenizer": model.tokenizer, "chat_template": model.chat_template}
    return model.model_copy(update={key: folder / path for key, path in paths.items() if path})
