"""The account: columns by hand, every ending, other people's load, views, predictions, lessons."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import pytest
from fleets import BLOCK, A, B, C, chain, decide, turn

from policies.base import (
    Ending,
    EngineKey,
    EngineView,
    Outcome,
    Pending,
    PoolSpan,
    Rates,
    Role,
    Tier,
    Turn,
    Usage,
)
from policies.book import Book, Charge, ReleasedError, Totals

NOTHING = Totals(0, 0, 0, 0.0, 0)
RATES = Rates(
    prefill=1e-3,
    fetch={Tier.MEMORY: 1e-4, Tier.SSD: 1e-3, Tier.DISK: 2e-3},
    overhead=0.01,
)
POOL = (PoolSpan(640, Tier.MEMORY, "own"), PoolSpan(160, Tier.SSD, "far"))


@pytest.fixture
def book() -> Book:
    book = Book(priors=RATES)
    book.add(A, segments=frozenset({"own"}))
    book.add(B)
    return book


def see(book: Book, key: EngineKey = A, now: float = 0.0) -> EngineView:
    (view,) = book.views([key], now)
    return view


def columns(view: EngineView) -> tuple[int, int, int, float, int]:
    return (
        view.waiting,
        view.running,
        view.queued_prefill,
        view.queued_fetch,
        view.decode_tokens,
    )


def pooled(name: str = "t") -> Turn:
    """1,000 tokens: 320 on A's device, 800 in the pool, 50 more to come."""
    return turn(name, 1000, chain=chain((name, 62)), device={A: 320}, pool=POOL, expected_output=50)


# What is in flight


def test_a_turn_counts_in_one_column_and_then_the_other(book: Book) -> None:
    charge = book.charge(decide(pooled(), A), 0.0)
    # 320 of its own memory at half price, 160 from SSD.
    assert columns(see(book)) == (1, 0, 200, pytest.approx(0.016 + 0.16), 0)
    charge.first_token(1.0)
    assert columns(see(book)) == (0, 1, 0, 0.0, 1050)
    assert book.totals() == Totals(0, 1, 0, 0.0, 1050)
    assert book.in_flight(A) == 1
    charge.release(Ending.DONE, 2.0)
    assert columns(see(book)) == (0, 0, 0, 0.0, 0)
    assert book.totals() == NOTHING
    assert book.in_flight(A) == 0


def test_what_is_not_expected_from_the_pool_is_not_fetched(book: Book) -> None:
    decision = decide(pooled(), A)
    less = type(decision)(
        decision.turn, "test", decision.ranking, A, decision.expected._replace(pool=100), 0.0
    )
    book.charge(less, 0.0)
    assert columns(see(book)) == (1, 0, 580, pytest.approx(0.005), 0)


@pytest.mark.parametrize("ending", list(Ending))
@pytest.mark.parametrize("answered", [False, True])
def test_release_counts_once(book: Book, ending: Ending, answered: bool) -> None:
    decision = decide(pooled(), A)
    charge = book.charge(decision, 0.0)
    if answered:
        charge.first_token(1.0)
    usage = Usage(1000, 800, 50)
    outcome = charge.release(ending, 2.0, usage)
    assert outcome == Outcome(decision, ending, 1.0 if answered else None, 2.0, usage)
    assert charge.released
    for again in Ending:
        assert charge.release(again, 3.0) is None
    charge.first_token(3.0)
    assert book.totals() == NOTHING


def test_only_the_first_first_token_counts(book: Book) -> None:
    charge = book.charge(decide(pooled(), A), 0.0)
    charge.first_token(1.0)
    charge.first_token(2.0)
    assert columns(see(book)) == (0, 1, 0, 0.0, 1050)
    outcome = charge.release(Ending.DONE, 3.0)
    assert outcome is not None
    assert outcome.first_token_at == 1.0


@pytest.mark.parametrize("answered", [False, True])
def test_a_move_takes_everything_along(book: Book, answered: bool) -> None:
    charge = book.charge(decide(pooled(), A), 0.0)
    if answered:
        charge.first_token(0.5)
    second = decide(pooled(), B, 1.0)
    charge.move(second, 1.0)
    assert charge.decision is second
    assert columns(see(book, A)) == (0, 0, 0, 0.0, 0)
    # B has nothing on its device and fetches from afar.
    assert columns(see(book, B)) == (1, 0, 200, pytest.approx(0.064 + 0.16), 0)
    assert set(book.pending(pooled().chain, BLOCK, 1.0)) == {B}
    outcome = charge.release(Ending.FAILED, 2.0)
    assert outcome == Outcome(second, Ending.FAILED, None, 2.0)
    assert book.totals() == NOTHING


