"""What pydantic finds wrong, in plain words: what is expected of the key, and what was given."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from connector.document import Fault, Where, depth, say, short

_COLLISION = "collision"

_WORDS: dict[str, str] = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be a section of keys, as `key: value`",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "int_type": "must be a whole number",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list, as `[...]`",
    "literal_error": "must be {expected}",
    "none_required": "must be null",
    "path_type": "must be the path of a file or directory, as text",
    "string_too_short": "must not be empty",
    "string_type": 'must be text; put it in quotes ("...") if it is',
    "too_short": "must have at least {min_length} entry",
    "tuple_type": "must be a list, as `[...]`",
}


def collision(faults: Iterable[Fault]) -> None:
    """Raise, in a validator of a model, for faults that no single key can be blamed for.

    Their places are as seen from that model; `faults` below gives them back.
    """
    told = tuple(faults)
    if told:
        text = "; ".join(map(say, told))
        raise PydanticCustomError(_COLLISION, "{text}", {"text": text, "faults": told})


def faults(error: ValidationError, root: type[BaseModel], data: object) -> Iterator[Fault]:
    """Yield a fault for every key that `error` names; `data` is what `root` was to be made of.

    What a fault deeper in causes above is left out. A key that fits none of
    several types is told once, with all that it could be.
    """
    found = error.errors()
    told: dict[Where, list[ErrorDetails]] = {}
    for fault in found:
        where = tuple(fault["loc"])
        if fault["type"] == _COLLISION:
            yield from (_below(where, one) for one in fault["ctx"]["faults"])
            continue
        if any(len(f["loc"]) > len(where) and f["loc"][: len(where)] == where for f in found):
            continue
        # Unions put the tried branch's name behind the key; only what stands in the data counts.
        if fault["type"] not in ("missing", "extra_forbidden"):
            where = where[: depth(data, where)]
        told.setdefault(where, []).append(fault)
    for where, details in told.items():
        first, *others = dict.fromkeys(_words(root, where, fault) for fault in details)
        message = ", or ".join([first, *(other.removeprefix("must be ") for other in others)])
        given = details[0]["input"]
        shown = any(fault["type"] in _SHOWN for fault in details)
        yield Fault(where, message + (f" (given: {short(given)})" if shown else ""))


def fields(root: type[BaseModel], where: Where) -> Mapping[str, FieldInfo]:
    """Return the keys that the section at `where` knows."""
    section: type[BaseModel] | None = root
    for part in where:
        if isinstance(part, int) or section is None:
            continue
        info = section.model_fields.get(part)
        section = section_in(info.annotation) if info else None
    return section.model_fields if section else {}


def section_in(annotation: object) -> type[BaseModel] | None:
    """Return the section that a field of this type holds, alone or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(section_in, get_args(annotation))), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a remedy for an unknown name: the nearest known one, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def _below(above: Where, fault: Fault) -> Fault:
    first = None if fault.first is None else (*above, *fault.first)
    return replace(fault, where=(*above, *fault.where), first=first)


def _words(root: type[BaseModel], where: Where, fault: ErrorDetails) -> str:
    kind = fault["type"]
    special = _SPECIAL.get(kind)
    if special is not None:
        return special(root, where)
    if kind == "value_error":
        return fault["msg"].removeprefix("Value error, ")
    context = {
        # pydantic tells bounds as floats.
        key: f"{value:g}" if isinstance(value, float) else value
        for key, value in fault.get("ctx", {}).items()
    }
    words = _WORDS[kind].format(**context) if kind in _WORDS else _unforeseen(fault["msg"])
    if kind == "literal_error" and isinstance(fault["input"], str):
        names = re.findall(r"'([^']*)'", str(context["expected"]))
        close = difflib.get_close_matches(fault["input"], names, n=1)
        words += f"; did you mean {close[0]!r}?" if close else ""
    return words


def _missing(root: type[BaseModel], where: Where) -> str:
    info = fields(root, where[:-1]).get(str(where[-1]))
    about = info.description if info else None
    return "is required" + (f": {about}" if about else "")


def _unknown(root: type[BaseModel], where: Where) -> str:
    return f"unknown key; {nearest(str(where[-1]), fields(root, where[:-1]))}"


def _section(root: type[BaseModel], where: Where) -> str:
    known = ", ".join(fields(root, where))
    return f"must be a section of keys, as `key: value`; known: {known}"


def _key(root: type[BaseModel], where: Where) -> str:
    return "keys must be text; put this one in quotes, or remove it"


def _unforeseen(message: str) -> str:
    return message.removeprefix("Input ").replace("should", "must", 1)


_SPECIAL: dict[str, Callable[[type[BaseModel], Where], str]] = {
    "missing": _missing,
    "extra_forbidden": _unknown,
    "model_type": _section,
    "model_attributes_type": _section,
    "invalid_key": _key,
}
# Validators of our own quote what they were given as they see fit.
_SHOWN: frozenset[str] = frozenset(_WORDS) | {"model_type", "model_attributes_type"}
