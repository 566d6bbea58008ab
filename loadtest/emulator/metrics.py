"""An engine's `/metrics` page: vLLM's names, labels and buckets, for what the model knows.

Source: vLLM 0.32, `v1/metrics/loggers.py`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from loadtest.engine import Limits

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_TIME = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_TIME = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0)

_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_TIERS = ("device", "host", "p2p", "disk", "external_unspecified")
_ENDINGS = ("stop", "length", "abort", "error", "repetition")


class Metrics:
    """The counters of one incarnation of an engine."""

    def __init__(self, model: str, limits: Limits, algorithm: str, context: int) -> None:
        self.registry = CollectorRegistry()
        labels = {"model_name": model, "engine": "0"}

        def gauge(name: str, text: str) -> Gauge:
            family = Gauge(name, text, list(labels), registry=self.registry)
            return family.labels(**labels)

        def counter(name: str, text: str, label: str = "") -> Counter:
            names = [*labels, *([label] if label else [])]
            family = Counter(name, text, names, registry=self.registry)
            return family if label else family.labels(**labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, list(labels), buckets=buckets, registry=self.registry)
            return family.labels(**labels)

        self.running = gauge("vllm:num_requests_running", "Requests in execution batches.")
        self.waiting = gauge("vllm:num_requests_waiting", "Requests waiting to be processed.")
        by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Waiting requests by reason.",
            [*labels, "reason"],
            registry=self.registry,
        )
        self.waiting_capacity = by_reason.labels(**labels, reason="capacity")
        self.waiting_deferred = by_reason.labels(**labels, reason="deferred")
        self.usage = gauge("vllm:kv_cache_usage_perc", "KV-cache usage, 1 is all of it.")
        self.queries = counter("vllm:prefix_cache_queries", "Tokens looked up in the device cache.")
        self.hits = counter("vllm:prefix_cache_hits", "Tokens found in the device cache.")
        self.external_queries = counter(
            "vllm:external_prefix_cache_queries", "Tokens looked up in the pool."
        )
        self.external_hits = counter("vllm:external_prefix_cache_hits", "Tokens found in the pool.")
        self.preemptions = counter("vllm:num_preemptions", "Preemptions of requests.")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prefill tokens processed.")
        self.prompt_cached = counter("vllm:prompt_tokens_cached", "Cached prompt tokens.")
        by_source = counter("vllm:prompt_tokens_by_source", "Prompt tokens by source.", "source")
        self.by_source = {s: by_source.labels(**labels, source=s) for s in _SOURCES}
        by_tier = counter("vllm:prompt_tokens_cached_by_source", "Cached tokens by tier.", "source")
        self.by_tier = {tier: by_tier.labels(**labels, source=tier) for tier in _TIERS}
        self.generated = counter("vllm:generation_tokens", "Tokens generated.")
        success = counter("vllm:request_success", "Finished requests.", "finished_reason")
        self.success = {end: success.labels(**labels, finished_reason=end) for end in _ENDINGS}
        self.prompt_sizes = histogram("vllm:request_prompt_tokens", "Tokens of prompts.", _TOKENS)
        self.answer_sizes = histogram(
            "vllm:request_generation_tokens", "Tokens of answers.", _TOKENS
        )
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token.", _TTFT)
        self.token_time = histogram(
            "vllm:inter_token_latency_seconds", "Time between tokens.", _TOKEN_TIME
        )
        self.request_time = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_TIME
        )
        self.queue_time = histogram(
            "vllm:request_queue_time_seconds", "Time in the queue.", _REQUEST_TIME
        )
        self.prefill_time = histogram(
            "vllm:request_prefill_time_seconds", "From admission to the first token.", _REQUEST_TIME
        )
        self.decode_time = histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", _REQUEST_TIME
        )
        info = {
            "block_size": str(limits.block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": "True",
            "engine": "0",
            "kv_cache_max_concurrency": str(limits.tokens / context),
            "kv_cache_size_tokens": str(limits.blocks * limits.block_size),
            "num_gpu_blocks": str(limits.blocks),
            "num_gpu_blocks_override": str(limits.blocks),
            "prefix_caching_hash_algo": algorithm,
            "prefix_match_unit": "None",
            "user_specified_block_size": "True",
        }
        cache_info = Gauge(
            "vllm:cache_config_info",
            "Information of the engine's cache configuration.",
            list(info),
            registry=self.registry,
        )
        cache_info.labels(**info).set(1)

    def admitted(self, prompt: int, local: int, external: int, *, pool: bool) -> None:
        """Count a prompt that was looked up."""
        self.queries.inc(prompt)
        self.hits.inc(local)
        if pool:
            self.external_queries.inc(prompt - local)
            self.external_hits.inc(external)
        self.by_tier["device"].inc(local)
        self.by_tier["external_unspecified"].inc(external)

    def prefilled(self, prompt: int, local: int, external: int) -> None:
        """Count a prompt whose first token is there."""
        self.prompt_tokens.inc(prompt)
        self.prompt_cached.inc(local + external)
        self.by_source["local_compute"].inc(prompt - local - external)
        self.by_source["local_cache_hit"].inc(local)
        self.by_source["external_kv_transfer"].inc(external)
        self.prompt_sizes.observe(prompt)

    def page(self) -> bytes:
        """Return the page."""
        return generate_latest(self.registry)
