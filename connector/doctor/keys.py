"""The names of a block's objects in the pool, taken apart: which part is not as configured?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from connector.model import PoolKeys

# As the store connector spells them; model and namespace stand without a mark between them.
_KEY = re.compile(
    r"(?:(?P<prefix>.+)@)?(?P<model>[^@]*)"
    r"@tp_rank:(?P<tp>\d+)@pcp(?P<pcp>\d+)@dcp(?P<dcp>\d+)@pp_rank:(?P<pp>\d+)"
    r"@group:(?P<group>\d+)@(?P<hash>[0-9A-Fa-f]+)"
)
ID_DIGITS = 16
"""Hex digits at the end of a hash that events name a block by; no key spells less."""


class Difference(NamedTuple):
    """One part of the keys that is not as configured, in words, and what to do."""

    cause: str
    found: str
    expected: str
    remedy: str


def block_id(digest_hex: str) -> str:
    """Return what is looked for in a key that may spell the rest of the hash otherwise."""
    return digest_hex[-ID_DIGITS:].lower()


def differences(
    keys: PoolKeys, served_name: str, digest_hex: str, named: Sequence[str]
) -> list[Difference]:
    """Compare the keys of one block with the configuration, part by part.

    `named` are all keys in the pool that hold the block's id. Empty where no part
    differs; one `template` where keys or configuration are of another shape.
    """
    parts = [match.groupdict() for key in named if (match := _KEY.fullmatch(key))]
    if keys.template != "default" or not parts:
        return [
            Difference(
                "template",
                f"the first block's key is {named[0]!r}",
                f"keys spelled by {keys.template!r}",
                "set `pool.key.template` to a format string that spells such keys"
                + (", or to `default`" if parts else ""),
            )
        ]
    found: list[Difference] = []
    found += _prefix({part["prefix"] or "" for part in parts}, keys.cache_prefix)
    model = (keys.model or served_name).rstrip("/").rsplit("/", 1)[-1]
    found += _model({part["model"] for part in parts}, model, keys.store_namespace)
    for name in ("tp", "pcp", "dcp", "pp"):
        ranks = {int(part[name]) for part in parts}
        configured = getattr(keys.ranks, name)
        # Decode-context ranks are tensor ranks too, and show up only with them.
        if ranks != set(range(min(configured, keys.ranks.tp) if name == "dcp" else configured)):
            found.append(_ranks(name, ranks, configured))
    groups = {int(part["group"]) for part in parts}
    if groups != set(keys.groups):
        found.append(_groups(groups, keys.groups))
    if not found and (odd := [part["hash"] for part in parts if part["hash"] != digest_hex]):
        found.append(
            Difference(
                "hash",
                f"the keys spell the hash {odd[0]}",
                digest_hex,
                "set `pool.key.template` to one that spells the hash like the engines do, or "
                "report it: this version of the store connector is not known here",
            )
        )
    return found


def _prefix(found: set[str], configured: str) -> list[Difference]:
    if found == {configured}:
        return []
    (first, *_) = sorted(found)
    told = f"cache_prefix {first!r}" if first else "no cache_prefix"
    return [
        Difference(
            "cache-prefix",
            f"the keys in the pool have {told}",
            f"cache_prefix {configured!r}" if configured else "no cache_prefix",
            f'set `pool.key.cache_prefix: "{first}"`, or cache_prefix in the engine\'s '
            "kv_connector_extra_config",
        )
    ]


def _model(found: set[str], model: str, namespace: str) -> list[Difference]:
    if found == {model + namespace}:
        return []
    (first, *_) = sorted(found)
    if namespace and first.endswith(namespace):
        first = first.removesuffix(namespace)
    elif first.startswith(model) or (namespace and first == model):
        rest = first.removeprefix(model)
        return [
            Difference(
                "namespace",
                f"the keys in the pool have {f'namespace {rest!r}' if rest else 'no namespace'}",
                f"namespace {namespace!r}" if namespace else "no namespace",
                f'set `pool.key.store_namespace: "{rest}"`; or, if {first} is the basename of '
                f"the engines' --model, `pool.key.model: {first}`",
            )
        ]
    return [
        Difference(
            "model",
            f"the keys in the pool name the model {first!r}",
            repr(model),
            f"set `pool.key.model: {first}` (the basename of the engine's --model)",
        )
    ]


def _ranks(name: str, found: set[int], configured: int) -> Difference:
    return Difference(
        f"{name}-ranks",
        f"the block has objects of {name} ranks {', '.join(map(str, sorted(found)))}",
        f"ranks 0 to {configured - 1}" if configured > 1 else "rank 0 only",
        f"set `pool.key.ranks.{name}: {max(found) + 1}`, if all of the engine's ranks could save",
    )


def _groups(found: set[int], configured: Sequence[int]) -> Difference:
    groups = ", ".join(map(str, sorted(found)))
    return Difference(
        "groups",
        f"the block has objects of KV-cache groups {groups}",
        f"groups {', '.join(map(str, configured))}",
        f"set `pool.key.groups: [{groups}]`",
    )
