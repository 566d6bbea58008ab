"""Does the gateway hash blocks as the engine does? If not, what is the engine's way?"""

from __future__ import annotations

import asyncio

from connector.doctor.recipes import Recipe, explain, seed_told
from connector.doctor.subject import Exam, Subject


def resolve(exam: Exam) -> None:
    """Settle how the gateway hashes for this model: `auto` is the first engine's word."""
    hashing = exam.model.hashing
    pages = [subject.page for subject in exam.reached]
    algorithm: str | None = hashing.algorithm
    if algorithm == "auto":
        algorithm = next((page.algorithm for page in pages if page.algorithm), None)
    size: int | str | None = hashing.block_size
    if size == "auto":
        size = next((page.block_size for page in pages if page.block_size), None)
    if algorithm is None or not isinstance(size, int):
        if exam.reached:
            exam.fail(
                "hashing",
                "untold",
                "no engine's /metrics tells how it hashes (vllm:cache_config_info)",
                expected="what `auto` in `hashing` can be taken from",
                remedy="set `hashing.algorithm` and `hashing.block_size` to the engines' "
                "--prefix-caching-hash-algo and --block-size",
            )
        return
    exam.way = Recipe(algorithm, size, hashing.seed)
    if not exam.way.usable:
        exam.fail(
            "hashing",
            "random-seed",
            f"engines with {algorithm} and no PYTHONHASHSEED draw a seed of their own at every "
            "start: no block is known again",
            expected="a seed that all engines share",
            remedy="start all engines with one PYTHONHASHSEED and set `hashing.seed` to it, or "
            "with --prefix-caching-hash-algo sha256_cbor",
        )


def facts(exam: Exam, subject: Subject) -> None:
    """Hold the gateway's way against what the engine says of itself in its metrics."""
    page = subject.page
    if page.prefix_caching is False:
        exam.fail(
            "hashing",
            "prefix-caching-off",
            "prefix caching is off: every turn is computed whole",
            subject,
            expected="prefix caching on",
            remedy="start the engine with --enable-prefix-caching",
        )
        return
    if page.algorithm is None or page.block_size is None:
        exam.warn(
            "hashing",
            "untold",
            "its /metrics does not tell how it hashes (vllm:cache_config_info)",
            subject,
            remedy="see whether `url` is a vLLM server, and of a version that tells its cache's "
            "configuration; the gateway cannot notice a mismatch",
        )
        return
    if exam.way is None:
        return
    if page.algorithm != exam.way.algorithm:
        _algorithm(exam, subject, "hashing", page.algorithm, "it says that")
    if page.block_size != exam.way.block_size:
        _block_size(exam, subject, "hashing", page.block_size, "it says that")
    if (page.algorithm, page.block_size) == exam.way[:2]:
        exam.ok(
            "hashing",
            f"it says that it hashes with {page.algorithm} in blocks of {page.block_size} tokens",
            subject,
        )


async def hashes(exam: Exam, subject: Subject) -> None:
    """Compute the published blocks' hashes anew, and find the recipe that gives them."""
    published = subject.published
    if published is None:
        return
    if published.lookahead:
        exam.fail(
            "hashes",
            "lookahead",
            "its block hashes hold look-ahead tokens of speculative decoding: they match no prompt",
            subject,
            expected="hashes of the prompt alone",
            remedy="start the engine without EAGLE-like speculative decoding, or with a KV "
            "connector, which makes vLLM hash the prompt alone",
        )
        return
    assert subject.probe is not None
    likely = Recipe(
        subject.page.algorithm or (exam.way.algorithm if exam.way else "sha256"),
        published.block_size,
        exam.model.hashing.seed,
    )
    recipe = await asyncio.to_thread(
        explain,
        published.hashes,
        published.token_ids,
        published.block_size,
        subject.probe.salt,
        likely,
    )
    if recipe is None:
        exam.fail(
            "hashes",
            "unexplained",
            "its block hashes are those of no algorithm with any usual seed: it runs with an "
            "unusual PYTHONHASHSEED, or, with xxhash or a version before 2026, without one and "
            "draws a new seed at every start",
            subject,
            expected=exam.way.told() if exam.way else None,
            remedy="start all engines with one PYTHONHASHSEED and set `hashing.seed` to it",
        )
        return
    prove(exam, subject, recipe, f"the hashes of {len(published.hashes)} blocks in its events")


