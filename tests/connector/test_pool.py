"""Names of the pool's objects, and the master's answers as a real one gave them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from connector.model import PoolKeys
from connector.pool import (
    KeySchema,
    PoolError,
    Replica,
    Segment,
    locate,
    parse_query,
    parse_segments,
    query_path,
)


def keys(**fields: Any) -> PoolKeys:
    return PoolKeys.model_validate(fields)


def test_keys_are_spelled_as_the_connector_spells_them() -> None:
    # As seen in a master's key list behind vLLM 0.32.
    schema = KeySchema(keys(), "models/tiny-qwen3")
    assert schema.objects("8c36") == ("tiny-qwen3@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@8c36",)
    assert schema.width == 1
    assert schema.first("8c36") == schema.objects("8c36")[0]


def test_prefix_namespace_and_model_have_their_places() -> None:
    schema = KeySchema(
        keys(cache_prefix="blue", model="/srv/models/qwen/", store_namespace="@store_tp:4"), "x"
    )
    assert schema.first("00") == ("blue@qwen@store_tp:4@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@00")


def test_a_block_has_an_object_for_each_rank_and_group() -> None:
    schema = KeySchema(keys(ranks={"tp": 2, "pcp": 2, "pp": 2}, groups=[0, 3]), "m")
    # group by group; within it pcp, then tp, then pp, as the connector looks them up
    spelled = [
        f"m@tp_rank:{tp}@pcp{pcp}@dcp0@pp_rank:{pp}@group:{group}@ff"
        for group in (0, 3)
        for pcp in (0, 1)
        for tp in (0, 1)
        for pp in (0, 1)
    ]
    assert list(schema.objects("ff")) == spelled
    assert schema.width == 16


def test_decode_context_ranks_subdivide_the_tensor_parallel_ones() -> None:
    schema = KeySchema(keys(ranks={"tp": 4, "dcp": 2}), "m")
    assert schema.objects("ff") == (
        "m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@ff",
        "m@tp_rank:1@pcp0@dcp1@pp_rank:0@group:0@ff",
        "m@tp_rank:2@pcp0@dcp0@pp_rank:0@group:0@ff",
        "m@tp_rank:3@pcp0@dcp1@pp_rank:0@group:0@ff",
    )


def test_a_template_of_ones_own() -> None:
    schema = KeySchema(
        keys(template="kv/{hash}/{model}-{tp:02d}{{x}}/{hash}", ranks={"tp": 2}), "m"
    )
    assert schema.objects("ab") == ("kv/ab/m-00{x}/ab", "kv/ab/m-01{x}/ab")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{hash}@{rank}", r"unknown field \{rank\}"),
        ("{hash}{}", r"unknown field \{\}"),
        ("{hash}{model.x}", r"unknown field \{model.x\}"),
        ("{model}", "lacks"),
        ("{hash", "no format string"),
        ("{hash:>10}", "spelled as it is"),
        ("{hash!r}", "spelled as it is"),
        ("{hash}{model:d}", "key template"),
        ("{hash},{model}", "comma"),
    ],
)
def test_a_template_that_cannot_work_is_refused(template: str, said: str) -> None:
    with pytest.raises(PoolError, match=said):
        KeySchema(keys(template=template), "m")


def test_commas_and_nul_in_names_are_refused() -> None:
    with pytest.raises(PoolError, match=r"'a,b@m@tp_rank:0.*\{hash\}' holds a comma"):
        KeySchema(keys(cache_prefix="a,b"), "m")
    with pytest.raises(PoolError, match="NUL"):
        KeySchema(keys(), "m\0")


def test_a_look_up_quotes_what_a_query_cannot_hold() -> None:
    # This very path found all three keys at a real master.
    assert query_path(["plain@tp_rank:0@x", "sp ace+pl%us&am=p#h?é@1"]) == (
        "/batch_query_keys?keys=plain@tp_rank:0@x,sp%20ace%2Bpl%25us%26am%3Dp%23h%3F%C3%A9@1"
    )
    with pytest.raises(PoolError, match="without keys"):
        query_path([])


# What a Mooncake master (0.3.13) answered.
ANSWER = (
    b'{"success":true,"data":{"a@b":{"ok":true,"error":null,"values":[{"size_":100,'
    b'"buffer_address_":139639419568336,"protocol_":"tcp","transport_endpoint_":"127.0.0.1:15726"}],'
    b'"disk_values":null,"local_disk_values":null,"nof_values":null},"absent":{"ok":false,"error":'
    b'"OBJECT_NOT_FOUND","values":null,"disk_values":null,"local_disk_values":null,"nof_values":'
    b'null},"sp ace#h?\\u00E9@1":{"ok":true,"error":null,"values":[{"size_":100,"buffer_address_":'
    b'139639419568232,"protocol_":"tcp","transport_endpoint_":"127.0.0.1:15726"}],"disk_values":null'
    b',"local_disk_values":null,"nof_values":null}}}'
)
SEGMENTS = (
    b'{"total_segments":1,"segments":[{"segment_name":"127.0.0.1:17191","segment_id":'
    b'"9748118826182058330-6296173449818611075","client_id":"9242686200749594591-'
    b'1571231882764622240","base_address":"0x7f0056000000","size_bytes":67108864,"size_human":'
    b'"0.0625 GiB","te_endpoint":"127.0.0.1:15726","protocol":"tcp","status":"OK",'
    b'"allocator_used_bytes":300,"allocator_capacity_bytes":67108864,'
    b'"allocator_usage_percent":4.470348358154297E-4}]}'
)


def test_the_answer_of_a_real_master() -> None:
    memory = Replica("memory", "127.0.0.1:15726")
    assert parse_query(ANSWER) == {"a@b": memory, "sp ace#h?é@1": memory}


def test_endpoints_drawn_at_start_are_named_by_the_segment_list() -> None:
    segments = parse_segments(SEGMENTS)
    assert segments == {
        "127.0.0.1:15726": Segment("127.0.0.1:17191", "127.0.0.1:15726", "OK", "tcp", 300, 67108864)
    }
    assert locate("127.0.0.1:15726", segments) == "127.0.0.1:17191"
    # with HTTP metadata an endpoint is the name already
    assert locate("127.0.0.3:17103", segments) == "127.0.0.3:17103"


MEMORY = {"values": [{"size_": 1, "transport_endpoint_": "m:1"}, {"transport_endpoint_": "m:2"}]}
LOCAL = {"local_disk_values": [{"client_id": "1-2", "transport_endpoint": "l:1"}]}
FABRIC = {"nof_values": [{"size_": 1, "transport_endpoint_": "f:1"}]}
SHARED = {"disk_values": [{"file_path": "/x", "object_size": 4}]}


@pytest.mark.parametrize(
    ("entry", "replica"),
    [
        (MEMORY | LOCAL | FABRIC | SHARED, Replica("memory", "m:1")),
        ({"values": []} | LOCAL | FABRIC | SHARED, Replica("ssd", "l:1")),
        (FABRIC | SHARED, Replica("ssd", "f:1")),
        (SHARED, Replica("disk", "")),
        ({"values": [], "disk_values": []}, None),
        ({}, None),
    ],
)
def test_the_cheapest_tier_counts(entry: dict[str, Any], replica: Replica | None) -> None:
    body = json.dumps({"success": True, "data": {"k": {"ok": True, "error": None} | entry}})
    assert parse_query(body.encode()) == ({"k": replica} if replica else {})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"success":false,"error":"No keys provided."}', "refused.*No keys provided"),
        (b'{"success":false}', "no reason"),
        (b'{"success":true}', "no data"),
        (b"{}", "cannot be read"),
        (b"<html>", "cannot be read"),
        (b"", "cannot be read"),
        (b'{"success":true,"data":[]}', "cannot be read"),
        (b'{"success":true,"data":{"k":{"ok":"yes"}}}', "cannot be read"),
        (b'{"success":true,"data":{"\xff":{}}}', "cannot be read"),
    ],
)
def test_answers_that_cannot_be_used(body: bytes, said: str) -> None:
    with pytest.raises(PoolError, match=said):
        parse_query(body)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"success":false,"error":"not leader"}', "refused.*not leader"),
        (b'{"total_segments":0}', "no segments"),
        (b'{"segments":[{"segment_name":"a"}]}', "cannot be read"),
        (b"oops", "cannot be read"),
    ],
)
def test_segment_lists_that_cannot_be_used(body: bytes, said: str) -> None:
    with pytest.raises(PoolError, match=said):
        parse_segments(body)


def test_an_answer_that_nests_without_end_is_an_error() -> None:
    deep = b'{"success":true,"data":{},"error":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(PoolError):
        parse_query(deep)
