"""Rates learned from lessons, some of them lies."""

from __future__ import annotations

import math
import random

import pytest

from policies.base import Rates, Tier
from policies.learning import ERROR_MAX, GAIN, PACE_RANGE, RANGE, learn, learn_pace, scaled

PRIORS = Rates()


def lessons(
    prefill: float, overhead: float, count: int, *, noise: float = 0.1, wild: float = 0.0
) -> Rates:
    chance = random.Random(4)
    rates = PRIORS
    for _ in range(count):
        computed = chance.choice((100, 500, 2000, 8000, 20000))
        measured = (overhead + prefill * computed) * chance.lognormvariate(0.0, noise)
        if chance.random() < wild:
            measured *= chance.choice((0.01, 50.0))
        rates = learn(rates, PRIORS, measured=measured, computed=computed)
    return rates


@pytest.mark.parametrize("factor", [0.1, 1.0, 10.0])
def test_prefill_and_overhead_are_found(factor: float) -> None:
    rates = lessons(1e-4 * factor, 0.02 * factor, 400)
    assert rates.prefill == pytest.approx(1e-4 * factor, rel=0.2)
    assert rates.overhead == pytest.approx(0.02 * factor, rel=0.3)


def test_prefill_is_found_quickly_however_wrong_its_prior() -> None:
    assert lessons(5e-3, 0.02, 60).prefill == pytest.approx(5e-3, rel=0.25)


def test_the_two_are_told_apart() -> None:
    # The overhead of turns that compute much is hard to see, and matters little.
    rates = lessons(5e-4, 0.005, 800)
    assert rates.prefill == pytest.approx(5e-4, rel=0.2)
    assert rates.overhead == pytest.approx(0.005, abs=0.01)
    rates = lessons(2e-5, 0.3, 800)
    assert rates.prefill == pytest.approx(2e-5, rel=0.3)
    assert rates.overhead == pytest.approx(0.3, rel=0.2)


def test_one_lesson_in_ten_a_lie_does_little() -> None:
    assert lessons(3e-4, 0.05, 800, wild=0.1).prefill == pytest.approx(3e-4, rel=0.35)


@pytest.mark.parametrize("measured", [1e-9, 1e9])
def test_one_outlier_moves_a_rate_by_a_fifth_at_most(measured: float) -> None:
    rates = learn(PRIORS, PRIORS, measured=measured, computed=10_000)
    for learned, prior in (
        (rates.prefill, PRIORS.prefill),
        (rates.overhead, PRIORS.overhead),
    ):
        assert abs(math.log(learned / prior)) <= GAIN * ERROR_MAX


@pytest.mark.parametrize(("measured", "factor"), [(1e-9, 1 / RANGE), (1e9, RANGE)])
def test_rates_stay_in_range_of_their_priors(measured: float, factor: float) -> None:
    rates = PRIORS
    for _ in range(2000):
        rates = learn(rates, PRIORS, measured=measured, computed=1000)
        rates = learn(rates, PRIORS, measured=measured, computed=0, fetched=1000.0)
    assert rates.prefill == pytest.approx(PRIORS.prefill * factor)
    assert rates.overhead == pytest.approx(PRIORS.overhead * factor)
    assert rates.fetch[Tier.MEMORY] == pytest.approx(PRIORS.fetch[Tier.MEMORY] * factor)


def test_a_fetch_teaches_the_memory_rate_alone() -> None:
    rates = PRIORS
    for _ in range(200):
        measured = PRIORS.overhead + PRIORS.prefill * 100 + 4e-5 * 10_000
        rates = learn(rates, PRIORS, measured=measured, computed=100, fetched=10_000.0)
    assert rates.fetch[Tier.MEMORY] == pytest.approx(4e-5, rel=0.01)
    assert rates.fetch[Tier.SSD] == PRIORS.fetch[Tier.SSD]
    assert (rates.prefill, rates.overhead) == (PRIORS.prefill, PRIORS.overhead)


def test_no_time_at_all_teaches_nothing() -> None:
    assert learn(PRIORS, PRIORS, measured=0.0, computed=10) is PRIORS
    free = Rates(prefill=0.0, overhead=0.0)
    assert learn(free, free, measured=1.0, computed=10) is free


def paces(slowness: float, count: int, *, noise: float) -> list[float]:
    chance = random.Random(5)
    pace, seen = 1.0, []
    for _ in range(count):
        computed = chance.choice((100, 500, 2000, 8000))
        measured = 0.02 + slowness * 1e-4 * computed * chance.lognormvariate(0.0, noise)
        pace = learn_pace(pace, PRIORS, measured=measured, computed=computed)
        seen.append(pace)
    return seen


def test_equals_stay_equal_however_noisy() -> None:
    assert all(0.85 < pace < 1.15 for pace in paces(1.0, 1000, noise=0.4))


def test_a_slow_engine_is_found_out() -> None:
    assert paces(2.0, 150, noise=0.2)[-1] == pytest.approx(2.0, rel=0.25)
    assert max(paces(1000.0, 1000, noise=0.0)) <= PACE_RANGE


def test_a_pace_scales_computing_alone() -> None:
    slow = scaled(PRIORS, 3.0)
    assert slow.prefill == pytest.approx(3 * PRIORS.prefill)
    assert (slow.overhead, slow.fetch, slow.decode) == (
        PRIORS.overhead,
        PRIORS.fetch,
        PRIORS.decode,
    )
