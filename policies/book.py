"""The account of what is in flight: this file owns it, and nothing else changes it.

A turn is entered in the book when it is sent (`charge`), told of its first
token, moved when another engine takes it over, and released exactly once however
it ends. Between those moments it counts on exactly one engine, in one of two
columns:

    charge ─> WAITING ── first_token ─> RUNNING
                 │  └───────┐  ┌───────────┘
                 └ move ┘   release ─> RELEASED

A turn whose answer comes whole shows no first token; it is taken to run from the
moment at which its first token was estimated, or it would stand in its engine's
queue for as long as it decodes.

    WAITING   queued_prefill (prompt tokens not expected in a cache),
              queued_fetch (seconds of pool loads)
    RUNNING   decode_tokens (prompt and expected output)

A charge remembers the amounts with which it was entered and takes out the very
same, all of them integers (seconds as nanoseconds), so an engine without charges
stands at exactly 0.

Beside the account the book keeps what follows from it: predictions of what
engines will hold (`predictions.py`), rates learned from how turns went, for a
model and, as a pace, for each of its engines (`learning.py`), and the load that
others put on an engine: what it reports less what is ours. From these it builds
the `EngineView`s that policies see.

Single-threaded; every moment is handed in, on one monotonic clock.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

from policies.base import (
    LOCAL_DISCOUNT,
    Decision,
    Ending,
    EngineKey,
    EngineView,
    Outcome,
    Pending,
    PoolSpan,
    Rates,
    Role,
    Tier,
    Usage,
)
from policies.learning import learn, learn_pace, scaled
from policies.predictions import Claim, Predictions

TYPICAL_PREFILL = 1000.0
"""Tokens that a turn is taken to compute before any was seen."""

TYPICAL_WEIGHT = 0.05
"""Weight of the newest turn in the mean of tokens that turns compute."""

REPORT_LAG = 0.25
"""Seconds by which an engine's metrics may trail behind the answers that it sends."""

SLOWEST_WHOLE = 1e-4
"""Seconds per output token below which an answer was not streamed but came whole."""


_arrivals = itertools.count()


class Totals(NamedTuple):
    """Sums over all engines, those with charges left but removed from the fleet included."""

    waiting: int
    running: int
    queued_prefill: int
    queued_fetch: float
    decode_tokens: int


class ReleasedError(RuntimeError):
    """A charge was to be moved after its release."""


class _Stage(Enum):
    WAITING = auto()
    RUNNING = auto()
    RELEASED = auto()


class _Lessons:
    """What a model's engines have taught together."""

    __slots__ = ("priors", "rates")

    def __init__(self, priors: Rates) -> None:
        self.priors = priors
        self.rates = priors


