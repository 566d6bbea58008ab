"""The wire format of KV events: vLLM's own bytes, older shapes, and what is not a batch."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.events import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    EventError,
    decode,
    encode,
)

pack = msgspec.msgpack.encode

# Bytes that vLLM 0.32's own KVEventBatch and msgspec encoder gave for a batch with every field of
# BlockStored, one with raw-byte hashes, a BlockRemoved with both forms, and AllBlocksCleared.
FROM_VLLM = bytes.fromhex(
    "93cb41dac315b243d70a948fa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cfffff"
    "ffffffffffff07b1706172656e745f626c6f636b5f68617368cf8000000000000000a9746f6b656e5f6964739801"
    "020304ce00011170050607aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f"
    "72615f6e616d65a373716caa65787472615f6b6579739293a373716c92a3696d67fea674656e616e74c0a967726f"
    "75705f69647800b26b765f63616368655f737065635f6b696e64ae736c6964696e675f77696e646f77bc6b765f63"
    "616368655f737065635f736c6964696e675f77696e646f77cc80a86c6f63616c697479a54c4f43414ca96f776e65"
    "7273686970a174aa73657373696f6e5f6964a17388a474797065ab426c6f636b53746f726564ac626c6f636b5f68"
    "617368657391c4200101010101010101010101010101010101010101010101010101010101010101b1706172656e"
    "745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f"
    "696403a66d656469756dc0a96c6f72615f6e616d65c084a474797065ac426c6f636b52656d6f766564ac626c6f63"
    "6b5f68617368657392c420020202020202020202020202020202020202020202020202000000000000000509a66d"
    "656469756da3475055a967726f75705f6964780181a474797065b0416c6c426c6f636b73436c6561726564c0"
)
FROM_VLLM_RANK_3 = bytes.fromhex(
    "93cb3ff80000000000009181a474797065b0416c6c426c6f636b73436c656172656403"
)


def test_what_vllm_encodes_decodes() -> None:
    assert decode(FROM_VLLM) == Batch(
        1795970761.06,
        [
            BlockStored(
                block_hashes=[2**64 - 1, 7],
                parent_block_hash=2**63,
                token_ids=[1, 2, 3, 4, 70000, 5, 6, 7],
                block_size=4,
                medium="GPU",
                lora_name="sql",
                extra_keys=[("sql", ["img", -2], "tenant"), None],
                group_idx=0,
                kv_cache_spec_kind="sliding_window",
                kv_cache_spec_sliding_window=128,
                locality="LOCAL",
                ownership="t",
                session_id="s",
            ),
            BlockStored([0x0101010101010101], None, [1, 2, 3, 4], 4, lora_id=3),
            BlockRemoved([5, 9], "GPU", 1),
            AllBlocksCleared(),
        ],
    )
    assert decode(FROM_VLLM_RANK_3) == Batch(1.5, [AllBlocksCleared()], dp_rank=3)


def test_an_event_that_a_real_engine_sent() -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": [12319440727795408978],
        "parent_block_hash": 628532196329866306,
        "token_ids": list(range(32)),
        "block_size": 32,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert decode(pack([1795970761.06, [event], 0])) == Batch(
        1795970761.06,
        [
            BlockStored(
                [12319440727795408978],
                628532196329866306,
                list(range(32)),
                32,
                medium="GPU",
                extra_keys=[None],
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
        ],
        dp_rank=0,
    )


def test_events_of_older_engines_are_arrays() -> None:
    long = bytes(24) + (77).to_bytes(8, "big")
    payload = pack(
        [
            2.0,
            [
                ["BlockStored", [long, 8], long, [1, 2], 1, None],
                ["BlockStored", [5], None, [1], 1, 4, "CPU", "sql"],
                ["BlockRemoved", [long]],
                ["AllBlocksCleared"],
            ],
        ]
    )
    assert decode(payload) == Batch(
        2.0,
        [
            BlockStored([77, 8], 77, [1, 2], 1),
            BlockStored([5], None, [1], 1, lora_id=4, medium="CPU", lora_name="sql"),
            BlockRemoved([77]),
            AllBlocksCleared(),
        ],
    )


def test_events_of_types_to_come_are_skipped_and_counted() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "colour": "red"}
    payload = pack([0.0, [{"type": "BlockMoved", "to": 3}, removed, ["BlockAged", 1]], 1])
    assert decode(payload) == Batch(0.0, [BlockRemoved([1], "GPU")], dp_rank=1, unknown=2)


def test_look_ahead_is_kept_for_whoever_must_refuse_it() -> None:
    stored = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [1],
        "block_size": 1,
        "lookahead_token_ids": [[2]],
    }
    (event,) = decode(pack([0.0, [stored]])).events
    assert isinstance(event, BlockStored)
    assert event.lookahead_token_ids == [[2]]


u64 = st.integers(0, 2**64 - 1)
words = st.none() | st.text(st.characters(codec="utf-8"), max_size=5)
numbers = st.none() | st.integers(0, 100)
extras = st.none() | st.lists(
    st.none() | st.lists(st.text(st.characters(codec="utf-8"), max_size=3)).map(tuple), max_size=3
)
stored = st.builds(
    BlockStored,
    st.lists(u64, max_size=4),
    st.none() | u64,
    st.lists(st.integers(0, 300_000), max_size=8),
    st.integers(1, 256),
    numbers,
    words,
    words,
    extras,
    numbers,
    words,
    numbers,
    words,
    words,
    words,
)
removed = st.builds(BlockRemoved, st.lists(u64, max_size=4), words, numbers, words, words)
batches = st.builds(
    Batch,
    st.floats(allow_nan=False),
    st.lists(st.one_of(stored, removed, st.just(AllBlocksCleared())), max_size=4),
    numbers,
)


@given(batches)
def test_batches_survive_the_wire(batch: Batch) -> None:
    assert decode(encode(batch)) == batch


@given(batches, st.booleans())
def test_the_old_shapes_say_the_same(batch: Batch, long: bool) -> None:
    def spelled(value: int | None) -> Any:
        return b"\xff" * 24 + value.to_bytes(8, "big") if long and value is not None else value

    events: list[list[Any]] = []
    for event in batch.events:
        fields = [getattr(event, name) for name in event.__struct_fields__]
        if not isinstance(event, AllBlocksCleared):
            fields[0] = [spelled(value) for value in fields[0]]
        if isinstance(event, BlockStored):
            fields[1] = spelled(fields[1])
        events.append([type(event).__name__, *fields])
    assert decode(pack([batch.ts, events, batch.dp_rank])) == batch


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"not msgpack",
        FROM_VLLM[:-20],
        pack({"ts": 1.0}),
        pack([1.0]),
        pack(["now", []]),
        pack([1.0, {"type": "AllBlocksCleared"}]),
        pack([1.0, [7]]),
        pack([1.0, [[]]]),
        pack([1.0, [{"block_hashes": [1]}]]),
        pack([1.0, [[["BlockRemoved"], [1]]]]),
        pack([1.0, [{"type": "BlockRemoved"}]]),
        pack([1.0, [{"type": "BlockRemoved", "block_hashes": ["one"]}]]),
        pack([1.0, [{"type": "BlockRemoved", "block_hashes": 1}]]),
        pack([1.0, [["BlockStored", [1], None]]]),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(EventError):
        decode(payload)


@given(st.binary(max_size=60))
def test_noise_is_decoded_or_refused_and_nothing_else(payload: bytes) -> None:
    try:
        batch = decode(payload)
    except EventError:
        return
    assert isinstance(batch, Batch)


def test_a_payload_that_nests_without_end_is_an_error() -> None:
    deep = b"\x93\xcb" + bytes(8) + b"\x91\x82\xa4type\xabBlockStored\xa1x" + b"\x91" * 100_000
    with pytest.raises(EventError):
        decode(deep + b"\xc0\xc0")
