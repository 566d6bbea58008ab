"""What to hand vLLM and Mooncake: configurations, command lines, environments.

Everything here is pure: models of settings go in, the JSON objects, argument
vectors and environments that vLLM (0.32, 0.33) and `mooncake_master` (0.3.13)
read come out. Starting processes is `stack.py`'s; which engines there are is
`fleet.py`'s.

Two defaults of vLLM are never left alone, because they hurt: a failed load from
the pool ends the request (`kv_load_failure_policy`), and every rank takes 4 GiB
for its segment and another 4 GiB for its buffer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from connector.model import Algorithm, Section, is_segment

MIB = 1024**2
GIB = 1024**3
P2P = "P2PHANDSHAKE"
"""Metadata server that means: none, the transfer engines tell one another."""

_UNITS = {"": 1, "B": 1, "K": 1024, "M": MIB, "G": GIB, "T": 1024 * GIB}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?|(B))?", re.IGNORECASE)


def parse_size(value: object) -> object:
    """Bytes of `256MB`, `1.5 GiB` or a plain number; other types pass to pydantic.

    Units are powers of 1024 whether or not they are written with an `i`, as
    Mooncake and vLLM read them.
    """
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise ValueError(f"{value!r} is not a size; write bytes, or 256MB, 4GiB")
    number, unit, _ = found.groups()
    return int(float(number) * _UNITS[(unit or "").upper()])


_IPV4 = re.compile(r"\d{1,3}(\.\d{1,3}){3}")

Size = Annotated[int, BeforeValidator(parse_size)]
Port = Annotated[int, Field(ge=1, le=65535)]


def _seed(value: object) -> object:
    # YAML reads `seed: 0` as a number; the environment holds text.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class MooncakeConfig(Section):
    """The file behind `MOONCAKE_CONFIG_PATH`: how one engine takes part in the pool."""

    metadata_server: str = Field(
        P2P, description="`P2PHANDSHAKE` or the metadata URL; the same in a whole fleet."
    )
    master_server_address: str = Field(description="host:port of the master's RPC server.")
    protocol: Literal["rdma", "tcp"] = Field("rdma", description="How bytes travel.")
    device_name: str = Field("", description="RDMA devices, comma separated; empty finds them.")
    mode: Literal["embedded", "standalone-store"] = Field(
        "embedded",
        description="`embedded`: every rank lends memory to the pool; `standalone-store`: a "
        "mooncake_client process beside it does.",
    )
    global_segment_size: Size = Field(ge=0, description="Bytes that each rank lends to the pool.")
    local_buffer_size: Size = Field(gt=0, description="Bytes of each rank's transfer buffer.")
    enable_offload: bool = Field(False, description="Let the pool spill to SSD.")
    tenant_id: str = Field("default", min_length=1, description="Tenant that the keys belong to.")

    @field_validator("master_server_address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if not re.fullmatch(r".+:\d+", value):
            raise ValueError(f"{value!r} is no address; write HOST:PORT")
        return value

    @field_validator("metadata_server")
    @classmethod
    def _known_metadata(cls, value: str) -> str:
        if value != P2P and not value.startswith(("http://", "https://", "etcd://", "redis://")):
            raise ValueError(f"{value!r} is neither {P2P} nor a URL")
        return value

    @model_validator(mode="after")
    def _sizes_fit_mode(self) -> Self:
        if self.mode == "embedded" and not self.global_segment_size:
            raise ValueError("mode embedded lends memory: global_segment_size must be above 0")
        if self.mode == "standalone-store" and self.global_segment_size:
            raise ValueError("mode standalone-store lends nothing: set global_segment_size to 0")
        return self

    def as_json(self) -> dict[str, Any]:
        """The object to write to the file; sizes are bytes."""
        return self.model_dump(mode="json")


def kv_transfer_config(
    *,
    lookup_rpc_port: int,
    role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both",
    cache_prefix: str = "",
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`--kv-transfer-config` for the MooncakeStoreConnector.

    `lookup_rpc_port` names the socket between an engine's scheduler and its
    worker, so it must differ between the engines of a host. `extra` are further
    keys of `kv_connector_extra_config`; it may not name what has an argument here.
    """
    owned = {"lookup_rpc_port", "cache_prefix"} & set(extra or ())
    if owned:
        raise ValueError(f"{', '.join(sorted(owned))} has a setting of its own; not in extra")
    extra_config: dict[str, Any] = {"lookup_rpc_port": lookup_rpc_port}
    if cache_prefix:
        extra_config["cache_prefix"] = cache_prefix
    extra_config |= extra or {}
    return {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": role,
        # A block can be evicted between look-up and load, and a dead engine keeps
        # "owning" its blocks for ten seconds: compute it then, do not answer 500.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra_config,
    }


