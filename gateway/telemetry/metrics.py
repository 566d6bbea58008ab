"""The gateway's Prometheus metrics: names and label sets are stable and documented.

Labels hold configured names only (models, engines, policies, routes), so their
number is bounded and no key, session or prompt can get into one. What other
rooms count for themselves is read at scrape time through `Source`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.telemetry.decisions import Record
from policies.base import Ending

PREFIX = "mooncake_gateway_"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STAGE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)

Family = CounterMetricFamily | GaugeMetricFamily
Source = Callable[[], Iterable[Family]]


class _Sources(Collector):
    def __init__(self) -> None:
        self.sources: list[Source] = []

    def collect(self) -> Iterator[Family]:
        for source in self.sources:
            yield from source()


class Metrics:
    """One registry, and a method for each thing that happens."""

    def __init__(self) -> None:
        # Process-wide, and a series for every counter and histogram less.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._sources = _Sources()
        self.registry.register(self._sources)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(PREFIX + name, text, labels, buckets=buckets, registry=self.registry)

        self._requests = counter("requests", "Requests answered.", "route", "status")
        self._decisions = counter("decisions", "Turns placed.", "model", "policy", "engine")
        self._endings = counter("endings", "How placed turns ended.", "model", "engine", "ending")
        self._inexact = counter("inexact_prompts", "Prompts hashed approximately.", "model")
        self._attempts = counter("failed_attempts", "Attempts that failed.", "engine", "cause")
        self._prompt = counter("prompt_tokens", "Prompt tokens of placed turns.", "model")
        self._expected = counter(
            "expected_cached_tokens", "Cached tokens expected at the decision.", "model", "source"
        )
        self._compared = counter(
            "compared_turns", "Turns whose engine reported cached tokens.", "model"
        )
        self._uncompared = counter(
            "uncompared_turns", "Answered turns whose engine reported no cached tokens.", "model"
        )
        self._reported = counter(
            "reported_cached_tokens", "Cached tokens that the engines reported.", "model"
        )
        self._overrated = counter(
            "overrated_cached_tokens", "Expected cached tokens that the engine had not.", "model"
        )
        self._underrated = counter(
            "underrated_cached_tokens", "Cached tokens that had not been expected.", "model"
        )
        self._learned = counter(
            "learned_blocks",
            "Device blocks that no event told of, known from the engines' cached tokens.",
            "model",
        )
        self._output = counter("output_tokens", "Output tokens that the engines reported.", "model")
        self._ttft = histogram(
            "ttft_seconds", "From body to first byte of a stream.", _SECONDS, "model", "policy"
        )
        self._duration = histogram(
            "turn_seconds", "From body to end of the answer.", _SECONDS, "model", "policy"
        )
        self._stages = histogram(
            "decision_seconds", "Time before the engine is asked.", _STAGE_SECONDS, "stage"
        )
        self._reloads = counter("config_reloads", "Reloads of the configuration.", "result")
        self._lookups = counter("pool_lookups", "Pool look-ups by result.", "model", "state")

        for result in ("applied", "refused"):
            self._reloads.labels(result)

    def expect_model(self, model: str, lookup_states: Iterable[str]) -> None:
        """Show a model's counters from 0 on: a counter that begins at 1 hides its first event."""
        for by_model in (
            self._inexact,
            self._prompt,
            self._compared,
            self._uncompared,
            self._reported,
            self._overrated,
            self._underrated,
            self._learned,
            self._output,
        ):
            by_model.labels(model)
        for source in ("device", "pool"):
            self._expected.labels(model, source)
        for state in lookup_states:
            self._lookups.labels(model, state)

    def expect_engine(self, model: str, engine: str, policy: str, causes: Iterable[str]) -> None:
        """Show an engine's counters under a policy from 0 on."""
        self._decisions.labels(model, policy, engine)
        for ending in Ending:
            self._endings.labels(model, engine, str(ending))
        for cause in causes:
            self._attempts.labels(engine, cause)

    def render(self) -> bytes:
        """Return the text page."""
        return generate_latest(self.registry)

    def add_source(self, source: Source) -> None:
        """Ask `source` for its families at every scrape."""
        self._sources.sources.append(source)

    def reloaded(self, result: str) -> None:
        """Count a reload: `applied` or `refused`."""
        self._reloads.labels(result).inc()

    def answered(self, route: str, status: int) -> None:
        """Count a request on a listed route, whatever it was answered."""
        self._requests.labels(route, str(status)).inc()

    def decided(self, record: Record) -> None:
        """Count a decision."""
        self._decisions.labels(record.model, record.policy, record.engine).inc()
        self._prompt.labels(record.model).inc(record.prompt_tokens)
        if not record.exact:
            self._inexact.labels(record.model).inc()
        self._stages.labels("prompt").observe(record.prompt_seconds)
        self._stages.labels("pool").observe(record.pool_seconds)
        self._stages.labels("decide").observe(record.decide_seconds)

    def attempt_failed(self, engine: str, cause: str) -> None:
        """Count an attempt that could not answer; `cause` is one of the proxy's few words."""
        self._attempts.labels(engine, cause).inc()

    def pool_looked_up(self, model: str, state: str) -> None:
        """Count a look-up."""
        self._lookups.labels(model, state).inc()

    def learned(self, model: str, blocks: int) -> None:
        """Count device blocks that an engine's cached tokens gave away."""
        self._learned.labels(model).inc(blocks)

    def ended(self, record: Record) -> None:
        """Count a turn's end, and hold what was expected against what the engine reported."""
        self._endings.labels(record.model, record.engine, record.ending).inc()
        if record.seconds is not None:
            self._duration.labels(record.model, record.policy).observe(record.seconds)
        if record.ttft_seconds is not None:
            self._ttft.labels(record.model, record.policy).observe(record.ttft_seconds)
        for source, tokens in record.expected.items():
            self._expected.labels(record.model, source).inc(tokens)
        cached = record.reported["cached"] if record.reported else None
        if record.reported is not None:
            self._output.labels(record.model).inc(record.reported["output"] or 0)
        if cached is None:
            if record.ending == Ending.DONE:
                self._uncompared.labels(record.model).inc()
            return
        error = sum(record.expected.values()) - cached
        self._compared.labels(record.model).inc()
        self._reported.labels(record.model).inc(cached)
        self._overrated.labels(record.model).inc(max(0, error))
        self._underrated.labels(record.model).inc(max(0, -error))


def gauge(name: str, text: str, labels: Iterable[str]) -> GaugeMetricFamily:
    """Make a gauge family for a `Source`."""
    return GaugeMetricFamily(PREFIX + name, text, labels=list(labels))


def count(name: str, text: str, labels: Iterable[str]) -> CounterMetricFamily:
    """Make a counter family for a `Source`."""
    return CounterMetricFamily(PREFIX + name, text, labels=list(labels))
