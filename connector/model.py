"""The `models:` section of the configuration: engines, tokenizer, hashing, pool.

These models are shared by whoever needs to know how a fleet is set up; the
gateway's own sections stand in `gateway/config.py`. `auto` values are learned
from the engines' `/metrics`; until one has answered, the model is starting.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Algorithm = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Hashing(Section):
    """How the engines hash prefix blocks (`--prefix-caching-hash-algo`, `--block-size`)."""

    algorithm: Literal["auto"] | Algorithm = Field(
        "auto", description="Prefix-caching hash algorithm; `auto` takes the engines' own."
    )
    block_size: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="Tokens per prefix block; `auto` takes the engines' own."
    )
    seed: str | None = Field(
        None,
        description="The engines' `PYTHONHASHSEED`. Null where they run without one: then "
        "sha256 algorithms use vLLM's fixed default and xxhash ones cannot be matched.",
    )

    @field_validator("seed", mode="before")
    @classmethod
    def _number_is_text(cls, value: object) -> object:
        # YAML reads `seed: 0` as a number; the engines' environment holds text.
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class Ranks(Section):
    """Parallel sizes of one engine: every rank stores an object of its own per block."""

    tp: int = Field(
        1,
        ge=1,
        description="Tensor-parallel ranks that store: min(tp, KV heads) for GQA, 1 for MLA.",
    )
    pcp: int = Field(1, ge=1, description="Prefill-context-parallel ranks.")
    dcp: int = Field(1, ge=1, description="Decode-context-parallel ranks.")
    pp: int = Field(1, ge=1, description="Pipeline-parallel ranks.")


class PoolKeys(Section):
    """How the store connector names a block's objects in the pool."""

    model: str | None = Field(
        None,
        description="Basename of the engines' `--model`; null takes the served name's basename.",
    )
    cache_prefix: str = Field("", description="`cache_prefix` of the connector's extra config.")
    store_namespace: str = Field("", description="Store namespace part of the key, where used.")
    ranks: Ranks = Field(Ranks(), description="Parallel sizes; a block needs every rank's object.")
    groups: tuple[int, ...] = Field(
        (0,), min_length=1, description="KV-cache groups; a block needs every group's object."
    )
    template: str = Field(
        "default",
        description="`default`, or a format string over {prefix} {model} {namespace} {tp} {pcp} "
        "{dcp} {pp} {group} {hash} for connectors that name objects otherwise.",
    )


class PoolConfig(Section):
    """The Mooncake pool behind a model's engines."""

    master: str = Field(description="URL of the master's HTTP (metrics) port.")
    deadline: float = Field(
        0.02, gt=0, description="Seconds a look-up may take before the turn goes on without it."
    )
    breaker_failures: int = Field(
        3, ge=1, description="Failed look-ups in a row that open the breaker."
    )
    breaker_seconds: float = Field(
        5.0, gt=0, description="Seconds the open breaker waits before it tries the master again."
    )
    client_ttl: float = Field(
        12.0,
        ge=0,
        description="Seconds after an engine's return during which its segments get no credit: "
        "the master's --client_ttl and a margin, since it lists a dead instance's blocks so long.",
    )
    key: PoolKeys = Field(PoolKeys(), description="Names of the pool's objects.")

    @field_validator("master")
    @classmethod
    def _is_url(cls, value: str) -> str:
        return _http_url(value)


class EngineConfig(Section):
    """One vLLM engine."""

    id: str = Field(
        pattern=r"^[A-Za-z0-9._:-]+$", description="Name of the engine in metrics and answers."
    )
    url: str = Field(description="Base URL of its HTTP server, without /v1.")
    role: Literal["both", "prefill", "decode"] = Field("both", description="What it may do.")
    events: str | None = Field(
        None,
        description="ZMQ endpoint of its KV events; null: its device cache is known only from "
        "what this gateway sent there.",
    )
    replay: str | None = Field(
        None, description="ZMQ endpoint of the event replay; null: a gap flushes what was known."
    )
    segments: tuple[str, ...] = Field(
        (), description="Pool segments it owns, as `host:port` (MOONCAKE_REQUESTER_LOCAL_HOSTNAME)."
    )

    @field_validator("events", "replay")
    @classmethod
    def _is_endpoint(cls, value: str | None) -> str | None:
        if value is not None and not _ENDPOINT.fullmatch(value):
            raise ValueError(
                f"{value!r} is not an endpoint to connect to; write tcp://HOST:PORT (the engine's "
                "own address where its endpoint says *), or ipc://PATH"
            )
        return value

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        return _http_url(value)

    @model_validator(mode="after")
    def _replay_needs_events(self) -> Self:
        if self.replay and not self.events:
            raise ValueError("`replay` is given without `events`; name the events endpoint too")
        return self


class ModelConfig(Section):
    """One served model: its engines, and how its prompts become prefix blocks."""

    name: str = Field(min_length=1, description="The engines' served model name.")
    exact: bool = Field(
        True, description="False: no tokenizer; text-block hashes and the gateway's own history."
    )
    tokenizer: Path | None = Field(
        None, description="Directory with tokenizer.json, as the engines use it."
    )
    chat_template: Path | None = Field(
        None, description="The engines' `--chat-template`; null: the tokenizer's own."
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        "auto", description="The engines' `--chat-template-content-format`."
    )
    default_chat_template_kwargs: dict[str, object] = Field(
        default_factory=dict, description="The engines' `--default-chat-template-kwargs`."
    )
    exclude_tools_when_tool_choice_none: bool = Field(
        False, description="The engines' `--exclude-tools-when-tool-choice-none`."
    )
    hashing: Hashing = Field(Hashing(), description="How prefix blocks are hashed.")
    full_reports: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of turns that ask their engine to announce anew what it holds of the "
        "prompt, so that blocks from before this gateway's time become known. Adds "
        "`vllm_xargs.kv_cache_report_mode` to their bodies. Needed only where the engines do not "
        "report cached tokens (--enable-prompt-tokens-details).",
    )
    pool: PoolConfig | None = Field(None, description="The Mooncake pool; null: none.")
    engines: tuple[EngineConfig, ...] = Field(min_length=1, description="The engines.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.exact and self.tokenizer is None:
            raise ValueError(
                "`tokenizer` is required where `exact` is true; name the directory that holds "
                "tokenizer.json, or set `exact: false`"
            )
        seen: set[str] = set()
        for engine in self.engines:
            if engine.id in seen:
                raise ValueError(f"engine id {engine.id!r} occurs twice; ids must be unique")
            seen.add(engine.id)
        return self


# An address, not a wildcard: the gateway dials.
_ENDPOINT = re.compile(r"tcp://[^:/\s*]+:\d{1,5}|tcp://\[[0-9a-fA-F:.]+\]:\d{1,5}|ipc://\S+")


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        valid = valid and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or re.search(r"\s", value):
        raise ValueError(f"{value!r} is not an http:// or https:// URL")
    if parts.username is not None:
        raise ValueError("credentials do not belong into the URL; see upstream.api_key_env")
    if parts.query or parts.fragment or parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"{value!r} must be a base URL: without /v1, query or fragment")
    return value.rstrip("/")
