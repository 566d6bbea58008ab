"""`gateway.yaml`: every setting, its default and meaning, and what must fit together.

The `models:` section is defined in `connector/model.py`, since the connector's
tools read it too. How a file and the environment become a configuration is
`reading.py`'s.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from connector import document, wording
from connector.document import Fault, Where
from connector.model import ModelConfig, Section, collisions
from policies import base

ENV_PREFIX = "MOONCAKE_GATEWAY_"


class Listen(Section):
    """The data plane's listener."""

    host: str = Field("127.0.0.1", description="Address to bind.")
    port: int = Field(8000, ge=0, le=65535, description="Port to bind; 0 takes a free one.")


class Admin(Section):
    """The admin listener: metrics, decisions, policy. Keep it off public networks."""

    host: str = Field("127.0.0.1", description="Address to bind.")
    port: int = Field(9100, ge=0, le=65535, description="Port to bind; 0 takes a free one.")


class Upstream(Section):
    """How engines are spoken to. Times in seconds."""

    connect_timeout: float = Field(
        5.0, gt=0, description="Connecting to an engine; then the next candidate is tried."
    )
    first_byte_timeout: float | None = Field(
        None,
        gt=0,
        description="From sending a request to the first byte of its answer; null: no limit, "
        "since a long JSON answer sends nothing until it is whole.",
    )
    idle_timeout: float = Field(
        300.0, gt=0, description="Between two pieces of an answer; there is no total limit."
    )
    api_key_env: str | None = Field(
        None,
        description="Environment variable that holds the engines' API key. Set: it replaces the "
        "client's Authorization. Null: the client's is passed on.",
    )


class Limits(Section):
    """What a client may send."""

    body_bytes: int = Field(
        64 * 2**20, ge=1024, description="Largest request body; a larger one is answered 413."
    )


class Probing(Section):
    """How engines are watched. Times in seconds."""

    interval: float = Field(1.0, gt=0, description="Between two probes of an engine.")
    timeout: float = Field(2.0, gt=0, description="For one probe.")
    failures: int = Field(2, ge=1, description="Failed probes in a row that make an engine down.")


class Log(Section):
    """The gateway's own log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level that is written."
    )
    format: Literal["json", "text"] = Field("json", description="One JSON object a line, or text.")
    access: bool = Field(True, description="One line for every request.")


class GatewayConfig(Section):
    """The whole configuration of `mooncake-gateway serve`."""

    listen: Listen = Field(Listen(), description="The data plane's listener.")
    admin: Admin = Field(Admin(), description="The admin listener.")
    policy: str = Field("pool_aware", description="The acting policy's name.")
    policies: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Options by policy name."
    )
    policy_header: bool = Field(
        False, description="Whether a request may name its policy in X-Gateway-Policy."
    )
    seed: int = Field(0, description="Seed of the policies' chance.")
    debug_headers: bool = Field(
        False,
        description="Answer with X-Gateway-Engine, X-Gateway-Policy and "
        "X-Gateway-Expected-Cached. They tell tenants what others have cached.",
    )
    allow_engine_fields: bool = Field(
        False,
        description="Let clients send engine-internal fields such as kv_transfer_params. A "
        "malformed one ends an engine's process; another reads a stranger's cache.",
    )
    upstream: Upstream = Field(Upstream(), description="How engines are spoken to.")
    limits: Limits = Field(Limits(), description="What a client may send.")
    probing: Probing = Field(Probing(), description="How engines are watched.")
    log: Log = Field(Log(), description="The gateway's own log.")
    shutdown_grace: float = Field(
        30.0, ge=0, le=86_400, description="Seconds that requests under way may take after SIGTERM."
    )
    decisions_kept: int = Field(
        1000, ge=1, le=100_000, description="Decisions that /gateway/decisions remembers."
    )
    models: tuple[ModelConfig, ...] = Field(min_length=1, description="The served models.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        wording.collision(inconsistencies(self.model_dump()))
        return self


class ConfigError(Exception):
    """A configuration that cannot be used; its text names file, line, key and remedy."""


class Faulty(ConfigError):
    """Values that cannot be used, each with its place in the configuration."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(map(document.say, self.faults)))


def inconsistencies(data: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield what the types of single values do not tell: names without an owner, collisions.

    `data` is a configuration as plain data, checked or not: what is not of the
    type that it should be is passed over, so that one fault does not hide another.
    """
    policy = data.get("policy")
    if isinstance(policy, str) and (unknown := _no_policy(policy)):
        yield Fault(("policy",), unknown)
    given = data.get("policies")
    for name, options in given.items() if isinstance(given, Mapping) else ():
        if unknown := _no_policy(str(name)):
            yield Fault(("policies", name), unknown)
        elif isinstance(options, Mapping) and all(isinstance(key, str) for key in options):
            for option, message in base.faults(name, options):
                where = ("policies", name) if option is None else ("policies", name, option)
                yield Fault(where, message)
    yield from _same_port(data)
    yield from collisions(data.get("models"))


def _no_policy(name: str) -> str | None:
    try:
        base.options(name)
    except base.PolicyError as error:
        return str(error)
    return None


def _same_port(data: Mapping[str, Any]) -> Iterator[Fault]:
    try:
        listen = Listen.model_validate(data.get("listen", {}))
        admin = Admin.model_validate(data.get("admin", {}))
    except ValidationError:
        return  # told as what it is
    one, other = _host(listen.host), _host(admin.host)
    if listen.port and listen.port == admin.port and (one == other or None in (one, other)):
        places: list[Where] = [("listen", "port"), ("admin", "port")]
        told = [where for where in places if document.holds(data, where)]
        yield Fault(
            told[-1] if told else ("admin",),
            f"listen and admin would both bind port {admin.port}",
            "give each a port of its own",
            told[0] if len(told) > 1 else None,
        )


def _host(name: str) -> str | None:
    """Return an address to compare with another; None for all of them."""
    if name in ("", "*", "0.0.0.0", "::"):
        return None
    return "127.0.0.1" if name == "localhost" else name


def engine_key(upstream: Upstream) -> str | None:
    """Return the engines' API key from the environment.

    Raises:
        Faulty: if the configuration names a variable that is not set.
    """
    if upstream.api_key_env is None:
        return None
    key = os.environ.get(upstream.api_key_env)
    message = None
    if not re.fullmatch(r"[A-Za-z_]\w*", upstream.api_key_env, re.ASCII):
        # Not shown: it may be the key.
        message = (
            "must be the name of an environment variable that holds the key, not the key itself"
        )
    elif not key:
        message = (
            f"names the environment variable {upstream.api_key_env!r}, which is not set; "
            "export it, or remove the setting to pass the clients' keys on"
        )
    elif not key.isascii() or not key.isprintable():
        message = (
            f"the key in {upstream.api_key_env!r} does not fit into a header; export one of "
            "printable ASCII characters"
        )
    if message:
        raise Faulty([Fault(("upstream", "api_key_env"), message)])
    return key