def kv_events_config(
    *,
    port: int,
    replay_port: int | None = None,
    replay_host: str = "*",
    topic: str = "",
    buffer_steps: int | None = None,
) -> dict[str, Any]:
    """`--kv-events-config` for an engine that publishes on a port of its own.

    The events' endpoint is written with `*`, which makes vLLM bind it, on all
    addresses: with one address it would connect there instead
    (`vllm/distributed/kv_events.py`). The replay's is always bound, so it can be
    kept to `replay_host`, an IPv4 address. `buffer_steps` is how many batches a
    replay can reach back (vLLM's default is 10,000).
    """
    config: dict[str, Any] = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "topic": topic,
    }
    if replay_port is not None:
        config["replay_endpoint"] = f"tcp://{replay_host}:{replay_port}"
    if buffer_steps is not None:
        config["buffer_steps"] = buffer_steps
    return config


class MasterSettings(Section):
    """One `mooncake_master`: the pool's index, and its metadata server if it has one."""

    host: str = Field("127.0.0.1", description="Address it listens on and is reached at.")
    bind: str | None = Field(
        None, description="Address it listens on where that is another: 0.0.0.0 in a container."
    )
    rpc_port: Port = Field(50051, description="Port that the engines' clients speak to.")
    http_port: Port = Field(9003, description="Port of its HTTP answers and metrics.")
    metadata_port: Port | None = Field(
        None,
        description="Port of its HTTP metadata server; null: none, P2PHANDSHAKE, which also "
        "survives a restart of the master or of a killed engine by itself.",
    )
    allocation_strategy: Literal[
        "random", "free_ratio_first", "cxl", "ssd_free_ratio_first", "local_first"
    ] = Field(
        "local_first",
        description="Where new blocks go. Mooncake's own default is `random`; `local_first` "
        "keeps them with their writer, so that where a block lies says who reads it cheaply.",
    )
    lease_ttl_ms: int = Field(5000, ge=0, description="Milliseconds that a read protects a key.")
    client_ttl: int = Field(
        10, ge=1, description="Seconds after which a silent client's segments are dropped."
    )
    extra_flags: tuple[str, ...] = Field((), description="Further flags, as `--name=value`.")

    @field_validator("extra_flags")
    @classmethod
    def _not_ours(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        _refuse_flags(value, _MASTER_FLAGS, "master")
        return value

    @property
    def listens_on(self) -> str:
        """Address that its servers bind."""
        return self.bind or self.host

    @property
    def url(self) -> str:
        """Base URL of its HTTP answers."""
        return f"http://{self.host}:{self.http_port}"

    @property
    def address(self) -> str:
        """host:port of its RPC server."""
        return f"{self.host}:{self.rpc_port}"

    @property
    def metadata_server(self) -> str:
        """What the engines' `metadata_server` must say."""
        if self.metadata_port is None:
            return P2P
        return f"http://{self.host}:{self.metadata_port}/metadata"

    def argv(self, binary: str | Path = "mooncake_master") -> list[str]:
        """Its command line."""
        flags = [
            f"--rpc_address={self.listens_on}",
            f"--rpc_port={self.rpc_port}",
            f"--metrics_host={self.listens_on}",
            f"--metrics_port={self.http_port}",
            f"--default_kv_lease_ttl={self.lease_ttl_ms}",
            f"--client_ttl={self.client_ttl}",
            f"--allocation_strategy={self.allocation_strategy}",
            "--logtostderr=true",
        ]
        if self.metadata_port is not None:
            flags += [
                "--enable_http_metadata_server=true",
                f"--http_metadata_server_host={self.listens_on}",
                f"--http_metadata_server_port={self.metadata_port}",
                # Else a killed engine's entry stays, and its successor of the same segment
                # name is refused for ever.
                "--enable_metadata_cleanup_on_timeout=true",
            ]
        return [str(binary), *flags, *self.extra_flags]


class SharedSettings(Section):
    """What the engines of a fleet usually have in common; an engine may differ in any of it."""

    model: str | None = Field(
        None, description="vLLM's `--model`: a directory (relative to where you start) or a name."
    )
    served_name: str | None = Field(
        None, description="`--served-model-name`; null takes the model's basename."
    )
    tokenizer: Path | None = Field(
        None, description="`--tokenizer`, a directory; null takes the model's."
    )
    exact: bool = Field(
        True,
        description="What the gateway's configuration is to say: false where no tokenizer files "
        "are at hand, so that it routes by text-block hashes and its own history.",
    )
    chat_template: Path | None = Field(None, description="`--chat-template`.")
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        "auto", description="`--chat-template-content-format`."
    )
    default_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="`--default-chat-template-kwargs`."
    )
    host: str = Field("127.0.0.1", description="Address it listens on and is reached at.")
    bind: str | None = Field(
        None, description="Address it listens on where that is another: 0.0.0.0 in a container."
    )
    device: Literal["cpu", "cuda"] = Field("cuda", description="Where the model runs.")
    dtype: str = Field("auto", description="`--dtype`.")
    tensor_parallel_size: int = Field(1, ge=1, description="`--tensor-parallel-size`.")
    max_model_len: int | None = Field(None, ge=1, description="`--max-model-len`, in tokens.")
    max_num_seqs: int | None = Field(None, ge=1, description="`--max-num-seqs`.")
    num_blocks: int | None = Field(
        None, ge=1, description="Blocks of the device cache (`--num-gpu-blocks-override`)."
    )
    cpu_kv_gib: int = Field(
        1, ge=1, description="GiB for the device cache of a CPU engine (`VLLM_CPU_KVCACHE_SPACE`)."
    )
    cpu_threads: int = Field(1, ge=1, description="OpenMP threads of a CPU engine.")
    block_size: int = Field(32, ge=1, description="`--block-size`; a multiple of 32 on a CPU.")
    hash_algorithm: Algorithm = Field(
        "sha256_cbor", description="`--prefix-caching-hash-algo`; vLLM's own default is sha256."
    )
    seed: Annotated[str, BeforeValidator(_seed)] = Field(
        "0", description="`PYTHONHASHSEED`: what block hashes start from; the same in a fleet."
    )
    protocol: Literal["rdma", "tcp"] = Field("rdma", description="How the pool's bytes travel.")
    device_name: str = Field("", description="RDMA devices, comma separated; empty finds them.")
    mode: Literal["embedded", "standalone-store"] = Field(
        "embedded", description="Whether the engine itself lends memory to the pool."
    )
    global_segment_size: Size = Field(
        4 * GIB, ge=0, description="Memory that each rank lends to the pool, e.g. 256MB."
    )
    local_buffer_size: Size = Field(
        GIB, gt=0, description="Each rank's transfer buffer, e.g. 64MB."
    )
    cache_prefix: str = Field("", description="Put before every key, to keep deployments apart.")
    role: Literal["kv_both", "kv_producer", "kv_consumer"] = Field(
        "kv_both", description="Whether it saves to the pool, loads from it, or both."
    )
    extra_config: dict[str, Any] = Field(
        default_factory=dict, description="Further keys of `kv_connector_extra_config`."
    )
    extra_args: tuple[str, ...] = Field((), description="Further arguments of the vLLM server.")
    env: dict[str, str] = Field(
        default_factory=dict, description="Further environment; over the generated one."
    )

    @field_validator("seed")
    @classmethod
    def _python_accepts(cls, value: str) -> str:
        # Python refuses to start with anything else; `random` would give every engine
        # hashes of its own.
        if not value.isdecimal() or int(value) > 4294967295:
            raise ValueError(f"seed {value!r} is not an integer from 0 to 4294967295")
        return value

    @field_validator("extra_args")
    @classmethod
    def _args_not_ours(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        _refuse_flags(value, _ENGINE_FLAGS, "engine")
        return value

    @field_validator("env")
    @classmethod
    def _env_not_ours(cls, value: dict[str, str]) -> dict[str, str]:
        owned = sorted(_ENGINE_ENV & value.keys())
        if owned:
            raise ValueError(f"{', '.join(owned)} follows from the other settings; remove it")
        return value

    @field_validator("extra_config")
    @classmethod
    def _extra_not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        kv_transfer_config(lookup_rpc_port=1, extra=value)
        return value

    @model_validator(mode="after")
    def _fits_device(self) -> Self:
        if self.device == "cpu" and self.block_size % 32:
            raise ValueError(
                f"block_size {self.block_size} is not a multiple of 32, as a CPU needs"
            )
        return self


def _engine_id(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", value):
        raise ValueError(
            f"{value!r} cannot be an engine's id: write letters, digits and . _ - only"
        )
    return value


def _segment(value: str) -> str:
    if not is_segment(value):
        raise ValueError(f"{value!r} is no segment's name; write HOST:PORT")
    return value


class EngineSettings(SharedSettings):
    """One vLLM server with the MooncakeStoreConnector."""

    id: Annotated[str, AfterValidator(_engine_id)] = Field(
        description="Name of the engine in this fleet."
    )
    model: str = Field(min_length=1, description="vLLM's `--model`.")
    port: Port = Field(description="Port of its HTTP server.")
    events_port: Port | None = Field(None, description="Port of its KV events; null: none.")
    replay_port: Port | None = Field(None, description="Port of the event replay; null: none.")
    segment: Annotated[str, AfterValidator(_segment)] | None = Field(
        None,
        description="Name of its segment of the pool, host:port "
        "(`MOONCAKE_REQUESTER_LOCAL_HOSTNAME`). The host parts must differ for local_first to "
        "tell engines of one host apart: 127.0.0.2, 127.0.0.3...; null: Mooncake names it.",
    )
    lookup_rpc_port: int | None = Field(
        None, ge=0, description="Name of its look-up socket; null takes its HTTP port."
    )

    @model_validator(mode="after")
    def _replay_needs_events(self) -> Self:
        if self.replay_port is not None and self.events_port is None:
            raise ValueError("replay_port is given without events_port")
        return self

    @property
    def name(self) -> str:
        """The served model name."""
        return self.served_name or self.model_basename

    @property
    def model_basename(self) -> str:
        """The model's part of a pool key."""
        return self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def listens_on(self) -> str:
        """Address that its HTTP server binds."""
        return self.bind or self.host

    @property
    def url(self) -> str:
        """Base URL of its HTTP server."""
        return f"http://{self.host}:{self.port}"

    @property
    def _in_process(self) -> bool:
        # A worker process of its own costs a CPU engine a third of its start, and buys
        # only the pinning of threads, which is switched off here. vLLM keeps it unless
        # the environment says so too.
        return self.device == "cpu" and self.tensor_parallel_size == 1

    def mooncake_config(self, master: MasterSettings) -> MooncakeConfig:
        """What the file behind `MOONCAKE_CONFIG_PATH` must say."""
        return MooncakeConfig(
            metadata_server=master.metadata_server,
            master_server_address=master.address,
            protocol=self.protocol,
            device_name=self.device_name,
            mode=self.mode,
            global_segment_size=self.global_segment_size,
            local_buffer_size=self.local_buffer_size,
        )

    def kv_transfer_config(self) -> dict[str, Any]:
        """Its `--kv-transfer-config`."""
        return kv_transfer_config(
            lookup_rpc_port=self.port if self.lookup_rpc_port is None else self.lookup_rpc_port,
            role=self.role,
            cache_prefix=self.cache_prefix,
            extra=self.extra_config,
        )

    def kv_events_config(self) -> dict[str, Any] | None:
        """Its `--kv-events-config`, or None where it publishes nothing."""
        if self.events_port is None:
            return None
        return kv_events_config(
            port=self.events_port,
            replay_port=self.replay_port,
            replay_host=self.replay_host,
            topic=f"kv@{self.id}",
        )

    @property
    def replay_host(self) -> str:
        """Where its event replay is bound: its own address, or `*` where ZMQ cannot bind that."""
        if self.host == "localhost":
            return "127.0.0.1"
        # ZMQ binds no host names, and IPv6 addresses only on sockets made for them.
        return self.host if _IPV4.fullmatch(self.host) else "*"

    def argv(self, python: str | Path = "python") -> list[str]:
        """Its command line, `python` being the interpreter that has vLLM."""
        # The module and not the `vllm` command: that one looks for a distribution
        # called vllm, which the CPU build is not.
        argv = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
        argv += ["--model", self.model, "--served-model-name", self.name]
        if self.tokenizer is not None:
            argv += ["--tokenizer", str(self.tokenizer)]
        if self.chat_template is not None:
            argv += ["--chat-template", str(self.chat_template)]
        if self.chat_template_content_format != "auto":
            argv += ["--chat-template-content-format", self.chat_template_content_format]
        if self.default_chat_template_kwargs:
            argv += ["--default-chat-template-kwargs", _json(self.default_chat_template_kwargs)]
        argv += ["--host", self.listens_on, "--port", str(self.port), "--dtype", self.dtype]
        argv += ["--block-size", str(self.block_size), "--enable-prefix-caching"]
        argv += ["--prefix-caching-hash-algo", self.hash_algorithm]
        if self._in_process:
            argv += ["--distributed-executor-backend", "uni"]
        if self.tensor_parallel_size != 1:
            argv += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        for flag, number in (
            ("--max-model-len", self.max_model_len),
            ("--max-num-seqs", self.max_num_seqs),
            ("--num-gpu-blocks-override", self.num_blocks),
        ):
            if number is not None:
                argv += [flag, str(number)]
        if self.device == "cpu":
            argv.append("--enforce-eager")
        # The first puts cached_tokens into answers, the ground truth of routing; the
        # second opens the render routes, the ground truth of tokenising.
        argv += ["--enable-prompt-tokens-details", "--enable-scale-out"]
        argv += ["--kv-transfer-config", _json(self.kv_transfer_config())]
        events = self.kv_events_config()
        if events is not None:
            argv += ["--kv-events-config", _json(events)]
        return [*argv, *self.extra_args]

    def environment(self, mooncake_config: Path) -> dict[str, str]:
        """What its environment must hold beside the usual; `mooncake_config` is the file's path."""
        env = {
            "PYTHONHASHSEED": self.seed,
            "MOONCAKE_CONFIG_PATH": str(mooncake_config),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        if self.segment is not None:
            env["MOONCAKE_REQUESTER_LOCAL_HOSTNAME"] = self.segment
        if self.host in ("127.0.0.1", "localhost"):
            env["VLLM_HOST_IP"] = "127.0.0.1"
        if Path(self.model).is_dir():
            env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if self.device == "cpu":
            env |= {
                "VLLM_CPU_KVCACHE_SPACE": str(self.cpu_kv_gib),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(self.cpu_threads),
            }
        if self._in_process:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        return env | self.env


_ENGINE_ENV = frozenset(
    {"PYTHONHASHSEED", "MOONCAKE_CONFIG_PATH", "MOONCAKE_REQUESTER_LOCAL_HOSTNAME"}
)

# Flags that follow from the settings: a second value in extra_args would win over the
# first, and the gateway's configuration would then tell something else than the engine.
_ENGINE_FLAGS = re.compile(
    "model|served-model-name|tokenizer|chat-template|chat-template-content-format|"
    "default-chat-template-kwargs|host|port|uds|dtype|block-size|(no-)?enable-prefix-caching|"
    "prefix-caching-hash-algo|tensor-parallel-size|tp|pipeline-parallel-size|pp|"
    "data-parallel-size|dp|decode-context-parallel-size|dcp|prefill-context-parallel-size|pcp|"
    "distributed-executor-backend|max-model-len|max-num-seqs|num-gpu-blocks-override|"
    "kv-transfer-config|kv-events-config"
)
_MASTER_FLAGS = re.compile(
    "rpc-address|rpc-port|port|metrics-host|metrics-port|default-kv-lease-ttl|client-ttl|"
    "allocation-strategy|enable-http-metadata-server|http-metadata-server-host|"
    "http-metadata-server-port|enable-metadata-cleanup-on-timeout"
)


def _refuse_flags(given: Sequence[str], owned: re.Pattern[str], whose: str) -> None:
    for argument in given:
        name = argument.lstrip("-").split("=", 1)[0].replace("_", "-")
        if argument.startswith("-") and owned.fullmatch(name):
            raise ValueError(
                f"{argument!r} has a setting of its own in the {whose} section, or is not supported"
            )


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