def test_an_ended_turn_cannot_be_moved(book: Book) -> None:
    charge = book.charge(decide(pooled("gone"), A), 0.0)
    charge.release(Ending.LEFT, 1.0)
    with pytest.raises(ReleasedError, match="gone has ended"):
        charge.move(decide(pooled(), B), 1.0)
    assert book.totals() == NOTHING


# Engines that come and go


def test_an_engine_removed_with_turns_in_flight(book: Book) -> None:
    first, second = (book.charge(decide(pooled(name), A), 0.0) for name in "xy")
    first.first_token(0.5)
    book.remove(A)
    assert book.predictions() == 0
    with pytest.raises(KeyError):
        book.views([A], 0.0)
    assert book.in_flight(A) == 2
    second.first_token(1.0)
    assert first.release(Ending.FAILED, 1.0) is not None
    second.move(decide(pooled("y"), B), 1.0)
    assert book.in_flight(A) == 0
    second.release(Ending.DONE, 2.0)
    assert book.totals() == NOTHING


def test_an_engine_that_returns_finds_its_turns(book: Book) -> None:
    charge = book.charge(decide(pooled(), A), 0.0)
    book.report(A, running=5, waiting=0, kv_usage=0.5, at=0.0)
    book.remove(A)
    book.add(A, Role.PREFILL)
    view = see(book)
    assert (view.role, view.load, view.age, view.kv_usage) == (Role.PREFILL, 1, math.inf, 0.0)
    charge.release(Ending.DONE, 1.0)
    assert see(book).load == 0


def test_a_turn_sent_to_an_engine_just_removed(book: Book) -> None:
    book.remove(A)
    charge = book.charge(decide(pooled(), A), 0.0)
    assert (book.in_flight(A), book.predictions()) == (1, 0)
    charge.release(Ending.FAILED, 1.0)
    assert book.in_flight(A) == 0
    assert book.totals() == NOTHING


def test_removing_what_is_not_there_is_nothing(book: Book) -> None:
    book.remove(C)
    book.forget(C)
    assert book.in_flight(C) == 0


def test_a_restarted_engine_has_lost_its_cache_and_not_its_turns(book: Book) -> None:
    one = pooled()
    charge = book.charge(decide(one, A), 0.0)
    book.report(A, running=5, waiting=0, kv_usage=0.5, at=0.0)
    book.forget(A)
    assert book.pending(one.chain, BLOCK, 0.0) == {}
    view = see(book)
    assert (view.load, view.age) == (1, math.inf)
    charge.first_token(1.0)
    charge.release(Ending.DONE, 1.0)
    assert book.pending(one.chain, BLOCK, 1.0) == {}
    assert book.totals() == NOTHING


# Other people's load


def test_foreign_load_is_what_is_reported_less_ours(book: Book) -> None:
    charges = [book.charge(decide(pooled(f"t{i}"), A), 0.0) for i in range(3)]
    charges[0].first_token(0.5)
    # 1 of ours runs and 2 wait; 4 more run and 3 more wait.
    book.report(A, running=5, waiting=5, kv_usage=0.25, at=1.0)
    view = see(book, now=1.0)
    assert (view.running, view.waiting, view.load, view.kv_usage) == (5, 5, 10, 0.25)
    for charge in charges:
        charge.release(Ending.DONE, 1.1)
    view = see(book, now=1.1)
    assert (view.running, view.waiting) == (4, 3)
    book.charge(decide(pooled(), A), 1.2)
    assert see(book, now=1.2).load == 8


def test_a_turn_of_ours_in_prefill_is_not_counted_twice(book: Book) -> None:
    # Over there it runs, here it waits for its first token.
    charge = book.charge(decide(pooled(), A), 0.0)
    book.report(A, running=1, waiting=0, kv_usage=0.0, at=1.0)
    assert see(book, now=1.0).load == 1
    charge.release(Ending.DONE, 1.1)
    assert see(book, now=1.1).load == 0


