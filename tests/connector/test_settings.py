"""What vLLM and Mooncake are handed."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from connector.settings import (
    GIB,
    MIB,
    EngineSettings,
    MasterSettings,
    MooncakeConfig,
    kv_events_config,
    kv_transfer_config,
    parse_size,
)


def engine(**changes: Any) -> EngineSettings:
    return EngineSettings(**{"id": "a", "model": "models/tiny/", "port": 8101} | changes)


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (17, 17),
        ("17", 17),
        ("17B", 17),
        ("256MB", 256 * MIB),
        ("256 MiB", 256 * MIB),
        ("1.5g", 3 * GIB // 2),
        ("2 TB", 2048 * GIB),
    ],
)
def test_sizes(written: object, size: int) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize("written", ["", "MB", "1 PB", "-1MB", "1e9", "4GBB"])
def test_what_is_not_a_size(written: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(written)


def test_loads_that_fail_are_always_recomputed() -> None:
    config = kv_transfer_config(lookup_rpc_port=3, cache_prefix="p", extra={"load_async": False})
    assert config == {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lookup_rpc_port": 3,
            "cache_prefix": "p",
            "load_async": False,
        },
    }
    assert "cache_prefix" not in kv_transfer_config(lookup_rpc_port=3)["kv_connector_extra_config"]


@pytest.mark.parametrize("key", ["lookup_rpc_port", "cache_prefix"])
def test_extra_cannot_contradict(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        kv_transfer_config(lookup_rpc_port=3, extra={key: 4})


def test_events_are_bound_and_replayed() -> None:
    assert kv_events_config(port=5557, replay_port=6557, topic="t", buffer_steps=7) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:6557",
        "topic": "t",
        "buffer_steps": 7,
    }
    assert "replay_endpoint" not in kv_events_config(port=5557)


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("10.0.0.2", "10.0.0.2"),
        ("0.0.0.0", "0.0.0.0"),
        ("localhost", "127.0.0.1"),
        ("node-3.example", "*"),
        ("::1", "*"),
    ],
)
def test_the_replay_is_bound_to_the_engines_own_address(host: str, bound: str) -> None:
    engine = EngineSettings(
        id="a", model="m", host=host, port=8101, events_port=5557, replay_port=6557
    )
    events = engine.kv_events_config()
    assert events is not None
    # With one address vLLM would connect there instead of binding it.
    assert events["endpoint"] == "tcp://*:5557"
    assert events["replay_endpoint"] == f"tcp://{bound}:6557"


def test_mooncake_sizes_are_explicit_bytes() -> None:
    made = engine(global_segment_size="256MB", local_buffer_size="64MB", protocol="tcp")
    config = made.mooncake_config(MasterSettings(rpc_port=1234, metadata_port=8080)).as_json()
    assert config == {
        "metadata_server": "http://127.0.0.1:8080/metadata",
        "master_server_address": "127.0.0.1:1234",
        "protocol": "tcp",
        "device_name": "",
        "mode": "embedded",
        "global_segment_size": 256 * MIB,
        "local_buffer_size": 64 * MIB,
        "enable_offload": False,
        "tenant_id": "default",
    }
    assert engine().mooncake_config(MasterSettings()).metadata_server == "P2PHANDSHAKE"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_segment_size": 0}, "must be above 0"),
        ({"mode": "standalone-store"}, "set global_segment_size to 0"),
        ({"local_buffer_size": 0}, "greater than 0"),
        ({"metadata_server": "none"}, "neither P2PHANDSHAKE nor a URL"),
        ({"master_server_address": "host"}, "master_server_address"),
        ({"protocol": "udp"}, "protocol"),
        ({"segment_size": 1}, "segment_size"),
    ],
)
def test_mooncake_refuses(changes: dict[str, Any], message: str) -> None:
    content = {
        "master_server_address": "host:1",
        "global_segment_size": GIB,
        "local_buffer_size": MIB,
    }
    with pytest.raises(ValidationError, match=message):
        MooncakeConfig(**content | changes)


def test_master_flags() -> None:
    argv = MasterSettings(
        metadata_port=8080, lease_ttl_ms=10, extra_flags=("--eviction_ratio=0.2",)
    ).argv("bin/mooncake_master")
    assert argv[0] == "bin/mooncake_master"
    assert "--default_kv_lease_ttl=10" in argv
    assert "--allocation_strategy=local_first" in argv
    assert "--http_metadata_server_port=8080" in argv
    assert "--enable_metadata_cleanup_on_timeout=true" in argv
    assert argv[-1] == "--eviction_ratio=0.2"
    assert not any("metadata" in flag for flag in MasterSettings().argv())
    with pytest.raises(ValidationError, match="has a setting of its own"):
        MasterSettings(extra_flags=("--rpc_port=1",))


def test_engine_command_line() -> None:
    argv = engine(
        served_name="served",
        hash_algorithm="sha256",
        device="cpu",
        dtype="float32",
        max_model_len=8192,
        events_port=5557,
        chat_template=Path("t.jinja"),
        default_chat_template_kwargs={"enable_thinking": False},
        extra_args=("--seed", "3"),
    ).argv("py")
    assert argv[0] == "py"
    assert option(argv, "--model") == "models/tiny/"
    assert option(argv, "--served-model-name") == "served"
    assert option(argv, "--prefix-caching-hash-algo") == "sha256"
    assert option(argv, "--block-size") == "32"
    assert option(argv, "--max-model-len") == "8192"
    assert option(argv, "--chat-template") == "t.jinja"
    assert json.loads(option(argv, "--default-chat-template-kwargs")) == {"enable_thinking": False}
    assert "--enforce-eager" in argv
    assert "--num-gpu-blocks-override" not in argv
    transfer = json.loads(option(argv, "--kv-transfer-config"))
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_extra_config"]["lookup_rpc_port"] == 8101
    assert json.loads(option(argv, "--kv-events-config"))["topic"] == "kv@a"
    assert argv[-2:] == ["--seed", "3"]


def test_a_gpu_engine_gets_no_cpu_settings() -> None:
    made = engine(tensor_parallel_size=2)
    assert "--enforce-eager" not in made.argv()
    assert option(made.argv(), "--tensor-parallel-size") == "2"
    assert not any("CPU" in name or "OMP" in name for name in made.environment(Path("m.json")))


def test_engine_environment(tmp_path: Path) -> None:
    made = engine(
        device="cpu",
        model=str(tmp_path),
        seed=5,
        segment="127.0.0.2:17101",
        cpu_kv_gib=2,
        env={"OMP_NUM_THREADS": "2", "NEW": "1"},
    )
    env = made.environment(Path("m.json"))
    assert env["PYTHONHASHSEED"] == "5"
    assert env["MOONCAKE_CONFIG_PATH"] == "m.json"
    assert env["MOONCAKE_REQUESTER_LOCAL_HOSTNAME"] == "127.0.0.2:17101"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert (env["OMP_NUM_THREADS"], env["NEW"]) == ("2", "1")
    by_name = engine().environment(Path("m.json"))
    assert by_name["PYTHONHASHSEED"] == "0"
    assert "HF_HUB_OFFLINE" not in by_name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": "random"}, "not an integer"),
        ({"seed": 2**32}, "not an integer"),
        ({"seed": True}, "seed"),
        ({"block_size": 48, "device": "cpu"}, "multiple of 32"),
        ({"extra_args": ("--block-size=16",)}, "has a setting of its own"),
        ({"extra_args": ("--kv_transfer_config", "{}")}, "has a setting of its own"),
        ({"extra_args": ("-tp", "2")}, "has a setting of its own"),
        ({"env": {"PYTHONHASHSEED": "1"}}, "follows from the other settings"),
        ({"extra_config": {"cache_prefix": "x"}}, "has a setting of its own"),
        ({"replay_port": 1}, "without events_port"),
        ({"segment": "127.0.0.2"}, "segment"),
        ({"port": 70000}, "port"),
    ],
)
def test_engine_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        engine(**changes)


def test_in_a_container_servers_bind_another_address_than_their_name() -> None:
    master = MasterSettings(host="master", bind="0.0.0.0", metadata_port=8080)
    flags = dict(flag[2:].split("=", 1) for flag in master.argv()[1:])
    bound = {flags[name] for name in ("rpc_address", "metrics_host", "http_metadata_server_host")}
    assert bound == {"0.0.0.0"}
    assert (master.url, master.address) == ("http://master:9003", "master:50051")
    assert master.metadata_server == "http://master:8080/metadata"
    settings = engine(host="engine-a", bind="0.0.0.0")
    assert option(settings.argv(), "--host") == "0.0.0.0"
    assert settings.url == "http://engine-a:8101"
