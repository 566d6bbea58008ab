"""vLLM's own parser and configuration classes accept what `connector.settings` generates."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from connector.fleet import FleetFile

pytestmark = pytest.mark.engine

# Runs in the engines' interpreter: the command line is parsed as the server parses it,
# the files are read as the connector reads them.
_PROGRAM = """
import dataclasses, json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.distributed.mooncake_store import MooncakeStoreConfig
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.rdma_utils import (
    get_requester_local_hostname,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
validate_parsed_serve_args(args)
names = ("model", "served_model_name", "port", "block_size", "prefix_caching_hash_algo",
         "max_model_len", "num_gpu_blocks_override", "enable_scale_out",
         "enable_prompt_tokens_details", "default_chat_template_kwargs")
print(json.dumps({
    "args": {name: getattr(args, name) for name in names},
    "transfer": dataclasses.asdict(args.kv_transfer_config),
    "events": dataclasses.asdict(args.kv_events_config),
    "connector": KVConnectorFactory.get_connector_class(args.kv_transfer_config).__name__,
    "mooncake": dataclasses.asdict(MooncakeStoreConfig.load_from_config()),
    "hostname": get_requester_local_hostname("0.0.0.0"),
}))
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> FleetFile:
    return FleetFile.model_validate(
        {
            "engine": {
                "model": str(tmp_path_factory.mktemp("model")),
                "served_name": "served",
                "device": "cpu",
                "protocol": "tcp",
                "block_size": 64,
                "hash_algorithm": "sha256_cbor",
                "max_model_len": 4096,
                "num_blocks": 128,
                "cache_prefix": "blue",
                "global_segment_size": "256MB",
                "local_buffer_size": "64MB",
                "extra_config": {"load_async": False},
                "default_chat_template_kwargs": {"enable_thinking": False},
            },
            "engines": [
                {
                    "id": "a",
                    "port": 8101,
                    "events_port": 5557,
                    "replay_port": 6557,
                    "segment": "127.0.0.2:17101",
                    "lookup_rpc_port": 7,
                }
            ],
        }
    )


@pytest.fixture(scope="module")
def accepted(
    interpreter: Path, fleet: FleetFile, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    [engine] = fleet.engines
    file = tmp_path_factory.mktemp("mooncake") / "a.json"
    file.write_text(json.dumps(engine.mooncake_config(fleet.master).as_json()))
    python, _, _, *argv = engine.argv(interpreter)
    done = subprocess.run(
        [python, "-c", _PROGRAM, *argv],
        env={**os.environ, **engine.environment(file)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_the_server_parses_the_command_line(accepted: dict[str, Any], fleet: FleetFile) -> None:
    assert accepted["args"] == {
        "model": fleet.engines[0].model,
        "served_model_name": ["served"],
        "port": 8101,
        "block_size": 64,
        "prefix_caching_hash_algo": "sha256_cbor",
        "max_model_len": 4096,
        "num_gpu_blocks_override": 128,
        "enable_scale_out": True,
        "enable_prompt_tokens_details": True,
        "default_chat_template_kwargs": {"enable_thinking": False},
    }


def test_transfer_config_names_the_store_connector(accepted: dict[str, Any]) -> None:
    assert accepted["connector"] == "MooncakeStoreConnector"
    assert accepted["transfer"]["kv_role"] == "kv_both"
    assert accepted["transfer"]["kv_load_failure_policy"] == "recompute"
    assert accepted["transfer"]["kv_connector_extra_config"] == {
        "lookup_rpc_port": 7,
        "cache_prefix": "blue",
        "load_async": False,
    }


def test_events_config_is_taken(accepted: dict[str, Any]) -> None:
    events = accepted["events"]
    assert events["enable_kv_cache_events"] is True
    assert events["publisher"] == "zmq"
    assert (events["endpoint"], events["replay_endpoint"]) == (
        "tcp://*:5557",
        "tcp://127.0.0.1:6557",
    )
    assert events["topic"] == "kv@a"


def test_mooncake_config_is_read_as_written(accepted: dict[str, Any], fleet: FleetFile) -> None:
    [engine] = fleet.engines
    assert accepted["mooncake"] == engine.mooncake_config(fleet.master).as_json()
    assert accepted["hostname"] == "127.0.0.2:17101"