def test_foreign_load_is_never_negative(book: Book) -> None:
    charges = [book.charge(decide(pooled(f"t{i}"), A), 0.0) for i in range(3)]
    book.report(A, running=1, waiting=0, kv_usage=0.0, at=1.0)
    assert see(book, now=1.0).load == 3
    for charge in charges:
        charge.release(Ending.DONE, 1.1)
    assert see(book, now=1.1).load == 0


def test_an_engine_reported_idle_for_ever_still_shows_our_turns(book: Book) -> None:
    for i in range(20):
        book.report(A, running=0, waiting=0, kv_usage=0.0, at=0.0)
        book.charge(decide(pooled(f"t{i}"), A), 0.0)
    assert see(book).load == 20


def test_waiting_strangers_are_taken_to_compute_as_much_as_ours(book: Book) -> None:
    book.report(A, running=0, waiting=3, kv_usage=0.0, at=0.0)
    assert see(book).foreign_prefill == 3000
    for i in range(100):
        book.charge(decide(turn(f"t{i}", 200), B), 0.0)
    book.report(A, running=9, waiting=3, kv_usage=0.0, at=1.0)
    assert see(book).foreign_prefill == pytest.approx(600, abs=30)
    book.report(A, running=9, waiting=0, kv_usage=0.0, at=2.0)
    assert see(book).foreign_prefill == 0


def test_a_report_of_an_engine_not_listed_is_nothing(book: Book) -> None:
    book.report(C, running=3, waiting=3, kv_usage=0.0, at=0.0)
    book.add(C)
    assert (see(book, C).load, see(book, C).age) == (0, math.inf)


# Views


def test_a_view_is_the_same_object_until_something_changes(book: Book) -> None:
    book.report(A, running=1, waiting=0, kv_usage=0.5, at=10.0)
    first = see(book, now=10.0)
    assert see(book, now=10.9) is first
    book.report(A, running=1, waiting=0, kv_usage=0.5, at=10.5)
    assert see(book, now=11.4) is first
    book.charge(decide(pooled(), B), 11.0).release(Ending.DONE, 11.0)
    assert see(book, now=11.4) is first
    charge = book.charge(decide(pooled(), A), 11.0)
    second = see(book, now=11.4)
    assert second is not first
    charge.release(Ending.DONE, 11.2)
    assert see(book, now=11.4) == first


def test_a_turn_that_came_and_went_between_two_looks_changes_nothing(book: Book) -> None:
    first = see(book)
    book.charge(decide(pooled(), A), 0.0).release(Ending.FAILED, 0.1)
    assert see(book, now=0.2) is first


def test_age_goes_in_whole_seconds(book: Book) -> None:
    assert see(book).age == math.inf
    book.report(A, running=0, waiting=0, kv_usage=0.0, at=10.0)
    ages = {now: see(book, now=now).age for now in (9.5, 10.0, 10.99, 11.0, 12.5, 70.2)}
    assert ages == {9.5: 0.0, 10.0: 0.0, 10.99: 0.0, 11.0: 1.0, 12.5: 2.0, 70.2: 60.0}


def test_adding_again_changes_role_and_segments_only(book: Book) -> None:
    book.charge(decide(pooled(), A), 0.0)
    book.add(A, Role.DECODE, frozenset({"new"}))
    view = see(book)
    assert (view.role, view.segments, view.load) == (Role.DECODE, frozenset({"new"}), 1)


def test_views_come_in_the_order_asked_for(book: Book) -> None:
    assert [view.key for view in book.views([B, A], 0.0)] == [B, A]


# Predictions


def test_a_turn_sent_is_pending_until_its_first_token(book: Book) -> None:
    one = turn("x", 640, chain=chain(("s", 30), ("x", 10)))
    charge = book.charge(decide(one, A), 5.0)
    # Nothing queued: 0.64 s of compute and the overhead.
    assert book.pending(one.chain, BLOCK, 5.0) == {A: Pending(640, pytest.approx(5.65))}
    sibling = chain(("s", 30), ("y", 10))
    assert book.pending(sibling, BLOCK, 5.0) == {A: Pending(480, pytest.approx(5.65))}
    assert book.pending(chain(("z", 9)), BLOCK, 5.0) == {}
    charge.first_token(5.2)
    assert book.pending(sibling, BLOCK, 5.3) == {A: Pending(480, 5.2)}


