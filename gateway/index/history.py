"""What this gateway itself sent where: the index for engines whose cache sends no events.

An engine that published no KV events, or a prompt that could only be hashed as
text, is known by its own routing history alone: the blocks of the turns that
an engine was given, the least recently used forgotten beyond a bound. This is
a guess; the decision says so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from policies.base import EngineKey

DEFAULT_BLOCKS = 65_536


class HistoryIndex:
    """Block ids by engine, least recently used first, at most `blocks` per engine."""

    def __init__(self, blocks: int = DEFAULT_BLOCKS) -> None:
        self._bound = blocks
        self._held: dict[EngineKey, OrderedDict[int, None]] = {}

    def record(self, key: EngineKey, ids: Sequence[int]) -> None:
        """Take note that a prompt with these blocks was answered by engine `key`."""
        held = self._held.setdefault(key, OrderedDict())
        # From the last block to the first: a prefix is wanted longer than what follows it.
        for block in reversed(ids[: self._bound]):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self._bound:
            held.popitem(last=False)

    def leading(self, ids: Sequence[int], keys: Iterable[EngineKey]) -> dict[EngineKey, int]:
        """Return the number of leading blocks that each engine of `keys` was given before."""
        found = {}
        for key in keys:
            held = self._held.get(key)
            if not held:
                continue
            count = next((i for i, block in enumerate(ids) if block not in held), len(ids))
            if count:
                found[key] = count
        return found

    def size(self, key: EngineKey) -> int:
        """Return the number of blocks that are remembered of engine `key`."""
        return len(self._held.get(key, ()))

    def forget(self, key: EngineKey) -> None:
        """Drop all that is known of an engine, because it was restarted."""
        self._held.pop(key, None)
