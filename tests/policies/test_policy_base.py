"""Turns, rates and rankings by hand; the registry and its complaints."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from fleets import A, B, C, fleet, turn

from policies import base
from policies.base import (
    Cached,
    Candidate,
    EngineView,
    Pending,
    PolicyError,
    PoolSpan,
    Ranking,
    Rates,
    Role,
    Tier,
)


def test_cached_is_device_then_pool_and_leaves_one_token_to_compute() -> None:
    one = turn(tokens=64, device={A: 16, B: 64}, pool=(PoolSpan(64, Tier.MEMORY, "s"),))
    assert one.cacheable == 48
    assert one.cached(A) == Cached(16, 32)
    assert one.cached(B) == Cached(48, 0)
    assert one.cached(C) == Cached(0, 48)
    assert one.cached(C).total == 48


def test_a_pending_prefix_counts_as_the_engines_own() -> None:
    one = turn(tokens=100, device={A: 16}, pending={A: Pending(64, 9.0), B: Pending(8, 9.0)})
    assert one.cached(A) == Cached(64, 0)
    assert one.cached(B) == Cached(8, 0)


def test_fetched_are_the_spans_beyond_the_device() -> None:
    spans = (
        PoolSpan(32, Tier.MEMORY, "x"),
        PoolSpan(32, Tier.SSD, "y"),
        PoolSpan(64, Tier.MEMORY, "z"),
    )
    one = turn(tokens=100, device={A: 48, B: 128}, pool=spans)
    assert one.fetched(A) == (PoolSpan(16, Tier.SSD, "y"), PoolSpan(32, Tier.MEMORY, "z"))
    assert one.fetched(B) == ()
    assert one.fetched(C) == (
        PoolSpan(32, Tier.MEMORY, "x"),
        PoolSpan(32, Tier.SSD, "y"),
        PoolSpan(32, Tier.MEMORY, "z"),
    )


def test_a_turn_of_nothing_has_nothing_cached() -> None:
    assert turn(tokens=0, device={A: 16}).cached(A) == Cached(0, 0)


def test_memory_of_the_own_segment_is_fetched_at_half_price() -> None:
    rates = Rates(fetch={Tier.MEMORY: 1e-3, Tier.SSD: 1e-2, Tier.DISK: 1e-1})
    spans = (
        PoolSpan(100, Tier.MEMORY, "own"),
        PoolSpan(100, Tier.MEMORY, "other"),
        PoolSpan(10, Tier.SSD, "own"),
        PoolSpan(1, Tier.DISK, "own"),
    )
    assert rates.fetch_seconds(spans) == pytest.approx(0.1 + 0.1 + 0.1 + 0.1)
    assert rates.fetch_seconds(spans, frozenset({"own"})) == pytest.approx(0.05 + 0.1 + 0.1 + 0.1)


def test_legs_are_one_object_until_roles_are_apart() -> None:
    candidates = [Candidate(key, 0.0, "") for key in (A, B, C)]
    same = Ranking.by_role(candidates, fleet(0, 0, 0))
    assert same.prefill is same.decode
    apart = Ranking.by_role(
        candidates,
        [EngineView(A, Role.PREFILL), EngineView(B, Role.DECODE), EngineView(C)],
    )
    assert [c.key for c in apart.prefill] == [A, C]
    assert [c.key for c in apart.decode] == [B, C]


def test_every_policy_is_registered_by_importing_the_package() -> None:
    assert base.names() == [
        "least_requests",
        "pool_aware",
        "power_of_two",
        "random",
        "round_robin",
        "session_affinity",
    ]


def test_options_have_their_defaults_and_nothing_that_is_remembered() -> None:
    assert base.options("round_robin") == {}
    assert base.options("session_affinity") == {"bound": 1.25}
    assert base.options("pool_aware") == {"work": 1.0, "doubling": 800_000, "copies": 2}


@pytest.mark.parametrize(
    ("name", "given", "complaint"),
    [
        ("poolaware", {}, "no policy 'poolaware'; did you mean 'pool_aware'?"),
        ("zzz", {}, "known: least_requests, pool_aware"),
        ("session_affinity", {"bund": 2.0}, "no option 'bund'; did you mean 'bound'?"),
        ("round_robin", {"bound": 2.0}, "no option 'bound'; known: none"),
        ("round_robin", {"_positions": {}}, "no option '_positions'"),
        ("random", {"seed": 3}, "no option 'seed'"),
        ("session_affinity", {"bound": "2"}, "'bound' must be a number, not '2'"),
        ("session_affinity", {"bound": True}, "'bound' must be a number, not True"),
        ("session_affinity", {"bound": float("nan")}, "'bound' must be a finite number, not nan"),
        ("session_affinity", {"bound": 0.9}, "'bound' must be at least 1, not 0.9"),
        ("pool_aware", {"doubling": 1.5}, "'doubling' must be a whole number, not 1.5"),
        ("pool_aware", {"doubling": 0}, "'doubling' must be at least 1, not 0"),
        ("pool_aware", {"work": -1}, "'work' must be at least 0, not -1.0"),
        ("pool_aware", {"copies": 0}, "'copies' must be at least 1, not 0"),
    ],
)
def test_mistakes_are_named(name: str, given: dict[str, object], complaint: str) -> None:
    with pytest.raises(PolicyError) as caught:
        base.create(name, given)
    assert complaint in str(caught.value)


def test_every_option_at_fault_is_named() -> None:
    given = {"work": -1, "doubling": "x", "copies": 2, "wrk": 1.0}
    assert [key for key, _ in base.faults("pool_aware", given)] == ["work", "doubling", "wrk"]
    assert base.faults("pool_aware", {"copies": 3}) == []
    with pytest.raises(PolicyError, match="no policy 'pool'"):
        base.faults("pool", {})


def test_texts_are_read_as_what_the_options_are() -> None:
    given = {"work": "2", "doubling": "9", "copies": "1.5", "none": "1", "other": 3}
    read = {"work": 2.0, "doubling": 9, "copies": "1.5", "none": "1", "other": 3}
    assert base.from_text("pool_aware", given) == read
    assert base.from_text("no_policy", given) == given


def test_a_whole_number_will_do_where_a_float_is_meant() -> None:
    policy = base.create("session_affinity", {"bound": 2})
    assert repr(policy) == "SessionAffinity(seed=0, bound=2.0)"


def test_a_name_is_registered_once() -> None:
    with pytest.raises(PolicyError, match="registered twice"):

        @base.register("random")
        @dataclass
        class Other(base.BasePolicy):
            def rank(self, turn, fleet, now):  # type: ignore[no-untyped-def]
                return Ranking.of(())


def test_a_policy_must_rank() -> None:
    with pytest.raises(TypeError, match="abstract"):
        base.BasePolicy()  # type: ignore[abstract]


def test_chance_comes_from_seed_and_turn_id() -> None:
    def draw(seed: int, name: str) -> float:
        policy = base.create("random", seed=seed)
        assert isinstance(policy, base.BasePolicy)
        return policy.chance(turn(name)).random()

    assert draw(1, "x") == draw(1, "x")
    assert len({draw(1, "x"), draw(2, "x"), draw(1, "y"), draw(11, "x")}) == 4
