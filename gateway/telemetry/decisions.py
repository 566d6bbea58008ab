"""The record of recent decisions: what was known, what was chosen and why, what came of it.

A record is opened when a turn is placed and closed when it has ended; it holds
no prompt text. `/gateway/decisions` shows them, newest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Attempt:
    """One try at an engine; `failed` is None for the one that answered.

    `detail` says more of a failure, addresses included: clients never see it.
    """

    engine: str
    failed: str | None = None
    detail: str | None = None


@dataclass(slots=True)
class Record:
    """One decision. Times in seconds; `at` is wall-clock time, the rest are durations."""

    id: str
    at: float
    route: str
    model: str
    policy: str
    session: str
    prompt_tokens: int
    blocks: int
    exact: bool
    inexact_reason: str | None
    pool_state: str
    engine: str
    reason: str
    expected: dict[str, int]
    ranking: list[dict[str, Any]]
    prompt_seconds: float
    pool_seconds: float
    decide_seconds: float
    attempts: list[Attempt] = field(default_factory=list)
    ending: str = "under way"
    status: int | None = None
    ttft_seconds: float | None = None
    seconds: float | None = None
    reported: dict[str, int | None] | None = None


class Decisions:
    """The last `kept` records."""

    def __init__(self, kept: int) -> None:
        self._records: deque[Record] = deque(maxlen=kept)

    def add(self, record: Record) -> None:
        """Remember a record, which goes on being filled in until its turn has ended."""
        self._records.append(record)

    def newest(self, limit: int, request_id: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield up to `limit` records, newest first; with `request_id` that request's."""
        matching = (r for r in reversed(self._records) if request_id in (None, r.id))
        for _, record in zip(range(limit), matching, strict=False):
            yield asdict(record)