class _Account:
    """One engine's page."""

    __slots__ = (
        "_rates",
        "_rates_from",
        "awaited",
        "decode_tokens",
        "due",
        "ends",
        "fetch_ns",
        "foreign_prefill",
        "foreign_running",
        "foreign_waiting",
        "key",
        "kv_usage",
        "lessons",
        "listed",
        "pace",
        "prefill",
        "reported_at",
        "role",
        "running",
        "segments",
        "stale",
        "view",
        "waiting",
    )

    def __init__(self, key: EngineKey, lessons: _Lessons) -> None:
        self.key = key
        self.role = Role.BOTH
        self.segments: frozenset[str] = frozenset()
        # False for an engine that is gone from the fleet but still has charges.
        self.listed = False
        self.lessons = lessons
        self.pace = 1.0
        self._rates = lessons.rates
        self._rates_from = (lessons.rates, 1.0)
        # When our latest turns ended here, as far back as a report may still show them.
        self.ends: deque[float] = deque(maxlen=1024)
        # Turns whose first token is awaited, in the order they were sent.
        self.awaited: dict[Charge, None] = {}
        # Turns whose answers come whole, by when they are taken to run.
        self.due: list[tuple[float, int, Charge]] = []
        # Ours.
        self.waiting = 0
        self.running = 0
        self.prefill = 0
        self.fetch_ns = 0
        self.decode_tokens = 0
        # The engine's report, less ours when it came.
        self.reported_at: float | None = None
        self.foreign_running = 0
        self.foreign_waiting = 0
        self.foreign_prefill = 0
        self.kv_usage = 0.0
        # The last view built, and whether anything but time has changed since.
        self.view: EngineView | None = None
        self.stale = True

    @property
    def charges(self) -> int:
        return self.waiting + self.running

    @property
    def rates(self) -> Rates:
        """The model's rates at this engine's pace; the same object until one of them changes."""
        rates, pace = self.lessons.rates, self.pace
        if rates is not self._rates_from[0] or pace != self._rates_from[1]:
            self._rates, self._rates_from = scaled(rates, pace), (rates, pace)
        return self._rates

    def ended_since(self, since: float) -> int:
        """Count our turns that ended here at `since` or later."""
        while self.ends and self.ends[0] < since:
            self.ends.popleft()
        return len(self.ends)

    def settle(self, now: float) -> None:
        """Take whole answers' turns to run whose first token should have come."""
        while self.due and self.due[0][0] <= now:
            _, _, charge = heapq.heappop(self.due)
            charge._take_to_run(self)

    def queue_seconds(self) -> float:
        """Estimate when a turn that arrives now would begin."""
        tokens = self.prefill + self.foreign_prefill
        return tokens * self.rates.prefill + self.fetch_ns / 1e9

    def clear_report(self) -> None:
        self.reported_at = None
        self.foreign_running = self.foreign_waiting = self.foreign_prefill = 0
        self.kv_usage = 0.0
        self.stale = True

    def age(self, now: float) -> float:
        """Whole seconds since the last report."""
        if self.reported_at is None:
            return math.inf
        return float(max(0, math.floor(now - self.reported_at)))

    def overdue(self, now: float) -> float:
        """Whole seconds by which the first token of the oldest turn is late."""
        oldest = next(iter(self.awaited), None)
        return 0.0 if oldest is None else float(max(0, math.floor(now - oldest._due_at)))

    def build(self, now: float) -> EngineView:
        """Return the view, the same object as long as nothing in it has changed."""
        age, overdue = self.age(now), self.overdue(now)
        rates = self.rates
        if (
            self.view is not None
            and not self.stale
            and self.view.age == age
            and self.view.overdue == overdue
            and self.view.rates is rates
        ):
            return self.view
        view = EngineView(
            key=self.key,
            role=self.role,
            segments=self.segments,
            running=self.running + self.foreign_running,
            waiting=self.waiting + self.foreign_waiting,
            queued_prefill=self.prefill,
            queued_fetch=self.fetch_ns / 1e9,
            decode_tokens=self.decode_tokens,
            kv_usage=self.kv_usage,
            rates=rates,
            age=age,
            foreign_prefill=self.foreign_prefill,
            overdue=overdue,
        )
        self.stale = False
        # A turn that came and went between two looks leaves things as they were.
        if self.view is None or view != self.view:
            self.view = view
        return self.view


