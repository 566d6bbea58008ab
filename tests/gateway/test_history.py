"""The index of engines whose caches send no events."""

from __future__ import annotations

import random

from gateway.index.history import HistoryIndex
from policies.base import EngineKey

A, B = EngineKey("a"), EngineKey("b")


def test_what_was_sent_is_found_again_by_its_leading_blocks() -> None:
    index = HistoryIndex()
    index.record(A, [1, 2, 3])
    index.record(B, [1, 2, 4, 5])
    assert index.leading([1, 2, 3, 9], [A, B]) == {A: 3, B: 2}
    assert index.leading([2, 3], [A]) == {A: 2}
    assert index.leading([9], [A, B]) == {}
    assert index.leading([1], [B]) == {B: 1}
    index.forget(A)
    assert index.leading([1, 2, 3], [A, B]) == {B: 2}


def test_it_is_bounded_and_keeps_what_was_used_last() -> None:
    index = HistoryIndex(blocks=100)
    chance = random.Random(1)
    hot = list(range(10))
    for _ in range(1000):
        index.record(A, hot + [chance.randrange(10**9) for _ in range(20)])
    assert index.leading(hot, [A]) == {A: 10}
    assert index.size(A) == 100


def test_a_prefix_outlives_what_follows_it() -> None:
    index = HistoryIndex(blocks=4)
    index.record(A, [1, 2, 3, 4])
    index.record(A, [7, 8])
    assert index.leading([1, 2, 3, 4], [A]) == {A: 2}
