"""The wire format of vLLM's KV-cache events: what a PUB message's payload holds.

A payload is a msgpack array `[ts, events, data-parallel rank]`; an event is a
map with its name under `type`. Engines from before 2026 wrote events as arrays
with the name first; those are read too, as are block hashes in their long form
(raw bytes), which are cut to the low 64 bits that the short form has.

Source: vLLM 0.32, `distributed/kv_events.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class EventError(ValueError):
    """A payload that is not a batch of KV-cache events, or holds a broken one."""


class Event(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """What every event has in common: its name as the tag, and nothing else."""


class BlockStored(Event, frozen=True):
    """Blocks that are now cached, in order: each is the child of the one before it.

    Hashes are the low 64 bits; `parent_block_hash` is None for blocks that
    start a prompt. `token_ids` are those of all the blocks. `medium` is GPU for
    the device cache (on CPU engines too), CPU, STORAGE or cpu for others.
    `extra_keys` has one entry per block, untagged: adapter name, (media id,
    offset), salt. Engines with speculative look-ahead hash more than the
    prompt and say so in `lookahead_token_ids`: such hashes are not ours.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: Any = None


class BlockRemoved(Event, frozen=True):
    """Blocks of which one cached copy each is gone; there may be others."""

    block_hashes: list[int]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(Event, frozen=True):
    """The engine's whole cache is gone."""


AnyEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True):
    """The events of one engine step.

    `ts` is the engine's clock in seconds since the epoch, `dp_rank` its
    data-parallel rank where it names one. `unknown` counts events of types
    that are not known here, which were skipped.
    """

    ts: float
    events: list[AnyEvent]
    dp_rank: int | None = None
    unknown: int = 0


class _Wire(msgspec.Struct, array_like=True):
    ts: float
    events: list[AnyEvent]
    data_parallel_rank: int | None = None


class _LooseWire(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


_EVENTS: dict[str, type[AnyEvent]] = {
    event.__name__: event for event in (BlockStored, BlockRemoved, AllBlocksCleared)
}
_decoder = msgspec.msgpack.Decoder(_Wire)
_loose_decoder = msgspec.msgpack.Decoder(_LooseWire)
_encoder = msgspec.msgpack.Encoder()


def decode(payload: bytes) -> Batch:
    """Decode the payload of one message.

    Raises EventError for bytes that are no batch, and for an event of a known
    type that lacks what it must have: skipping it would leave a hole in what
    is known of the engine.
    """
    try:
        wire = _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        # Another shape, a newer type, or truly broken: read it step by step.
        return _decode_loosely(payload)
    return Batch(wire.ts, wire.events, wire.data_parallel_rank)


def encode(batch: Batch) -> bytes:
    """Encode a batch as current engines do; `unknown` is not part of it."""
    return _encoder.encode(_Wire(batch.ts, batch.events, batch.dp_rank))


def _decode_loosely(payload: bytes) -> Batch:
    try:
        wire = _loose_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventError(f"not a batch of KV-cache events: {error}") from error
    events: list[AnyEvent] = []
    unknown = 0
    for item in wire.events:
        kind, fields = _fields(item)
        if kind is None:
            unknown += 1
            continue
        try:
            events.append(msgspec.convert(fields, kind))
        except msgspec.ValidationError as error:
            raise EventError(f"a broken {kind.__name__} event: {error}") from error
    return Batch(wire.ts, events, wire.data_parallel_rank, unknown)


def _fields(item: Any) -> tuple[type[AnyEvent] | None, dict[str, Any]]:
    """Return an event's type (None for one that is not known) and its fields by name."""
    if isinstance(item, dict):
        kind = _kind(item.get("type"))
        fields = dict(item)
    elif isinstance(item, list) and item:
        kind = _kind(item[0])
        # A newer engine may have put further fields behind those known here.
        fields = dict(zip(kind.__struct_fields__, item[1:], strict=False)) if kind else {}
    else:
        raise EventError(f"an event is a map or an array, not {type(item).__name__}")
    if kind is not None:
        fields["type"] = kind.__name__
        if "block_hashes" in fields:
            fields["block_hashes"] = _short(fields["block_hashes"])
        if "parent_block_hash" in fields:
            fields["parent_block_hash"] = _short([fields["parent_block_hash"]])[0]
    return kind, fields


def _kind(name: Any) -> type[AnyEvent] | None:
    if not isinstance(name, str):
        raise EventError(f"an event's type is a name, not {name!r}")
    return _EVENTS.get(name)


def _short(hashes: Any) -> list[Any]:
    if not isinstance(hashes, Sequence):
        raise EventError(f"block hashes are a list, not {type(hashes).__name__}")
    return [
        int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value for value in hashes
    ]
