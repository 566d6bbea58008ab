"""docs/troubleshooting.md quotes words that the code says, and leaves out none of its kinds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from gateway.api.errors import Fault
from gateway.fleet.engine import State
from gateway.index.pool import LookupState
from gateway.proxy.upstream import Cause

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs/troubleshooting.md").read_text()
CODE = re.compile(r"(?<!`)``(?!`)(.+?)``(?!`)|(?<!`)`([^`\n]+)`(?!`)")
# What stands for a value, and what splits a quotation otherwise.
GAPS = re.compile(
    r"\b(?:NAME|ID|STATE|ERROR|KEYS?|ENDPOINT|TOPIC|OTHER|URL|SEGMENT|FIELD|METHOD|CAUSE|STATUS|"
    r"SESSION|LOAD|LIMIT|A|B|N|M)\b|\.\.\.|'(?:A|B|image_url)'|\d+|[:;()]"
)


@cache
def said() -> str:
    """Everything that the code may say: its string literals, one a line."""
    return "\n".join(
        node.value.replace("\n", " ")
        for folder in ("gateway", "connector", "policies")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def spans(text: str) -> Iterator[str]:
    for double, single in CODE.findall(text):
        yield double.strip() or single.strip()


def quotations() -> list[str]:
    """Return what is quoted in the first two columns of tables, cut where values stand."""
    found = []
    for line in DOCUMENT.splitlines():
        if not line.startswith("|"):
            continue
        for span in spans(" ".join(line.split("|")[1:3])):
            found += [
                piece.strip(" ,'")
                for piece in GAPS.split(span)
                if len(piece.split()) >= 3 and "=" not in piece and not piece.startswith("--")
            ]
    return sorted(set(found))


@pytest.mark.parametrize("quotation", quotations())
def test_it_quotes_what_the_code_says(quotation: str) -> None:
    assert quotation in said()


def test_there_are_quotations_to_check() -> None:
    assert len(quotations()) > 40


@pytest.mark.parametrize("kind", [*Fault, *Cause, *LookupState, *State], ids=str)
def test_every_kind_is_explained(kind: str) -> None:
    named = {str(span) for span in spans(DOCUMENT)}
    assert any(re.search(rf"\b{re.escape(str(kind))}\b", span) for span in named), kind


def test_every_metric_it_names_is_documented() -> None:
    documented = (ROOT / "docs/operating.md").read_text()
    metrics = {
        found.group(1)
        for span in spans(DOCUMENT)
        if (found := re.match(r"([a-z_]+_(?:total|seconds))\b(?!\.)", span))
    } - {"breaker_seconds"}
    assert metrics
    assert [name for name in sorted(metrics) if f"`{name}" not in documented] == []


def test_its_links_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in DOCUMENT.splitlines()
        if line.startswith("#")
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", DOCUMENT)) <= headings