class Charge:
    """One turn in flight; made by `Book.charge`. See the module's first lines for its states."""

    __slots__ = (
        "_account",
        "_alone",
        "_book",
        "_claim",
        "_decision",
        "_decode_tokens",
        "_due_at",
        "_fetch_ns",
        "_fetched",
        "_first_token_at",
        "_prefill",
        "_sent_at",
        "_stage",
    )

    _account: _Account
    _decision: Decision
    _stage: _Stage
    _claim: Claim | None
    _sent_at: float
    # When its first token should come.
    _due_at: float
    _first_token_at: float | None
    # Amounts entered, to be taken out again.
    _prefill: int
    _fetch_ns: int
    _decode_tokens: int
    # For the lesson: whether the queue was empty, and the tokens to be loaded
    # from memory (None when some come from elsewhere).
    _alone: bool
    _fetched: float | None

    def __init__(self, book: Book, decision: Decision, now: float) -> None:
        self._book = book
        self._enter(decision, now)

    @property
    def decision(self) -> Decision:
        """The decision that the turn now runs under."""
        return self._decision

    @property
    def released(self) -> bool:
        """Whether the turn has ended."""
        return self._stage is _Stage.RELEASED

    def move(self, decision: Decision, now: float) -> None:
        """Transfer the turn to another engine, where it begins anew.

        Raises:
            ReleasedError: if the turn has ended already.
        """
        if self._stage is _Stage.RELEASED:
            raise ReleasedError(f"turn {self._decision.turn.id} has ended; it cannot be moved")
        self._leave()
        self._drop_claim()
        self._enter(decision, now)

    def first_token(self, now: float) -> None:
        """Note the first byte of an answer; only the first call counts, and none after the end."""
        if self._stage is not _Stage.WAITING:
            return
        self._first_token_at = now
        self._run()
        if self._claim is not None:
            self._book._predictions.ready(self._claim, now)

    def release(self, ending: Ending, now: float, usage: Usage | None = None) -> Outcome | None:
        """End the turn. None on every call after the first, which returns its outcome."""
        if self._stage is _Stage.RELEASED:
            return None
        self._leave()
        self._account.ends.append(now)
        self._stage = _Stage.RELEASED
        computed = ending is Ending.DONE or (
            ending is Ending.LEFT and self._first_token_at is not None
        )
        if not computed:
            self._drop_claim()
        elif self._claim is not None:
            # A whole answer that nobody noted the first token of was computed too.
            self._book._predictions.ready(self._claim, now)
            self._book._predictions.linger(self._claim, now)
        outcome = Outcome(self._decision, ending, self._first_token_at, now, usage)
        self._teach(outcome)
        return outcome

    def _enter(self, decision: Decision, now: float) -> None:
        turn, expected = decision.turn, decision.expected
        account = self._book._account(decision.key)
        spans = _take(turn.fetched(decision.key), expected.pool)
        fetch_seconds = account.rates.fetch_seconds(spans, account.segments)
        self._account = account
        self._decision = decision
        self._stage = _Stage.WAITING
        self._sent_at = now
        self._first_token_at = None
        self._alone = account.waiting == 0 and account.foreign_waiting == 0
        self._fetched = _memory_tokens(spans, account.segments)
        self._prefill = max(0, turn.prompt_tokens - expected.total)
        self._fetch_ns = round(fetch_seconds * 1e9)
        self._decode_tokens = turn.prompt_tokens + turn.expected_output
        ready_at = (
            now
            + account.queue_seconds()
            + fetch_seconds
            + self._prefill * account.rates.prefill
            + account.rates.overhead
        )
        sent, blocks = turn.chain, turn.prompt_tokens // turn.block_size
        if len(sent) > blocks:
            sent = sent[:blocks]
        self._claim = None
        if account.listed:
            self._claim = self._book._predictions.claim(
                account.key, sent, ready_at, now, silent=not turn.streams
            )
        self._due_at = ready_at
        if turn.streams:
            account.awaited[self] = None
        else:
            heapq.heappush(account.due, (ready_at, next(_arrivals), self))
        account.waiting += 1
        account.prefill += self._prefill
        account.fetch_ns += self._fetch_ns
        account.stale = True

    def _take_to_run(self, account: _Account) -> None:
        """Count the turn as running without a first token seen, if it still waits there."""
        if self._stage is _Stage.WAITING and self._account is account:
            self._run()

    def _run(self) -> None:
        self._stage = _Stage.RUNNING
        account = self._account
        account.awaited.pop(self, None)
        account.waiting -= 1
        account.prefill -= self._prefill
        account.fetch_ns -= self._fetch_ns
        account.running += 1
        account.decode_tokens += self._decode_tokens
        account.stale = True

    def _leave(self) -> None:
        """Take out of the account what was entered."""
        account = self._account
        account.awaited.pop(self, None)
        if self._stage is _Stage.WAITING:
            account.waiting -= 1
            account.prefill -= self._prefill
            account.fetch_ns -= self._fetch_ns
        else:
            account.running -= 1
            account.decode_tokens -= self._decode_tokens
        account.stale = True
        self._book._close(account)

    def _drop_claim(self) -> None:
        if self._claim is not None:
            self._book._predictions.drop(self._claim)

    def _teach(self, outcome: Outcome) -> None:
        """Learn the engine's rates, from turns about which nothing is in doubt."""
        usage, first = outcome.usage, outcome.first_token_at
        if usage is None or usage.cached is None or first is None or not self._alone:
            return
        streamed = outcome.ended_at - first
        if usage.output > 1 and streamed < (usage.output - 1) * SLOWEST_WHOLE:
            return  # its first token was seen with its last
        expected, block = self._decision.expected, self._decision.turn.block_size
        surplus = usage.cached - expected.total
        # More than expected may have come from the pool; with pool tokens expected,
        # fewer may have as well.
        if surplus > block or (expected.pool and surplus < -block):
            return
        if self._fetched is None:
            return  # loads from SSD or disk
        account, measured = self._account, first - self._sent_at
        computed, lessons = max(0, usage.prompt - usage.cached), account.lessons
        before = lessons.rates
        learned = learn(
            account.rates,
            scaled(lessons.priors, account.pace),
            measured=measured,
            computed=computed,
            fetched=self._fetched,
        )
        lessons.rates = scaled(learned, 1.0 / account.pace)
        if not self._fetched:
            account.pace = learn_pace(account.pace, before, measured=measured, computed=computed)