def test_ready_at_counts_the_queue_and_the_own_fetch(book: Book) -> None:
    book.charge(decide(turn("x", 500), A), 0.0)
    book.report(
        A, running=0, waiting=2, kv_usage=0.0, at=0.0
    )  # one foreign: 1,000 tokens less a bit
    foreign = see(book).foreign_prefill
    assert foreign == 975
    one = pooled()
    book.charge(decide(one, A), 0.0)
    # Queue 0.5 + 0.975, fetch 0.016 + 0.16, prefill 0.2, overhead 0.01.
    assert book.pending(one.chain, BLOCK, 0.0) == {A: Pending(992, pytest.approx(1.861))}


def ended(book: Book, ending: Ending, answered: bool, after: float) -> dict[EngineKey, Pending]:
    one = turn("x", 160, chain=chain(("x", 10)))
    charge = book.charge(decide(one, A), 0.0)
    if answered:
        charge.first_token(0.1)
    charge.release(ending, 1.0)
    return book.pending(one.chain, BLOCK, 1.0 + after)


@pytest.mark.parametrize(
    ("ending", "answered", "ready_at"),
    [(Ending.DONE, True, 0.1), (Ending.DONE, False, 0.17), (Ending.LEFT, True, 0.1)],
)
def test_what_was_computed_is_predicted_for_a_while(
    book: Book, ending: Ending, answered: bool, ready_at: float
) -> None:
    assert ended(book, ending, answered, 2.9) == {A: Pending(160, pytest.approx(ready_at))}
    assert book.pending(chain(("x", 10)), BLOCK, 4.0) == {}
    assert book.predictions() == 0


@pytest.mark.parametrize(
    ("ending", "answered"),
    [(Ending.FAILED, False), (Ending.FAILED, True), (Ending.LEFT, False)],
)
def test_what_was_perhaps_not_computed_is_not_predicted(
    book: Book, ending: Ending, answered: bool
) -> None:
    assert ended(book, ending, answered, 0.0) == {}
    assert book.predictions() == 0


def test_the_time_to_live_is_given() -> None:
    book = Book(prediction_ttl=60.0)
    book.add(A)
    assert set(ended(book, Ending.DONE, True, 59.0)) == {A}
    assert book.pending(chain(("x", 10)), BLOCK, 61.0) == {}


def test_never_more_is_predicted_than_was_sent(book: Book) -> None:
    ids = chain(("x", 10))
    book.charge(decide(turn("x", 5 * BLOCK + 3, chain=ids), A), 0.0)
    assert book.pending(ids, BLOCK, 0.0)[A].tokens == 5 * BLOCK


def test_turns_that_share_a_prefix_hold_it_for_one_another(book: Book) -> None:
    ids = chain(("s", 10))
    first = book.charge(decide(turn("x", 160, chain=ids), A), 0.0)
    second = book.charge(decide(turn("y", 160, chain=ids), A), 0.0)
    # The first to compute it is the one that counts; when it fails, the second is.
    assert book.pending(ids, BLOCK, 0.0)[A].ready_at == pytest.approx(0.17)
    first.release(Ending.FAILED, 0.1)
    assert book.pending(ids, BLOCK, 0.1)[A].ready_at == pytest.approx(0.33)
    second.release(Ending.FAILED, 0.1)
    assert book.pending(ids, BLOCK, 0.1) == {}


# Lessons


def live(
    book: Book,
    one: Turn,
    seconds: float,
    *,
    usage: Usage | None,
    at: float = 0.0,
    streamed: float = 1.0,
    ending: Ending = Ending.DONE,
) -> Rates:
    charge = book.charge(decide(one, A), at)
    charge.first_token(at + seconds)
    charge.release(ending, at + seconds + streamed, usage)
    return see(book).rates


def test_a_clean_turn_teaches_prefill_and_overhead(book: Book) -> None:
    rates = live(book, turn("x", 1000), 2.0, usage=Usage(1000, 0, 50))
    assert rates.prefill > RATES.prefill
    assert rates.overhead > RATES.overhead
    assert rates.fetch == RATES.fetch
    # The engines of a model learn together; this one's pace is a little slower, besides.
    assert RATES.prefill < see(book, B).rates.prefill < rates.prefill
    assert see(book, B).rates.overhead == rates.overhead


def test_models_and_roles_learn_apart() -> None:
    book = Book(priors=RATES)
    book.add(A, model="one")
    book.add(B, model="two")
    live(book, turn("x", 1000), 2.0, usage=Usage(1000, 0, 50))
    assert see(book, B).rates == RATES


