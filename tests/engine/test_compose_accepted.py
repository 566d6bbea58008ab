"""vLLM's own parser and the real master accept what docker-compose.yml hands them."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from deployment import EXAMPLES, MODEL, argv, service

_PROGRAM = """
import dataclasses, json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.distributed.mooncake_store import MooncakeStoreConfig
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.rdma_utils import (
    get_requester_local_hostname,
)

args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
validate_parsed_serve_args(args)
print(json.dumps({
    "model": args.model,
    "port": args.port,
    "connector": args.kv_transfer_config.kv_connector,
    "events": args.kv_events_config.endpoint,
    "replay": args.kv_events_config.replay_endpoint,
    "details": args.enable_prompt_tokens_details,
    "mooncake": dataclasses.asdict(MooncakeStoreConfig.load_from_config()),
    "hostname": get_requester_local_hostname("0.0.0.0"),
}))
"""


@pytest.mark.parametrize(("name", "number"), [("engine-a", 1), ("engine-b", 2)])
def test_vllm_parses_the_engines_command(interpreter: Path, name: str, number: int) -> None:
    python, _, module, *arguments = argv(name)
    assert (python, module) == ("python3", "vllm.entrypoints.openai.api_server")
    file = EXAMPLES / "mooncake.json"
    environment = service(name)["environment"] | {"MOONCAKE_CONFIG_PATH": str(file)}
    done = subprocess.run(
        [interpreter, "-c", _PROGRAM, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert parsed == {
        "model": MODEL,
        "port": 8100 + number,
        "connector": "MooncakeStoreConnector",
        "events": f"tcp://*:{5556 + number}",
        "replay": f"tcp://*:{6556 + number}",
        "details": True,
        "mooncake": json.loads(file.read_text()),
        "hostname": f"{name}:{17100 + number}",
    }


def test_the_module_is_where_the_image_looks_for_it(interpreter: Path) -> None:
    _, _, module, *_ = argv("engine-a")
    program = f"import importlib.util as u; print(u.find_spec({module!r}).origin)"
    done = subprocess.run([interpreter, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("openai/api_server.py")


def test_the_master_knows_its_flags(interpreter: Path) -> None:
    program, *flags = argv("mooncake-master")
    # gflags ends with 1 after its help.
    said = subprocess.run(
        [interpreter.with_name(program), "--help"], capture_output=True, text=True, check=False
    ).stdout
    types = dict(re.findall(r"^\s+-(\w+) \([\s\S]*?\)\s+type:\s+(\w+)", said, re.MULTILINE))
    valid = {
        "int32": r"-?\d+",
        "int64": r"-?\d+",
        "uint64": r"\d+",
        "bool": "true|false",
        "string": ".+",
    }
    for flag in flags:
        name, value = flag.removeprefix("--").split("=", 1)
        assert name in types, f"{name} is not among {sorted(types)}"
        assert re.fullmatch(valid[types[name]], value), flag
