"""Ways to hash, and the search for the one that an engine must have used."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple, get_args

from connector.blocks import Chain, Hasher, HashingError
from connector.model import Algorithm

ALGORITHMS: tuple[str, ...] = get_args(Algorithm)

_USUAL_SEEDS: tuple[str | None, ...] = (
    None, "0", "42", "1", "1234", "123", "12345", "1337", "2024", "2025", "2026",
    "random", "None", "none", "null", "", "0x0", "False", '"0"', "vllm", "mooncake",
)  # fmt: skip
_COUNTED_SEEDS = range(1024)
"""Numbers that are tried as seeds after the usual ones; a block takes some microseconds."""


class Recipe(NamedTuple):
    """A way to hash. `seed` is PYTHONHASHSEED, None where it is not set."""

    algorithm: str
    block_size: int
    seed: str | None

    def chain(self, token_ids: Sequence[int], salt: str) -> Chain:
        """Hash a salted prompt. Raises HashingError for xxhash without a seed."""
        return Hasher(self.algorithm, self.block_size, self.seed).chain(token_ids, salt=salt)

    @property
    def usable(self) -> bool:
        """Whether it gives the same hashes in every process."""
        return self.seed is not None or not self.algorithm.startswith("xxhash")

    def told(self) -> str:
        """Return the recipe in words."""
        return f"{self.algorithm}, blocks of {self.block_size} tokens, {seed_told(self.seed)}"


def seed_told(seed: str | None) -> str:
    """Return a seed in words."""
    return "no seed (PYTHONHASHSEED not set)" if seed is None else f'seed "{seed}"'


def recipes(likely: Recipe, sizes: Sequence[int] = ()) -> Iterator[Recipe]:
    """Yield the recipes worth trying, each once, the likely one first.

    `sizes` are further block sizes to try.
    """
    own = os.environ.get("PYTHONHASHSEED")
    seeds = (likely.seed, own, *_USUAL_SEEDS, *map(str, _COUNTED_SEEDS))
    for seed in dict.fromkeys(seeds):
        for size in dict.fromkeys((likely.block_size, *sizes)):
            for algorithm in dict.fromkeys((likely.algorithm, *ALGORITHMS)):
                recipe = Recipe(algorithm, size, seed)
                if recipe.usable:
                    yield recipe


def first_blocks(
    token_ids: Sequence[int], salt: str, likely: Recipe, sizes: Sequence[int] = ()
) -> Iterator[tuple[Recipe, str]]:
    """Yield what a prompt's first block may be called, in hex, with the recipe behind it."""
    for recipe in recipes(likely, sizes):
        if recipe.block_size <= len(token_ids):
            yield recipe, recipe.chain(token_ids[: recipe.block_size], salt).hex(0)


def explain(
    hashes: Sequence[int], token_ids: Sequence[int], size: int, salt: str, likely: Recipe
) -> Recipe | None:
    """Find the recipe that gives the published hashes; None where none does.

    `hashes` are the low 64 bits of each block of `size` tokens. Engines with
    several cache groups hash in smaller blocks than some of them store, and name
    a stored block by the last hash in it.
    """
    smaller = [s for s in (likely.block_size, 16, 32, 64, 128) if s < size and size % s == 0]
    for recipe in recipes(likely._replace(block_size=size), smaller):
        step = size // recipe.block_size
        try:
            first = recipe.chain(token_ids[:size], salt).ids
        except HashingError:
            continue
        if len(first) != step or first[-1] != hashes[0]:
            continue
        ids = list(recipe.chain(token_ids, salt).ids)[step - 1 :: step]
        if ids[: len(hashes)] == list(hashes[: len(ids)]):
            return recipe
    return None