def prove(exam: Exam, subject: Subject, recipe: Recipe, what: str) -> None:
    """Take a recipe for the engine's, and say where the gateway's differs from it."""
    subject.recipe = recipe
    way = exam.way
    if way is None or recipe == way:
        exam.ok("hashes", f"{what} are as computed here: {recipe.told()}", subject)
        return
    by = f"by {what}"
    if recipe.algorithm != way.algorithm:
        _algorithm(exam, subject, "hashes", recipe.algorithm, by)
    if recipe.block_size != way.block_size:
        _block_size(exam, subject, "hashes", recipe.block_size, by)
    if recipe.seed != way.seed:
        wanted = "null" if recipe.seed is None else f'"{recipe.seed}"'
        start = "without PYTHONHASHSEED" if way.seed is None else f"with PYTHONHASHSEED={way.seed}"
        exam.fail(
            "hashes",
            "seed",
            f"{by} the engine hashes with {recipe.algorithm} and {seed_told(recipe.seed)}",
            subject,
            expected=seed_told(way.seed),
            remedy=f"set `hashing.seed: {wanted}`, or start the engine {start}",
        )


def unverified(exam: Exam, subject: Subject) -> None:
    """Say so where neither events nor the pool showed a hash."""
    if subject.recipe is None and subject.published is None:
        exam.warn(
            "hashes",
            "unverified",
            "no hash of it was seen, neither in events nor in the pool",
            subject,
            expected=exam.way.told() if exam.way else None,
            remedy="see what is said of its events, and of the pool",
        )


def agreement(exam: Exam) -> None:
    """Say whether the model's engines hash alike: else they cannot share a pool."""
    ways: dict[str, list[str]] = {}
    for subject in exam.reached:
        page = subject.page
        if subject.recipe is not None:
            ways.setdefault(subject.recipe.told(), []).append(subject.name)
        elif page.algorithm and page.block_size:
            told = f"{page.algorithm}, blocks of {page.block_size} tokens"
            same = next((way for way in ways if way.startswith(told)), told)
            ways.setdefault(same, []).append(subject.name)
    if len(ways) > 1:
        exam.fail(
            "agreement",
            "hashing",
            "the engines hash differently and cannot share the pool: "
            + "; ".join(f"{', '.join(names)}: {way}" for way, names in ways.items()),
            expected="one algorithm, block size and seed",
            remedy="give all engines of a model the same --prefix-caching-hash-algo, --block-size "
            "and PYTHONHASHSEED",
        )
    elif len(exam.reached) > 1 and ways:
        exam.ok("agreement", f"all engines hash alike: {next(iter(ways))}")


def versions(exam: Exam) -> None:
    """Say so where the engines are not of one version."""
    found: dict[str, list[str]] = {}
    for subject in exam.reached:
        if subject.version:
            found.setdefault(subject.version, []).append(subject.name)
    if len(found) > 1:
        exam.warn(
            "agreement",
            "version",
            "the engines run different versions of vLLM: "
            + "; ".join(f"{version}: {', '.join(names)}" for version, names in found.items()),
            expected="one version",
            remedy="nothing needs to be done as long as tokens and hashes agree",
        )


def _algorithm(exam: Exam, subject: Subject, check: str, actual: str, by: str) -> None:
    assert exam.way is not None
    auto = exam.model.hashing.algorithm == "auto"
    start = f"start the engine with --prefix-caching-hash-algo {exam.way.algorithm}"
    exam.fail(
        check,
        "algorithm",
        f"{by} the engine hashes with {actual}",
        subject,
        expected=f"{exam.way.algorithm}" + (" (`auto`: the first engine's)" if auto else ""),
        remedy=start if auto else f"set `hashing.algorithm: {actual}` (or auto), or {start}",
    )


def _block_size(exam: Exam, subject: Subject, check: str, actual: int, by: str) -> None:
    assert exam.way is not None
    auto = exam.model.hashing.block_size == "auto"
    start = f"start the engine with --block-size {exam.way.block_size}"
    exam.fail(
        check,
        "block-size",
        f"{by} the engine's blocks hold {actual} tokens",
        subject,
        expected=f"{exam.way.block_size} tokens"
        + (" (`auto`: the first engine's)" if auto else ""),
        remedy=start if auto else f"set `hashing.block_size: {actual}` (or auto), or {start}",
    )
