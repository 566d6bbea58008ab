"""Lets the model of an engine run in real time, and carries its facts to where they are heard.

One incarnation of one engine: tokens go to their exchanges, changes of the
caches to the publisher (one batch per step, as vLLM does), everything to the
metrics. The engine's clock starts at 0 with the incarnation; it runs `speed`
times as fast as real time, slower or not at all under a fault. Nothing here
waits: a timer of the event loop is set for when the engine is due.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Hashable, Iterable

from connector.events import AnyEvent, BlockRemoved, BlockStored
from loadtest.emulator.exchange import Choice, Exchange
from loadtest.emulator.metrics import Metrics
from loadtest.emulator.publisher import Publisher
from loadtest.engine import (
    Admitted,
    Engine,
    Fact,
    Finished,
    Pooled,
    Removed,
    Stored,
    Token,
)


class Runner:
    """Drives one engine. `publisher` is None where it publishes no events."""

    def __init__(
        self, engine: Engine, metrics: Metrics, publisher: Publisher | None, *, pool: bool
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self._publisher = publisher
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._choices: set[Choice] = set()
        self._rate = 0.0
        self._scale = 1.0
        self._since = self._loop.time()
        self._before = 0.0
        self._preempted = 0

    @property
    def now(self) -> float:
        """Seconds on the engine's clock."""
        return self._before + (self._loop.time() - self._since) * self._rate

    @property
    def load(self) -> int:
        """Requests that are not done."""
        return len(self._choices)

    def pace(self, rate: float) -> None:
        """Let the engine's clock run `rate` times as fast as real time; 0 stops it."""
        self._advance()
        self._before, self._since = self.now, self._loop.time()
        self._rate = rate
        self._scale = rate or self._scale
        self._set_timer()

    def submit(self, exchange: Exchange) -> None:
        """Bring a request. Raises ValueError for one that never fits; nothing of it is kept."""
        # One and the same moment: by a later look at the clock more may be due.
        now = self._advance()
        submitted = []
        try:
            for choice in exchange.choices:
                self.engine.submit(choice, now)
                self._choices.add(choice)
                submitted.append(choice)
        except ValueError:
            self.abort(submitted)
            raise
        self._advance()
        self._set_timer()

    def abort(self, choices: Iterable[Choice]) -> None:
        """Drop what is not done of a request."""
        now = self._advance()
        for choice in choices:
            if choice in self._choices:
                self._choices.discard(choice)
                self.engine.abort(choice, now)
        self._advance()
        self._set_timer()

    def refresh(self) -> None:
        """Bring the gauges of the metrics up to date."""
        engine, metrics = self.engine, self.metrics
        metrics.running.set(engine.running)
        metrics.waiting.set(engine.waiting)
        metrics.waiting_deferred.set(engine.loading)
        metrics.waiting_capacity.set(engine.waiting - engine.loading)
        metrics.usage.set(engine.cache.usage)
        metrics.preemptions.inc(engine.preemptions - self._preempted)
        self._preempted = engine.preemptions

    def stop(self) -> None:
        """Do nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._rate = 0.0
        self._choices.clear()

    # -- facts -----------------------------------------------------------------

    def _tick(self) -> None:
        self._advance()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self.engine.next_event_at()
        if at is not None and self._rate:
            wait = max(0.0, (at - self.now) / self._rate)
            self._timer = self._loop.call_later(wait, self._tick)

    def _advance(self) -> float:
        """Let happen what is due by now, and return when that is."""
        now = self.now
        facts = self.engine.advance(now)
        for _, together in itertools.groupby(facts, key=lambda fact: fact.at):
            events: list[AnyEvent] = []
            for fact in together:
                self._take(fact, events)
            if events and self._publisher is not None:
                self._publisher.publish(events)
        return now

    def _take(self, fact: Fact, events: list[AnyEvent]) -> None:
        if isinstance(fact, Removed):
            events.append(
                BlockRemoved(block_hashes=[_short(fact.prefix)], medium="GPU", group_idx=0)
            )
            return
        choice = fact.job
        assert isinstance(choice, Choice)
        match fact:
            case Token():
                self._token(choice, fact)
            case Stored():
                events.append(_stored(choice, fact.first, fact.count))
            case Pooled():
                events += [_pooled(choice, block) for block in fact.blocks]
            case Admitted():
                self._admitted(choice, fact)
            case Finished():
                self._finished(choice, fact)

    def _admitted(self, choice: Choice, fact: Admitted) -> None:
        choice.local, choice.external = fact.local, fact.external
        choice.admitted_at = fact.at
        self.metrics.admitted(choice.prompt, fact.local, fact.external, pool=self._pool)
        self.metrics.queue_time.observe(fact.waited / self._scale)

    def _token(self, choice: Choice, fact: Token) -> None:
        metrics, scale = self.metrics, self._scale
        metrics.generated.inc()
        if fact.index == 0:
            choice.first_token_at = fact.at
            metrics.prefilled(choice.prompt, choice.local, choice.external)
            metrics.ttft.observe((fact.at - choice.arrived_at) / scale)
            metrics.prefill_time.observe((fact.at - choice.admitted_at) / scale)
        else:
            metrics.token_time.observe((fact.at - choice.last_token_at) / scale)
        choice.last_token_at = fact.at
        choice.exchange.arrive(choice, fact.index)

    def _finished(self, choice: Choice, fact: Finished) -> None:
        self._choices.discard(choice)
        metrics, scale = self.metrics, self._scale
        metrics.success[choice.finish].inc()
        metrics.answer_sizes.observe(choice.output)
        metrics.request_time.observe((fact.at - choice.arrived_at) / scale)
        metrics.decode_time.observe((fact.at - choice.first_token_at) / scale)


def _short(prefix: Hashable) -> int:
    assert isinstance(prefix, bytes)
    return int.from_bytes(prefix[-8:], "big")


def _stored(choice: Choice, first: int, count: int) -> BlockStored:
    size = choice.chain.block_size
    ids = choice.chain.ids
    extra: list[tuple[str, ...] | None] = [None] * count
    if choice.salt and first == 0:
        extra[0] = (choice.salt,)
    return BlockStored(
        block_hashes=list(ids[first : first + count]),
        parent_block_hash=ids[first - 1] if first else None,
        token_ids=choice.tokens(first * size, (first + count) * size),
        block_size=size,
        medium="GPU",
        extra_keys=extra,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def _pooled(choice: Choice, block: int) -> BlockStored:
    size = choice.chain.block_size
    ids = choice.chain.ids
    return BlockStored(
        block_hashes=[ids[block]],
        parent_block_hash=ids[block - 1] if block else None,
        token_ids=choice.tokens(block * size, (block + 1) * size),
        block_size=size,
        medium="cpu",
        group_idx=0,
    )
