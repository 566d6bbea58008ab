"""The policies that look at no cache: choices by hand, and by the numbers chance gives."""

from __future__ import annotations

from collections import Counter

import pytest
from fleets import A, decide, fleet, order, turn

from policies import base
from policies.base import Turn


def firsts(name: str, views: list[base.EngineView], turns: int = 4000) -> Counter[str]:
    policy = base.create(name, seed=5)
    return Counter(order(policy.rank(turn(f"t{i}"), views, 0.0))[0] for i in range(turns))


def test_round_robin_goes_round_as_decisions_are_acted_on() -> None:
    policy = base.create("round_robin")
    views = fleet(9, 0, 0)
    seen = []
    for i in range(4):
        ranking = policy.rank(turn(f"t{i}"), views, 0.0)
        seen.append("".join(order(ranking)))
        policy.committed(decide(turn(f"t{i}"), A))
    assert seen == ["abc", "bca", "cab", "abc"]


def test_round_robin_costs_are_steps() -> None:
    ranking = base.create("round_robin").rank(turn(), fleet(0, 0, 0), 0.0)
    assert [c.cost for c in ranking.prefill] == [0.0, 1.0, 2.0]


def test_round_robin_keeps_a_position_per_model() -> None:
    policy = base.create("round_robin")
    policy.committed(decide(turn(), A))
    other = Turn("t", "another", 10, 16)
    assert order(policy.rank(turn(), fleet(0, 0), 0.0)) == ["b", "a"]
    assert order(policy.rank(other, fleet(0, 0), 0.0)) == ["a", "b"]


def test_random_takes_every_engine_as_often() -> None:
    counts = firsts("random", fleet(9, 0, 0, 0))
    assert len(counts) == 4
    assert all(900 < count < 1100 for count in counts.values())


def test_another_seed_draws_otherwise() -> None:
    views = fleet(0, 0, 0, 0, 0, 0, 0, 0)
    orders = {
        tuple(order(base.create("random", seed=s).rank(turn(), views, 0.0))) for s in range(9)
    }
    assert len(orders) == 9


def test_least_requests_orders_by_running_and_waiting() -> None:
    views = [
        base.EngineView(base.EngineKey("a"), running=2, waiting=3),
        base.EngineView(base.EngineKey("b"), running=4),
        base.EngineView(base.EngineKey("c"), waiting=6),
    ]
    ranking = base.create("least_requests").rank(turn(), views, 0.0)
    assert order(ranking) == ["b", "a", "c"]
    assert [c.cost for c in ranking.prefill] == [4.0, 5.0, 6.0]
    assert ranking.prefill[1].reason == "2 running, 3 waiting"


def test_least_requests_breaks_ties_by_chance() -> None:
    counts = firsts("least_requests", fleet(1, 0, 0, 1))
    assert set(counts) == {"b", "c"}
    assert 1850 < counts["b"] < 2150


def test_power_of_two_takes_the_better_of_two() -> None:
    # Of 4 engines with distinct loads, the best is in the pair with probability 1/2, the
    # second best is the better of it in 2 of 6 pairs, the third in 1 of 6, the last never.
    counts = firsts("power_of_two", fleet(3, 2, 1, 0), turns=6000)
    assert counts["a"] == 0
    assert counts["b"] == pytest.approx(1000, abs=120)
    assert counts["c"] == pytest.approx(2000, abs=150)
    assert counts["d"] == pytest.approx(3000, abs=150)


def test_power_of_two_falls_back_on_the_other_of_the_pair() -> None:
    policy = base.create("power_of_two")
    views = fleet(4, 3, 2, 1, 0)
    for i in range(50):
        costs = [c.cost for c in policy.rank(turn(f"t{i}"), views, 0.0).prefill]
        assert costs[0] < costs[1]
        assert costs[2] < costs[3]
        assert sorted(costs) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_power_of_two_breaks_ties_by_chance() -> None:
    counts = firsts("power_of_two", fleet(1, 1, 1, 1))
    assert all(900 < count < 1100 for count in counts.values())
