"""Pool look-ups against a master that speaks Mooncake's HTTP over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import aiohttp
import pytest
from fake_master import FakeMaster
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.blocks import Chain
from connector.model import PoolConfig, PoolKeys, Ranks
from connector.pool import KeySchema
from gateway.index.breaker import State
from gateway.index.pool import Limits, LookupState, PoolIndex
from policies.base import PoolSpan, Tier

HOME = "127.0.0.1:13294"


def make_chain(blocks: int, *, after: int = 0) -> Chain:
    """A chain of 16-token blocks; those of two calls are the same up to the shorter's end."""
    digests = (random.Random(f"{after}/{i}").randbytes(32) for i in range(blocks))
    return Chain(16, 32, b"".join(digests))


def schema(tp: int = 1, groups: tuple[int, ...] = (0,)) -> KeySchema:
    return KeySchema(PoolKeys(ranks=Ranks(tp=tp), groups=groups), "tiny")


def put(
    master: FakeMaster,
    keys: KeySchema,
    chain: Chain,
    blocks: Iterable[int],
    tier: str = "memory",
    endpoint: str = HOME,
) -> None:
    for block in blocks:
        for key in keys.objects(chain.hex(block)):
            master.keys[key] = (tier, endpoint)


@contextlib.asynccontextmanager
async def pool(
    master: FakeMaster | str, keys: KeySchema, *, deadline: float = 5.0, **options: Any
) -> AsyncIterator[PoolIndex]:
    url = master if isinstance(master, str) else master.url
    config = PoolConfig(master=url, deadline=deadline, breaker_failures=3, breaker_seconds=5.0)
    index = PoolIndex(config, keys, **options)
    try:
        yield index
    finally:
        await index.close()


@pytest.fixture
async def master() -> AsyncIterator[FakeMaster]:
    master = FakeMaster(segments={HOME: "seg-a"})
    await master.start()
    yield master
    await master.stop()


