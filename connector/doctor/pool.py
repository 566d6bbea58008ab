"""Are the probe's blocks in the pool, under the keys that the gateway asks for?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence

from connector.blocks import HashingError
from connector.doctor import hashing
from connector.doctor.engine import page
from connector.doctor.keys import ID_DIGITS, block_id, differences
from connector.doctor.recipes import Recipe, first_blocks
from connector.doctor.subject import Exam, Subject
from connector.model import PoolConfig, PoolKeys
from connector.pool import KeySchema, PoolError, parse_query, query_path

SOON = 1.0
SAVED_WITHIN = 5.0
"""Seconds in which an engine usually has put a probe's blocks into the pool, and at most."""
_LISTING_BYTES = 512 * 2**20
"""Most that is read of the master's list of all keys."""


def schema(exam: Exam, pool: PoolConfig) -> KeySchema | None:
    """Return the configured keys' speller, or say why there is none."""
    try:
        return KeySchema(pool.key, exam.model.name)
    except PoolError as error:
        exam.fail(
            "config",
            "pool-key",
            str(error),
            expected="keys that can be spelled",
            remedy="correct `pool.key`",
        )
        return None


async def keys(exam: Exam, pool: PoolConfig, spell: KeySchema, subject: Subject) -> None:
    """Wait for the probe's objects under the configured keys; else find how they are named."""
    assert subject.probe is not None
    recipe = subject.recipe or exam.way
    ids = subject.token_ids
    if recipe is None or not ids:
        exam.warn(
            "keys",
            "unverified",
            "the probe's hashes are not known, so its keys cannot be looked for",
            subject,
            remedy="start the engine with --enable-scale-out, or let its events be heard",
        )
        return
    try:
        chain = recipe.chain(ids, subject.probe.salt)
    except HashingError:
        return  # said of the configuration
    wanted = [key for i in range(len(chain)) for key in spell.objects(chain.hex(i))]
    for patience in (SOON, SAVED_WITHIN):
        found = await _until_there(exam, pool, wanted, patience)
        if wanted and len(found) == len(wanted):
            subject.pooled = True
            if subject.recipe is None:
                by = f"the hashes in {len(wanted)} keys of the pool"
                hashing.prove(exam, subject, recipe, by)
            if not await _more_than_configured(exam, pool, spell, subject, chain.hex(0)):
                exam.ok(
                    "keys",
                    f"all {len(wanted)} objects of the probe are in the pool, as "
                    f"{spell.first(chain.hex(0))}",
                    subject,
                )
            return
        if await _otherwise(exam, pool, spell, subject):
            return
    await _missing(exam, pool, subject, len(found))


async def _until_there(
    exam: Exam, pool: PoolConfig, wanted: Sequence[str], patience: float
) -> set[str]:
    deadline = time.monotonic() + min(patience, exam.timeout)
    while True:
        found = await _query(exam, pool, wanted)
        if len(found) == len(wanted) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.1)


async def _query(exam: Exam, pool: PoolConfig, wanted: Sequence[str]) -> set[str]:
    """Look keys up, without a lease."""
    if not wanted:
        return set()
    answer = await exam.asker.get(pool.master + query_path(wanted))
    try:
        return set(parse_query(answer.body)) if answer.ok else set()
    except PoolError:
        return set()


async def _more_than_configured(
    exam: Exam, pool: PoolConfig, spell: KeySchema, subject: Subject, digest: str
) -> bool:
    """Look for objects of further ranks and groups, which the configuration does not ask for."""
    configured = set(spell.objects(digest))
    wider = {
        key for keys in _wider(pool.key) for key in KeySchema(keys, exam.model.name).objects(digest)
    }
    extra = await _query(exam, pool, sorted(wider - configured))
    if not extra:
        return False
    named, _ = await _named(exam, pool, {block_id(digest): digest})
    _differ(exam, pool, subject, digest, named or [*configured, *extra])
    return True


def _wider(keys: PoolKeys) -> Iterator[PoolKeys]:
    for name, size in keys.ranks.model_dump().items():
        yield keys.model_copy(update={"ranks": keys.ranks.model_copy(update={name: size + 1})})
    yield keys.model_copy(update={"groups": (*keys.groups, max(keys.groups) + 1)})


