"""What the doctor reads of an engine's `/metrics`: how it hashes, and what its caches hit."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

CACHE_INFO = "vllm:cache_config_info"
DEVICE_HITS = "vllm:prefix_cache_hits_total"
POOL_HITS = "vllm:external_prefix_cache_hits_total"
STORE = "vllm:mooncake_store_operation"
STORE_FAILED = "vllm:mooncake_store_operation_failed_keys_total"


@dataclass(frozen=True, slots=True)
class Page:
    """One scrape. Hits are tokens since the engine's start; None where it does not say."""

    algorithm: str | None = None
    block_size: int | None = None
    prefix_caching: bool | None = None
    device_hits: float = 0.0
    pool_hits: float = 0.0
    store: bool = False
    """Whether a Mooncake store connector counts its operations."""
    failed_keys: float = 0.0


def read_page(text: str) -> Page:
    """Read a Prometheus text page. Raises ValueError for a wanted line that is none."""
    prefixes = (CACHE_INFO, DEVICE_HITS, POOL_HITS, STORE)
    wanted = "\n".join(line for line in text.splitlines() if line.startswith(prefixes))
    labels: dict[str, str] = {}
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(wanted + "\n"):
        for sample in family.samples:
            if sample.name == CACHE_INFO:
                labels = labels or sample.labels
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    size = labels.get("block_size", "")
    caching = labels.get("enable_prefix_caching")
    return Page(
        algorithm=labels.get("prefix_caching_hash_algo"),
        block_size=int(size) if size.isdecimal() and int(size) else None,
        prefix_caching=None if caching is None else caching == "True",
        device_hits=sums.get(DEVICE_HITS, 0.0),
        pool_hits=sums.get(POOL_HITS, 0.0),
        store=any(name.startswith(STORE) for name in sums),
        failed_keys=sums.get(STORE_FAILED, 0.0),
    )
