"""Owns what is known of the shared pool: look-ups at the Mooncake master.

A look-up answers with a chain's leading unbroken run, as spans of one tier and
segment each. A short chain is asked for whole; in a long one the run's end is
searched (`boundary.py`), starting from where it is likely: the ends of the runs
and chains that this conversation's earlier turns had. The spans of a long run
are therefore inferred: a block that was not asked for is taken to lie where the
nearest one asked before it lies. A hole that no probe met is credited until
`verify`, which runs after the decision, has checked every object of every block
and made it known; from then on, for a few seconds, runs end there.

A look-up has a deadline, connecting included, and a breaker before it. It never
raises and never hides: `PoolAnswer.state` says what became of it, and whatever
was known by then is in its spans. A deadline that passed while this process was
itself too busy to look says nothing of the master: such a look-up is `late`, and
goes on in the background until it is known whether the master answers. Only
`/batch_query_keys` is asked, which leaves no lease: leases would keep alive what
nobody loads.

The client is aiohttp, as on the data path, and not httpx, as in the rest of the
control plane: this request precedes every turn, and httpx spends 1.6 ms of CPU
on one key and 2 to 3 ms on 64, aiohttp 0.3 to 0.5 ms (measured on 2 cores).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import aiohttp
from yarl import URL

from connector.blocks import Chain
from connector.model import PoolConfig
from connector.pool import (
    KeySchema,
    PoolError,
    Replica,
    Segment,
    locate,
    parse_query,
    parse_segments,
    query_path,
)
from gateway.index.boundary import Boundary
from gateway.index.breaker import Breaker, Permit, State
from gateway.index.lag import Lag
from policies.base import PoolSpan, Tier

log = logging.getLogger(__name__)

# A key that nobody has; asking for it shows whether the master answers.
_PROBE_KEY = "mooncake-gateway-probe"

_COST = {Tier.MEMORY: 0, Tier.SSD: 1, Tier.DISK: 2}


class LookupState(StrEnum):
    """What became of a look-up. Only `ok` found the end of the run.

    `deadline` is the master's slowness, `late` this process's own.
    """

    OK = "ok"
    DEADLINE = "deadline"
    LATE = "late"
    BREAKER = "breaker"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class PoolAnswer:
    """A chain's leading run in the pool: `blocks` of them, as spans from the first token on.

    `reason` explains every state but `ok`, and a run that was cut at a known
    hole. `seconds` is the look-up's time on the index's clock.
    """

    spans: tuple[PoolSpan, ...]
    blocks: int
    state: LookupState
    reason: str
    seconds: float
    keys_asked: int
    round_trips: int

    @property
    def tokens(self) -> int:
        """Tokens of the run."""
        return sum(span.tokens for span in self.spans)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a pool index; counts are of blocks and keys, times in seconds.

    Up to `whole_blocks` undecided blocks, or `round_keys` keys, are asked for
    in one query; beyond, `probes` blocks are. A probe asks for the objects of
    all ranks and groups unless that exceeds `round_keys`; then for the first.
    """

    whole_blocks: int = 64
    probes: int = 32
    round_keys: int = 320
    hints: int = 2
    ends: int = 16_384
    holes: int = 4_096
    hole_seconds: float = 5.0
    verify_keys: int = 1_000
    verify_queue: int = 64
    verify_timeout: float = 2.0
    refresh_seconds: float = 10.0
    refresh_pause: float = 1.0
    refresh_timeout: float = 2.0
    late_seconds: float = 0.25


@dataclass(slots=True)
class PoolCounters:
    """What the index has done since it was made; for telemetry, which only reads."""

    lookups: dict[LookupState, int] = field(default_factory=lambda: dict.fromkeys(LookupState, 0))
    keys_asked: int = 0
    round_trips: int = 0
    verified: int = 0
    verify_failed: int = 0
    verify_dropped: int = 0
    holes: int = 0
    masked: int = 0
    refreshed: int = 0
    refresh_failed: int = 0


