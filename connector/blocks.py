"""Block-hash chains of prompts, identical to vLLM's.

A prompt is cut into blocks of `block_size` tokens. Every full block is hashed
together with its parent's hash and whatever else its KV cache depends on, so
that one hash names the whole prefix that ends there::

    H(x)    = sha256 or xxh3_128 over pickle protocol 5 or canonical CBOR of x
    NONE    = H(seed)
    hash[i] = H((hash[i-1] or NONE, (token ids of block i), extra or None))
    extra   = ("lora", name, path)?  ("mm", id, offset - block start)*  ("cache_salt", s)?

The salt goes into block 0 only.

Source: vLLM 0.32, `utils/hashing.py` and `v1/core/kv_cache_utils.py`.
Prompts given as embeddings are hashed by their tensors and are not known here.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import cbor2
import numpy as np
import xxhash

# What vLLM seeds the sha256 algorithms with where PYTHONHASHSEED is not set.
DEFAULT_SEED = "vllm-none-hash"

# What else than tokens a block depends on: tagged tuples, or None for nothing.
Extra = tuple[tuple[Any, ...], ...] | None


class HashingError(ValueError):
    """The hashes asked for cannot be computed, or would match no engine's."""


class MultiModal(NamedTuple):
    """One image, audio clip or video of a prompt.

    `id` is vLLM's identifier of the item; `offset` and `length` count tokens
    from the start of the prompt.
    """

    id: str
    offset: int
    length: int


class Chain:
    """The hashes of a prompt's full blocks, in order. Not to be changed once made.

    `digests` holds the hashes back to back, `digest_size` bytes each; `ids` the
    low 64 bits of each, the form in which KV events name blocks.
    """

    __slots__ = ("block_size", "digest_size", "digests", "ids")

    def __init__(self, block_size: int, digest_size: int, digests: bytes = b"") -> None:
        self.block_size = block_size
        self.digest_size = digest_size
        self.digests = digests
        words = array("Q", digests)
        if sys.byteorder == "little":
            words.byteswap()
        per_digest = digest_size // 8
        self.ids: array[int] = words[per_digest - 1 :: per_digest]

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[bytes]:
        return (self.digest(i) for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Chain):
            return NotImplemented
        return self.block_size == other.block_size and self.digests == other.digests

    def __hash__(self) -> int:
        return hash((self.block_size, self.digests))

    def __repr__(self) -> str:
        last = self.hex(len(self) - 1)[-16:] if len(self) else "none"
        return f"Chain({len(self)} blocks of {self.block_size}, last ...{last})"

    @property
    def tokens(self) -> int:
        """Tokens in the chain's blocks."""
        return len(self.ids) * self.block_size

    def digest(self, i: int) -> bytes:
        """Return the hash of block `i`, counted from 0. Raises IndexError beyond the chain."""
        if not 0 <= i < len(self.ids):
            raise IndexError(f"block {i} of a chain of {len(self.ids)}")
        return self.digests[i * self.digest_size : (i + 1) * self.digest_size]

    def hex(self, i: int) -> str:
        """Return the hash of block `i` as the pool's keys spell it: lower-case hex."""
        return self.digest(i).hex()

    def head(self, blocks: int) -> Chain:
        """Return the chain of the first `blocks` blocks (this one, where it is no longer)."""
        if blocks >= len(self):
            return self
        return Chain(self.block_size, self.digest_size, self.digests[: blocks * self.digest_size])


class Hasher:
    """Computes chains for engines that share an algorithm, a block size and a seed.

    `seed` is the engines' PYTHONHASHSEED, None where it is not set. Raises
    HashingError for an unknown algorithm, for a block size below 1, and for an
    xxhash algorithm without a seed: those engines draw a random one at start.
    """

    __slots__ = ("_cbor", "_hash", "_opening", "algorithm", "block_size", "none")

    def __init__(self, algorithm: str, block_size: int, seed: str | None = None) -> None:
        if algorithm not in _ALGORITHMS:
            raise HashingError(
                f"unknown hash algorithm {algorithm!r}; vLLM has sha256, sha256_cbor, xxhash "
                "and xxhash_cbor"
            )
        if block_size < 1:
            raise HashingError(f"block size {block_size} is not a positive number of tokens")
        if seed is None:
            if algorithm.startswith("xxhash"):
                raise HashingError(
                    f"engines with {algorithm} and no PYTHONHASHSEED seed their hashes at random; "
                    "set one PYTHONHASHSEED on all of them and name it in `hashing.seed`, or use "
                    "sha256_cbor"
                )
            seed = DEFAULT_SEED
        self.algorithm = algorithm
        self.block_size = block_size
        self._hash, self._cbor = _ALGORITHMS[algorithm]
        self.none: bytes = self._hash(_cbor(seed) if self._cbor else _pickle(seed))
        # The start of every block in CBOR, up to the parent's bytes: a list of
        # three whose first member is a byte string.
        self._opening = b"\x83" + _cbor_head(0x40, len(self.none))

    def empty(self) -> Chain:
        """Return the chain of a prompt without a full block."""
        return Chain(self.block_size, len(self.none))

    def chain(
        self,
        token_ids: Sequence[int],
        *,
        salt: str | None = None,
        lora: tuple[str, str] | None = None,
        mm: Sequence[MultiModal] = (),
        parent: Chain | None = None,
    ) -> Chain:
        """Hash the full blocks of a prompt.

        `token_ids` is the whole prompt. `salt` is the request's `cache_salt`
        (an empty one is none), `lora` the adapter's name and path. With
        `parent`, its blocks are taken over unread and hashing goes on behind
        them: the caller vouches that they are this prompt's, with the same
        salt, adapter and media. Raises HashingError for a parent of another
        shape or longer than the prompt, for ids that are not whole numbers
        from 0, and for text that is not Unicode.
        """
        size = self.block_size
        count = len(token_ids) // size
        done = 0
        digests: list[bytes] = []
        last = self.none
        if parent is not None and len(parent):
            done = len(parent)
            if (parent.block_size, parent.digest_size) != (size, len(self.none)) or done > count:
                raise HashingError(f"{parent!r} is no start of {count} blocks of {size} tokens")
            if done == count:
                return parent
            digests.append(parent.digests)
            last = parent.digest(done - 1)

        shared = [("lora", _decoded(lora[0]), _decoded(lora[1]))] if lora else []
        salted = [("cache_salt", _decoded(salt))] if salt else []
        media = [
            MultiModal(_decoded(item.id), item.offset, item.length)
            for item in sorted(mm, key=lambda item: item.offset)
        ]
        plain = not (shared or salted or media)
        # Plain ints whatever came: numpy's would pickle otherwise.
        words = _words(token_ids[done * size : count * size])
        id_lists = _cbor_id_lists(words, size) if self._cbor else _tuples(words, size)
        first_medium = 0
        for start, id_list in zip(range(done * size, count * size, size), id_lists, strict=True):
            extra: Extra = None
            if not plain:
                inside, first_medium = _media_inside(media, first_medium, start, start + size)
                extra = tuple(shared + inside + (salted if start == 0 else [])) or None
            if isinstance(id_list, bytes):
                message = self._opening + last + id_list + (_cbor(extra) if extra else b"\xf6")
            else:
                message = _pickle((last, id_list, extra))
            last = self._hash(message)
            digests.append(last)
        return Chain(size, len(self.none), b"".join(digests))


