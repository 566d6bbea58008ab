"""A model of one vLLM engine that owns no clock: what it computes, holds, loads and stores.

Whoever drives it says what time it is: `submit` and `abort` bring work,
`advance(now)` lets everything happen that was due by `now` and returns it as
facts in order, `next_event_at()` says when to come back. Nothing here does I/O,
knows tokens, or has a clock; hashes name blocks.

The engine works in steps, as vLLM's scheduler does. A step first gives every
running request its next token or the next chunk of its prompt, then admits
waiting ones while the budget of tokens, the number of requests and the cache
allow: a request is admitted when its whole prompt fits. Its prompt's leading
blocks are looked up in the device cache, then, from block 0 on, in the pool; if
the pool's run is longer, the rest of it is loaded first, beside the steps. Full
blocks can be hit from the moment their step is scheduled, and are announced when
it ends. Blocks of generated tokens are held too; only those of prompts are
stored in the pool, beside the steps, and stay referenced until they are. If a
running request finds no block, the one admitted last gives up its own and waits
again, in front.

A step takes `Rates.step` and `Rates.prefill_token` for each prompt token in it.

Source: vLLM 0.32, `v1/core/sched/scheduler.py`, `v1/core/kv_cache_manager.py`,
and the scheduler of `mooncake/store`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from loadtest.cache import BlockCache
from loadtest.pool import Pool, Segment


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast an engine is, in seconds. The defaults are a small model on a laptop:

    a prompt of 4,000 tokens takes 0.2 s when nothing of it is cached, a token of
    an answer 5 ms; a token loaded from the pool costs a tenth of one computed.
    """

    prefill_token: float = 50e-6
    step: float = 5e-3
    load_token: float = 5e-6
    store_token: float = 5e-6


@dataclass(frozen=True, slots=True)
class Limits:
    """How large an engine is: `--block-size`, `--num-gpu-blocks-override` and so on."""

    block_size: int = 32
    blocks: int = 4096
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048

    def __post_init__(self) -> None:
        if min(self.block_size, self.max_num_seqs, self.max_num_batched_tokens) < 1:
            raise ValueError("block size, requests and tokens of a step must be at least 1")

    @property
    def tokens(self) -> int:
        """Tokens that the device cache has room for."""
        return (self.blocks - 1) * self.block_size


@dataclass(slots=True, eq=False)
class Job:
    """One request. `hashes` name the full blocks of prompt and answer, in order.

    `report_hits` is vLLM's `kv_cache_report_mode: full`: blocks that were hit
    are announced once more.
    """

    prompt: int
    output: int
    hashes: Sequence[Hashable]
    report_hits: bool = False
    # What the engine has done with it so far.
    prefill_end: int = 0
    computed: int = 0
    emitted: int = 0
    saved: int = 0
    held: int = 0
    blocks: list[int] = field(default_factory=list)
    arrived_at: float = 0.0
    admitted: bool = False
    done: bool = False

    @property
    def known(self) -> int:
        """Tokens of prompt and answer that are there to be computed."""
        return self.prompt + self.emitted


@dataclass(frozen=True, slots=True)
class Admitted:
    """A job was admitted; `local` and `external` tokens of it need not be computed.

    Said once per job. `waited` is in seconds.
    """

    at: float
    job: Job
    local: int
    external: int
    waited: float


@dataclass(frozen=True, slots=True)
class Stored:
    """The device cache holds blocks `first` to `first + count` of a job."""

    at: float
    job: Job
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Removed:
    """One copy of a block has left the device cache."""

    at: float
    prefix: Hashable


