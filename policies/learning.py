"""What an engine's work costs, learned from how long its first tokens took.

The model of a turn that found its engine's queue empty is

    seconds to first token = overhead + prefill * computed + fetch * fetched

with `computed` the prompt tokens not cached and `fetched` those loaded from the
pool's memory. Each lesson compares the model's `predicted` with what was
`measured`, on a logarithmic scale and with the error cut off (a Huber-like
estimate), and corrects each rate in proportion to its part of the prediction:

    error     = ln(measured / predicted), within -ERROR_MAX and ERROR_MAX
    prefill  *= exp(GAIN * error * prefill * computed / predicted)
    overhead *= exp(GAIN * error * overhead / predicted)

A turn that fetched teaches `fetch` only, in the same way, since the other two
have lessons of their own. So one outlier, however wild, moves a rate by at most
22% (exp(GAIN * ERROR_MAX)), while a prior that is wrong a hundredfold is put
right in about 25 lessons. Rates stay within `RANGE` times their prior either
way. SSD and disk rates stay at their priors, as does decode.

What is learned so belongs to a model, and all its engines teach it. An engine
differs from it by one factor on computing, its `pace` (2.0: twice as slow). The
pace has a small gain and forgets a little with each lesson:

    pace = pace ** (1 - PACE_FORGETS) * exp(PACE_GAIN * error * computing / predicted)

so a slow engine is found out within some fifty lessons, while ordinary noise
moves a pace by few percent: equals stay equal, and a turn does not leave the
engine that holds its prefix for a difference that is none.
"""

from __future__ import annotations

import dataclasses
import math
from types import MappingProxyType

from policies.base import Rates, Tier

GAIN = 0.2
ERROR_MAX = 1.0
RANGE = 100.0
PACE_GAIN = 0.02
PACE_FORGETS = 0.002
PACE_RANGE = 8.0


def learn(
    rates: Rates, priors: Rates, *, measured: float, computed: int, fetched: float = 0.0
) -> Rates:
    """Return the rates after one more lesson.

    Args:
        rates: what was believed before.
        priors: what was believed before any lesson; they bound the result.
        measured: seconds from sending the turn to its first token.
        computed: prompt tokens that the engine computed.
        fetched: tokens that it loaded from the pool's memory, those of its own
            segment discounted.
    """
    if measured <= 0.0:
        return rates
    computing = rates.prefill * computed
    fetching = rates.fetch[Tier.MEMORY] * fetched
    predicted = rates.overhead + computing + fetching
    if predicted <= 0.0:
        return rates
    error = max(-ERROR_MAX, min(ERROR_MAX, math.log(measured / predicted)))

    def corrected(rate: float, prior: float, part: float) -> float:
        rate *= math.exp(GAIN * error * part / predicted)
        return max(prior / RANGE, min(prior * RANGE, rate))

    if fetched:
        fetch = dict(rates.fetch)
        fetch[Tier.MEMORY] = corrected(fetch[Tier.MEMORY], priors.fetch[Tier.MEMORY], fetching)
        return dataclasses.replace(rates, fetch=MappingProxyType(fetch))
    return dataclasses.replace(
        rates,
        prefill=corrected(rates.prefill, priors.prefill, computing),
        overhead=corrected(rates.overhead, priors.overhead, rates.overhead),
    )


def scaled(rates: Rates, pace: float) -> Rates:
    """Return a model's rates as they are on an engine of this pace."""
    if pace == 1.0:
        return rates
    return dataclasses.replace(rates, prefill=rates.prefill * pace)


def learn_pace(pace: float, rates: Rates, *, measured: float, computed: int) -> float:
    """Return an engine's pace after one more lesson, by a turn that fetched nothing.

    `rates` are the model's; the other arguments as in `learn`.
    """
    if measured <= 0.0:
        return pace
    computing = pace * rates.prefill * computed
    predicted = rates.overhead + computing
    if predicted <= 0.0:
        return pace
    error = max(-ERROR_MAX, min(ERROR_MAX, math.log(measured / predicted)))
    pace = pace ** (1.0 - PACE_FORGETS) * math.exp(PACE_GAIN * error * computing / predicted)
    return max(1.0 / PACE_RANGE, min(PACE_RANGE, pace))
