"""The probe: a chat of a few blocks that nobody has sent before, and nobody will again.

Its `cache_salt` keeps its blocks apart from every other request's, and names it
in the first block's `extra_keys` of the KV events. Its first words are unique
too, for engines whose events carry no extra keys.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

# Where tokenizers differ: accents, other scripts, digits, code, runs of spaces, line ends.
_PARAGRAPH = (
    "Read the file, change line 47 and run it again.\n    def answer(x): return x[3] + 1.50\n"
    "na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve caf\N{LATIN SMALL LETTER E WITH ACUTE} "
    "\N{CJK UNIFIED IDEOGRAPH-65E5}\N{CJK UNIFIED IDEOGRAPH-672C} don't  stop\r\n\r\nthen "
    '{"path": "a/b_c.py"} \N{GRINNING FACE} and so on.\n'
)
_WORDS = len(_PARAGRAPH.split())

BLOCKS = 3
"""Full blocks that a probe has at least, unless the engine's context is too short for them."""

_ROOM = 512
"""Tokens left for the template, the other messages and the answer."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One chat for one engine. A new one is another chat, with another salt."""

    model: str
    block_size: int
    max_model_len: int | None = None
    plain: bool = False
    """Whether to leave out all but the user's message, for templates that refuse the rest."""
    salt: str = field(default_factory=lambda: f"doctor-{uuid.uuid4().hex}")

    @property
    def text(self) -> str:
        """The user's last message: a word is at least a token, a byte at most one."""
        text = _PARAGRAPH * (1 + BLOCKS * self.block_size // _WORDS)
        if self.max_model_len is None:
            return text
        room = max(_ROOM, self.max_model_len - _ROOM)
        return text.encode()[:room].decode(errors="ignore")

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation."""
        mark = f"{self.salt.removeprefix('doctor-')} is examined."
        if self.plain:
            return [{"role": "user", "content": f"{mark} {self.text}"}]
        return [
            {"role": "system", "content": f"{mark} Be brief."},
            {"role": "user", "content": "Are you there?"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": self.text},
        ]

    @property
    def body(self) -> dict[str, Any]:
        """The chat completion: one token, greedily."""
        return {
            "model": self.model,
            "messages": self.messages,
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": self.salt,
        }

    @property
    def render_body(self) -> dict[str, Any]:
        """What is asked of routes that render without serving."""
        return {"model": self.model, "messages": self.messages}
