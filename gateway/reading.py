"""Makes a configuration of a file and the environment, and says where its faults stand.

Environment variables `MOONCAKE_GATEWAY_<SECTION>__<KEY>` override the file. All
that can be judged is judged, so that every fault is named at once: a wrong type
here does not hide a collision there.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource

from connector import document, wording
from connector.document import Document, DocumentError, Fault, Where
from connector.model import ModelConfig
from gateway.config import ENV_PREFIX, ConfigError, GatewayConfig, inconsistencies
from policies import base


class Reading:
    """A configuration file together with the environment that overrides parts of it.

    `config` is None where `faults` are; `models` holds those whose files can be
    judged all the same, by their position, with everything at fault left out.
    """

    def __init__(self, path: Path) -> None:
        """Read and judge everything but the files that the configuration names.

        Raises:
            ConfigError: if the file cannot be read as YAML.
        """
        try:
            self._document = Document.read(path, "models: [...]")
        except DocumentError as error:
            raise ConfigError(str(error)) from error
        self._environment = _Environment().read()
        self.data: dict[Any, Any] = _joined(self._document.data, self._environment)
        self.config: GatewayConfig | None = None
        found = [*self._document.faults, *_unknown_variables()]
        try:
            config = GatewayConfig.model_validate(self.data)
        except ValidationError as error:
            found += wording.faults(error, GatewayConfig, self.data)
            told = {fault.where for fault in found}
            found += (fault for fault in inconsistencies(self.data) if fault.where not in told)
            self.models = dict(self._judgeable(found, path.parent))
        else:
            self.models = {
                position: _rooted(model, path.parent)
                for position, model in enumerate(config.models)
            }
            if not found:
                models = tuple(self.models.values())
                self.config = config.model_copy(update={"models": models})
        self.faults = tuple(found)

    def accepted(self) -> GatewayConfig:
        """Return the configuration.

        Raises:
            ConfigError: with one line per fault.
        """
        if self.config is None:
            raise self.error(self.faults)
        return self.config

    def error(self, faults: Iterable[Fault]) -> ConfigError:
        """Return an error that names each fault's file and line, or environment variable."""
        ordered = sorted(
            dict.fromkeys(faults),
            key=lambda fault: (
                self._variable(fault.where) is None,
                self._document.line(fault.where),
            ),
        )
        return ConfigError("\n".join(document.say(fault, self._place) for fault in ordered))

    def _place(self, where: Where) -> str:
        variable = self._variable(where)
        if where[:1] == (variable,):
            return "the environment"
        return f"{variable} in the environment" if variable else self._document.place(where)

    def _variable(self, where: Where) -> str | None:
        """Return the environment variable that a value, or the section that lacks it, is from."""
        if where and str(where[0]).startswith(ENV_PREFIX):
            return str(where[0])
        if not _overrides(self._environment, self._document.data, where):
            return None
        names = {tuple(name[len(ENV_PREFIX) :].lower().split("__")): name for name in _variables()}
        keys = tuple(str(part).lower() for part in where)
        around = [way for way in names if keys[: len(way)] == way or way[: len(keys)] == keys]
        return names[max(around, key=len)] if around else None

    def _judgeable(
        self, faults: Iterable[Fault], folder: Path
    ) -> Iterator[tuple[int, ModelConfig]]:
        wrong = [fault.where for fault in faults]
        models = self.data.get("models")
        for position, given in enumerate(models if isinstance(models, list) else ()):
            if not isinstance(given, dict):
                continue
            kept = {
                key: value
                for key, value in given.items()
                if key in ModelConfig.model_fields
                and not any(where[:3] == ("models", position, key) for where in wrong)
            }
            engine = {"id": "stand-in", "url": "http://stand-in"}
            try:
                model = ModelConfig.model_validate({"name": "?", "engines": [engine]} | kept)
            except ValidationError:
                continue  # what is wrong with the whole of it is among the faults
            yield position, _rooted(model, folder)


def load(path: Path) -> GatewayConfig:
    """Read and validate a configuration file; relative paths in it are taken from its folder.

    Raises:
        ConfigError: with one line per fault.
    """
    return Reading(path).accepted()


class _Environment(EnvSettingsSource):
    """What `MOONCAKE_GATEWAY_...` variables say; all they can hold is text."""

    def __init__(self) -> None:
        super().__init__(
            # The reading of variables needs no more of a settings class than any model has.
            cast("type[BaseSettings]", GatewayConfig),
            case_sensitive=False,
            env_prefix=ENV_PREFIX,
            env_nested_delimiter="__",
            env_parse_none_str="null",
        )

    def read(self) -> dict[str, Any]:
        """Return what the variables say, by key; policies' options of the options' types."""
        data = self()
        policies = data.get("policies")
        if isinstance(policies, dict):
            data["policies"] = {
                name: base.from_text(name, options) if isinstance(options, dict) else options
                for name, options in policies.items()
            }
        return data

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Read a section or list as JSON; a text that is none goes on as it is, to be refused."""
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return value


def _overrides(above: object, below: object, where: Where) -> bool:
    """Tell whether what stands at `where` in two joined mappings, or lacks there, is `above`'s."""
    for position, part in enumerate(where):
        if not isinstance(above, Mapping) or (position and not isinstance(below, Mapping)):
            return True  # nothing of `below` is left from here on
        if part not in above:
            return False
        above = above[part]
        below = below.get(part) if isinstance(below, Mapping) else None
    return bool(where)


def _variables() -> Iterator[str]:
    return (name for name in os.environ if name.upper().startswith(ENV_PREFIX))


def _unknown_variables() -> Iterator[Fault]:
    """Yield variables that are surely meant for the gateway and name no setting.

    Others may have the prefix by chance: Kubernetes makes some for a Service
    named mooncake-gateway.
    """
    known = {f"{ENV_PREFIX}{name.upper()}": name for name in GatewayConfig.model_fields}
    for variable in _variables():
        name, nested, _ = variable.upper().partition("__")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
            if nested or close:
                hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
                yield Fault((variable,), "names no setting", hint)


def _joined(below: Mapping[Any, Any], above: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return two mappings as one: sections are joined, of all else `above` wins."""
    joined = dict(below) | dict(above)
    for key in below.keys() & above.keys():
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping):
            joined[key] = _joined(below[key], above[key])
    return joined


def _rooted(model: ModelConfig, folder: Path) -> ModelConfig:
    paths = {"tokenizer": model.tokenizer, "chat_template": model.chat_template}
    return model.model_copy(
        update={key: folder / path for key, path in paths.items() if path is not None}
    )
