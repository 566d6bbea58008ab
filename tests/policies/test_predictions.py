"""Predictions of what engines will hold, against a model that keeps every block."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from fleets import BLOCK, A, B, C, chain
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import predictions
from policies.base import EngineKey, Pending
from policies.predictions import Claim, Predictions


@dataclass
class Known:
    """One claim, as the model remembers it."""

    claim: Claim
    key: EngineKey
    ids: list[int]
    ready_at: float
    confirmed: bool
    until: float = float("inf")


def naive(known: list[Known], ids: list[int], now: float) -> dict[EngineKey, Pending]:
    """Longest leading run per engine, ready with the first claim that has all of it."""
    runs: dict[EngineKey, dict[int, list[Known]]] = {}
    for one in known:
        if one.until <= now:
            continue
        run = 0
        while run < min(len(one.ids), len(ids)) and one.ids[run] == ids[run]:
            run += 1
        if run:
            runs.setdefault(one.key, {}).setdefault(run, []).append(one)
    found: dict[EngineKey, Pending] = {}
    for key, by_run in runs.items():
        claims = by_run[max(by_run)]
        ready_at = min(one.ready_at for one in claims)
        if ready_at < now and not any(one.confirmed for one in claims):
            ready_at = 2 * now - ready_at  # overdue: as long again as it is late
        found[key] = Pending(max(by_run) * BLOCK, ready_at)
    return found


# Chains over few names part and meet again in every way.
CHAINS = st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 5)), min_size=1, max_size=4).map(
    lambda parts: chain(*parts)
)


@settings(max_examples=60, deadline=None)
@given(chains=st.lists(CHAINS, min_size=2, max_size=8), seed=st.integers(0, 2**32))
def test_like_a_model_that_keeps_every_block(chains: list[list[int]], seed: int) -> None:
    chance = random.Random(seed)
    tree = Predictions(ttl=3.0)
    known: list[Known] = []
    now = 0.0
    for _ in range(60):
        now += chance.choice((0.0, 0.3, 1.0))
        known = [one for one in known if one.until > now]
        deed = chance.random()
        alive = [one for one in known if one.until == float("inf")]
        if deed < 0.4 or not alive:
            key, ids = chance.choice((A, B, C)), chance.choice(chains)
            ids = ids[: chance.randint(1, len(ids))]
            ready_at = now + chance.randint(0, 5)
            silent = chance.random() < 0.3
            claim = tree.claim(key, ids, ready_at, now, silent=silent)
            assert claim is not None
            known.append(Known(claim, key, ids, ready_at, silent))
        elif deed < 0.6:
            one = chance.choice(alive)
            tree.ready(one.claim, now)
            one.ready_at, one.confirmed = min(one.ready_at, now), True
        elif deed < 0.75:
            one = chance.choice(alive)
            tree.linger(one.claim, now)
            one.until = now + 3.0
        elif deed < 0.95:
            one = chance.choice(alive)
            tree.drop(one.claim)
            tree.drop(one.claim)
            known.remove(one)
        else:
            tree.forget(B)
            known = [one for one in known if one.key != B]
        for ids in chains:
            assert tree.leading(ids, BLOCK, now) == naive(known, ids, now)
        assert len(tree) == len(known)
    for one in known:
        tree.drop(one.claim)
    assert len(tree) == 0
    assert not tree._root.children
    assert not tree._by_engine


def test_nodes_are_merged_again_when_their_split_has_gone() -> None:
    tree = Predictions(ttl=3.0)
    stem = chain(("x", 100))
    tree.claim(A, stem, 0.0, 0.0)
    for at in range(1, 100):
        branch = tree.claim(B, stem[:at] + chain((f"y{at}", 5)), 0.0, 0.0)
        assert branch is not None
        tree.drop(branch)
    (only,) = tree._root.children.values()
    assert (only.start, only.end, only.children) == (0, 100, {})


def test_an_empty_chain_predicts_nothing() -> None:
    tree = Predictions(ttl=3.0)
    assert tree.claim(A, [], 0.0, 0.0) is None
    assert tree.leading([], BLOCK, 0.0) == {}
    assert tree.leading(chain(("x", 3)), BLOCK, 0.0) == {}


def test_claims_of_ended_turns_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "LINGERING_MAX", 10)
    tree = Predictions(ttl=1e9)
    for i in range(50):
        claim = tree.claim(A, chain((f"x{i}", 2)), 0.0, 0.0)
        assert claim is not None
        tree.linger(claim, 0.0)
        assert len(tree) <= 10
    assert tree.leading(chain(("x49", 2)), BLOCK, 0.0) == {A: Pending(32, 0.0)}
    assert tree.leading(chain(("x39", 2)), BLOCK, 0.0) == {}


def test_claims_expire_with_the_next_look() -> None:
    tree = Predictions(ttl=3.0)
    claim = tree.claim(A, chain(("x", 2)), 0.0, 0.0)
    assert claim is not None
    tree.ready(claim, 0.0)
    tree.linger(claim, 1.0)
    assert tree.leading(chain(("x", 9)), BLOCK, 3.9) == {A: Pending(32, 0.0)}
    assert tree.leading(chain(("x", 9)), BLOCK, 4.0) == {}
    assert len(tree) == 0


def test_what_is_overdue_is_taken_to_need_as_long_again() -> None:
    tree = Predictions(ttl=3.0)
    ids = chain(("x", 2))
    claim = tree.claim(A, ids, ready_at=1.0, now=0.0)
    assert claim is not None
    assert tree.leading(ids, BLOCK, 1.0) == {A: Pending(32, 1.0)}
    assert tree.leading(ids, BLOCK, 5.0) == {A: Pending(32, 9.0)}
    tree.ready(claim, 6.0)
    assert tree.leading(ids, BLOCK, 7.0) == {A: Pending(32, 1.0)}


def test_a_run_is_overdue_until_one_of_its_turns_has_shown_a_token() -> None:
    tree = Predictions(ttl=3.0)
    ids = chain(("x", 2))
    tree.claim(A, ids, ready_at=1.0, now=0.0)
    second = tree.claim(A, ids + chain(("y", 1)), ready_at=2.0, now=0.0)
    assert second is not None
    tree.ready(second, 3.0)
    assert tree.leading(ids, BLOCK, 4.0)[A].ready_at < 4.0
    tree.drop(second)
    assert tree.leading(ids, BLOCK, 4.0)[A].ready_at == 7.0
