"""The pool's language: names of a block's objects, and the master's HTTP answers.

A prefix block is stored as one object per rank and per KV-cache group, and can
be loaded only where all of them exist. Keys are spelled as the store connector
spells them (vLLM 0.32, `mooncake/store/data.py` and `worker.py`). Look-ups go
through the master's `/batch_query_keys`, which takes no lease: a lease would
keep alive what nobody loads. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from string import Formatter
from typing import Literal, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from connector.model import PoolKeys

T = TypeVar("T")

Tier = Literal["memory", "ssd", "disk"]

_DEFAULT_TEMPLATE = (
    "{prefix}{model}{namespace}@tp_rank:{tp}@pcp{pcp}@dcp{dcp}@pp_rank:{pp}@group:{group}@{hash}"
)
_FIELDS = ("prefix", "model", "namespace", "tp", "pcp", "dcp", "pp", "group", "hash")

# Stands for the hash while a key is spelled; cannot occur in a configured name.
_HASH = "\0"


class PoolError(ValueError):
    """Keys that cannot be spelled, or an answer of the master that cannot be used."""


class Replica(NamedTuple):
    """Where an object's bytes are: the tier, and the endpoint of whoever holds them.

    The endpoint is empty for a file system that all instances share.
    """

    tier: Tier
    endpoint: str


class Segment(NamedTuple):
    """One instance's share of the pool, as the master lists it. Sizes are in bytes."""

    name: str
    endpoint: str
    status: str
    protocol: str
    used: int
    capacity: int


class KeySchema:
    """Spells the keys of a block's objects, for every rank and group.

    Raises PoolError for a template that is not a format string over the known
    fields or lacks `{hash}`, and for names that put a comma into a key, since
    the master's look-up separates keys by commas.
    """

    def __init__(self, keys: PoolKeys, served_name: str) -> None:
        template = _DEFAULT_TEMPLATE if keys.template == "default" else keys.template
        _check(template)
        names: dict[str, str | int] = {
            "prefix": f"{keys.cache_prefix}@" if keys.cache_prefix else "",
            # As the connector takes it from the engine's --model.
            "model": (keys.model or served_name).rstrip("/").rsplit("/", 1)[-1],
            "namespace": keys.store_namespace,
            "hash": _HASH,
        }
        # What surrounds the hash in each key; joining by a hash spells the key.
        self._around: tuple[list[str], ...] = tuple(
            _spell(template, names | numbers).split(_HASH) for numbers in _ranks(keys)
        )

    @property
    def width(self) -> int:
        """Objects per block."""
        return len(self._around)

    def objects(self, digest_hex: str) -> tuple[str, ...]:
        """Return the keys of all objects of the block with this hash, `width` of them."""
        return tuple([digest_hex.join(around) for around in self._around])

    def first(self, digest_hex: str) -> str:
        """Return one key of the block: the first of `objects`."""
        return digest_hex.join(self._around[0])


def query_path(keys: Iterable[str]) -> str:
    """Return the path and query that look `keys` up without leasing them.

    Raises PoolError for no keys: the master refuses such a look-up.
    """
    # Commas separate keys and are in none of them; the others are what keys
    # consist of, and need no quoting in a query.
    joined = quote(",".join(keys), safe=",@:/")
    if not joined:
        raise PoolError("a look-up without keys")
    return "/batch_query_keys?keys=" + joined


def parse_query(body: bytes) -> dict[str, Replica]:
    """Read the answer to `query_path`: the cheapest replica of each key that is there.

    Keys that are unknown, or have no complete replica, are left out. Raises
    PoolError for an answer that is malformed or says that the look-up failed.
    """
    answer = _decode(body, _query_decoder)
    if not answer.success:
        raise PoolError(f"the master refused the look-up: {_reason(answer.error)}")
    if answer.data is None:
        raise PoolError("the master's answer to a look-up has no data")
    found: dict[str, Replica] = {}
    for key, entry in answer.data.items():
        replica = _cheapest(entry) if entry.ok else None
        if replica is not None:
            found[key] = replica
    return found


def parse_segments(body: bytes) -> dict[str, Segment]:
    """Read the answer of `/get_segments_detail`: segments by transfer endpoint.

    Raises PoolError for an answer that is malformed or says that it failed.
    """
    answer = _decode(body, _segments_decoder)
    if not answer.success:
        raise PoolError(f"the master refused to list its segments: {_reason(answer.error)}")
    if answer.segments is None:
        raise PoolError("the master's list of segments has no segments")
    return {
        item.te_endpoint: Segment(
            item.segment_name,
            item.te_endpoint,
            item.status,
            item.protocol,
            item.allocator_used_bytes,
            item.allocator_capacity_bytes,
        )
        for item in answer.segments
    }