def test_whole_answers_leave_the_queue_when_their_first_token_should_have_come(
    book: Book,
) -> None:
    whole = dataclasses.replace(turn("x", 1000), streams=False)
    charge = book.charge(decide(whole, A), 0.0)
    streamed = book.charge(decide(turn("y", 500), A), 0.0)
    first = 0.01 + 1000 * RATES.prefill
    assert see(book, A, first - 0.02).queued_prefill == 1500
    view = see(book, A, first + 0.02)
    assert (view.queued_prefill, view.waiting, view.running) == (500, 1, 1)
    assert charge.release(Ending.DONE, 3.0) is not None
    streamed.release(Ending.DONE, 3.0)
    assert set(book.totals()) == {0}


def test_an_engine_is_overdue_by_its_oldest_turn_without_a_first_token(book: Book) -> None:
    first = book.charge(decide(turn("x", 1000), A), 0.0)  # due at 1.01 by the priors
    second = book.charge(decide(turn("y", 1000), A), 0.0)  # due at 2.01
    assert see(book, now=1.5).overdue == 0.0
    assert see(book, now=4.5).overdue == 3.0
    assert see(book, now=4.9) is see(book, now=4.5)
    first.first_token(5.0)
    assert see(book, now=5.0).overdue == 2.0
    second.release(Ending.FAILED, 6.0)
    assert see(book, now=60.0).overdue == 0.0


def test_a_turn_that_moves_is_overdue_nowhere_else(book: Book) -> None:
    charge = book.charge(decide(turn("x", 1000), A), 0.0)
    charge.move(decide(turn("x", 1000), B), 10.0)
    assert see(book, A, 20.0).overdue == 0.0
    assert see(book, B, 20.0).overdue == 8.0


def test_own_turns_are_never_taken_for_strangers(book: Book) -> None:
    charge = book.charge(decide(turn("x", 1000), A), 0.0)
    charge.release(Ending.DONE, 1.0)
    # Asked just after, the engine still shows the turn that has ended; later it does not.
    book.report(A, running=1, waiting=0, kv_usage=0.0, at=1.1, asked_at=1.05)
    assert see(book, A).load == 0
    book.report(A, running=1, waiting=0, kv_usage=0.0, at=3.0, asked_at=2.9)
    assert see(book, A).load == 1


def test_many_clean_turns_teach_the_truth(book: Book) -> None:
    rates = RATES
    for i in range(100):
        tokens = 200 + 40 * i
        rates = live(
            book,
            turn(f"t{i}", tokens),
            0.03 + 2e-4 * (tokens - 96),
            usage=Usage(tokens, 96, 50) if i % 2 else Usage(tokens, None, 50),
            at=10.0 * i,
        )
    assert rates.prefill == RATES.prefill  # an engine's surplus of 96 tokens is in doubt
    for i in range(100):
        tokens = 200 + 40 * i
        one = turn(f"t{i}", tokens, device={A: 96})
        seconds = 0.03 + 2e-4 * (tokens - 96)
        rates = live(book, one, seconds, usage=Usage(tokens, 96, 50), at=10.0 * i)
    assert rates.prefill == pytest.approx(2e-4, rel=0.1)


def test_turns_with_pool_tokens_teach_the_memory_rate() -> None:
    book = Book(priors=RATES)
    book.add(A, segments=frozenset({"own"}))
    pool = (PoolSpan(320, Tier.MEMORY, "own"), PoolSpan(480, Tier.MEMORY, "far"))
    for i in range(100):
        one = turn(f"t{i}", 1000, pool=pool)
        # 160 + 480 tokens at 0.3 ms, 200 computed.
        rates = live(book, one, 0.01 + 0.2 + 0.192, usage=Usage(1000, 800, 50), at=10.0 * i)
    assert rates.fetch[Tier.MEMORY] == pytest.approx(3e-4, rel=0.1)
    assert (rates.prefill, rates.overhead) == (RATES.prefill, RATES.overhead)


MEMORY = (PoolSpan(800, Tier.MEMORY, "far"),)


