"""The model of an engine: what it hits, holds, evicts, loads, stores, and when tokens come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.cache import BlockCache
from loadtest.engine import (
    Admitted,
    Engine,
    Fact,
    Finished,
    Job,
    Limits,
    Pooled,
    Rates,
    Removed,
    Stored,
    Token,
)
from loadtest.pool import Pool

SIZE = 4
RATES = Rates(prefill_token=1.0, step=10.0, load_token=0.1, store_token=0.01)


def job(prefix: str, prompt: int, output: int = 1, *, shared: int = 0, **options: bool) -> Job:
    """Return a job whose blocks are its own but for the first `shared`, those of "common"."""
    count = (prompt + output) // SIZE
    hashes = [("common" if i < shared else prefix, i) for i in range(count)]
    return Job(prompt, output, hashes, **options)


def engine(blocks: int = 64, pool: Pool | None = None, **limits: int) -> Engine:
    segment = None if pool is None else pool.mount("segment")
    return Engine(Limits(SIZE, blocks, **limits), RATES, pool=pool, segment=segment)


def drain(*engines: Engine, until: float = float("inf")) -> list[Fact]:
    """Let everything happen that is due by `until`, in the order of time."""
    facts: list[Fact] = []
    while True:
        due = [(at, i) for i, one in enumerate(engines) if (at := one.next_event_at()) is not None]
        if not due or min(due)[0] > until:
            return facts
        at, i = min(due)
        facts += engines[i].advance(at)


def admitted(facts: Iterable[Fact], of: Job) -> Admitted:
    (found,) = (fact for fact in facts if isinstance(fact, Admitted) and fact.job is of)
    return found


def token_times(facts: Iterable[Fact], of: Job) -> list[float]:
    found = [fact for fact in facts if isinstance(fact, Token) and fact.job is of]
    assert [fact.index for fact in found] == list(range(len(found)))
    return [fact.at for fact in found]


def run(one: Engine, work: Job, at: float) -> list[Fact]:
    """Run a job alone."""
    one.advance(at)
    one.submit(work, at)
    return drain(one)


def test_a_cold_prompt_takes_its_tokens_and_then_a_step_for_each_token() -> None:
    one = engine()
    work = job("a", 9, 3)
    facts = run(one, work, 100.0)
    assert token_times(facts, work) == [119.0, 129.0, 139.0]
    assert admitted(facts, work).local == 0
    assert isinstance(facts[-1], Finished)
    assert one.next_event_at() is None


def test_full_blocks_are_hit_but_for_the_one_with_the_last_token() -> None:
    one = engine()
    for turn, (prompt, hit) in enumerate(((8, 0), (8, 4), (9, 8), (11, 8), (12, 8))):
        work = job("a", prompt)
        facts = run(one, work, 100.0 * turn)
        assert admitted(facts, work).local == hit
        assert token_times(facts, work) == [100.0 * turn + 10.0 + prompt - hit]


def test_blocks_of_generated_tokens_are_held_when_computed() -> None:
    one = engine()
    first = job("a", 5, 8)
    stored = [fact for fact in run(one, first, 0.0) if isinstance(fact, Stored)]
    # 5 + 8 tokens, of which the last is never computed: three blocks.
    assert [(fact.first, fact.count) for fact in stored] == [(0, 1), (1, 1), (2, 1)]
    again = job("a", 13)
    assert admitted(run(one, again, 1000.0), again).local == 12


def test_long_prompts_are_computed_in_chunks_beside_others() -> None:
    one = engine(max_num_batched_tokens=10)
    long, short = job("a", 24, 2), job("b", 3, 1)
    one.submit(long, 0.0)
    one.submit(short, 0.0)
    facts = drain(one)
    # 10 and 10 tokens of the long one; then its last 4 and the short one's 3.
    assert token_times(facts, long) == [57.0, 67.0]
    assert token_times(facts, short) == [57.0]
    assert admitted(facts, short).waited == 40.0


def test_requests_wait_for_a_place_and_for_room() -> None:
    one = engine(max_num_seqs=1)
    first, second = job("a", 4, 2), job("b", 4)
    one.submit(first, 0.0)
    one.submit(second, 0.0)
    drain(one, until=13.0)
    assert (one.running, one.waiting) == (1, 1)
    facts = drain(one)
    assert admitted(facts, second).at == 24.0
    small = engine(blocks=5)
    first, second = job("a", 9, 2), job("b", 9)
    small.submit(first, 0.0)
    small.submit(second, 0.0)
    facts = drain(small)
    assert admitted(facts, second).at == token_times(facts, first)[-1]


def test_a_request_that_never_fits_is_refused() -> None:
    one = engine(blocks=5)
    with pytest.raises(ValueError, match="17 tokens and 1 of answer do not fit"):
        one.submit(job("a", 17), 0.0)
    with pytest.raises(ValueError, match="at least one token"):
        one.submit(job("a", 0), 0.0)
    one.submit(job("a", 4), 0.0)
    one.advance(0.0)
    with pytest.raises(ValueError, match="advance first"):
        one.submit(job("b", 4), 20.0)


def test_tails_are_evicted_before_what_they_build_on() -> None:
    one = engine(blocks=9)
    run(one, job("a", 16, 1), 0.0)
    run(one, job("b", 8, 1), 100.0)
    facts = run(one, job("c", 20, 1), 200.0)
    # Two blocks never held anything; of the others "a" is the oldest, its tail first.
    removed = [fact.prefix for fact in facts if isinstance(fact, Removed)]
    assert removed == [("a", 3), ("a", 2), ("a", 1)]
    again = job("a", 16)
    assert admitted(run(one, again, 300.0), again).local == 4


def test_a_hit_saves_a_prefix_from_eviction() -> None:
    one = engine(blocks=9)
    run(one, job("a", 12, 1), 0.0)
    run(one, job("b", 12, 1), 100.0)
    run(one, job("a", 13, 1), 200.0)
    facts = run(one, job("c", 16, 1), 300.0)
    assert {fact.prefix[0] for fact in facts if isinstance(fact, Removed)} == {"b"}  # type: ignore[index]


def test_the_pool_is_filled_by_prompts_and_loaded_from_block_zero_on() -> None:
    pool = Pool(100)
    one, other = engine(pool=pool), engine(pool=pool)
    facts = run(one, job("a", 18, 9), 0.0)
    pooled = [fact for fact in facts if isinstance(fact, Pooled)]
    # 18 tokens are four blocks; decode blocks stay out. Stored beside the steps.
    assert [fact.blocks for fact in pooled] == [(0, 1, 2, 3)]
    assert pooled[0].at == pytest.approx(28.0 + 16 * 0.01)
    work = job("a", 18, 1)
    facts = run(other, work, 1000.0)
    assert (admitted(facts, work).local, admitted(facts, work).external) == (0, 16)
    assert token_times(facts, work) == [pytest.approx(1000.0 + 1.6 + 10.0 + 2.0)]
    stored = [(fact.first, fact.count) for fact in facts if isinstance(fact, Stored)]
    assert stored == [(0, 4)]
    assert not [fact for fact in facts if isinstance(fact, Pooled)]


def test_the_rest_of_a_longer_run_is_loaded_after_a_device_hit() -> None:
    pool = Pool(100)
    one, other = engine(pool=pool), engine(pool=pool)
    run(one, job("a", 24, shared=6), 0.0)
    run(other, job("a", 9, shared=6), 100.0)
    work = job("a", 24, shared=6)
    found = admitted(run(other, work, 200.0), work)
    assert (found.local, found.external) == (8, 12)  # 24 are cached, the last block is computed


def test_a_hole_in_the_pool_ends_the_run() -> None:
    pool = Pool(3)
    one, other = engine(pool=pool), engine(pool=pool)
    run(one, job("a", 13), 0.0)
    run(one, job("b", 5), 100.0)  # evicts the oldest of the three: "a"'s first block
    assert [block for block in pool if block[0] == "a"] == [("a", 1), ("a", 2)]  # type: ignore[index]
    work = job("a", 13)
    assert admitted(run(other, work, 200.0), work).external == 0


def test_what_a_dead_engine_held_is_listed_but_computed() -> None:
    pool = Pool(100, client_ttl=50.0)
    segment = pool.mount("dead")
    one = Engine(Limits(SIZE, 64), RATES, pool=pool, segment=segment)
    other = engine(pool=pool)
    run(one, job("a", 17), 0.0)
    pool.died(segment, 100.0)
    assert pool.leading([("a", i) for i in range(4)]) == 4
    work = job("a", 17)
    facts = run(other, work, 100.0)
    # Its load is tried and fails: all 17 tokens are computed.
    assert token_times(facts, work) == [pytest.approx(100.0 + 1.6 + 10.0 + 17.0)]
    pool.expire(149.0)
    assert len(pool) == 4
    pool.expire(150.0)
    assert len(pool) == 0
    assert [one.name for one in pool.segments] == ["segment"]


def test_hits_are_announced_again_when_a_request_wants_it() -> None:
    one = engine()
    run(one, job("a", 12), 0.0)
    facts = run(one, job("a", 17, report_hits=True), 100.0)
    stored = [(fact.first, fact.count) for fact in facts if isinstance(fact, Stored)]
    assert stored == [(0, 3), (3, 1)]


def test_without_room_for_a_token_the_last_one_admitted_starts_over() -> None:
    one = engine(blocks=6)
    first, second = job("a", 8, 8), job("b", 8, 8)
    one.submit(first, 0.0)
    one.submit(second, 0.0)
    facts = drain(one)
    assert one.preemptions > 0
    assert len(token_times(facts, first)) == len(token_times(facts, second)) == 8
    assert token_times(facts, first)[-1] < token_times(facts, second)[-1]
    assert one.cache.usage == 0.0


def test_an_aborted_request_gives_its_blocks_back_at_once() -> None:
    one = engine()
    work, waits = job("a", 40, 100), job("b", 200)
    one.submit(work, 0.0)
    facts = drain(one, until=85.0)
    one.submit(waits, 85.0)
    assert one.cache.usage > 0
    one.abort(work, 85.0)
    one.abort(work, 85.0)
    facts += drain(one)
    assert len(token_times(facts, work)) < 100
    assert len(token_times(facts, waits)) == 1
    assert one.cache.usage == 0.0


# -- properties ------------------------------------------------------------------------


class Naive:
    """The same cache, said as plainly as can be: lists that are searched."""

    def __init__(self, blocks: int) -> None:
        self.queue = list(range(1, blocks))
        self.references = [0] * blocks
        self.holders: list[tuple[Hashable, int]] = []

    def leading(self, hashes: Sequence[Hashable]) -> list[int]:
        found = []
        for prefix in hashes:
            blocks = [block for held, block in self.holders if held == prefix]
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def touch(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.references[block] += 1
        self.queue = [block for block in self.queue if block not in blocks]

    def take(self, count: int) -> tuple[list[int], list[Hashable]]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        evicted = [held for block in taken for held, holder in self.holders if holder == block]
        self.holders = [(held, block) for held, block in self.holders if block not in taken]
        for block in taken:
            self.references[block] = 1
        return taken, evicted

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.references[block] -= 1
        gone = [block for block in blocks if not self.references[block]]
        holding = {block for _, block in self.holders}
        empty = [block for block in gone if block not in holding]
        self.queue = empty + self.queue + [block for block in gone if block in holding]


@settings(deadline=None)
@given(
    st.integers(4, 12),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(0, 5)), max_size=40),
)
def test_the_cache_is_what_a_naive_one_is(
    blocks: int, operations: list[tuple[int, int, int]]
) -> None:
    """Requests come with a prefix of one of three texts, stay for a while, and go."""
    cache, naive = BlockCache(blocks), Naive(blocks)
    open_: list[list[int]] = []
    for text, length, stay in operations:
        while len(open_) > stay:
            done = open_.pop(0)
            cache.release(reversed(done))
            naive.release(done[::-1])
        hashes = [(text if i else "shared", i) for i in range(length)]
        local = cache.leading(hashes, length)
        assert local == naive.leading(hashes)
        wanted = length + 1 - len(local)  # one more than is full
        if wanted + cache.unreferenced(local) > cache.free:
            continue
        cache.touch(local)
        naive.touch(local)
        taken = naive.take(wanted)
        assert cache.take(wanted) == taken
        mine = local + taken[0]
        for i in range(len(local), length):
            cache.hold(mine[i], hashes[i])
            naive.holders.append((hashes[i], mine[i]))
        open_.append(mine)
        assert cache.eviction_order() == naive.queue
        assert [cache.references(block) for block in range(blocks)] == naive.references
        assert cache.held() == Counter(held for held, _ in naive.holders)
        assert cache.free + sum(map(bool, naive.references)) == blocks - 1
        assert cache.usage == pytest.approx(1 - cache.free / (blocks - 1))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 30),
            st.integers(0, 1),
            st.integers(0, 2),
            st.integers(1, 20),
            st.integers(1, 9),
            st.booleans(),
        ),
        max_size=25,
    ),
    st.integers(8, 14),
    st.booleans(),
)
def test_every_request_ends_and_every_block_comes_back(
    arrivals: list[tuple[float, int, int, int, int, bool]], blocks: int, with_pool: bool
) -> None:
    pool = Pool(10) if with_pool else None
    engines = [engine(blocks, pool, max_num_seqs=3, max_num_batched_tokens=11) for _ in range(2)]
    facts: list[Fact] = []
    kept: list[Job] = []
    now = 0.0
    for wait, where, text, prompt, output, leaves in arrivals:
        facts += drain(*engines, until=now + wait)
        now += wait
        for one in engines:
            facts += one.advance(now)
        work = job(f"text {text}", prompt, output, shared=2)
        engines[where].submit(work, now)
        if leaves:
            facts += drain(*engines, until=now + 7)
            now += 7
            engines[where].abort(work, now)
        else:
            kept.append(work)
    facts += drain(*engines)
    for one in engines:
        assert one.next_event_at() is None
        assert (one.running, one.waiting) == (0, 0)
        assert one.cache.usage == 0.0
        assert len(one.cache.eviction_order()) == blocks - 1
    for work in kept:
        assert len(token_times(facts, work)) == work.output
        assert admitted(facts, work).local % SIZE == 0
        found = admitted(facts, work)
        assert found.local + found.external <= (work.prompt - 1) // SIZE * SIZE
    assert [fact.at for fact in facts] == sorted(fact.at for fact in facts)
    # What was announced adds up to what is there.
    stored: Counter[Hashable] = Counter()
    for fact in facts:
        if isinstance(fact, Stored):
            stored.update(fact.job.hashes[fact.first : fact.first + fact.count])
        elif isinstance(fact, Removed):
            stored[fact.prefix] -= 1
    held: Counter[Hashable] = Counter()
    for one in engines:
        held.update(one.cache.held())
    assert +stored == held
    assert min(stored.values(), default=0) >= 0
