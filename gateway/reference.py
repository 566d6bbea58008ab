"""Writes the configuration reference from the models and the policies themselves."""

from __future__ import annotations

from collections.abc import Iterator

from connector.reference import sections
from gateway.config import ENV_PREFIX, GatewayConfig
from policies import base

_HEAD = f"""\
# Configuration reference

`gateway.yaml`, as read by `mooncake-gateway serve` and `check`. Written from the
configuration's own models by `mooncake-gateway reference`; do not edit it by hand.

Unknown keys are refused with the nearest known one. Relative paths are taken from the
file's folder. Environment variables `{ENV_PREFIX}<SECTION>__<KEY>` override the file
(`{ENV_PREFIX}LISTEN__PORT=8080`); sections and lists can be given as JSON. Times are
seconds, sizes bytes, lengths tokens.
"""


def markdown() -> str:
    """Return the whole reference."""
    parts = [_HEAD, *sections(GatewayConfig), *_policies()]
    return "\n".join(parts).rstrip() + "\n"


def _policies() -> Iterator[str]:
    yield "\n## Policies and their options\n"
    yield "Chosen by `policy`, tuned under `policies.<name>`.\n"
    yield "| Policy | Options and defaults | What it does |\n|---|---|---|"
    for name in base.names():
        options = ", ".join(f"`{key}: {value}`" for key, value in base.options(name).items())
        yield f"| `{name}` | {options or 'none'} | {base.summary(name)} |"