def _media_inside(
    media: Sequence[MultiModal], first: int, start: int, end: int
) -> tuple[list[tuple[str, str, int]], int]:
    """Return the extra keys of the media that touch tokens `start` to `end`.

    `first` is the first item that earlier blocks have not passed; the second
    answer is the same for the next block. An offset is relative to its block,
    so it is negative in the later blocks of a long item.
    """
    keys: list[tuple[str, str, int]] = []
    while first < len(media):
        item = media[first]
        if item.offset >= end:
            break
        if item.offset + item.length > start:
            keys.append(("mm", item.id, item.offset - start))
            if item.offset + item.length > end:
                break
        first += 1
    return keys, first


def _decoded(text: str) -> str:
    """Return `text` as an object of its own, the way an engine core holds it.

    Pickle writes a str object that it has met before as a reference, so which
    objects are the same one changes the bytes. Engine cores decode names and
    salts from msgpack: every occurrence is a new object, save that the
    interpreter keeps one of each single Latin-1 character.
    """
    try:
        return text.encode().decode()
    except UnicodeEncodeError as error:
        raise HashingError(f"{text!r} holds half a surrogate pair: {error}") from error


def _pickle(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


def _words(token_ids: Sequence[int]) -> array[int]:
    try:
        return array("Q", token_ids)
    except (TypeError, OverflowError) as error:
        raise HashingError(f"token ids must be whole numbers from 0: {error}") from error


def _tuples(words: array[int], size: int) -> Iterator[tuple[int, ...]]:
    return (tuple(words[start : start + size]) for start in range(0, len(words), size))


def _cbor_id_lists(words: array[int], size: int) -> list[bytes]:
    """Return the canonical CBOR of each `size` ids as a list; `words` is whole blocks.

    All ids are encoded at once, as rows of the five bytes that the longest
    usual one takes (head, then 32 bits, big endian), of which each id keeps
    those it needs.
    """
    if not words:
        return []
    ids = np.frombuffer(words, dtype=np.uint64)
    head = _cbor_head(0x80, size)
    if int(ids.max()) >> 32:  # no vocabulary is that large; be right, not fast
        return [_cbor(list(block)) for block in _tuples(words, size)]
    rows = np.empty((len(ids), 5), dtype=np.uint8)
    rows[:, 1:] = ids.astype(">u4").view(np.uint8).reshape(-1, 4)
    keep = np.empty((len(ids), 5), dtype=np.bool_)
    keep[:, 0] = True
    keep[:, 1] = keep[:, 2] = ids >= 1 << 16
    keep[:, 3] = ids >= 1 << 8
    keep[:, 4] = ids >= 24
    # The head's low bits are the value itself below 24, else 24, 25 or 26 for
    # one, two or four bytes to follow.
    rows[:, 0] = np.where(keep[:, 4], 24 + keep[:, 3].astype(np.uint8) + keep[:, 1], ids)
    encoded = rows[keep].tobytes()
    ends = keep.reshape(-1, size * 5).sum(axis=1).cumsum().tolist()
    return [head + encoded[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _cbor_head(major: int, value: int) -> bytes:
    """Return the shortest head of a CBOR item: major type (in the top bits), then its number."""
    if value < 24:
        return bytes((major | value,))
    if value < 1 << 8:
        return bytes((major | 24, value))
    if value < 1 << 16:
        return bytes((major | 25,)) + value.to_bytes(2, "big")
    if value < 1 << 32:
        return bytes((major | 26,)) + value.to_bytes(4, "big")
    return bytes((major | 27,)) + value.to_bytes(8, "big")


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


# Each algorithm's hash function, and whether it hashes CBOR instead of pickles.
_ALGORITHMS: dict[str, tuple[Callable[[bytes], bytes], bool]] = {
    "sha256": (_sha256, False),
    "sha256_cbor": (_sha256, True),
    "xxhash": (xxhash.xxh3_128_digest, False),
    "xxhash_cbor": (xxhash.xxh3_128_digest, True),
}