async def eventually(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not reached():
            await asyncio.sleep(0.005)


# -- runs --------------------------------------------------------------------


async def test_a_short_chain_is_asked_for_whole(master: FakeMaster) -> None:
    keys, chain = schema(tp=2), make_chain(20)
    put(master, keys, chain, range(13))
    async with pool(master, keys) as index:
        await index.refresh()
        answer = await index.lookup(chain)
    assert answer.spans == (PoolSpan(13 * 16, Tier.MEMORY, "seg-a"),)
    assert (answer.blocks, answer.tokens, answer.state) == (13, 208, LookupState.OK)
    assert (answer.keys_asked, answer.round_trips, answer.reason) == (40, 1, "")
    assert index.counters.lookups[LookupState.OK] == 1
    assert index.counters.keys_asked == 40
    assert master.paths == {"/batch_query_keys", "/get_segments_detail"}


async def test_holes_and_missing_ranks_end_a_short_run(master: FakeMaster) -> None:
    keys, chain = schema(tp=2, groups=(0, 1)), make_chain(10)
    put(master, keys, chain, range(10))
    async with pool(master, keys) as index:
        for block, rank in ((7, 3), (4, 0), (0, 2)):
            del master.keys[keys.objects(chain.hex(block))[rank]]
            assert (await index.lookup(chain)).blocks == block


async def test_spans_change_with_tier_and_segment(master: FakeMaster) -> None:
    keys, chain = schema(), make_chain(12)
    other = "127.0.0.2:17102"
    put(master, keys, chain, range(4))
    put(master, keys, chain, range(4, 6), endpoint=other)
    put(master, keys, chain, range(6, 9), tier="ssd", endpoint=other)
    put(master, keys, chain, range(9, 12), tier="disk", endpoint="")
    async with pool(master, keys) as index:
        await index.refresh()
        answer = await index.lookup(chain, limit_blocks=11)
    assert answer.spans == (
        PoolSpan(64, Tier.MEMORY, "seg-a"),
        PoolSpan(32, Tier.MEMORY, other),  # not in the list: its endpoint is its name
        PoolSpan(48, Tier.SSD, other),
        PoolSpan(32, Tier.DISK, ""),
    )


async def test_a_block_is_as_slow_as_its_slowest_object(master: FakeMaster) -> None:
    keys, chain = schema(tp=2), make_chain(1)
    put(master, keys, chain, [0])
    master.keys[keys.objects(chain.hex(0))[1]] = ("ssd", "elsewhere:1")
    async with pool(master, keys) as index:
        await index.refresh()
        assert (await index.lookup(chain)).spans == (PoolSpan(16, Tier.SSD, "seg-a"),)


async def test_nothing_to_ask_asks_nothing(master: FakeMaster) -> None:
    async with pool(master, schema()) as index:
        for answer in (
            await index.lookup(make_chain(0)),
            await index.lookup(make_chain(3), limit_blocks=0),
        ):
            assert (answer.spans, answer.state, answer.round_trips) == ((), LookupState.OK, 0)
    assert master.queries == []


@pytest.mark.parametrize("width", [1, 8, 64])
@pytest.mark.parametrize("run", [0, 1, 63, 700, 1_599, 1_600])
async def test_long_chains_take_few_round_trips_and_keys(
    master: FakeMaster, width: int, run: int
) -> None:
    keys, chain = schema(tp=width), make_chain(1_600)
    put(master, keys, chain, range(run))
    async with pool(master, keys) as index:
        answer = await index.lookup(chain)
    assert (answer.blocks, answer.tokens, answer.state) == (run, run * 16, LookupState.OK)
    assert answer.round_trips == len(master.queries) <= 3
    assert answer.keys_asked == sum(map(len, master.queries)) <= 3 * 320


async def test_a_later_turn_starts_where_the_last_one_ended(master: FakeMaster) -> None:
    keys = schema()
    first, second, third = make_chain(1_000), make_chain(1_100), make_chain(1_200)
    put(master, keys, first, range(617))
    async with pool(master, keys) as index:
        assert (await index.lookup(first)).round_trips == 2
        # Nothing was saved since: the run ends where it did.
        assert (await index.lookup(second)).round_trips == 1
        # All of the second prompt was saved.
        put(master, keys, second, range(1_100))
        answer = await index.lookup(third)
        assert (answer.blocks, answer.round_trips) == (1_100, 1)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 400).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    st.sampled_from([1, 2, 16]),
    st.sets(st.integers(0, 399), max_size=3),
)
def test_equals_brute_force_after_verification(
    sizes: tuple[int, int], width: int, holes: set[int]
) -> None:
    blocks, run = sizes
    keys, chain = schema(tp=width), make_chain(blocks)
    expected = min([run, *(h for h in holes if h < run)])

    async def check() -> None:
        master = FakeMaster()
        await master.start()
        put(master, keys, chain, range(run))
        for hole in holes:
            if hole < blocks:
                master.keys.pop(keys.objects(chain.hex(hole))[hole % width], None)
        try:
            async with pool(master, keys) as index:
                answer = await index.lookup(chain)
                assert answer.blocks <= run
                if not holes:
                    assert answer.blocks == run
                assert await index.verify(chain) == expected
                assert (await index.lookup(chain)).blocks == expected
        finally:
            await master.stop()

    asyncio.run(check())


# -- holes -------------------------------------------------------------------


async def test_a_hole_is_credited_once_then_known_for_a_while(master: FakeMaster) -> None:
    now = 0.0
    keys, chain = schema(tp=2), make_chain(500)
    put(master, keys, chain, range(500))
    del master.keys[keys.objects(chain.hex(123))[1]]
    async with pool(master, keys, clock=lambda: now) as index:
        first = await index.lookup(chain)
        assert first.blocks == 500
        index.start()
        index.verify_later(chain, blocks=first.blocks)
        await eventually(lambda: index.counters.verified == 1)
        assert index.counters.holes == 1
        answer = await index.lookup(chain)
        assert (answer.blocks, answer.state) == (123, LookupState.OK)
        assert answer.reason == "block 123 is known to be missing"
        # Saved again: known as soon as a check has seen it, or when the memory fades.
        put(master, keys, chain, range(500))
        assert await index.verify(chain) == 500
        assert (await index.lookup(chain)).blocks == 500
        del master.keys[keys.first(chain.hex(77))]
        assert await index.verify(chain) == 77
        put(master, keys, chain, range(500))
        assert (await index.lookup(chain)).blocks == 77
        now = 5.0
        assert (await index.lookup(chain)).blocks == 500


