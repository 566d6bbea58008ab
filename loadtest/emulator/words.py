"""Answers: words drawn by the prompt, so that the same prompt is always answered alike.

Only tokens are drawn that come out of the tokenizer again when their text goes
in: a conversation that appends an answer then goes on with the very tokens that
were generated, and hits their blocks. With tokenizers that join words otherwise
than most do, some answers re-tokenise differently, as real ones may.
"""

from __future__ import annotations

import hashlib
import random
import re
from array import array
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_LOOKED_AT = 8192
_WANTED = 1024
_LEAST = 16
_BARE = re.compile(r"[a-z]{2,12}")
_SPACED = re.compile(r" [a-z]{2,12}")


class Words:
    """Draws answers for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = sorted(tokenizer.get_vocab(with_added_tokens=False).values())[:_LOOKED_AT]
        texts = tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)
        words = [
            (token, text)
            for token, text in zip(ids, texts, strict=True)
            if _BARE.fullmatch(text) or _SPACED.fullmatch(text)
        ]
        again = tokenizer.encode_batch_fast([text for _, text in words], add_special_tokens=False)
        safe = [
            (token, text)
            for (token, text), encoding in zip(words, again, strict=True)
            if encoding.ids == [token]
        ]
        self._openings = [token for token, text in safe if not text.startswith(" ")][:_WANTED]
        self._spaced = [token for token, text in safe if text.startswith(" ")][:_WANTED]
        if len(self._spaced) < _LEAST or len(self._openings) < _LEAST:
            self._openings = self._spaced = ids

    def answer(
        self, prompt: Sequence[int], choice: int, length: int, *, opening: bool
    ) -> list[int]:
        """Return an answer of `length` tokens to a prompt.

        `opening` begins it as a text of its own, else as a text that goes on.
        """
        seed = hashlib.blake2b(array("Q", prompt).tobytes(), digest_size=16)
        seed.update(choice.to_bytes(4, "big"))
        draw = random.Random(seed.digest())
        tokens = draw.choices(self._spaced, k=length)
        if opening:
            tokens[0] = draw.choice(self._openings)
        return tokens

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each token adds to those before it."""
        stream = DecodeStream(skip_special_tokens=True)
        return [stream.step(self._tokenizer, token) or "" for token in tokens]
