"""Writes the configuration reference from the models themselves, so that it cannot go stale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gateway.config import ENV_PREFIX, GatewayConfig
from policies import base

_HEAD = f"""\
# Configuration reference

`gateway.yaml`, as read by `mooncake-gateway serve` and `check`. Written from the
configuration's own models by `mooncake-gateway reference`; do not edit it by hand.

Unknown keys are refused with the nearest known one. Relative paths are taken from the
file's folder. Environment variables `{ENV_PREFIX}<SECTION>__<KEY>` override the file
(`{ENV_PREFIX}LISTEN__PORT=8080`); sections and lists can be given as JSON. Times are
seconds, sizes bytes, lengths tokens.
"""


def markdown() -> str:
    """Return the whole reference."""
    parts = [_HEAD, *_sections(GatewayConfig, ""), *_policies()]
    return "\n".join(parts).rstrip() + "\n"


def _sections(model: type[BaseModel], path: str) -> Iterator[str]:
    yield f"\n## {'`' + path + '`' if path else 'Top level'}\n"
    doc = (model.__doc__ or "").strip().splitlines()[0]
    yield f"{doc}\n"
    yield "| Key | Type | Default | Meaning |\n|---|---|---|---|"
    below: list[tuple[type[BaseModel], str]] = []
    for name, info in model.model_fields.items():
        section, several = _section(info.annotation)
        if section is not None:
            below.append((section, f"{path}.{name}".lstrip(".") + ("[]" if several else "")))
        kind = _type(info.annotation) + _bounds(info)
        yield f"| `{name}` | {kind} | {_default(info, section)} | {info.description} |"
    for section, name in below:
        yield from _sections(section, name)


def _section(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the section that a field holds, and whether it holds a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for part in get_args(annotation):
        section, _ = _section(part)
        if section is not None:
            return section, get_origin(annotation) is tuple
    return None, False


def _type(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0])
    if origin is Literal:
        return " \\| ".join(f"`{part}`" for part in parts)
    if origin is tuple:
        return f"list of {_type(parts[0])}"
    if origin is dict:
        return "mapping"
    if parts and (origin is Union or not isinstance(annotation, type)):
        return " \\| ".join(_type(part) for part in parts)
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    name: str = annotation.__name__
    return {"Path": "path", "str": "text"}.get(name, name)


def _bounds(info: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {getattr(rule, name)}"
        for rule in info.metadata
        for name, sign in signs.items()
        if getattr(rule, name, None) is not None
    ]
    return f", {', '.join(found)}" if found else ""


def _default(info: FieldInfo, section: type[BaseModel] | None) -> str:
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True, validated_data={})
    if section is not None and default is not None:
        return "as below"
    if default is None or default is PydanticUndefined:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return f"`{list(default)}`"
    return f"`{default}`" if default != "" else '`""`'


def _policies() -> Iterator[str]:
    yield "\n## Policies and their options\n"
    yield "Chosen by `policy`, tuned under `policies.<name>`.\n"
    yield "| Policy | Options and defaults | What it does |\n|---|---|---|"
    for name in base.names():
        options = ", ".join(f"`{key}: {value}`" for key, value in base.options(name).items())
        yield f"| `{name}` | {options or 'none'} | {base.summary(name)} |"