async def test_the_end_of_a_run_is_no_hole(master: FakeMaster) -> None:
    keys, chain = schema(), make_chain(100)
    put(master, keys, chain, range(40))
    async with pool(master, keys) as index:
        assert await index.verify(chain) == 40
        put(master, keys, chain, range(100))
        assert (await index.lookup(chain)).blocks == 100


async def test_checks_go_in_pieces(master: FakeMaster) -> None:
    keys, chain = schema(tp=3), make_chain(1_000)
    put(master, keys, chain, range(1_000))
    async with pool(master, keys) as index:
        assert await index.verify(chain) == 1_000
        assert [len(query) for query in master.queries] == [1_000] * 3
        assert await index.verify(chain, blocks=10) == 10
        assert len(master.queries[-1]) == 30


async def test_memories_are_bounded(master: FakeMaster) -> None:
    keys, limits = schema(), Limits(ends=4, holes=2, verify_queue=3)
    async with pool(master, keys, limits=limits) as index:
        for after in range(1, 6):
            chain = make_chain(5, after=after)
            put(master, keys, chain, [0, 1, 3, 4])
            await index.lookup(chain)
            await index.verify(chain)
            index.verify_later(chain)
        assert (len(index._ends), len(index._holes), len(index._queue)) == (4, 2, 3)
        assert index.counters.verify_dropped == 2


async def test_a_check_without_an_answer_says_nothing(master: FakeMaster) -> None:
    keys, chain = schema(), make_chain(5)
    master.status = 500
    async with pool(master, keys) as index:
        assert await index.verify(chain) is None
        assert (index.counters.verify_failed, index.breaker.state) == (1, State.CLOSED)


# -- segments ----------------------------------------------------------------


async def test_an_unknown_endpoint_has_the_list_read_again(master: FakeMaster) -> None:
    keys, chain = schema(), make_chain(3)
    put(master, keys, chain, range(3))
    async with pool(master, keys, limits=Limits(refresh_pause=0.01)) as index:
        index.start()
        await eventually(lambda: index.counters.refreshed == 1)
        assert (await index.lookup(chain)).spans[0].segment == "seg-a"
        # The engine restarts: same segment, new port.
        put(master, keys, chain, range(3), endpoint="127.0.0.1:20001")
        master.segments = {"127.0.0.1:20001": "seg-a"}
        assert (await index.lookup(chain)).spans[0].segment == "127.0.0.1:20001"
        await eventually(lambda: "127.0.0.1:20001" in index.segments)
        assert (await index.lookup(chain)).spans[0].segment == "seg-a"
        assert index.counters.refreshed == 2


async def test_the_list_is_read_on_a_period_and_survives_errors(master: FakeMaster) -> None:
    limits = Limits(refresh_seconds=0.03, refresh_pause=0.01)
    async with pool(master, schema(), limits=limits) as index:
        index.start()
        await eventually(lambda: index.counters.refreshed >= 2)
        master.body = b"nonsense"
        await eventually(lambda: index.counters.refresh_failed >= 2)
        assert index.segments[HOME].name == "seg-a"


async def test_masked_segments_end_the_run(master: FakeMaster) -> None:
    keys, chain = schema(), make_chain(10)
    put(master, keys, chain, range(10))
    put(master, keys, chain, [6], endpoint="127.0.0.1:9999")
    master.segments["127.0.0.1:9999"] = "seg-b"
    async with pool(master, keys) as index:
        await index.refresh()
        index.mask(["seg-b"])
        assert (await index.lookup(chain)).blocks == 6
        assert index.counters.masked == 1
        index.mask(["seg-a"])
        assert (await index.lookup(chain)).blocks == 0
        index.mask([])
        assert (await index.lookup(chain)).blocks == 10


# -- failure -----------------------------------------------------------------


async def test_the_deadline_holds_and_what_was_known_is_answered(master: FakeMaster) -> None:
    keys, chain = schema(), make_chain(1_600)
    put(master, keys, chain, range(700))
    master.delays = [0.0, 30.0]
    async with pool(master, keys, deadline=0.2) as index:
        began = asyncio.get_running_loop().time()
        answer = await index.lookup(chain)
        assert asyncio.get_running_loop().time() - began < 0.5
    assert (answer.state, answer.round_trips) == (LookupState.DEADLINE, 2)
    assert answer.reason == "no answer of the master in 0.2 s"
    assert 0.2 <= answer.seconds < 0.5
    assert 640 <= answer.blocks <= 700
    assert answer.tokens == answer.blocks * 16


