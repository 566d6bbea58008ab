"""One HTTP request under way: its choices, and the tokens that arrive for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from connector.blocks import Chain
from loadtest.engine import Job


@dataclass(slots=True, eq=False, kw_only=True)
class Choice(Job):
    """One answer to one prompt: what it will be, and how far it has come.

    `pieces` is the text of each token; `finish` and `stop` say how it ends, as
    vLLM's `finish_reason` and `stop_reason` do. `chain` covers prompt and answer.
    """

    index: int
    prompt_ids: list[int]
    answer: list[int]
    pieces: list[str]
    finish: str
    stop: str | None
    chain: Chain
    salt: str | None
    exchange: Exchange = field(init=False)
    local: int = 0
    external: int = 0
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    @property
    def cached(self) -> int:
        """Prompt tokens that need not be computed."""
        return self.local + self.external

    @property
    def created(self) -> int:
        """Prompt tokens whose blocks this request added to the cache."""
        size = self.chain.block_size
        return max(0, self.prompt // size * size - self.cached)

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.pieces)

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the ids of tokens `start` to `end` of prompt and answer."""
        ids = self.prompt_ids[start:end]
        if end > self.prompt:
            ids = ids + self.answer[max(0, start - self.prompt) : end - self.prompt]
        return ids


class Exchange:
    """The choices of one request, and their tokens in order of arrival."""

    __slots__ = ("_arrived", "_left", "_wake", "choices")

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.choices = choices
        self._arrived: deque[tuple[Choice, int]] = deque()
        self._left = sum(len(choice.answer) for choice in choices)
        self._wake = asyncio.Event()
        for choice in choices:
            choice.exchange = self

    def arrive(self, choice: Choice, token: int) -> None:
        """Note that a choice's token is there, by its number."""
        self._arrived.append((choice, token))
        self._wake.set()

    async def tokens(self) -> AsyncIterator[tuple[Choice, int]]:
        """Yield each token as it arrives, until all are there."""
        while self._left:
            while self._arrived:
                self._left -= 1
                yield self._arrived.popleft()
            if self._left:
                self._wake.clear()
                await self._wake.wait()

    async def whole(self) -> None:
        """Wait until all tokens are there."""
        async for _ in self.tokens():
            pass
