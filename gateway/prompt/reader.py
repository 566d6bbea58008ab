"""Reads a decoded body into a prompt: token ids and the chain of its prefix blocks.

Exact where the model's own template and tokenizer reproduce what the engine
does; otherwise the body's text is hashed in blocks of its own, and the prompt
says that it is approximate and why. Long texts are tokenised in a thread: the
tokenizer lets go of the interpreter lock while it works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import xxhash

from connector.blocks import Chain, Hasher, HashingError
from connector.model import ModelConfig
from connector.render import Inexact, Renderer

Kind = Literal["chat", "completions"]

# Text blocks stand for token blocks where ids are unknown: about four bytes to a token.
BYTES_PER_TOKEN = 4
_TEXT_BLOCK_TOKENS = 64
# Below this many bytes a thread costs more than the tokenising; above the next many a body goes
# to a thread of its own kind, so that it does not hold up the ordinary ones; beyond the last it
# is not tokenised at all: 4 MiB are a million tokens, and take seconds.
_INLINE_BYTES = 2048
_LONG_BYTES = 512 * 1024
_MOST_BYTES = 4 * 2**20


class Threads:
    """Where prompts are tokenised: ordinary bodies and long ones apart."""

    def __init__(self, workers: int = 2) -> None:
        self.ordinary = ThreadPoolExecutor(workers, thread_name_prefix="prompt")
        self.long = ThreadPoolExecutor(1, thread_name_prefix="long-prompt")

    def shutdown(self) -> None:
        """End the threads; what has not begun is dropped."""
        self.ordinary.shutdown(cancel_futures=True)
        self.long.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready to be looked up. `tokens` is an estimate where `exact` is false."""

    tokens: int
    token_ids: list[int] | None
    chain: Chain
    exact: bool
    reason: str | None = None


class PromptReader:
    """Reads the prompts of one model."""

    def __init__(self, model: ModelConfig, threads: Threads) -> None:
        self._renderer = Renderer(model) if model.exact else None
        self._seed = model.hashing.seed
        self._threads = threads
        self._hasher: Hasher | None = None
        self._hasher_of: tuple[str, int] | None = None

    def hash_with(self, algorithm: str, block_size: int) -> None:
        """Hash as the model's engines do from now on.

        Raises:
            connector.blocks.HashingError: if these hashes cannot be reproduced
                (xxhash without a seed).
        """
        if self._hasher_of != (algorithm, block_size):
            self._hasher = Hasher(algorithm, block_size, self._seed)
            self._hasher_of = (algorithm, block_size)

    async def read(
        self, kind: Kind, body: Mapping[str, Any], size: int, unreadable: str | None = None
    ) -> Prompt:
        """Read one body of `size` bytes; `unreadable` says why it can only be read approximately.

        Raises:
            connector.render.RenderError: if the body cannot be a prompt.
        """
        if self._renderer is None:
            return approximate(kind, body, "the model is configured with exact: false")
        if unreadable is not None:
            return approximate(kind, body, unreadable)
        if self._hasher is None:
            return approximate(kind, body, "the engines' hashing is not known (yet)")
        renderer, hasher = self._renderer, self._hasher
        salt = body.get("cache_salt") or None
        if salt is not None and not isinstance(salt, str):
            return approximate(kind, body, "cache_salt is not text")
        if size > _MOST_BYTES:
            return approximate(kind, body, f"the body is longer than {_MOST_BYTES} bytes")

        def work() -> tuple[list[int], Chain]:
            ids = _token_ids(renderer, kind, body)
            return ids, hasher.chain(ids, salt=salt)

        try:
            if size > _INLINE_BYTES:
                loop = asyncio.get_running_loop()
                threads = self._threads.long if size > _LONG_BYTES else self._threads.ordinary
                ids, chain = await loop.run_in_executor(threads, work)
            else:
                ids, chain = work()
        except (Inexact, HashingError) as inexact:
            # Not to be hashed are ids that no vocabulary has; the engine judges them.
            return approximate(kind, body, str(inexact))
        return Prompt(len(ids), ids, chain, exact=True)


def approximate(kind: Kind, body: Mapping[str, Any], reason: str) -> Prompt:
    """Hash the body's text in blocks: what precedes equal text precedes equal blocks.

    The chain is comparable only with others made here, never with an engine's.
    """
    text = _text(kind, body)
    step = _TEXT_BLOCK_TOKENS * BYTES_PER_TOKEN
    digests = bytearray()
    running = xxhash.xxh3_128(str(body.get("cache_salt") or "").encode("utf-8", "replace"))
    for start in range(0, len(text) - step + 1, step):
        running.update(text[start : start + step])
        digests += running.digest()
    chain = Chain(_TEXT_BLOCK_TOKENS, running.digest_size, bytes(digests))
    return Prompt(max(1, len(text) // BYTES_PER_TOKEN), None, chain, exact=False, reason=reason)


def _token_ids(renderer: Renderer, kind: Kind, body: Mapping[str, Any]) -> list[int]:
    if kind == "chat":
        return renderer.chat(body).token_ids
    prompts = renderer.completion(body)
    if len(prompts) != 1:
        # Several prompts in one body run on one engine; the first one's prefix decides.
        raise Inexact(f"the body holds {len(prompts)} prompts")
    return prompts[0].token_ids


def _text(kind: Kind, body: Mapping[str, Any]) -> bytes:
    """Return what identifies the prompt, in the order in which templates render it."""
    if kind == "completions":
        parts = [body.get("prompt")]
    else:
        messages = body.get("messages")
        parts = [body.get("tools"), *(messages if isinstance(messages, list) else [messages])]
    try:
        return b"\n".join(msgspec.json.encode(part) for part in parts if part is not None)
    except (UnicodeEncodeError, msgspec.MsgspecError, TypeError):
        # Lone surrogates: valid JSON that is not valid Unicode.
        return repr(parts).encode("utf-8", "surrogatepass")