def locate(endpoint: str, segments: Mapping[str, Segment]) -> str:
    """Return the name of the segment behind a replica's endpoint.

    With P2PHANDSHAKE metadata an endpoint is an address with a port drawn at
    start, which only the segment list can name; with HTTP metadata it is the
    segment's name already, and so is an endpoint that the list has not got.
    """
    segment = segments.get(endpoint)
    return segment.name if segment else endpoint


def _ranks(keys: PoolKeys) -> Iterable[dict[str, str | int]]:
    ranks = keys.ranks
    for group in keys.groups:
        for pcp in range(ranks.pcp):
            for tp in range(ranks.tp):
                # Decode-context parallelism divides the tensor-parallel ranks
                # among themselves: no rank of its own, so no loop of its own.
                dcp = tp % ranks.dcp
                for pp in range(ranks.pp):
                    yield {"group": group, "pcp": pcp, "tp": tp, "dcp": dcp, "pp": pp}


def _check(template: str) -> None:
    try:
        fields = [
            (name, spec, conversion)
            for _, name, spec, conversion in Formatter().parse(template)
            if name is not None
        ]
    except ValueError as error:
        raise PoolError(f"key template {template!r} is no format string: {error}") from error
    for name, spec, conversion in fields:
        if name not in _FIELDS:
            known = " ".join(f"{{{field}}}" for field in _FIELDS)
            raise PoolError(f"key template has an unknown field {{{name}}}; known are {known}")
        if name == "hash" and (spec or conversion):
            raise PoolError("key template formats {hash}, which is spelled as it is")
    if not any(name == "hash" for name, _, _ in fields):
        raise PoolError("key template lacks {hash}: all blocks would have one key")


def _spell(template: str, values: Mapping[str, str | int]) -> str:
    for name in ("prefix", "model", "namespace"):
        if _HASH in str(values[name]):
            raise PoolError(f"the pool key's {name} holds a NUL character")
    try:
        key = template.format(**values)
    except (ValueError, TypeError) as error:
        raise PoolError(f"key template {template!r}: {error}") from error
    if "," in key:
        shown = key.replace(_HASH, "{hash}")
        raise PoolError(f"pool key {shown!r} holds a comma, by which the master separates keys")
    return key


class _Buffer(msgspec.Struct):
    transport_endpoint_: str = ""


class _LocalDisk(msgspec.Struct):
    client_id: str = ""
    transport_endpoint: str = ""


class _Entry(msgspec.Struct):
    ok: bool = False
    values: list[_Buffer] | None = None
    local_disk_values: list[_LocalDisk] | None = None
    nof_values: list[_Buffer] | None = None
    disk_values: list[msgspec.Raw] | None = None


class _QueryAnswer(msgspec.Struct):
    success: bool
    data: dict[str, _Entry] | None = None
    error: object = None


class _SegmentItem(msgspec.Struct):
    segment_name: str
    te_endpoint: str
    status: str = ""
    protocol: str = ""
    allocator_used_bytes: int = 0
    allocator_capacity_bytes: int = 0


class _SegmentsAnswer(msgspec.Struct):
    segments: list[_SegmentItem] | None = None
    # Said only of failures: a list that came needs no word about it.
    success: bool = True
    error: object = None


_query_decoder = msgspec.json.Decoder(_QueryAnswer)
_segments_decoder = msgspec.json.Decoder(_SegmentsAnswer)


def _decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PoolError(f"the master's answer cannot be read: {error}") from error


def _reason(error: object) -> str:
    return str(error) if error else "it gives no reason"


def _cheapest(entry: _Entry) -> Replica | None:
    if entry.values:
        return Replica("memory", entry.values[0].transport_endpoint_)
    if entry.local_disk_values:
        return Replica("ssd", entry.local_disk_values[0].transport_endpoint)
    if entry.nof_values:
        # NVMe over fabrics: an SSD that is reached by RDMA, with an SSD's
        # latency and bandwidth, whoever's machine it is in.
        return Replica("ssd", entry.nof_values[0].transport_endpoint_)
    if entry.disk_values:
        return Replica("disk", "")
    return None
