"""Sessions stay where they are, within the bound."""

from __future__ import annotations

from collections import Counter

from fleets import fleet, order, turn

from policies import base
from policies.base import EngineKey, EngineView

IDLE = fleet(0, 0, 0, 0)


def walk(
    session: str, views: list[EngineView] = IDLE, name: str = "t", **options: float
) -> list[str]:
    policy = base.create("session_affinity", options)
    return order(policy.rank(turn(name, session=session), views, 0.0))


def loaded(loads: dict[str, int]) -> list[EngineView]:
    return [EngineView(EngineKey(name), running=loads.get(name, 0)) for name in "abcd"]


def test_a_session_has_one_engine_whatever_the_turn_and_the_fleets_order() -> None:
    assert walk("s", name="t1") == walk("s", name="t2") == walk("s", IDLE[::-1])


def test_sessions_are_spread_evenly() -> None:
    counts = Counter(walk(f"session-{i}")[0] for i in range(2000))
    assert all(420 < counts[name] < 580 for name in "abcd")


def test_a_session_is_not_another_whose_name_it_begins() -> None:
    assert len({tuple(walk(f"session-1{rest}")) for rest in ("", "2", "3", "4", "5", "6")}) > 3


def test_an_engine_lost_moves_only_its_own_sessions() -> None:
    for i in range(200):
        before = walk(f"s{i}")
        after = walk(f"s{i}", [view for view in IDLE if view.key.engine != "c"])
        assert after == [name for name in before if name != "c"]


def test_an_overrun_engine_is_walked_past_and_ranked_last() -> None:
    first, second, third, fourth = walk("s")
    # 8 requests and this turn on 4 engines: ceil(1.25 * 9 / 4) = 3 at most.
    assert walk("s", loaded({first: 2, second: 6})) == [first, third, fourth, second]
    assert walk("s", loaded({first: 3, second: 5})) == [third, fourth, first, second]
    assert walk("s", loaded({first: 8})) == [second, third, fourth, first]


def test_the_bound_is_an_option() -> None:
    first, second, third, fourth = walk("s")
    # ceil(4 * 9 / 4) = 9 requests at most.
    assert walk("s", loaded({first: 8}), bound=4.0) == [first, second, third, fourth]


def test_within_the_bound_in_every_fleet_some_engine_is() -> None:
    policy = base.create("session_affinity", {"bound": 1.0})
    for loads in ((5, 5, 5, 5), (0, 0, 0, 9), (7, 1, 3, 3)):
        best = policy.rank(turn(session="s"), fleet(*loads), 0.0).prefill[0]
        assert "within bound" in best.reason


def test_turns_without_a_session_go_anywhere() -> None:
    counts = Counter(walk("", name=f"t{i}")[0] for i in range(400))
    assert all(70 < counts[name] < 130 for name in "abcd")


def test_the_reason_says_place_and_load() -> None:
    policy = base.create("session_affinity")
    best = policy.rank(turn(session="s"), IDLE, 0.0).prefill[0]
    assert best.reason == "place 0 for session/s; 1 of 1 requests, within bound"
    assert best.cost == 0.0