class _Search:
    """One look-up under way: the boundary, and where the blocks seen lie."""

    __slots__ = ("boundary", "chain", "keys_asked", "round_trips", "seen")

    def __init__(self, chain: Chain, blocks: int) -> None:
        self.chain = chain
        self.boundary = Boundary(blocks)
        self.seen: dict[int, tuple[Tier, str]] = {}
        self.keys_asked = 0
        self.round_trips = 0

    def spans(self) -> tuple[PoolSpan, ...]:
        run, size = self.boundary.run, self.chain.block_size
        if not run:
            return ()
        starts = sorted(block for block in self.seen if block < run)
        spans: list[PoolSpan] = []
        for start, end in zip(starts, [*starts[1:], run], strict=True):
            tokens, (tier, segment) = (end - start) * size, self.seen[start]
            if spans and spans[-1][1:] == (tier, segment):
                tokens += spans.pop().tokens
            spans.append(PoolSpan(tokens, tier, segment))
        return tuple(spans)


class PoolIndex:
    """The pool behind one model's engines.

    `start` begins the background work (the segment list, checks of whole
    chains), `close` ends it. A `session` given stays the caller's; without one
    the index has its own. `clock` gives seconds and never runs backwards.
    """

    def __init__(
        self,
        config: PoolConfig,
        keys: KeySchema,
        *,
        session: aiohttp.ClientSession | None = None,
        limits: Limits = Limits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = PoolCounters()
        self.breaker = Breaker(
            config.breaker_failures, config.breaker_seconds, clock, self._breaker_moved
        )
        self.refreshed_at: float | None = None
        """When the list in `segments` was asked for, on this index's clock."""
        self.refresh_error: str | None = None
        """Why the last attempt to read the list failed."""
        self._config = config
        self._keys = keys
        self._limits = limits
        self._clock = clock
        self._master = config.master.rstrip("/")
        self._given = session
        self._own: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._segments: dict[str, Segment] = {}
        self._stale = asyncio.Event()  # an endpoint was met that the list has not got
        self._masked: frozenset[str] = frozenset()
        self._ends: OrderedDict[int, None] = OrderedDict()
        self._holes: OrderedDict[int, float] = OrderedDict()
        self._queue: OrderedDict[int, tuple[Chain, int | None]] = OrderedDict()
        self._queued = asyncio.Event()
        self._searches: set[asyncio.Task[None]] = set()
        self._failure = ""  # of the last look-up that failed
        self._told: set[State] = set()  # states of the breaker that are in the log, this outage

    def start(self) -> None:
        """Begin the background work."""
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._refresh_always(), name="pool-segments"),
                asyncio.create_task(self._verify_always(), name="pool-verify"),
            ]
            for task in self._tasks:
                task.add_done_callback(_ended)

    async def close(self) -> None:
        """End the background work and close the connections, unless they were given."""
        tasks = [*self._tasks, *self._searches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = []
        if self._own is not None:
            await self._own.close()
            self._own = None

    @property
    def segments(self) -> dict[str, Segment]:
        """The master's segments by transfer endpoint, as last heard."""
        return self._segments

    @property
    def trouble(self) -> str | None:
        """What is wrong with the master, in words for an operator; None: nothing known of."""
        unheard = self.refresh_error and f"it does not list its segments ({self.refresh_error})"
        if self.breaker.state is not State.CLOSED:
            again = f"turns go without the pool for {self._config.breaker_seconds:g} s at a time"
            return "; ".join(filter(None, (self._failure, unheard, again)))
        if unheard:
            return (
                f"the pool's master at {self._master}: {unheard}; it must be up, and pool.master "
                "the URL of its HTTP port (--metrics_port, 9003 by default), not of its RPC port"
            )
        return None

    def look_again(self) -> None:
        """Have the list of segments read anew, as soon as `refresh_pause` allows."""
        self._stale.set()

    def mask(self, segments: Iterable[str]) -> None:
        """Take these segments, by name, for dead, and no others.

        The master lists a dead instance's blocks for ten seconds more; a block
        on a masked segment is not credited, and ends the run.
        """
        self._masked = frozenset(segments)

    async def lookup(self, chain: Chain, *, limit_blocks: int | None = None) -> PoolAnswer:
        """Find the leading run of a chain, or of its first `limit_blocks` blocks.

        Ends within `config.deadline`, or a quarter later where this process is itself late;
        never raises but for its own cancellation.
        """
        began = self._clock()
        blocks = len(chain) if limit_blocks is None else min(len(chain), limit_blocks)
        open_blocks = self._before_hole(chain, blocks)
        search = _Search(chain, open_blocks)
        state, reason = LookupState.OK, ""
        if open_blocks < blocks:
            reason = f"block {open_blocks} is known to be missing"
        if open_blocks:
            permit = self.breaker.ask()
            if permit is None:
                state, reason = LookupState.BREAKER, "the master failed; it is tried again soon"
            else:
                state, failure = await self._in_time(search, permit)
                reason = failure or reason
        self.counters.lookups[state] += 1
        self.counters.keys_asked += search.keys_asked
        self.counters.round_trips += search.round_trips
        return PoolAnswer(
            spans=search.spans(),
            blocks=search.boundary.run,
            state=state,
            reason=reason,
            seconds=self._clock() - began,
            keys_asked=search.keys_asked,
            round_trips=search.round_trips,
        )

    async def verify(self, chain: Chain, *, blocks: int | None = None) -> int | None:
        """Check every object of a chain's first `blocks` blocks; return the true leading run.

        A block that is missing or incomplete, with anything after it present,
        is a hole, and is remembered. Returns None when the master did not
        answer; such a check says nothing and does not move the breaker.
        """
        wanted = [
            (block, key)
            for block in range(len(chain) if blocks is None else min(len(chain), blocks))
            for key in self._keys.objects(chain.hex(block))
        ]
        run, beyond = len(wanted) // self._keys.width, False
        try:
            for start in range(0, len(wanted), self._limits.verify_keys):
                piece = wanted[start : start + self._limits.verify_keys]
                async with asyncio.timeout(self._limits.verify_timeout):
                    found = await self._query([key for _, key in piece])
                run = min([run, *(block for block, key in piece if key not in found)])
                beyond = beyond or any(block >= run and key in found for block, key in piece)
                if beyond:
                    break
        except (TimeoutError, aiohttp.ClientError, OSError, PoolError) as error:
            self.counters.verify_failed += 1
            log.info("check of %d pool keys failed: %r", len(wanted), error)
            return None
        self.counters.verified += 1
        for block in chain.ids[:run]:
            self._holes.pop(block, None)
        if beyond:
            self.counters.holes += 1
            self._holes[chain.ids[run]] = self._clock() + self._limits.hole_seconds
            self._holes.move_to_end(chain.ids[run])
            if len(self._holes) > self._limits.holes:
                self._holes.popitem(last=False)
        return run

    def verify_later(self, chain: Chain, *, blocks: int | None = None) -> None:
        """Have `verify` run in the background; of too many that wait the oldest is dropped."""
        if not len(chain) or blocks == 0:
            return
        self._queue[chain.ids[-1]] = (chain, blocks)
        if len(self._queue) > self._limits.verify_queue:
            self._queue.popitem(last=False)
            self.counters.verify_dropped += 1
        self._queued.set()

    async def refresh(self) -> bool:
        """Read the master's segment list anew; tell whether that succeeded."""
        asked_at = self._clock()
        try:
            async with asyncio.timeout(self._limits.refresh_timeout):
                self._segments = parse_segments(await self._get("/get_segments_detail"))
        except (TimeoutError, aiohttp.ClientError, OSError, PoolError) as error:
            self.counters.refresh_failed += 1
            said, self.refresh_error = self.refresh_error, _words(error)
            if self.refresh_error != said:
                log.warning(
                    "the pool's master at %s does not list its segments: %s; pool.master must be "
                    "the URL of its HTTP port (--metrics_port), not of its RPC port",
                    self._master,
                    self.refresh_error,
                )
            return False
        if self.refresh_error is not None:
            log.info("the pool's master at %s lists its segments again", self._master)
        self.counters.refreshed += 1
        self.refreshed_at, self.refresh_error = asked_at, None
        return True

    async def objects(self, chain: Chain) -> int | None:
        """Return how many objects of a chain's first or last block there are, of `width`.

        The greater number counts. None when the master did not answer, which
        does not move the breaker; nor is it asked while that is open.
        """
        if self.breaker.state is not State.CLOSED:
            return None
        blocks = [self._keys.objects(chain.hex(i)) for i in (0, len(chain) - 1)]
        try:
            async with asyncio.timeout(self._limits.verify_timeout):
                found = await self._query([key for names in blocks for key in names])
        except (TimeoutError, aiohttp.ClientError, OSError, PoolError) as error:
            log.info("whether the pool holds a turn's blocks cannot be told: %r", error)
            return None
        return max(sum(name in found for name in names) for names in blocks)

    @property
    def width(self) -> int:
        """Objects per block."""
        return self._keys.width

    # -- the search ------------------------------------------------------------

    async def _in_time(self, search: _Search, permit: Permit) -> tuple[LookupState, str]:
        """Search within the deadline, and give the permit back with the master's verdict.

        A search that is late through this process's own fault gets a quarter of
        the deadline more, for its answer may lie in the socket; if that does not
        do, the turn goes on without it, and the verdict comes later.
        """
        deadline = self._config.deadline
        slack, lag = deadline / 4, Lag(deadline / 4)
        task = asyncio.ensure_future(self._search(search))
        self._searches.add(task)
        task.add_done_callback(self._searches.discard)
        judging = False
        try:
            await asyncio.wait((task,), timeout=deadline)
            late = lag.worst > slack
            if late and not task.done():
                await asyncio.wait((task,), timeout=slack)
            if task.done():
                return self._judged(task, search, permit)
            if not late:
                self._fail(permit, self._too_slow(deadline))
                return LookupState.DEADLINE, f"no answer of the master in {deadline:g} s"
            judging = True
            self._judge_later(task, search, permit)
            return LookupState.LATE, f"the gateway itself was late by {lag.worst:.3f} s"
        finally:
            lag.end()
            if not judging:
                task.cancel()
                permit.abandoned()

    def _judge_later(self, task: asyncio.Task[None], search: _Search, permit: Permit) -> None:
        """Give the permit back when the search ends, or after `late_seconds` for a failure."""

        def give_up() -> None:
            if task.done():
                return
            self._fail(permit, self._too_slow(self._limits.late_seconds))
            task.cancel()

        timer = asyncio.get_running_loop().call_later(self._limits.late_seconds, give_up)

        def ended(task: asyncio.Task[None]) -> None:
            timer.cancel()
            try:
                if not task.cancelled():
                    self._judged(task, search, permit)
            finally:
                permit.abandoned()

        task.add_done_callback(ended)

    def _judged(
        self, task: asyncio.Task[None], search: _Search, permit: Permit
    ) -> tuple[LookupState, str]:
        """Give the permit back for a search that has ended by itself."""
        try:
            task.result()
        except (aiohttp.ClientError, OSError, PoolError) as error:
            self._fail(permit, f"the pool's master at {self._master} fails: {_words(error)}")
            return LookupState.ERROR, _words(error)
        permit.succeeded()
        self._remember(search.chain, search.boundary.run)
        return LookupState.OK, ""

    def _too_slow(self, seconds: float) -> str:
        if seconds == self._config.deadline:
            limit = f"pool.deadline ({1000 * seconds:g} ms)"
        else:
            limit = f"pool.deadline by far ({1000 * seconds:g} ms)"
        return f"look-ups at the pool's master, {self._master}, exceed {limit}"

    def _fail(self, permit: Permit, why: str) -> None:
        self._failure = why
        permit.failed()

    def _breaker_moved(self, before: State, after: State) -> None:
        """Log each state once in an outage: probes go on every few seconds."""
        if before is State.CLOSED:
            self._told = {State.OPEN}
            log.warning(
                "breaker open: %s; turns go without the pool, one look-up is tried every %g s",
                self._failure,
                self._config.breaker_seconds,
            )
        elif after is State.CLOSED:
            log.info("breaker closed: the pool's master at %s answers again", self._master)
        elif after not in self._told:
            self._told.add(after)
            log.info("breaker half-open: the pool's master at %s is tried again", self._master)

    async def _search(self, search: _Search) -> None:
        boundary, limits, width = search.boundary, self._limits, self._keys.width
        hints = self._hints(search)
        while boundary.unknown:
            most = limits.probes
            if boundary.unknown <= limits.whole_blocks:
                most = max(most, min(limits.whole_blocks, limits.round_keys // width))
            probes = boundary.probes(most, hints)
            whole = len(probes) * width <= limits.round_keys
            asked: dict[int, Sequence[str]] = {}
            for block in probes:
                name = search.chain.hex(block)
                asked[block] = self._keys.objects(name) if whole else (self._keys.first(name),)
            keys = [key for names in asked.values() for key in names]
            search.round_trips += 1
            search.keys_asked += len(keys)
            found = await self._query(keys)
            there: dict[int, bool] = {}
            for block, names in asked.items():
                place = self._place([found.get(name) for name in names])
                there[block] = place is not None
                if place is not None:
                    search.seen[block] = place
            boundary.learn(there)
            hints = []

    def _place(self, replicas: Sequence[Replica | None]) -> tuple[Tier, str] | None:
        """Return where a block lies: its slowest object's tier, its first object's segment.

        None where an object is missing or lies on a masked segment.
        """
        tiers, names = [], []
        for replica in replicas:
            if replica is None:
                return None
            name = locate(replica.endpoint, self._segments)
            if name in self._masked:
                self.counters.masked += 1
                return None
            if replica.endpoint and replica.endpoint not in self._segments:
                self._stale.set()
            tiers.append(Tier(replica.tier))
            names.append(name)
        return max(tiers, key=_COST.__getitem__), names[0]

    def _hints(self, search: _Search) -> list[int]:
        """Return the last blocks of the chain at which a run or a chain has ended before."""
        if search.boundary.unknown <= self._limits.whole_blocks or not self._ends:
            return []
        found: list[int] = []
        ids = search.chain.ids
        for block in range(search.boundary.missing - 1, -1, -1):
            if ids[block] in self._ends:
                found.append(block)
                if len(found) == self._limits.hints:
                    break
        return found

    def _remember(self, chain: Chain, run: int) -> None:
        """Note where a later turn of the conversation may find its run's end.

        That is where it ends now, or the end of this chain, once it is saved.
        """
        for block in {run, len(chain)} - {0}:
            self._ends[chain.ids[block - 1]] = None
            self._ends.move_to_end(chain.ids[block - 1])
        while len(self._ends) > self._limits.ends:
            self._ends.popitem(last=False)

    def _before_hole(self, chain: Chain, blocks: int) -> int:
        """Return how many leading blocks come before a hole that is still remembered."""
        now = self._clock()
        while self._holes and next(iter(self._holes.values())) <= now:
            self._holes.popitem(last=False)
        if not self._holes:
            return blocks
        return next((i for i, b in enumerate(chain.ids[:blocks]) if b in self._holes), blocks)

    # -- the master ------------------------------------------------------------

    async def _query(self, keys: Sequence[str]) -> dict[str, Replica]:
        return parse_query(await self._get(query_path(keys)))

    async def _get(self, path: str) -> bytes:
        # `encoded`: to parse and quote a long query once more costs as much as sending it.
        async with self._session().get(URL(self._master + path, encoded=True)) as response:
            body = await response.read()
            if response.status != 200:
                raise PoolError(f"the master answered {response.status}")
            return body

    def _session(self) -> aiohttp.ClientSession:
        if self._given is not None:
            return self._given
        if self._own is None:
            # Deadlines are set around the calls, and connections are bounded by them.
            self._own = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._own

    # -- in the background -----------------------------------------------------

    async def _refresh_always(self) -> None:
        while True:
            self._stale.clear()
            heard = await self.refresh()
            if heard and self.breaker.state is not State.CLOSED:
                await self._probe()
            await asyncio.sleep(self._limits.refresh_pause)
            if not heard or self.breaker.state is not State.CLOSED:
                continue
            try:
                async with asyncio.timeout(
                    max(0.0, self._limits.refresh_seconds - self._limits.refresh_pause)
                ):
                    await self._stale.wait()
            except TimeoutError:
                continue  # the period is over

    async def _probe(self) -> None:
        """Try the master in a turn's place: an idle gateway, too, notices that it is back."""
        permit = self.breaker.ask()
        if permit is None:
            return  # it rests
        try:
            async with asyncio.timeout(self._config.deadline):
                await self._query([_PROBE_KEY])
        except TimeoutError:
            self._fail(permit, self._too_slow(self._config.deadline))
        except (aiohttp.ClientError, OSError, PoolError) as error:
            self._fail(permit, f"the pool's master at {self._master} fails: {_words(error)}")
        else:
            permit.succeeded()
        finally:
            permit.abandoned()

    async def _verify_always(self) -> None:
        while True:
            await self._queued.wait()
            while self._queue:
                _, (chain, blocks) = self._queue.popitem(last=False)
                if self.breaker.state is not State.CLOSED:
                    self.counters.verify_dropped += 1
                    continue
                await self.verify(chain, blocks=blocks)
            self._queued.clear()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s broke down", task.get_name(), exc_info=error)