async def test_a_frozen_master_opens_the_breaker_and_a_probe_closes_it(
    master: FakeMaster,
) -> None:
    now = 0.0
    keys, chain = schema(), make_chain(5)
    put(master, keys, chain, range(5))
    master.frozen = True
    async with pool(master, keys, deadline=0.2, clock=lambda: now) as index:
        states = [(await index.lookup(chain)).state for _ in range(5)]
        assert states == [LookupState.DEADLINE] * 3 + [LookupState.BREAKER] * 2
        now = 5.0
        assert (await index.lookup(chain)).state is LookupState.DEADLINE
        assert (await index.lookup(chain)).state is LookupState.BREAKER
        master.frozen = False
        now = 10.0
        answers = await asyncio.gather(*(index.lookup(chain) for _ in range(3)))
        # One probe passed; who came beside it was not made to wait.
        assert [a.state for a in answers] == [LookupState.OK] + [LookupState.BREAKER] * 2
        assert index.breaker.state is State.CLOSED
        assert (await index.lookup(chain)).blocks == 5
        assert index.counters.lookups == {
            LookupState.OK: 2,
            LookupState.DEADLINE: 4,
            LookupState.LATE: 0,
            LookupState.BREAKER: 5,
            LookupState.ERROR: 0,
        }


async def test_a_cancelled_probe_leaves_the_way_to_another(master: FakeMaster) -> None:
    now = 0.0
    keys, chain = schema(), make_chain(5)
    master.status = 500
    async with pool(master, keys, clock=lambda: now) as index:
        for _ in range(3):
            await index.lookup(chain)
        now, master.status, master.frozen = 5.0, 200, True
        probe = asyncio.create_task(index.lookup(chain))
        await eventually(lambda: len(master.queries) == 4)
        probe.cancel()
        with pytest.raises(asyncio.CancelledError):
            await probe
        master.frozen = False
        assert (await index.lookup(chain)).state is LookupState.OK


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (500, b"", "500"),
        (404, b"", "404"),
        (200, b"", "read"),
        (200, b"{", "read"),
        (200, b'{"success":false,"error":"no"}', "no"),
        (200, b'{"success":true}', "data"),
        (200, b"\xff\xfe", "read"),
    ],
)
async def test_bad_answers_are_errors(
    master: FakeMaster, status: int, body: bytes, reason: str
) -> None:
    master.status, master.body = status, body
    async with pool(master, schema()) as index:
        answers = [await index.lookup(make_chain(5)) for _ in range(4)]
    assert [a.state for a in answers] == [LookupState.ERROR] * 3 + [LookupState.BREAKER]
    assert reason in answers[0].reason
    assert answers[0].spans == ()


async def test_nobody_there_is_an_error() -> None:
    async with pool("http://127.0.0.1:9", schema()) as index:
        answer = await index.lookup(make_chain(5))
        assert (answer.state, answer.spans) == (LookupState.ERROR, ())
        assert "Connect" in answer.reason
        assert not await index.refresh()


async def test_waiting_checks_are_dropped_while_the_master_is_failing(master: FakeMaster) -> None:
    keys, chain = schema(), make_chain(5)
    async with pool(master, keys) as index:
        master.status = 500
        for _ in range(3):
            await index.lookup(chain)
        asked = len(master.queries)
        index.start()
        index.verify_later(chain)
        await eventually(lambda: index.counters.verify_dropped == 1)
        assert len(master.queries) == asked


async def test_a_session_that_was_given_stays_open(master: FakeMaster) -> None:
    async with aiohttp.ClientSession() as session:
        async with pool(master, schema(), session=session) as index:
            assert (await index.lookup(make_chain(2))).state is LookupState.OK
        assert not session.closed


# -- whose fault a deadline is -------------------------------------------------


async def hold_the_loop(until: asyncio.Event) -> None:
    """Let the loop be late by 30 ms again and again."""
    while not until.is_set():
        time.sleep(0.03)  # noqa: ASYNC251 - being late is the point
        await asyncio.sleep(0)