async def _otherwise(exam: Exam, pool: PoolConfig, spell: KeySchema, subject: Subject) -> bool:
    """Look for the probe's first block under any name; False where it has none but the right."""
    recipes = await asyncio.to_thread(_possible, exam, subject)
    digests = {block_id(digest): digest for digest in recipes}
    there, _ = await _named(exam, pool, digests)
    if not there:
        return False
    subject.pooled = True
    first = _id_in(there[0], digests)
    digest = digests[first]
    if subject.recipe is None:
        hashing.prove(exam, subject, recipes[digest], "the hashes in keys of the pool")
    named = [key for key in there if _id_in(key, digests) == first]
    if not set(spell.objects(digest)) <= set(named):
        _differ(exam, pool, subject, digest, named)
        return True
    if subject.recipe == exam.way:
        return False  # the rest is to come
    exam.ok("keys", "but for their hashes its keys are named as configured", subject)
    return True


def _possible(exam: Exam, subject: Subject) -> dict[str, Recipe]:
    """Return what the probe's first block may be called, in hex, with the recipe behind it."""
    assert subject.probe is not None
    salt, ids, page_ = subject.probe.salt, subject.token_ids, subject.page
    if subject.recipe is not None:
        recipe = subject.recipe
        return {recipe.chain(ids[: recipe.block_size], salt).hex(0): recipe}
    likely = Recipe(
        page_.algorithm or (exam.way.algorithm if exam.way else "sha256"),
        page_.block_size or (exam.way.block_size if exam.way else 16),
        exam.model.hashing.seed,
    )
    sizes = [exam.way.block_size] if exam.way else []
    return {digest: recipe for recipe, digest in first_blocks(ids, salt, likely, sizes)}


async def _named(
    exam: Exam, pool: PoolConfig, digests: Mapping[str, str]
) -> tuple[list[str], bool]:
    """Return all keys of the pool that hold one of these blocks' ids, and whether all were read."""
    return await exam.asker.search(
        f"{pool.master}/get_all_keys", lambda key: bool(_id_in(key, digests)), _LISTING_BYTES
    )


def _id_in(key: str, digests: Mapping[str, str]) -> str:
    """Return the id of a block that a key names: its last hex digits; empty for none of them."""
    tail = key[-ID_DIGITS:].lower()
    if tail in digests:
        return tail
    # Another shape of key: the hash may stand anywhere.
    low = key.lower() if len(digests) == 1 else ""
    return next((id_ for id_ in digests if id_ in low), "") if low else ""


def _differ(
    exam: Exam, pool: PoolConfig, subject: Subject, digest: str, named: Sequence[str]
) -> None:
    for part in differences(pool.key, exam.model.name, digest, named):
        exam.fail(
            "keys",
            part.cause,
            f"{part.found}, e.g. {named[-1]}",
            subject,
            expected=part.expected,
            remedy=part.remedy,
        )


async def _missing(exam: Exam, pool: PoolConfig, subject: Subject, found: int) -> None:
    """Say why the probe's objects are not in the pool, or not all of them."""
    now = await page(exam, subject)
    if found:
        why = f"only {found} objects of the probe came into the pool within {SAVED_WITHIN:g} s"
    else:
        why = f"no object of the probe came into the pool within {SAVED_WITHIN:g} s"
    if now.failed_keys:
        why += f"; its store connector failed to put {now.failed_keys:.0f} keys so far"
        remedy = "see whether the pool is full or a segment cannot be reached; its log says which"
    elif found:
        remedy = "see whether the pool is full (the master's /metrics/summary)"
    elif now.store:
        why += ", though its store connector is at work: it has another master, or may not save"
        remedy = (
            "compare master_server_address in the engine's MOONCAKE_CONFIG_PATH with the master "
            f"behind `pool.master` ({pool.master}); kv_role must be kv_both or kv_producer"
        )
    else:
        why += ", and it shows no sign of a store connector"
        remedy = (
            "start the engine with --kv-transfer-config for the MooncakeStoreConnector "
            "(`mooncake-connector config` prints one), or remove the model's `pool`"
        )
    if subject.recipe is None:
        why += "; or it hashes in a way that is not known here"
    say = exam.warn if found else exam.fail
    say(
        "keys",
        "partial" if found else "absent",
        why,
        subject,
        expected="all blocks of the probe in the pool",
        remedy=remedy,
    )