@pytest.mark.parametrize(
    ("one", "usage", "more"),
    [
        (turn("x", 1000), None, {}),
        (turn("x", 1000), Usage(1000, None, 50), {}),
        (turn("x", 1000), Usage(1000, 800, 50), {}),  # cached, from where?
        (turn("x", 1000, pool=MEMORY), Usage(1000, 0, 50), {}),  # not loaded after all
        (pooled(), Usage(1000, 800, 50), {}),  # some of it from SSD
        (turn("x", 1000), Usage(1000, 0, 50), {"streamed": 0.001}),  # came whole
    ],
)
def test_turns_in_doubt_teach_nothing(
    book: Book, one: Turn, usage: Usage | None, more: dict[str, float]
) -> None:
    assert live(book, one, 9.0, usage=usage, **more) == RATES


def queue_own(book: Book) -> None:
    book.charge(decide(turn("before", 100), A), 0.0)


def queue_foreign(book: Book) -> None:
    book.report(A, running=0, waiting=1, kv_usage=0.0, at=0.0)


@pytest.mark.parametrize("queue", [queue_own, queue_foreign])
def test_turns_behind_a_queue_teach_nothing(book: Book, queue: Callable[[Book], None]) -> None:
    queue(book)
    assert live(book, turn("x", 1000), 9.0, usage=Usage(1000, 0, 50)) == RATES


def test_a_moved_turn_teaches_from_its_move_on(book: Book) -> None:
    charge = book.charge(decide(turn("x", 1000), B), 0.0)
    charge.move(decide(turn("x", 1000), A, 100.0), 100.0)
    charge.first_token(101.01)
    charge.release(Ending.DONE, 102.0, Usage(1000, 0, 50))
    assert see(book, A).rates.prefill == pytest.approx(RATES.prefill)
    assert see(book, B).rates.prefill == pytest.approx(RATES.prefill)


# Everything at once


@pytest.mark.parametrize("seed", range(3))
def test_ten_thousand_random_turns_leave_nothing_behind(seed: int) -> None:
    chance = random.Random(seed)
    keys = [EngineKey("abcdefgh"[i % 8], i // 8) for i in range(12)]
    book = Book()
    listed = set(keys)
    for key in keys:
        book.add(key, segments=frozenset({"own"}))
    flying: list[Charge] = []
    now, sent, released = 0.0, 0, 0

    def some(name: str) -> Turn:
        tokens = chance.randint(1, 3000)
        return turn(
            name,
            tokens,
            chain=chain((chance.choice("xyz"), tokens // BLOCK // 8), (name, 1)),
            device={chance.choice(keys): chance.randint(0, 100) * BLOCK},
            pool=(
                PoolSpan(chance.randint(1, 50) * BLOCK, Tier.MEMORY, chance.choice(["own", "far"])),
                PoolSpan(chance.randint(1, 50) * BLOCK, chance.choice(list(Tier)), "far"),
            ),
            expected_output=chance.randint(0, 500),
        )

    while sent < 10_000 or flying:
        now += chance.expovariate(100.0)
        deed = chance.random()
        if sent < 10_000 and (deed < 0.35 or not flying):
            flying.append(book.charge(decide(some(f"t{sent}"), chance.choice(keys)), now))
            sent += 1
        elif flying and deed < 0.55:
            chance.choice(flying).first_token(now)
        elif flying and deed < 0.65:
            charge = chance.choice(flying)
            charge.move(decide(some(charge.decision.turn.id), chance.choice(keys)), now)
        elif flying and deed < 0.98:
            charge = flying.pop(chance.randrange(len(flying)))
            usage = Usage(chance.randint(1, 3000), chance.choice([None, 0, 16]), 5)
            assert charge.release(chance.choice(list(Ending)), now, usage) is not None
            assert charge.release(Ending.DONE, now) is None
            released += 1
        elif deed < 0.985:
            key = chance.choice(keys)
            (book.remove if key in listed else book.add)(key)
            listed ^= {key}
        elif deed < 0.99:
            book.forget(chance.choice(keys))
        else:
            waiting = chance.randint(0, 9)
            book.report(chance.choice(keys), running=waiting, waiting=waiting, kv_usage=0.5, at=now)
        assert sum(book.in_flight(key) for key in keys) == len(flying)

    assert released == 10_000
    assert book.totals() == NOTHING
    for key in keys:
        assert book.in_flight(key) == 0
        book.add(key)
        book.report(key, running=0, waiting=0, kv_usage=0.0, at=now)
        assert columns(see(book, key, now)) == (0, 0, 0, 0.0, 0)
    book.pending((), BLOCK, now + 3.0)
    assert book.predictions() == 0