async def test_the_loops_own_lateness_is_not_the_masters(master: FakeMaster) -> None:
    keys, chain = schema(), make_chain(5)
    put(master, keys, chain, range(5))
    async with pool(master, keys, deadline=0.02) as index:
        done = asyncio.Event()
        busy = asyncio.create_task(hold_the_loop(done))
        states = {(await index.lookup(chain)).state for _ in range(8)}
        done.set()
        await busy
        await eventually(lambda: not index._searches)
        assert states <= {LookupState.OK, LookupState.LATE}
        assert index.breaker.state is State.CLOSED
        assert index.breaker.opened == 0
        async with asyncio.timeout(5):
            while (await index.lookup(chain)).state is not LookupState.OK:
                await asyncio.sleep(0.005)


async def test_a_frozen_master_opens_the_breaker_of_a_busy_gateway_too(
    master: FakeMaster, caplog: pytest.LogCaptureFixture
) -> None:
    keys, chain = schema(), make_chain(5)
    master.frozen = True
    limits = Limits(late_seconds=0.1)
    async with pool(master, keys, deadline=0.02, limits=limits) as index:
        done = asyncio.Event()
        busy = asyncio.create_task(hold_the_loop(done))
        states = {(await index.lookup(chain)).state for _ in range(4)}
        await eventually(lambda: index.breaker.state is State.OPEN)
        done.set()
        await busy
    assert states <= {LookupState.LATE, LookupState.DEADLINE, LookupState.BREAKER}
    assert "exceed pool.deadline" in caplog.text


async def test_the_breaker_says_once_in_an_outage_what_it_does_and_why(
    master: FakeMaster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.index.pool")
    now = 0.0
    keys, chain = schema(), make_chain(5)
    put(master, keys, chain, range(5))
    master.frozen = True
    async with pool(master, keys, deadline=0.2, clock=lambda: now) as index:
        assert index.trouble is None
        for _ in range(4):
            await index.lookup(chain)
        assert index.trouble == (
            f"look-ups at the pool's master, {master.url}, exceed pool.deadline (200 ms); "
            "turns go without the pool for 5 s at a time"
        )
        for _ in range(3):
            now += 5.0
            await index.lookup(chain)
        master.frozen = False
        now += 5.0
        assert (await index.lookup(chain)).state is LookupState.OK
        assert index.trouble is None
    said = [r.getMessage().partition(":")[0] for r in caplog.records if "breaker" in r.message]
    assert said == ["breaker open", "breaker half-open", "breaker closed"]


async def test_a_master_that_lists_no_segments_is_named_once_until_it_does(
    master: FakeMaster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.index.pool")
    master.status = 404
    async with pool(master, schema()) as index:
        assert not await index.refresh()
        assert not await index.refresh()
        assert index.trouble is not None
        assert "the master answered 404" in index.trouble
        assert "--metrics_port" in index.trouble
        master.status = 200
        assert await index.refresh()
        assert index.trouble is None
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]


async def test_the_objects_of_a_turn_are_counted(master: FakeMaster) -> None:
    keys, chain = schema(tp=2), make_chain(5)
    async with pool(master, keys) as index:
        assert await index.objects(chain) == 0
        put(master, schema(tp=1), chain, [4])
        assert (await index.objects(chain), index.width) == (1, 2)
        put(master, keys, chain, [0])
        assert await index.objects(chain) == 2
        master.status = 500
        assert await index.objects(chain) is None


async def test_an_idle_gateway_too_notices_that_the_master_is_back(master: FakeMaster) -> None:
    limits = Limits(refresh_pause=0.01, refresh_seconds=0.05)
    config = PoolConfig(master=master.url, deadline=0.5, breaker_failures=1, breaker_seconds=0.05)
    index = PoolIndex(config, schema(), limits=limits)
    index.start()
    try:
        master.status = 500
        await index.lookup(make_chain(3))
        assert index.breaker.state is not State.CLOSED
        master.status = 200
        while index.breaker.state is not State.CLOSED:
            await asyncio.sleep(0.01)
        assert index.trouble is None or "list" in index.trouble
    finally:
        await index.close()
