"""The boundary search against pools that are there up to some block."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.index.boundary import Boundary


def search(there: list[bool], most: int, hints: tuple[int, ...] = ()) -> tuple[int, int, set[int]]:
    """Return the run found, the rounds it took, and all blocks asked for."""
    boundary, rounds, asked = Boundary(len(there)), 0, set()
    while boundary.unknown:
        probes = boundary.probes(most, hints if not rounds else ())
        assert probes == sorted(set(probes))
        assert all(boundary.present < b < boundary.missing for b in probes)
        assert len(probes) <= most + 2 * len(hints)
        asked |= set(probes)
        boundary.learn({b: there[b] for b in probes})
        rounds += 1
    return boundary.run, rounds, asked


@given(
    st.integers(0, 3_000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    st.integers(2, 64),
    st.lists(st.integers(-5, 3_005), max_size=3),
)
def test_finds_the_end_of_the_run(sizes: tuple[int, int], most: int, hints: list[int]) -> None:
    blocks, run = sizes
    found, _, _ = search([i < run for i in range(blocks)], most, tuple(hints))
    assert found == run


@given(st.integers(0, 1_600))
def test_rounds_are_few(run: int) -> None:
    _, rounds, asked = search([i < run for i in range(1_600)], 32)
    assert rounds <= 3
    assert len(asked) <= 96


def test_all_nothing_and_a_good_hint_take_one_round() -> None:
    for run in (0, 1_600):
        assert search([i < run for i in range(1_600)], 32)[1] == 1
    assert search([i < 777 for i in range(1_600)], 32, (776,))[1] == 1


@given(st.lists(st.booleans(), max_size=300), st.integers(2, 40))
def test_with_holes_it_ends_at_a_true_edge(there: list[bool], most: int) -> None:
    """It may step over a hole that no probe met, but never past one that it has seen."""
    run, _, asked = search(there, most)
    assert all(there[b] for b in asked if b < run)
    assert run == len(there) or not there[run]
    assert run == 0 or there[run - 1]
