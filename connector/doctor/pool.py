"""Are the probe's blocks in the pool, under the keys that the gateway asks for?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence

from connector.blocks import HashingError
from connector.doctor import hashing
from connector.doctor.engine import page
from connector.doctor.keys import block_id, differences
from connector.doctor.recipes import Recipe, first_blocks
from connector.doctor.subject import Exam, Subject
from connector.model import PoolConfig, PoolKeys
from connector.pool import KeySchema, PoolError, parse_query, query_path

SAVED_WITHIN = 5.0
"""Seconds that an engine may take to put a probe's blocks into the pool."""
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
    found = await _until_there(exam, pool, wanted)
    if wanted and len(found) == len(wanted):
        subject.pooled = True
        if subject.recipe is None:
            hashing.prove(exam, subject, recipe, f"the hashes in {len(wanted)} keys of the pool")
        if not await _more_than_configured(exam, pool, spell, subject, chain.hex(0)):
            exam.ok(
                "keys",
                f"all {len(wanted)} objects of the probe are in the pool, as "
                f"{spell.first(chain.hex(0))}",
                subject,
            )
        return
    await _explain(exam, pool, spell, subject, found)


async def _until_there(exam: Exam, pool: PoolConfig, wanted: Sequence[str]) -> set[str]:
    deadline = time.monotonic() + min(SAVED_WITHIN, exam.timeout)
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


async def _explain(
    exam: Exam, pool: PoolConfig, spell: KeySchema, subject: Subject, found: set[str]
) -> None:
    """The probe's objects are not all there: find what is, whatever its name."""
    recipes = await asyncio.to_thread(_possible, exam, subject)
    digests = {block_id(digest): digest for digest in recipes}
    there, whole = await _named(exam, pool, digests)
    subject.pooled = bool(there)
    if not there:
        await _absent(exam, pool, subject, whole)
        return
    first = _id_in(there[0], digests)
    digest = digests[first]
    if subject.recipe is None:
        hashing.prove(exam, subject, recipes[digest], "the hashes in keys of the pool")
    named = [key for key in there if _id_in(key, digests) == first]
    if not set(spell.objects(digest)) <= set(named):
        _differ(exam, pool, subject, digest, named)
    elif subject.recipe == exam.way:
        exam.warn(
            "keys",
            "partial",
            f"{len(found)} objects of the probe are in the pool, the rest did not come within "
            f"{SAVED_WITHIN:g} s",
            subject,
            expected="all objects of its blocks",
            remedy="see whether the pool is full (the master's /metrics/summary) or puts fail "
            "(vllm:mooncake_store_operation_failed_keys_total)",
        )
    else:
        exam.ok("keys", "but for their hashes its keys are named as configured", subject)


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
    tail = key[-16:].lower()
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


async def _absent(exam: Exam, pool: PoolConfig, subject: Subject, whole: bool) -> None:
    now = await page(exam, subject)
    if not whole:
        why = "and the list of all keys could not be read to its end"
        remedy = "raise --timeout"
    elif now.failed_keys:
        why = f"and its store connector failed to put {now.failed_keys:.0f} keys so far"
        remedy = "see whether the pool is full or a segment cannot be reached; its log says which"
    elif now.store:
        why = "though its store connector is at work: it has another master, or may not save"
        remedy = (
            "compare master_server_address in the engine's MOONCAKE_CONFIG_PATH with the master "
            f"behind `pool.master` ({pool.master}); kv_role must be kv_both or kv_producer"
        )
    else:
        why = "and it shows no sign of a store connector"
        remedy = (
            "start the engine with --kv-transfer-config for the MooncakeStoreConnector "
            "(`mooncake-connector config` prints one), or remove the model's `pool`"
        )
    exam.fail(
        "keys",
        "absent",
        f"no key at the master holds a hash of the probe, {why}"
        + ("" if subject.recipe else "; or it hashes in a way that is not known here"),
        subject,
        expected="the probe's blocks in the pool",
        remedy=remedy,
    )
