"""Many turns behind one prefix: neither fan out cold nor heap on one engine."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from fleets import BLOCK, chain, send, turn

from policies import base
from policies.base import EngineKey, PoolSpan, Tier
from policies.book import Book

FLEET = [EngineKey(f"e{i}") for i in range(8)]
SHARED = 20_000


def eight() -> Book:
    book = Book()
    for key in FLEET:
        book.add(key)
    return book


@pytest.mark.parametrize("own", [0, 16, 208, 2000])
def test_siblings_of_one_prompt_compute_it_on_two_engines_at_most(own: int) -> None:
    """64 of them, sent one after another before any engine has said a word."""
    book, policy = eight(), base.create("pool_aware")
    cold = set()
    for i in range(64):
        ids = chain(("prompt", SHARED // BLOCK), (f"own{i}", own // BLOCK))
        one = turn(f"t{i}", SHARED + own, chain=ids, pending=book.pending(ids, BLOCK, 0.0))
        charge = send(book, policy, one, FLEET, 0.0)
        if not charge.decision.expected.total:
            cold.add(charge.decision.key)
    assert 1 <= len(cold) <= 2
    # Nor does one engine get them all.
    assert max(book.in_flight(key) for key in FLEET) <= 40


def share(*, own: int, output: int, resident: bool, pooled: bool, answered: bool) -> float:
    """Send 100 agents of one shared prefix and return the largest share over the mean."""
    book, policy = eight(), base.create("pool_aware")
    counts: Counter[EngineKey] = Counter()
    for i in range(100):
        ids = chain(("system", SHARED // BLOCK), (f"agent{i}", own // BLOCK))
        one = turn(
            f"t{i}",
            SHARED + own,
            chain=ids,
            device={FLEET[0]: SHARED} if resident else {},
            pending=book.pending(ids, BLOCK, 0.0),
            pool=(PoolSpan(SHARED, Tier.MEMORY, "s"),) if pooled else (),
            expected_output=output,
        )
        charge = send(book, policy, one, FLEET, 0.0)
        counts[charge.decision.key] += 1
        if answered:
            charge.first_token(0.0)
    return max(counts.values()) / (100 / len(FLEET))


@pytest.mark.parametrize(
    ("own", "output", "resident", "answered"),
    list(itertools.product([48, 208, 2000], [64, 256, 1024], [False, True], [False, True])),
)
def test_a_shared_prefix_in_the_pool_does_not_collapse_the_fleet(
    own: int, output: int, resident: bool, answered: bool
) -> None:
    largest = share(own=own, output=output, resident=resident, pooled=True, answered=answered)
    assert largest <= 1.5


@pytest.mark.parametrize(
    ("own", "resident"), list(itertools.product([48, 208, 2000], [False, True]))
)
def test_nor_does_one_without_a_pool_once_turns_decode(own: int, resident: bool) -> None:
    assert share(own=own, output=256, resident=resident, pooled=False, answered=True) <= 1.5
