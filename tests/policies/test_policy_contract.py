"""What every policy owes its callers."""

from __future__ import annotations

import copy

import pytest
from fleets import A, B, C, chain, decide, fleet, turn

from policies import base
from policies.base import EngineView, Pending, PoolSpan, Role, Tier

EVERY = pytest.mark.parametrize("name", base.names())

TURN = turn(
    tokens=2000,
    chain=chain(("x", 125)),
    device={A: 512},
    pending={B: Pending(1024, 5.0)},
    pool=(PoolSpan(256, Tier.MEMORY, "s"),),
    session="s1",
)


@EVERY
def test_ranking_twice_ranks_alike_and_moves_nothing(name: str) -> None:
    policy = base.create(name, seed=7)
    before = copy.deepcopy(policy)
    views = fleet(3, 1, 2, 1)
    first = policy.rank(TURN, views, 1.0)
    for i in range(20):
        policy.rank(turn(f"other{i}"), views, 1.0)
    assert policy.rank(TURN, views, 1.0) == first
    assert policy == before


@EVERY
@pytest.mark.parametrize("engines", [1, 2, 3, 8])
def test_every_engine_is_ranked_once_with_a_reason(name: str, engines: int) -> None:
    views = fleet(*range(engines))
    ranking = base.create(name).rank(TURN, views, 1.0)
    assert sorted(c.key for c in ranking.prefill) == [view.key for view in views]
    assert ranking.prefill is ranking.decode
    assert all(c.reason for c in ranking.prefill)
    assert ranking.reject is None


@EVERY
def test_an_empty_fleet_has_an_empty_ranking(name: str) -> None:
    ranking = base.create(name).rank(TURN, (), 1.0)
    assert ranking.prefill == ranking.decode == ()
    assert ranking.reject is None


@EVERY
def test_legs_hold_the_engines_meant_for_them(name: str) -> None:
    views = [EngineView(A, Role.PREFILL), EngineView(B, Role.DECODE), EngineView(C)]
    ranking = base.create(name).rank(TURN, views, 1.0)
    assert {c.key for c in ranking.prefill} == {A, C}
    assert {c.key for c in ranking.decode} == {B, C}


@EVERY
def test_ranks_of_one_engine_are_engines_of_their_own(name: str) -> None:
    keys = [base.EngineKey("a", rank) for rank in range(4)]
    ranking = base.create(name).rank(TURN, [EngineView(key) for key in keys], 1.0)
    assert sorted(c.key for c in ranking.prefill) == keys


@EVERY
def test_a_shadow_that_hears_the_same_stays_the_same(name: str) -> None:
    acting, shadow = base.create(name, seed=3), base.create(name, seed=3)
    views = fleet(0, 0, 0)
    for i in range(10):
        one = turn(f"t{i}", session=f"s{i % 3}")
        ranking = acting.rank(one, views, float(i))
        assert shadow.rank(one, views, float(i)) == ranking
        decision = decide(one, ranking.prefill[0].key, float(i), ranking)
        outcome = base.Outcome(decision, base.Ending.DONE, i + 0.5, i + 1.0)
        for policy in (acting, shadow):
            policy.committed(decision)
            policy.observed(outcome)
