"""Who is examined (`Subject`), and in which exam: what all checks hand one another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq.asyncio

from connector.doctor.ask import Asker
from connector.doctor.listen import Listener, Published, Source
from connector.doctor.metrics import Page
from connector.doctor.probe import Probe
from connector.doctor.recipes import Recipe
from connector.doctor.report import Finding, Report
from connector.model import EngineConfig, ModelConfig
from connector.render import Renderer


@dataclass(slots=True)
class Subject:
    """One engine, or one data-parallel rank of it, and what has become known of it.

    `ours` are the probe's token ids as the configuration makes them, `theirs` as
    the engine does; `recipe` is how the engine was proved to hash, `pooled`
    whether the probe's blocks were seen in the pool under whatever name.
    """

    config: EngineConfig
    rank: int = 0
    ranks: int = 1
    up: bool = False
    version: str | None = None
    max_model_len: int | None = None
    page: Page = field(default_factory=Page)
    source: Source | None = None
    probe: Probe | None = None
    ours: list[int] | None = None
    theirs: list[int] | None = None
    prompt_tokens: int | None = None
    listener: Listener | None = None
    published: Published | None = None
    recipe: Recipe | None = None
    pooled: bool = False

    @property
    def name(self) -> str:
        """The engine's id, with the rank where there are several."""
        return f"{self.config.id} rank {self.rank}" if self.ranks > 1 else self.config.id

    @property
    def headers(self) -> dict[str, str]:
        """Headers that lead a request to this rank."""
        return {"X-data-parallel-rank": str(self.rank)} if self.ranks > 1 else {}

    @property
    def token_ids(self) -> list[int]:
        """The probe's token ids: by the engine's word, its events, or the configuration."""
        if self.theirs is not None:
            return self.theirs
        if self.published is not None:
            return self.published.token_ids
        return self.ours or []

    @property
    def block_size(self) -> int | None:
        """Tokens per block of the engine's cache, by the best that is known."""
        if self.published is not None:
            return self.published.block_size
        return self.recipe.block_size if self.recipe else self.page.block_size


@dataclass(slots=True)
class Exam:
    """One model under examination. `timeout` bounds every single wait, in seconds."""

    model: ModelConfig
    asker: Asker
    context: zmq.asyncio.Context
    report: Report
    timeout: float
    subjects: list[Subject]
    renderer: Renderer | None = None
    way: Recipe | None = None
    """How the gateway hashes for this model; None while `auto` cannot be resolved."""
    heard: asyncio.Condition = field(default_factory=asyncio.Condition)
    """Notified whenever any listener has heard something."""

    @property
    def reached(self) -> list[Subject]:
        """The subjects that answer and serve the model."""
        return [subject for subject in self.subjects if subject.up]

    def ok(self, check: str, found: str, subject: Subject | None = None) -> None:
        """Put down that a check has proved what it is for."""
        self.report.findings.append(Finding(check, "ok", self.model.name, found, *_of(subject)))

    def warn(
        self,
        check: str,
        cause: str,
        found: str,
        subject: Subject | None = None,
        *,
        expected: str | None = None,
        remedy: str | None = None,
    ) -> None:
        """Put down what costs precision."""
        engine, rank = _of(subject)
        self.report.findings.append(
            Finding(check, "warn", self.model.name, found, engine, rank, cause, expected, remedy)
        )

    def fail(
        self,
        check: str,
        cause: str,
        found: str,
        subject: Subject | None = None,
        *,
        expected: str | None = None,
        remedy: str,
    ) -> None:
        """Put down what makes the gateway route wrongly or blindly."""
        engine, rank = _of(subject)
        self.report.findings.append(
            Finding(check, "fail", self.model.name, found, engine, rank, cause, expected, remedy)
        )


def some(names: Sequence[str], most: int = 8) -> str:
    """Return names in one line, the first few of many; `none` of none."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more


def _of(subject: Subject | None) -> tuple[str | None, int | None]:
    if subject is None:
        return None, None
    return subject.config.id, subject.rank if subject.ranks > 1 else None