@dataclass(frozen=True, slots=True)
class Pooled:
    """The pool now has these blocks of a job, by their numbers, which it had not before."""

    at: float
    job: Job
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """A job has its answer's next token; `index` counts from 0."""

    at: float
    job: Job
    index: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A job has all of its answer."""

    at: float
    job: Job


Fact = Admitted | Stored | Removed | Pooled | Token | Finished


@dataclass(frozen=True, slots=True)
class _Step:
    ends_at: float
    work: list[tuple[Job, int]]
    stores: list[_Store]


@dataclass(frozen=True, slots=True, eq=False)
class _Load:
    job: Job
    local: int
    external: int


@dataclass(frozen=True, slots=True, eq=False)
class _Store:
    job: Job
    first: int
    end: int
    pinned: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class _Putting:
    store: _Store
    missing: list[int]


class Engine:
    """One engine. `pool` and `segment` are None where it has no pool."""

    def __init__(
        self,
        limits: Limits = Limits(),
        rates: Rates = Rates(),
        *,
        pool: Pool | None = None,
        segment: Segment | None = None,
    ) -> None:
        self.limits = limits
        self.rates = rates
        self.cache = BlockCache(limits.blocks)
        self.preemptions = 0
        self._pool = pool
        self._segment = segment
        self._now = 0.0
        self._running: list[Job] = []
        self._waiting: deque[Job] = deque()
        self._loaded: deque[Job] = deque()
        self._loading = 0
        self._step: _Step | None = None
        # Loads and stores that go on beside the steps, by when they end.
        self._beside: list[tuple[float, int, _Load | _Putting]] = []
        self._tickets = itertools.count()
        self._stuck = False
        self._facts: list[Fact] = []
        # Cache facts of the step that is being computed.
        self._announced: list[tuple[Job, int, int] | tuple[Hashable]] = []

    @property
    def running(self) -> int:
        """Requests that take part in steps."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for room, or for blocks from the pool."""
        return len(self._waiting) + len(self._loaded) + self._loading

    @property
    def loading(self) -> int:
        """Requests that wait for blocks from the pool, or have just got them."""
        return len(self._loaded) + self._loading

    def submit(self, job: Job, now: float) -> None:
        """Bring a request; `advance(now)` comes first.

        Raises ValueError for one that never fits into the cache.
        """
        due = self._next_due()
        if due is not None and due <= now:
            raise ValueError(f"something was due at {due}, before {now}: advance first")
        if job.prompt < 1 or job.output < 1:
            raise ValueError("a request has at least one token of prompt and one of answer")
        if job.prompt + job.output > self.limits.tokens:
            raise ValueError(
                f"{job.prompt} tokens and {job.output} of answer do not fit into a cache of "
                f"{self.limits.tokens}"
            )
        job.arrived_at = now
        job.prefill_end = job.prompt
        self._waiting.append(job)
        self._stir(now)

    def abort(self, job: Job, now: float) -> None:
        """Drop a request and give its blocks back; one that is done is left alone."""
        if job.done:
            return
        job.done = True
        for queue in (self._running, self._waiting, self._loaded):
            if job in queue:
                queue.remove(job)
        self._free(job)
        self._stir(now)

    def next_event_at(self) -> float | None:
        """Return when something is due; None: nothing before the next request."""
        times = [at for at, _, _ in self._beside[:1]]
        if self._step is not None:
            times.append(self._step.ends_at)
        elif not self._stuck and (self._running or self._waiting or self._loaded):
            times.append(self._now)
        return min(times, default=None)

    def advance(self, now: float) -> list[Fact]:
        """Let happen what is due by `now`, and return it in order."""
        while True:
            self._begin_step()
            due = self._next_due()
            if due is None or due > now:
                break
            self._now = max(self._now, due)
            if self._step is not None and self._step.ends_at == due:
                self._end_step(self._step)
            else:
                _, _, ended = heapq.heappop(self._beside)
                if isinstance(ended, _Load):
                    self._end_load(ended)
                else:
                    self._end_put(ended)
            self._stuck = False
        facts, self._facts = self._facts, []
        return facts

    # -- time ------------------------------------------------------------------

    def _stir(self, now: float) -> None:
        """Look at the queues again, at `now` if nothing is under way."""
        self._stuck = False
        if self._step is None:
            self._now = max(self._now, now)

    def _next_due(self) -> float | None:
        times = [at for at, _, _ in self._beside[:1]]
        if self._step is not None:
            times.append(self._step.ends_at)
        return min(times, default=None)

    def _later(self, seconds: float, what: _Load | _Putting) -> None:
        heapq.heappush(self._beside, (self._now + seconds, next(self._tickets), what))

    # -- steps -----------------------------------------------------------------

    def _begin_step(self) -> None:
        if self._step is not None or self._stuck:
            return
        work: list[tuple[Job, int]] = []
        budget = self._schedule_running(work)
        if budget is not None:
            self._admit(work, budget)
        if not work:
            # Nothing fits until a load or store ends, or a request comes or goes.
            self._stuck = True
            self._announce()
            return
        prefill = sum(tokens for job, tokens in work if job.computed < job.prefill_end)
        seconds = self.rates.step + prefill * self.rates.prefill_token
        stores = [store for job, tokens in work if (store := self._store(job, tokens))]
        self._step = _Step(self._now + seconds, work, stores)

    def _end_step(self, step: _Step) -> None:
        self._step = None
        self._announce()
        for store in step.stores:
            self._begin_put(store)
        for job, tokens in step.work:
            if job.done:
                continue
            job.computed += tokens
            if job.computed < job.known:
                continue
            self._facts.append(Token(self._now, job, job.emitted))
            job.emitted += 1
            if job.emitted == job.output:
                job.done = True
                self._running.remove(job)
                self._free(job)
                self._facts.append(Finished(self._now, job))

    def _schedule_running(self, work: list[tuple[Job, int]]) -> int | None:
        """Give the running requests their tokens; return what is left, None after a preemption."""
        budget = self.limits.max_num_batched_tokens
        before = self.preemptions
        index = 0
        while index < len(self._running) and budget:
            job = self._running[index]
            tokens = min(job.known - job.computed, budget)
            if not self._make_room(job, job.computed + tokens):
                break
            self._hold(job, job.computed + tokens)
            work.append((job, tokens))
            budget -= tokens
            index += 1
        return budget if self.preemptions == before else None

    def _make_room(self, job: Job, tokens: int) -> bool:
        """Allocate for a running job, at the cost of those admitted after it; False: of itself."""
        while not self._allocate(job, tokens):
            last = self._running.pop()
            self._preempt(last)
            if last is job:
                return False
        return True

    def _preempt(self, job: Job) -> None:
        self.preemptions += 1
        self._free(job)
        job.computed = job.saved = 0
        job.prefill_end = job.known
        self._waiting.appendleft(job)

    def _admit(self, work: list[tuple[Job, int]], budget: int) -> None:
        limits = self.limits
        while budget and len(self._running) < limits.max_num_seqs:
            if self._loaded:
                job = self._loaded[0]
                if not self._fits(job, []):
                    return
                self._loaded.popleft()
            elif self._waiting:
                job = self._waiting[0]
                local, external = self._look_up(job)
                if external:
                    if not self._begin_load(job, local, external):
                        return
                    self._waiting.popleft()
                    continue
                if not self._fits(job, local):
                    return
                self._waiting.popleft()
                self._take_up(job, local)
                self._admitted(job, len(local) * limits.block_size, 0)
            else:
                return
            tokens = min(job.known - job.computed, budget)
            self._allocate(job, job.computed + tokens)
            self._hold(job, job.computed + tokens)
            self._running.append(job)
            work.append((job, tokens))
            budget -= tokens

    # -- blocks ----------------------------------------------------------------

    def _look_up(self, job: Job) -> tuple[list[int], int]:
        """Return the device blocks that hold the job's start, and the blocks to load after them."""
        most = (job.known - 1) // self.limits.block_size
        local = self.cache.leading(job.hashes, most)
        if self._pool is None:
            return local, 0
        full = job.known // self.limits.block_size
        pooled = min(self._pool.leading(job.hashes[:full]), most)
        return local, max(0, pooled - len(local))

    def _fits(self, job: Job, local: list[int]) -> bool:
        """Whether the whole of what is known of a job finds room, with `local` taken up."""
        wanted = -(-job.known // self.limits.block_size) - len(job.blocks) - len(local)
        return wanted + self.cache.unreferenced(local) <= self.cache.free

    def _take_up(self, job: Job, local: list[int]) -> None:
        if job.report_hits and local:
            self._announced.append((job, 0, len(local)))
        self.cache.touch(local)
        job.blocks = list(local)
        job.held = len(local)
        job.computed = len(local) * self.limits.block_size

    def _allocate(self, job: Job, tokens: int) -> bool:
        """Give a job blocks for its first `tokens` tokens; False where they are not there."""
        wanted = -(-tokens // self.limits.block_size) - len(job.blocks)
        if wanted <= 0:
            return True
        if wanted > self.cache.free:
            return False
        taken, evicted = self.cache.take(wanted)
        job.blocks += taken
        self._announced += [(prefix,) for prefix in evicted]
        return True

    def _hold(self, job: Job, tokens: int) -> None:
        """Let the full blocks among the first `tokens` tokens be hit from now on."""
        full = tokens // self.limits.block_size
        if full <= job.held:
            return
        for i in range(job.held, full):
            self.cache.hold(job.blocks[i], job.hashes[i])
        self._announced.append((job, job.held, full - job.held))
        job.held = full

    def _free(self, job: Job) -> None:
        self.cache.release(reversed(job.blocks))
        job.blocks = []
        job.held = 0

    def _announce(self) -> None:
        for what in self._announced:
            if len(what) == 3:
                self._facts.append(Stored(self._now, *what))
            else:
                self._facts.append(Removed(self._now, *what))
        self._announced = []

    def _admitted(self, job: Job, local: int, external: int) -> None:
        if not job.admitted:
            job.admitted = True
            waited = self._now - job.arrived_at
            self._facts.append(Admitted(self._now, job, local, external, waited))

    # -- the pool --------------------------------------------------------------

    def _begin_load(self, job: Job, local: list[int], external: int) -> bool:
        """Reserve blocks for what the pool has and begin to load it; False where there is no room.

        Room that prompts under way still need is not to be had: a load makes no
        progress that would free anything.
        """
        size = self.limits.block_size
        under_way = [j for j in self._running if j.computed < j.prefill_end]
        under_way += [load.job for _, _, load in self._beside if isinstance(load, _Load)]
        under_way += self._loaded
        reserved = sum(max(0, -(-j.known // size) - len(j.blocks)) for j in under_way)
        wanted = external + self.cache.unreferenced(local)
        if not self._fits(job, local) or wanted > self.cache.free - reserved:
            return False
        self._take_up(job, local)
        self._allocate(job, job.computed + external * size)
        self._loading += 1
        self._admitted(job, len(local) * size, external * size)
        load = _Load(job, len(local), external)
        self._later(external * size * self.rates.load_token, load)
        return True

    def _end_load(self, load: _Load) -> None:
        self._loading -= 1
        job = load.job
        if job.done:
            return
        assert self._pool is not None
        end = load.local + load.external
        # What has vanished since the look-up is computed (`recompute`).
        end = load.local + self._pool.loadable(job.hashes[load.local : end])
        size = self.limits.block_size
        job.computed = end * size
        self._hold(job, job.computed)
        self._loaded.append(job)

    def _store(self, job: Job, tokens: int) -> _Store | None:
        """Keep the prompt's blocks that are full after this step until they are in the pool."""
        if self._pool is None or job.computed >= job.prefill_end:
            return None
        end = (job.computed + tokens) // self.limits.block_size
        if end <= job.saved:
            return None
        first, job.saved = job.saved, end
        pinned = list(job.blocks)
        self.cache.touch(pinned)
        return _Store(job, first, end, pinned)

    def _begin_put(self, store: _Store) -> None:
        assert self._pool is not None
        missing = self._pool.missing(store.job.hashes[store.first : store.end])
        seconds = len(missing) * self.limits.block_size * self.rates.store_token
        self._later(seconds, _Putting(store, [store.first + i for i in missing]))

    def _end_put(self, putting: _Putting) -> None:
        assert self._pool is not None
        assert self._segment is not None
        store, hashes = putting.store, putting.store.job.hashes
        new = tuple(i for i in putting.missing if self._pool.put(hashes[i], self._segment))
        self.cache.release(reversed(store.pinned))
        if new:
            self._facts.append(Pooled(self._now, store.job, new))