class Book:
    """The account of a fleet.

    Args:
        priors: rates of an engine about which nothing was learned yet.
        prediction_ttl: seconds for which the prompt of an ended turn is still
            predicted to be on its engine: until the engine's events have
            surely arrived.
    """

    def __init__(self, *, priors: Rates | None = None, prediction_ttl: float = 3.0) -> None:
        self.priors = priors or Rates()
        self._accounts: dict[EngineKey, _Account] = {}
        self._lessons: dict[str, _Lessons] = {}
        self._predictions = Predictions(prediction_ttl)
        self._typical_prefill = TYPICAL_PREFILL

    def add(
        self,
        key: EngineKey,
        role: Role = Role.BOTH,
        segments: frozenset[str] = frozenset(),
        model: str = "",
    ) -> None:
        """List an engine of a model, or change what is said of a listed one.

        The engines of a model (and role) learn their rates together.
        """
        account = self._account(key)
        account.lessons = self._lessons.setdefault(f"{model}/{role}", _Lessons(self.priors))
        account.listed = True
        account.role = role
        account.segments = segments
        account.stale = True

    def remove(self, key: EngineKey) -> None:
        """Take an engine off the list. Its charges stay to be released; the rest is forgotten."""
        account = self._accounts.get(key)
        if account is None:
            return
        self.forget(key)
        account.listed = False
        self._close(account)

    def forget(self, key: EngineKey) -> None:
        """Note that an engine has restarted: its cache and its report are gone, charges stay."""
        self._predictions.forget(key)
        if key in self._accounts:
            self._accounts[key].clear_report()

    def report(
        self,
        key: EngineKey,
        *,
        running: int,
        waiting: int,
        kv_usage: float,
        at: float,
        asked_at: float | None = None,
    ) -> None:
        """Note what an engine, asked at `asked_at`, said of itself at `at`; unlisted ones: nothing.

        What it says beyond this book's own charges is foreign load, which stands
        until the next report. An own turn without a first token may be waiting
        or in prefill over there (vLLM calls the latter running), so only the sum
        is compared, and own turns are taken to explain waiting ones first. Own turns
        that ended while the report was under way (or `REPORT_LAG` before) count as
        own, too: a turn of ours is never mistaken for a stranger's, at the price of
        overlooking some strangers behind a busy gateway.
        """
        account = self._accounts.get(key)
        if account is None or not account.listed:
            return  # scraped before it was removed
        ended = account.ended_since((at if asked_at is None else asked_at) - REPORT_LAG)
        foreign = max(0, running + waiting - account.charges - ended)
        account.foreign_waiting = min(foreign, max(0, waiting - account.waiting))
        account.foreign_running = foreign - account.foreign_waiting
        account.foreign_prefill = round(account.foreign_waiting * self._typical_prefill)
        account.kv_usage = kv_usage
        account.reported_at = at
        account.stale = True

    def views(self, keys: Iterable[EngineKey], now: float) -> tuple[EngineView, ...]:
        """Return the engines' views, in the order of `keys`.

        A view is the same object until something in it has changed. Its ages go
        in whole seconds, so time alone replaces it twice a second at most, and
        never while reports come more often than that and no turn is overdue.

        Raises:
            KeyError: for an engine that is not listed.
        """
        views = []
        for key in keys:
            account = self._accounts[key]
            if not account.listed:
                raise KeyError(key)
            account.settle(now)
            views.append(account.build(now))
        return tuple(views)

    def pending(
        self, chain: Sequence[int], block_size: int, now: float
    ) -> dict[EngineKey, Pending]:
        """Return the leading run of `chain` among the predictions of each engine.

        `tokens` counts whole blocks; `ready_at` is when the first turn that was
        sent with them should have them computed, in the past only if it has.
        Engines without any are left out.
        """
        return self._predictions.leading(chain, block_size, now)

    def charge(self, decision: Decision, now: float) -> Charge:
        """Enter a turn that is being sent; an engine that was just removed is no error."""
        charge = Charge(self, decision, now)
        self._typical_prefill += TYPICAL_WEIGHT * (charge._prefill - self._typical_prefill)
        return charge

    def in_flight(self, key: EngineKey) -> int:
        """Return how many of this book's turns are with an engine."""
        account = self._accounts.get(key)
        return account.charges if account else 0

    def totals(self) -> Totals:
        """Return the sums over all engines; exactly 0 when every charge is released."""
        accounts = self._accounts.values()
        return Totals(
            sum(a.waiting for a in accounts),
            sum(a.running for a in accounts),
            sum(a.prefill for a in accounts),
            sum(a.fetch_ns for a in accounts) / 1e9,
            sum(a.decode_tokens for a in accounts),
        )

    def predictions(self) -> int:
        """Return how many turns are predicted to be in a cache; some may have just expired."""
        return len(self._predictions)

    def _account(self, key: EngineKey) -> _Account:
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _Account(key, _Lessons(self.priors))
        return account

    def _close(self, account: _Account) -> None:
        """Let go of an unlisted engine's account after its last charge."""
        if not account.listed and not account.charges:
            self._accounts.pop(account.key, None)


def _take(spans: Iterable[PoolSpan], tokens: int) -> list[PoolSpan]:
    """Return the first `tokens` tokens of `spans`."""
    taken = []
    for span in spans:
        if tokens <= 0:
            break
        taken.append(span._replace(tokens=min(span.tokens, tokens)))
        tokens -= span.tokens
    return taken


def _memory_tokens(spans: Sequence[PoolSpan], local: frozenset[str]) -> float | None:
    """Count tokens as the memory rate prices them; None if some lie elsewhere than in memory."""
    if any(span.tier is not Tier.MEMORY for span in spans):
        return None
    return sum(span.tokens * (LOCAL_DISCOUNT if span.segment in local else 1.0) for span in spans)
