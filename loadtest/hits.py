"""What turns hit: one `Hit` per turn, their sums, and several runs side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Hit:
    """What one turn hit. Tokens; times in seconds from the request on.

    `cached` is the engine's own count, None where it reports none. `engine`,
    `device` and `pool` are the gateway's word (its debug headers), None without
    them. `status` is None where no answer came. `error` says what failed, None
    for a turn that was answered whole.
    """

    session: str
    turn: int
    status: int | None
    seconds: float
    error: str | None = None
    prompt: int | None = None
    cached: int | None = None
    engine: str | None = None
    device: int | None = None
    pool: int | None = None
    ttft: float | None = None

    @property
    def expected(self) -> int | None:
        """Cached tokens that the gateway expected, None where it does not say."""
        return None if self.device is None else self.device + (self.pool or 0)


@dataclass(frozen=True, slots=True)
class Summary:
    """Sums over turns.

    `cached` over `prompt_compared` is the cached share: turns whose engine
    reports no cached tokens count in neither. `overrated` sums what was expected
    and not there, `underrated` what was there and not expected, over the turns
    that tell both. `ttft` has seconds by percentile, empty without answers.
    """

    turns: int
    failed: int
    prompt: int
    prompt_compared: int
    cached: int
    device: int
    pool: int
    overrated: int
    underrated: int
    without_cached: int
    without_expected: int
    ttft: dict[str, float]

    @property
    def share(self) -> float | None:
        """Cached part of the prompt tokens, 0..1; None where no engine reports any."""
        return self.cached / self.prompt_compared if self.prompt_compared else None

    def as_json(self) -> dict[str, Any]:
        """The object that a machine reads."""
        return {
            "turns": self.turns,
            "failed": self.failed,
            "prompt_tokens": self.prompt,
            "cached_tokens": self.cached,
            "cached_share": self.share,
            "expected_device_tokens": self.device,
            "expected_pool_tokens": self.pool,
            "overrated_tokens": self.overrated,
            "underrated_tokens": self.underrated,
            "turns_without_cached_tokens": self.without_cached,
            "turns_without_expectation": self.without_expected,
            "ttft_seconds": self.ttft,
        }


def summarise(hits: Iterable[Hit]) -> Summary:
    """Sum up turns; failed ones count as such and in nothing else."""
    every = list(hits)
    answered = [hit for hit in every if hit.error is None]
    both = [
        (hit.expected, hit.cached)
        for hit in answered
        if hit.expected is not None and hit.cached is not None
    ]
    times = [hit.ttft for hit in answered if hit.ttft is not None]
    marks = np.percentile(times, PERCENTILES) if times else ()
    return Summary(
        turns=len(every),
        failed=len(every) - len(answered),
        prompt=sum(hit.prompt or 0 for hit in answered),
        prompt_compared=sum(hit.prompt or 0 for hit in answered if hit.cached is not None),
        cached=sum(hit.cached or 0 for hit in answered),
        device=sum(hit.device or 0 for hit in answered),
        pool=sum(hit.pool or 0 for hit in answered),
        overrated=sum(max(0, expected - cached) for expected, cached in both),
        underrated=sum(max(0, cached - expected) for expected, cached in both),
        without_cached=sum(hit.cached is None for hit in answered),
        without_expected=sum(hit.expected is None for hit in answered),
        ttft={f"p{mark}": float(time) for mark, time in zip(PERCENTILES, marks, strict=False)},
    )


def side_by_side(runs: dict[str, Sequence[Hit]]) -> Table:
    """Return a table of what each turn hit in each run of the same turns, and the sums."""
    table = Table("session", "turn", "prompt")
    for name in runs:
        table.add_column(f"{name}: engine")
        for what in ("device", "pool", "cached"):
            table.add_column(what, justify="right")
    for same in zip(*runs.values(), strict=True):
        row = [same[0].session[:8], str(same[0].turn), str(same[0].prompt)]
        for hit in same:
            row += [hit.engine or "?", str(hit.device), str(hit.pool), str(hit.cached)]
        table.add_row(*row)
    table.add_section()
    sums = {name: summarise(hits) for name, hits in runs.items()}
    row = ["all", "", str(next(iter(sums.values())).prompt)]
    for total in sums.values():
        row += ["", str(total.device), str(total.pool), str(total.cached)]
    table.add_row(*row)
    return table
