"""Estimates of `pool_aware` by hand.

Rates for all: 1 ms per token computed, 0.1 ms per token fetched from memory and
1 ms from SSD, 10 ms overhead, 10 ms per token decoded. Turns are of 1,000 tokens
(992 of them cacheable) and 100 more to come, unless a test says otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest
from fleets import A, B, C, D, order, turn

from policies import base
from policies.base import Candidate, EngineKey, EngineView, Pending, PoolSpan, Rates, Tier, Turn

RATES = Rates(
    prefill=1e-3,
    fetch={Tier.MEMORY: 1e-4, Tier.SSD: 1e-3, Tier.DISK: 2e-3},
    overhead=0.01,
    decode=0.01,
)


def view(key: EngineKey, **more: Any) -> EngineView:
    return EngineView(key, rates=RATES, **more)


def ask(**more: Any) -> Turn:
    return turn(tokens=1000, expected_output=100, **more)


def rank(turn: Turn, *views: EngineView, now: float = 0.0, **options: Any) -> list[Candidate]:
    return list(base.create("pool_aware", options).rank(turn, views, now).prefill)


def terms(turn: Turn, one: EngineView, now: float = 0.0, **options: Any) -> dict[str, float]:
    """The terms that are not 0, of a fleet of one."""
    (candidate,) = rank(turn, one, now=now, **options)
    assert candidate.cost == pytest.approx(sum(candidate.terms.values()))
    return {name: round(value, 9) for name, value in candidate.terms.items() if value}


def test_a_cold_turn_on_an_idle_engine() -> None:
    assert terms(ask(), view(A)) == {"prefill": 1.0, "overhead": 0.01, "work": 1.0}


def test_device_tokens_are_not_computed() -> None:
    assert terms(ask(device={A: 800}), view(A)) == {"prefill": 0.2, "overhead": 0.01, "work": 0.2}


def test_pool_tokens_are_fetched_by_tier_and_nearness() -> None:
    pool = (
        PoolSpan(400, Tier.MEMORY, "own"),
        PoolSpan(200, Tier.MEMORY, "far"),
        PoolSpan(200, Tier.SSD, "own"),
    )
    there = view(A, segments=frozenset({"own"}))
    # 200 on the device; 200 of its own memory at half price, 200 from afar, 200 from SSD.
    expected = {"fetch": 0.01 + 0.02 + 0.2, "prefill": 0.2, "overhead": 0.01, "work": 0.2}
    assert terms(ask(device={A: 200}, pool=pool), there) == expected


def test_the_queue_is_ours_and_others() -> None:
    busy = view(A, queued_prefill=300, foreign_prefill=200, queued_fetch=0.05)
    assert terms(ask(), busy)["queue"] == 0.55


def test_what_hangs_is_taken_to_hang_as_long_again() -> None:
    assert terms(ask(), view(A, overdue=3.0))["overdue"] == 3.0
    hanging = view(A, overdue=1.0)
    assert [c.key for c in rank(ask(device={A: 992}), hanging, view(B))] == [A, B]
    hanging = view(A, overdue=30.0)
    assert [c.key for c in rank(ask(device={A: 992}), hanging, view(B))] == [B, A]


def test_requests_there_are_slowed_and_slow_down() -> None:
    # Context: 5,000 running, which this turn's 1,100 tokens slow down twice (running) and
    # twice three times (waiting): 5,000 + 8 * 1,100 = 13,800 of 100,000 that double a step,
    # of 100 steps of 10 ms.
    busy = view(A, running=2, waiting=3, decode_tokens=5000)
    assert terms(ask(), busy, doubling=100_000)["decode"] == pytest.approx(0.138)
    assert terms(ask(), busy, doubling=200_000)["decode"] == pytest.approx(0.069)


def test_work_is_the_price_of_compute_to_others() -> None:
    assert terms(ask(), view(A), work=2.5)["work"] == 2.5
    assert "work" not in terms(ask(), view(A), work=0)


def test_work_decides_between_waiting_for_a_hit_and_computing_anew() -> None:
    one = ask(device={A: 900})
    busy, idle = view(A, queued_prefill=1500), view(B)
    # A: 1.5 + 0.1 = 1.6 s to the first token, B: 1.0 s; with work, A 1.7 and B 2.0.
    assert [c.key for c in rank(one, busy, idle, work=0)] == [B, A]
    assert [c.key for c in rank(one, busy, idle)] == [A, B]


def test_a_pending_prefix_is_waited_for_beyond_the_queue() -> None:
    one = ask(pending={A: Pending(800, 10.7)})
    there = view(A, queued_prefill=500)
    expected = {"queue": 0.5, "wait": 0.2, "prefill": 0.2, "overhead": 0.01, "work": 0.2}
    assert terms(one, there, now=10.0) == expected
    assert "wait" not in terms(one, there, now=10.2)
    assert "wait" not in terms(one, there, now=99.0)


def test_a_pending_prefix_that_takes_too_long_is_computed_or_fetched_instead() -> None:
    # Waiting 5 s saves 2 * 0.8 s of compute and work.
    assert terms(ask(pending={A: Pending(800, 5.0)}), view(A)) == {
        "prefill": 1.0,
        "overhead": 0.01,
        "work": 1.0,
    }
    # Waiting 0.2 s saves a fetch of 0.08 s.
    pool = (PoolSpan(800, Tier.MEMORY, "s"),)
    assert terms(ask(pending={A: Pending(800, 0.2)}, pool=pool), view(A)) == {
        "fetch": 0.08,
        "prefill": 0.2,
        "overhead": 0.01,
        "work": 0.2,
    }


def test_a_device_hit_as_long_needs_no_wait() -> None:
    one = ask(device={A: 800}, pending={A: Pending(800, 5.0)})
    assert terms(one, view(A)) == {"prefill": 0.2, "overhead": 0.01, "work": 0.2}


def test_what_enough_engines_are_computing_costs_the_next_tenfold() -> None:
    one = ask(pending={A: Pending(800, 1.0), B: Pending(640, 1.0), D: Pending(992, -1.0)})
    # A and B are computing 640 tokens between them; D has computed its own.
    assert terms(one, view(C))["duplicate"] == 6.4
    assert "duplicate" not in terms(one, view(D))
    assert "duplicate" not in terms(one, view(C), copies=3)
    assert terms(one, view(C), copies=1)["duplicate"] == 8.0


def test_what_the_pool_or_the_device_has_is_no_duplicate() -> None:
    pending = {A: Pending(800, 1.0), B: Pending(800, 1.0)}
    pool = (PoolSpan(600, Tier.MEMORY, "s"),)
    assert terms(ask(pending=pending, pool=pool), view(C))["duplicate"] == 2.0
    assert "duplicate" not in terms(ask(pending=pending, device={C: 800}), view(C))
    # An engine that has on its device what is pending there is not computing it.
    known = ask(pending=pending, device={B: 800})
    assert "duplicate" not in terms(known, view(C))


def test_slow_engines_are_estimated_by_their_own_rates() -> None:
    slow = EngineView(A, rates=Rates(prefill=1e-2, overhead=0.01))
    assert [c.key for c in rank(ask(device={A: 800}), slow, view(B))] == [B, A]


def test_a_fleet_in_order() -> None:
    one = ask(device={A: 960, B: 320}, pool=(PoolSpan(640, Tier.MEMORY, "s"),))
    views = (view(A, queued_prefill=2000), view(B), view(C), view(D, queued_prefill=100))
    ranked = rank(one, *views)
    # B 320 fetched 320: 0.032 + 0.36 * 2; C 640 fetched: 0.064 + 0.72; D 0.1 more;
    # A 2.0 + 0.04 * 2; and 0.01 each.
    assert [(str(c.key), round(c.cost, 6)) for c in ranked] == [
        ("b", 0.762),
        ("c", 0.794),
        ("d", 0.894),
        ("a", 2.09),
    ]


def test_ties_go_by_load_and_then_by_chance() -> None:
    # Requests that decode for nothing, so that load alone is between them.
    rates = Rates(decode=0.0)
    views = [EngineView(k, running=n, rates=rates) for k, n in ((A, 2), (B, 1), (C, 1), (D, 0))]
    orders = {tuple(order(base.create("pool_aware").rank(ask2, views, 0.0))) for ask2 in many(40)}
    assert orders == {("d", "b", "c", "a"), ("d", "c", "b", "a")}


def many(count: int) -> list[Turn]:
    return [turn(f"t{i}") for i in range(count)]


def test_costs_within_a_microsecond_tie() -> None:
    rates = (Rates(overhead=0.02), Rates(overhead=0.02 + 1e-10))
    views = [EngineView(A, rates=rates[0]), EngineView(B, rates=rates[1])]
    firsts = {order(base.create("pool_aware").rank(one, views, 0.0))[0] for one in many(40)}
    assert firsts == {"a", "b"}


def test_the_reason_in_words() -> None:
    pool = (PoolSpan(768, Tier.MEMORY, "s"),)
    (one,) = rank(ask(device={A: 512}, pool=pool), view(A))
    # 0.0256 s of fetch, 0.232 of compute, 0.01 of overhead.
    assert one.reason == "device 512 + pool 256 of 1000 tokens; 268 ms"
    (other,) = rank(ask(pending={A: Pending(800, 0.3)}), view(A))
    assert other.reason == (
        "device 800 + pool 0 of 1000 tokens; 510 ms, 300 of them for a prefix in flight"
    )
