"""`pool_aware`: the engine that will answer first, at the least expense of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from policies.base import (
    BasePolicy,
    Cached,
    Candidate,
    EngineView,
    PolicyError,
    Ranking,
    Turn,
    register,
)

PRECISION = 0.05
"""Relative difference of two costs below which the estimates cannot tell them apart."""

DUPLICATE = 10.0
"""Price of a second of compute that is being done on enough engines already."""


@register("pool_aware")
@dataclass
class PoolAware(BasePolicy):
    """Estimate in seconds what each engine would take, and what that costs the others.

    Formula, per engine, in seconds by its own learned rates:

        queue     = (queued_prefill + foreign_prefill) * prefill + queued_fetch
        overdue   = by how much its oldest turn without a first token is late
        wait      = until a prefix in flight there is computed, beyond the queue
        fetch     = pool tokens beyond the device's, by tier; memory in the
                    engine's own segment at half price (`Rates.fetch_seconds`)
        prefill   = tokens in neither cache * prefill
        overhead  = what every turn takes there
        work      = `work` * prefill
        duplicate = 10 * prefill of the tokens that `copies` engines are computing
        decode    = rates.decode * expected_output / `doubling`
                    * (decode_tokens + (running + 2 * waiting) * size)
                    where size = prompt_tokens + expected_output

    The first six are the time to first token. What has hung for a while is taken
    to hang as long again, so an engine that accepts turns and answers none, or
    waits for a dead peer's blocks, gets no more of them while another is free.

    Where a prefix is still being computed, both ways are estimated, to wait for
    it and to go without it, and the cheaper counts. (Its computation stands in the
    queue as well, hence "beyond the queue".)

    `work` is what the turn costs those who come after: seconds of compute that
    they will find taken. A fetch occupies no compute and is not counted again.

    `decode` is what turns do to one another once they decode: each token of
    context in flight lengthens a step by 1/`doubling` of itself. `decode_tokens`
    is what the running ones will cost this turn, `running * size` what it will
    cost them; those waiting count in both ways and are taken to be of its size.
    This spreads turns that share a prefix instead of heaping them where it is.

    `duplicate` keeps that from going too far: siblings of one prompt that come
    before it is computed anywhere share the first `copies` engines, up to many
    times the queue that would otherwise send them on to compute it once more.

    argmin of the sum, as far as estimates go: costs within `PRECISION` of the
    least are alike, and of such engines the one with most on its device comes
    first (what is there is sure, rates are estimates), then the less loaded, then
    chance from (seed, turn id). Without this an idle fleet's cold turns would all
    go to the one engine that seems a percent faster, and crowd its cache.

    Inputs: the turn's device, pending and pool tokens; the views' queues, overdue,
    running, waiting, decode tokens, segments, rates. Cost: seconds; `terms` add
    up to it.
    Options: `work` (1.0), price of a second of compute to others; `doubling`
    (800,000), tokens of context in flight that double a decode step: 64 GB of KV
    at 80 KB a token, read in 20 ms; `copies` (2), engines that may compute one
    prefix at the same time at the plain price.
    Source: the estimate of Mooncake's Conductor (FAST'25, Algorithm 1), with the
    pool in place of engine-to-engine transfers and without its threshold.
    Bad at: rates that are far off, as they are before the first lessons. The
    queue does not shrink while a prefill runs, only at its first token. An
    eviction that the turn causes costs nothing here, nor does a full device
    (`kv_usage`). Where there is no pool, a burst of many sessions behind one
    cold prefix stays on `copies` engines until it is computed, though a third
    copy would serve them sooner.
    """

    work: float = 1.0
    doubling: int = 800_000
    copies: int = 2

    def __post_init__(self) -> None:
        for name, least in (("work", 0), ("doubling", 1), ("copies", 1)):
            value = getattr(self, name)
            if value < least:
                raise PolicyError(
                    f"policy 'pool_aware': option {name!r} must be at least {least}, not {value}"
                )

    def rank(self, turn: Turn, fleet: Sequence[EngineView], now: float) -> Ranking:
        """Rank the fleet by estimated seconds."""
        computing = self._computing(turn, now)
        chance = self.chance(turn)
        candidates = [self._candidate(turn, view, computing, now) for view in fleet]
        best = min((candidate.cost for candidate in candidates), default=0.0)
        alike = best * (1.0 + PRECISION) + 1e-6

        def place(view: EngineView, candidate: Candidate) -> tuple[float, int, int, float]:
            if candidate.cost <= alike:
                return best, -turn.cached(view.key).device, view.load, chance.random()
            return candidate.cost, 0, view.load, chance.random()

        places = [place(view, c) for view, c in zip(fleet, candidates, strict=True)]
        order = sorted(range(len(candidates)), key=places.__getitem__)
        return Ranking.by_role([candidates[i] for i in order], fleet)

    def _computing(self, turn: Turn, now: float) -> int:
        """Return the leading tokens that at least `copies` engines are computing now."""
        runs = sorted(
            (
                prefix.tokens
                for key, prefix in turn.pending.items()
                if prefix.ready_at > now and prefix.tokens > turn.device.get(key, 0)
            ),
            reverse=True,
        )
        return min(runs[self.copies - 1], turn.cacheable) if len(runs) >= self.copies else 0

    def _candidate(self, turn: Turn, view: EngineView, computing: int, now: float) -> Candidate:
        """Estimate one engine, with or without the prefix that is pending there."""
        cached = turn.cached(view.key)
        pending = turn.pending.get(view.key)
        known = turn.device.get(view.key, 0)
        if pending is None or pending.tokens <= known:
            return self._estimate(turn, view, cached, computing, 0.0)
        wait = max(0.0, pending.ready_at - now - self._queue(view) - view.overdue)
        waiting = self._estimate(turn, view, cached, computing, wait)
        if not wait:
            return waiting  # a prefix that costs no wait is only for the better
        device = min(known, turn.cacheable)
        bare = Cached(device, max(0, min(turn.pool_run, turn.cacheable) - device))
        return min(
            waiting,
            self._estimate(turn, view, bare, computing, 0.0),
            key=lambda candidate: candidate.cost,
        )

    def _queue(self, view: EngineView) -> float:
        tokens = view.queued_prefill + view.foreign_prefill
        return tokens * view.rates.prefill + view.queued_fetch

    def _estimate(
        self, turn: Turn, view: EngineView, cached: Cached, computing: int, wait: float
    ) -> Candidate:
        rates, total = view.rates, cached.device + cached.pool
        queue = self._queue(view)
        spans = turn.beyond(cached.device) if cached.pool else ()
        fetch = rates.fetch_seconds(spans, view.segments)
        prefill = (turn.prompt_tokens - total) * rates.prefill
        size = turn.prompt_tokens + turn.expected_output
        context = view.decode_tokens + (view.running + 2 * view.waiting) * size
        terms = {
            "queue": queue,
            "overdue": view.overdue,
            "wait": wait,
            "fetch": fetch,
            "prefill": prefill,
            "overhead": rates.overhead,
            "work": self.work * prefill,
            "duplicate": DUPLICATE * max(0, computing - total) * rates.prefill,
            "decode": rates.decode * turn.expected_output * context / self.doubling,
        }
        first_token = queue + view.overdue + wait + fetch + prefill + rates.overhead
        reason = (
            f"device {cached.device} + pool {cached.pool} of {turn.prompt_tokens} tokens; "
            f"{first_token * 1e3:.0f} ms"
        )
        if wait:
            reason += f", {wait * 1e3:.0f} of them for a prefix in flight"
        if view.overdue:
            reason += f", {view.overdue:.0f} s because a turn there is overdue"
        return Candidate(view.key, sum(terms.values()), reason, MappingProxyType(terms))
