"""Writes configuration references from the models themselves, so that they cannot go stale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from connector.fleet import PYTHON_VARIABLE, FleetFile
from connector.settings import SharedSettings

_FLEET = f"""\
# Fleet file reference

The file that `mooncake-connector up FLEET.yaml` starts a fleet from, and that
`mooncake-connector config FLEET.yaml` prints command lines, environments and the gateway's
`models:` section for. Written from the fleet file's own models by `mooncake-connector
reference`; do not edit it by hand.

```yaml
master: {{rpc_port: 50051, http_port: 9003}}
engine:                              # what the engines have in common
  model: models/qwen3
  device: cuda
engines:                             # who they are, and where they differ
  - {{id: a, port: 8101, events_port: 5557, replay_port: 6557, segment: "127.0.0.2:17101"}}
  - {{id: b, port: 8102, events_port: 5558, replay_port: 6558, segment: "127.0.0.3:17102"}}
```

An engine takes from `engine` what it does not say itself; mappings (`env`, `extra_config`,
template arguments) are joined. Relative paths are taken from where the command runs.
`{PYTHON_VARIABLE}` in the environment names another interpreter than `python`. Sizes are bytes
or as 256MB, 4GiB. Unknown keys are refused with the nearest known one.

**What listens where.** The HTTP servers of engines and master, and the event replay, are bound to
`host`. KV events are bound to all addresses, `tcp://*:PORT`: vLLM binds an events endpoint only
where it holds `*` (or is `ipc://`), and takes `tcp://ADDRESS:PORT` as one to connect to. They tell
token ids to whoever can reach the port: on a shared network, close it to all but the gateways.
The replay is bound to all addresses too where `host` is a name or an IPv6 address, which ZMQ does
not bind.

**The tokenizer.** The gateway's section names the engines' tokenizer directory. Where its files
are not on this host (a model by its Hub id, a directory that is elsewhere), the section still
names it, and a warning says which files to fetch. Only `exact: false` here makes the gateway go
without.
"""


def fleet_markdown() -> str:
    """Return the reference of the fleet file."""
    tables = sections(FleetFile, apart_from=SharedSettings)
    text = "\n".join([_FLEET, *tables]).rstrip() + "\n"
    # The last table is the engines'; what it leaves out must be said.
    before, heading, engines = text.rpartition("## `engines[]`\n")
    return before + heading + engines.replace("\n| Key", "\nAll keys of `engine`, and:\n\n| Key", 1)


def sections(
    model: type[BaseModel], path: str = "", *, apart_from: type[BaseModel] | None = None
) -> Iterator[str]:
    """Yield the tables of a section and of all below it, as Markdown.

    A section that extends `apart_from` is given without what it takes over.
    """
    yield f"\n## {'`' + path + '`' if path else 'Top level'}\n"
    doc = (model.__doc__ or "").strip().splitlines()[0]
    yield f"{doc}\n"
    yield "| Key | Type | Default | Meaning |\n|---|---|---|---|"
    below: list[tuple[type[BaseModel], str]] = []
    known = apart_from.model_fields if apart_from and issubclass(model, apart_from) else {}
    for name, info in model.model_fields.items():
        if name in known and model is not apart_from:
            continue
        section, several = _section(info.annotation)
        if section is not None:
            below.append((section, f"{path}.{name}".lstrip(".") + ("[]" if several else "")))
        kind = _type(info.annotation) + _bounds(info.metadata)
        yield f"| `{name}` | {kind} | {_default(info, section)} | {info.description} |"
    for section, name in below:
        yield from sections(section, name, apart_from=apart_from)


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


def _bounds(rules: Iterable[object]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {getattr(rule, name)}"
        for rule in rules
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
