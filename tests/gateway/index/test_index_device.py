"""The device index, by example and against a model of multisets."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from publisher import removed, stored

from connector.blocks import Chain
from gateway.index.device import DeviceIndex
from policies.base import EngineKey

A, B, C = EngineKey("a"), EngineKey("b"), EngineKey("b", 1)
Chains = Callable[..., Chain]


def make_chain(ids: list[int]) -> Chain:
    return Chain(4, 8, b"".join(i.to_bytes(8, "big") for i in ids))


def test_leading_run_per_engine_and_rank(index: DeviceIndex, chain: Chains) -> None:
    index.store(A, stored(1, 2, 3))
    index.store(B, stored(1, 3))
    index.store(C, stored(2, 3))
    assert index.leading(chain(1, 2, 3, 4)) == {A: 12, B: 4}
    assert index.leading(chain(1, 2, 3, 4), keys=[B, EngineKey("x")]) == {B: 4}
    assert index.leading(chain()) == {}
    assert (index.size(A), index.size(EngineKey("x"))) == (3, 0)


def test_ids_use_all_their_64_bits(index: DeviceIndex, chain: Chains) -> None:
    top = 2**64 - 1
    index.store(A, stored(top, 0))
    assert index.leading(chain(top, 0)) == {A: 8}


@pytest.mark.parametrize("medium", ["GPU", "gpu", "Gpu", None])
def test_device_media_count(index: DeviceIndex, chain: Chains, medium: str | None) -> None:
    index.store(A, stored(1, 2, medium=medium))
    index.remove(A, removed(2, medium=medium))
    assert index.leading(chain(1, 2)) == {A: 4}
    assert (index.events, index.ignored) == (2, 0)


@pytest.mark.parametrize("medium", ["cpu", "CPU", "STORAGE", ""])
def test_other_media_are_passed_over(index: DeviceIndex, chain: Chains, medium: str) -> None:
    index.store(A, stored(1))
    index.store(A, stored(2, medium=medium))
    index.remove(A, removed(1, medium=medium))
    assert index.leading(chain(1, 2)) == {A: 4}
    assert (index.events, index.ignored, index.unknown) == (1, 2, 0)


def test_blocks_restored_under_another_parent_match_whole(
    index: DeviceIndex, chain: Chains
) -> None:
    index.store(A, stored(1, 2, 3))
    index.remove(A, removed(3))
    index.store(A, stored(3))  # announced alone; parents do not matter to the index
    assert index.leading(chain(1, 2, 3)) == {A: 12}


def test_a_block_counts_only_in_every_group(index: DeviceIndex, chain: Chains) -> None:
    index.store(A, stored(1, 2, 3, group=0))
    index.store(A, stored(1, 2, group=1))
    assert index.leading(chain(1, 2, 3)) == {A: 8}
    index.remove(A, removed(1, group=1))
    assert index.leading(chain(1, 2, 3)) == {}
    assert index.size(A) == 4


def test_a_group_with_bigger_blocks_names_them_by_their_last_hash(
    index: DeviceIndex, chain: Chains
) -> None:
    index.store(A, stored(1, 2, 3, 4, 5, 6, group=0))
    index.store(A, stored(2, 4, group=1, block_size=8))
    assert index.leading(chain(1, 2, 3, 4, 5, 6)) == {A: 16}
    index.store(B, stored(1, 2, block_size=6))  # hashed otherwise: nothing can match
    assert B not in index.leading(chain(1, 2))


def test_flush_and_forget(index: DeviceIndex, chain: Chains) -> None:
    for key in (A, B):
        index.store(key, stored(1))
    index.flush(A)
    assert (index.keys(), index.leading(chain(1)), index.flushes) == ((A, B), {B: 4}, 1)
    index.forget(B)
    index.forget(B)
    assert (index.keys(), index.leading(chain(1))) == ((A,), {})


def test_removals_of_what_was_never_heard_of_are_counted(index: DeviceIndex) -> None:
    index.remove(A, removed(1, 2))
    index.store(A, stored(1))
    index.remove(A, removed(2, 1, 1))
    assert (index.unknown, index.size(A)) == (4, 0)


def test_more_copies_than_device_blocks_flush(chain: Chains) -> None:
    index = DeviceIndex(limit=3)
    index.store(A, stored(1, 2, 2))
    assert (index.size(A), index.overflows) == (2, 0)
    index.remove(A, removed(2))
    index.store(A, stored(3))
    assert index.leading(chain(1, 2, 3)) == {A: 12}
    index.store(A, stored(4))
    assert (index.size(A), index.overflows, index.flushes) == (0, 1, 1)
    index.store(A, stored(1, 2, 3))
    assert index.leading(chain(1, 2, 3)) == {A: 12}


def test_a_limit_learned_later_holds_at_once(index: DeviceIndex) -> None:
    index.store(A, stored(1, 2, 3))
    index.set_limit(A, 3)
    assert (index.size(A), index.overflows) == (3, 0)
    index.set_limit(A, 2)
    assert (index.size(A), index.overflows) == (0, 1)
    index.set_limit(A, None)
    index.store(A, stored(*range(10)))
    assert index.size(A) == 10


def test_memory_is_bounded_by_the_limit() -> None:
    index = DeviceIndex(limit=100)
    for start in range(0, 100_000, 10):
        index.store(A, stored(*range(start, start + 10)))
        assert index.size(A) <= 100
    assert index.overflows == index.flushes > 0


def test_retained_blocks_are_believed_until_removed(index: DeviceIndex, chain: Chains) -> None:
    index.store(A, stored(3))
    assert index.retained(A, chain(1, 2, 3, 4), 12) == 2
    assert index.retained(A, chain(1, 2, 3, 4), 12) == 0
    assert index.leading(chain(1, 2, 3, 4)) == {A: 12}
    index.remove(A, removed(2))
    assert (index.leading(chain(1, 2, 3)), index.unknown) == ({A: 4}, 0)
    index.store(A, stored(1))  # now it is heard: one copy, not two
    index.remove(A, removed(1))
    assert index.leading(chain(1)) == {}
    assert index.retained(B, chain(1), 7) == 1  # a partial block is none
    assert index.leading(chain(1, 2)) == {B: 4}


def test_retained_blocks_make_way_for_what_is_heard(chain: Chains) -> None:
    index = DeviceIndex(limit=4)
    index.store(A, stored(10, 11))
    assert index.retained(A, chain(1, 2, 3, 4), 16) == 2
    index.store(A, stored(12))
    assert index.leading(chain(2)) == {A: 4}
    assert index.leading(chain(1)) == {}
    index.store(A, stored(13))
    assert (index.size(A), index.overflows) == (4, 0)
    assert index.retained(A, chain(1), 4) == 0


def test_retained_in_every_group(index: DeviceIndex, chain: Chains) -> None:
    index.store(A, stored(9, group=0))
    index.store(A, stored(8, group=1, block_size=8))
    assert index.retained(A, chain(1, 2, 3, 4), 16) == 4 + 2
    assert index.leading(chain(1, 2, 3, 4)) == {A: 16}


def test_a_report_that_was_asked_for_adds_no_copies(index: DeviceIndex) -> None:
    index.store(A, stored(0, 1))
    report = index.expect_report(A, 0)
    index.store(A, stored(0, 1, 2))
    assert index.leading(make_chain([0, 1, 2]))[A] == 12
    index.remove(A, removed(0, 1, 2))
    assert index.size(A) == 0, "each block was there once"
    index.withdraw_report(A, report)


def test_without_asking_it_is_a_second_copy(index: DeviceIndex) -> None:
    index.store(A, stored(0, 1))
    index.withdraw_report(A, index.expect_report(A, 0))
    index.store(A, stored(0, 1))
    index.remove(A, removed(0, 1))
    assert index.size(A) == 2


def test_a_report_is_awaited_of_one_engine_and_for_one_prompt(index: DeviceIndex) -> None:
    index.expect_report(A, 0)
    for key, first in ((B, 0), (A, 5)):
        index.store(key, stored(first))
        index.store(key, stored(first))
        index.remove(key, removed(first))
    assert (index.size(A), index.size(B)) == (1, 1)


def test_what_was_withdrawn_does_not_take_anothers_report_away(index: DeviceIndex) -> None:
    first, second = index.expect_report(A, 0), index.expect_report(A, 0)
    index.store(A, stored(0))
    index.withdraw_report(A, first)
    index.store(A, stored(0))
    index.remove(A, removed(0))
    assert index.size(A) == 0
    index.withdraw_report(A, second)


def test_reports_come_for_each_group(index: DeviceIndex) -> None:
    index.store(A, stored(7, group=0))
    index.store(A, stored(7, group=1))
    index.expect_report(A, 0)
    for group in (0, 1):
        index.store(A, stored(0, 1, group=group))
        index.store(A, stored(0, 1, group=group))
        index.remove(A, removed(0, 1, group=group))
    assert index.leading(make_chain([0, 1]))[A] == 8
    for group in (0, 1):
        index.remove(A, removed(0, 1, group=group))
    assert A not in index.leading(make_chain([0, 1]))


def test_hearsay_that_an_engine_contradicts_is_given_up(index: DeviceIndex) -> None:
    chain = make_chain([0, 1, 2, 3])
    index.store(A, stored(0))
    index.retained(A, chain, 16)
    assert index.leading(chain)[A] == 16
    assert index.doubted(A, chain, 8) == 2
    assert index.leading(chain)[A] == 8
    assert index.doubted(A, chain, 0) == 1, "what events told stays"
    assert index.leading(chain)[A] == 4
    assert index.doubted(B, chain, 0) == 0


events = st.tuples(
    st.sampled_from([A, B, C]),
    st.sampled_from(["store", "store", "store", "remove", "remove", "flush"]),
    st.lists(st.integers(0, 7), min_size=1, max_size=5),
    st.sampled_from([None, 0, 1]),
)


@given(st.lists(events, max_size=60), st.lists(st.integers(0, 7), max_size=8))
def test_agrees_with_multisets(
    stream: list[tuple[EngineKey, str, list[int], int | None]], ids: list[int]
) -> None:
    index = DeviceIndex()
    model: dict[EngineKey, dict[int, Counter[int]]] = defaultdict(dict)
    unknown = 0
    for key, what, blocks, group in stream:
        if what == "flush":
            index.flush(key)
            model[key] = {}
        elif what == "store":
            index.store(key, stored(*blocks, group=group))
            model[key].setdefault(group or 0, Counter()).update(blocks)
        else:
            index.remove(key, removed(*blocks, group=group))
            held = model[key].get(group or 0, Counter())
            for block in blocks:
                unknown += not held[block]
                held[block] = max(0, held[block] - 1)
    assert index.unknown == unknown
    expected = {}
    for key, groups in model.items():
        sets = [{b for b, n in held.items() if n} for held in groups.values()]
        assert index.size(key) == sum(map(len, sets))
        run = 0
        while run < len(ids) and sets and all(ids[run] in held for held in sets):
            run += 1
        if run:
            expected[key] = 4 * run
    assert index.leading(make_chain(ids)) == expected


def test_the_work_is_proportional_to_the_run(index: DeviceIndex) -> None:
    long = make_chain(list(range(100_000)))
    index.store(A, stored(0, 1, 2))

    def measure(chain: Chain) -> float:
        best = float("inf")
        for _ in range(20):
            began = time.perf_counter()
            index.leading(chain)
            best = min(best, time.perf_counter() - began)
        return best

    short = measure(make_chain([0, 1, 2]))
    assert measure(long) < 20 * short + 20e-6
