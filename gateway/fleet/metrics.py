"""An engine's `/metrics` page, read for what routing needs.

Source: vLLM's metric names (`vllm:num_requests_running` and so on), one time
series per data-parallel rank in the label `engine`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import get_args

from prometheus_client.parser import text_string_to_metric_families

from connector.model import Algorithm

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
CACHE_INFO = "vllm:cache_config_info"
# Bounds on what a page may say: series of the wanted names, digits of a rank, requests.
_MOST_LINES = 4096
_RANK_DIGITS = 3
_MOST = 1e9
_WANTED = (RUNNING, WAITING, KV_USAGE, CACHE_INFO)


@dataclass(frozen=True, slots=True)
class RankLoad:
    """One data-parallel rank's load: requests, and the share of KV blocks in use (0..1)."""

    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class HashFacts:
    """How an engine says it hashes. It never says its seed."""

    algorithm: str
    block_size: int
    prefix_caching: bool
    blocks: int | None


@dataclass(frozen=True, slots=True)
class Page:
    """What one scrape said; `facts` is None for an engine that is not vLLM."""

    loads: dict[int, RankLoad]
    facts: HashFacts | None


def read_page(text: str) -> Page:
    """Read a Prometheus text page; lines that routing does not need are not parsed.

    Numbers that are no counts (negative, infinite, none) are taken for 0.

    Raises:
        ValueError: if a wanted line is not in the Prometheus text format.
    """
    lines = (line for line in text.splitlines() if line.startswith(_WANTED))
    wanted = "\n".join(itertools.islice(lines, _MOST_LINES))
    values: dict[int, dict[str, float]] = {}
    facts: HashFacts | None = None
    for family in text_string_to_metric_families(wanted + "\n"):
        for sample in family.samples:
            # vLLM writes the rank as text; anything else means a single engine.
            label = sample.labels.get("engine", "0")
            rank = int(label) if label.isdecimal() and len(label) <= _RANK_DIGITS else 0
            if sample.name == CACHE_INFO:
                facts = facts or _facts(sample.labels)
            elif sample.name in _WANTED:
                values.setdefault(rank, {})[sample.name] = sample.value
    loads = {
        rank: RankLoad(
            running=int(_number(found, RUNNING)),
            waiting=int(_number(found, WAITING)),
            kv_usage=min(1.0, _number(found, KV_USAGE)),
        )
        for rank, found in values.items()
    }
    return Page(loads, facts)


def _number(found: dict[str, float], name: str) -> float:
    value = found.get(name, 0.0)
    return value if 0.0 <= value < _MOST else 0.0


def _facts(labels: dict[str, str]) -> HashFacts | None:
    algorithm, size = labels.get("prefix_caching_hash_algo"), labels.get("block_size", "")
    if algorithm is None or algorithm not in get_args(Algorithm):
        return None
    blocks = labels.get("num_gpu_blocks", "")
    if not (size.isdecimal() and len(size) <= 6 and int(size)):
        return None
    return HashFacts(
        algorithm=algorithm,
        block_size=int(size),
        prefix_caching=labels.get("enable_prefix_caching", "True") == "True",
        blocks=int(blocks) if blocks.isdecimal() and len(blocks) <= 12 else None,
    )
