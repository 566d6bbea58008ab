"""The search for the way in which an engine hashes."""

from __future__ import annotations

import itertools

import pytest

from connector.doctor.probe import BLOCKS, Probe
from connector.doctor.recipes import ALGORITHMS, Recipe, explain, first_blocks, recipes

IDS = list(range(1000, 1100))
LIKELY = Recipe("sha256_cbor", 16, "7777")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", ["0", "42", None, "random", "99"])
def test_an_engines_recipe_is_found_from_its_hashes(algorithm: str, seed: str | None) -> None:
    recipe = Recipe(algorithm, 32, seed)
    if not recipe.usable:
        recipe = recipe._replace(seed="1")
    ids = list(recipe.chain(IDS, "salt").ids)
    assert explain(ids, IDS, 32, "salt", LIKELY) == recipe


def test_the_configured_seed_is_tried_whatever_it_is() -> None:
    recipe = Recipe("sha256", 16, "a long secret")
    ids = list(recipe.chain(IDS, "salt").ids)
    assert explain(ids, IDS, 16, "salt", LIKELY) is None
    assert explain(ids, IDS, 16, "salt", LIKELY._replace(seed="a long secret")) == recipe


def test_the_seed_of_this_environment_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe("sha256", 16, "987654")
    monkeypatch.setenv("PYTHONHASHSEED", "987654")
    assert explain(list(recipe.chain(IDS, "s").ids), IDS, 16, "s", LIKELY) == recipe


def test_blocks_that_are_named_by_the_last_hash_in_them() -> None:
    recipe = Recipe("sha256_cbor", 16, "0")
    every_fourth = list(recipe.chain(IDS[:64], "salt").ids)[3::4]
    assert explain(every_fourth, IDS[:64], 64, "salt", LIKELY) == recipe


def test_a_recipe_must_explain_all_blocks() -> None:
    ids = list(Recipe("sha256_cbor", 16, "0").chain(IDS, "salt").ids)
    assert explain([*ids[:3], 5, *ids[4:]], IDS, 16, "salt", LIKELY) is None


def test_each_recipe_is_tried_once_and_the_likely_one_first() -> None:
    tried = list(itertools.islice(recipes(LIKELY, [16, 32]), 500))
    assert tried[0] == LIKELY
    assert len(set(tried)) == len(tried)
    assert all(recipe.usable for recipe in tried)


def test_first_blocks_are_those_of_the_chains() -> None:
    for recipe, digest in itertools.islice(first_blocks(IDS, "salt", LIKELY, [32, 4096]), 20):
        assert digest == recipe.chain(IDS, "salt").hex(0)


def test_probes_share_no_salt_and_no_beginning() -> None:
    one, other = Probe("m", 16), Probe("m", 16)
    assert one.salt != other.salt
    assert one.messages[0] != other.messages[0]
    assert one.text == other.text
    assert one.salt not in str(one.render_body)


@pytest.mark.parametrize("size", [1, 16, 128, 1056])
def test_a_probe_has_several_blocks_and_fits_into_the_context(size: int) -> None:
    assert len(Probe("m", size).text.split()) >= BLOCKS * size
    assert len(Probe("m", size, max_model_len=2048).text.encode()) <= 2048
