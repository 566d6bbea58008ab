"""What the doctor found: findings, and the report that holds them.

A check either proves something (`ok`), finds a thing that costs precision
(`warn`), or one because of which the gateway routes wrongly or blindly
(`fail`). The names of checks and causes are stable: scripts may go by them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]
_RISING: tuple[Status, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's outcome.

    `engine` is None for what concerns the whole model, `rank` for engines with a
    single data-parallel rank. `cause` names what is wrong, and is None where
    nothing is; so are `expected` (what the configuration says) and `remedy`.
    `found` is a sentence.
    """

    check: str
    status: Status
    model: str
    found: str
    engine: str | None = None
    rank: int | None = None
    cause: str | None = None
    expected: str | None = None
    remedy: str | None = None


@dataclass(slots=True)
class Report:
    """All findings of one run, in the order they were made."""

    findings: list[Finding] = field(default_factory=list)

    @property
    def status(self) -> Status:
        """The worst status of all; `ok` of nothing."""
        return max((finding.status for finding in self.findings), key=_RISING.index, default="ok")

    def count(self, status: Status) -> int:
        """Return how many findings have this status."""
        return sum(finding.status == status for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return the document that `--json` prints."""
        return {
            "status": self.status,
            "counts": {status: self.count(status) for status in _RISING},
            "findings": [asdict(finding) for finding in self.findings],
        }
