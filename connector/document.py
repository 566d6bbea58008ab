"""A YAML file and where in it everything stands, so that a fault can name line and key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

Where = tuple[str | int, ...]
"""The way from the top of a document to a value: keys, and positions in lists."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with the value at `where`.

    `first` leads to the entry that it collides with, if that is what is wrong;
    `remedy` says what would be right where `message` does not.
    """

    where: Where
    message: str
    remedy: str = ""
    first: Where | None = None


class DocumentError(Exception):
    """A file that cannot be read as a YAML mapping; its text names file and line."""


class Document:
    """What a YAML file holds (`data`), and its faults as YAML: keys that are given twice."""

    def __init__(
        self, path: Path, data: dict[Any, Any], node: yaml.Node, faults: Iterable[Fault]
    ) -> None:
        self.path = path
        self.data = data
        self.faults = tuple(faults)
        self._node = node

    @classmethod
    def read(cls, path: Path, example: str) -> Self:
        """Read a file; `example` shows what could stand in one that holds no mapping.

        Raises:
            DocumentError: if it cannot be read, is not YAML, or holds no mapping.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DocumentError(f"{path}: cannot be read: {reason}") from error
        try:
            loader = _Loader(text)
            try:
                node = loader.get_single_node()
                # Before the data are made: that puts merged keys beside a mapping's own.
                repeated = [] if node is None else list(_repeated_keys(node, (), set()))
                data = None if node is None else loader.construct_document(node)
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = f":{mark.line + 1}" if mark else ""
            told = " ".join(filter(None, (error.context, error.problem)))
            if mark and error.context_mark and error.context_mark.line != mark.line:
                told += f" (it begins in line {error.context_mark.line + 1})"
            raise DocumentError(
                f"{path}{line}: is not YAML: {told}; look for a quote, bracket, colon or "
                "indentation that is wrong there or just before"
            ) from error
        except yaml.reader.ReaderError as error:
            line = f":{text.count(chr(10), 0, error.position) + 1}"
            raise DocumentError(
                f"{path}{line}: is not YAML: a character that may not stand there: "
                f"U+{error.character:04X}; remove it"
            ) from error
        except RecursionError as error:
            raise DocumentError(f"{path}: is not YAML of a sane depth; nest it less") from error
        if not isinstance(data, dict) or node is None:
            raise DocumentError(f"{path}:1: must be a mapping of settings, e.g. `{example}`")
        return cls(path, data, node, repeated)

    def line(self, where: Where) -> int:
        """Return the line of the deepest part of `where` that the file holds, from 1 on."""
        line, node = 1, self._node
        for part in where:
            found = _below(node, part)
            if found is None:
                break
            line, node = found
        return line

    def place(self, where: Where) -> str:
        """Return `file:line` of a value."""
        return f"{self.path}:{self.line(where)}"

    def say(self, faults: Iterable[Fault]) -> list[str]:
        """Return one line of text for every fault, in the order of the file."""
        ordered = sorted(dict.fromkeys(faults), key=lambda fault: self.line(fault.where))
        return [say(fault, self.place) for fault in ordered]


def say(fault: Fault, place: Callable[[Where], str] | None = None) -> str:
    """Return a fault as a line of text; `place` tells where a value stands (`file:line`)."""
    parts = [place(fault.where)] if place else []
    parts += [dotted(fault.where)] if fault.where else []
    first = ""
    if fault.first:
        first = f" (first: {dotted(fault.first)}{f' at {place(fault.first)}' if place else ''})"
    remedy = f"; {fault.remedy}" if fault.remedy else ""
    return ": ".join([*parts, f"{fault.message}{first}{remedy}"])


def dotted(where: Where) -> str:
    """Return a way as people write it: `models.0.engines.1.url`."""
    return ".".join(map(str, where))


def holds(data: object, where: Where) -> bool:
    """Tell whether plain data has a value at `where`."""
    return depth(data, where) == len(where)


def depth(data: object, where: Where) -> int:
    """Return how many parts of `where` lead somewhere in plain data."""
    for position, part in enumerate(where):
        match data:
            case Mapping() if part in data:
                data = data[part]
            case Sequence() if (
                not isinstance(data, str) and isinstance(part, int) and part < len(data)
            ):
                data = data[part]
            case _:
                return position
    return len(where)


def short(value: object) -> str:
    """Return a value as it may be quoted in a line of text, in YAML's words."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Loader(yaml.SafeLoader):
    """Names the line of a value that its type cannot hold, such as a 40th of May."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{short(node.value)} is no {kind}: {error}", node.start_mark
            ) from error


def _below(node: yaml.Node, part: str | int) -> tuple[int, yaml.Node] | None:
    """Return the line and the node of an entry; of keys given twice the last, as YAML takes it."""
    if isinstance(node, yaml.SequenceNode):
        if isinstance(part, int) and part < len(node.value):
            below = node.value[part]
            return below.start_mark.line + 1, below
        return None
    if not isinstance(node, yaml.MappingNode):
        return None
    for key, value in reversed(node.value):
        if key.value == str(part):
            return key.start_mark.line + 1, value
    return None


def _repeated_keys(node: yaml.Node, where: Where, seen: set[int]) -> Iterator[Fault]:
    # An alias leads to the same node again, possibly for ever.
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            yield from _repeated_keys(item, (*where, position), seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], list[int]] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                lines.setdefault((key.tag, key.value), []).append(key.start_mark.line + 1)
                yield from _repeated_keys(value, (*where, key.value), seen)
        for (_, name), given in lines.items():
            if len(given) > 1:
                yield Fault(
                    (*where, name),
                    f"is given {len(given)} times, in lines {' and '.join(map(str, given))}, "
                    "and YAML takes the last alone",
                    "keep one",
                )
