"""A model of one engine's device cache: numbered blocks, reference counts, eviction order.

Blocks in use have references; free ones stand in a queue, the next to be taken
at its head. A freed block that holds a prefix goes to the queue's end, one that
holds none to its head; a hit takes a block out of the queue again. A prefix may
be held by several blocks, since a block that fills up is not compared with what
is there. Taking a block forgets the prefix it held.

Source: vLLM 0.32, `v1/core/block_pool.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence


class BlockCache:
    """The blocks of one engine. Block 0 is vLLM's placeholder: it is never handed out.

    Blocks are named by their numbers, prefixes by hashes that the caller chooses.
    """

    __slots__ = ("_by_hash", "_free", "_held", "_references", "blocks")

    def __init__(self, blocks: int) -> None:
        if blocks < 2:
            raise ValueError(f"{blocks} blocks are too few: one is a placeholder, one must be left")
        self.blocks = blocks
        self._references = [0] * blocks
        self._held: list[Hashable | None] = [None] * blocks
        self._by_hash: dict[Hashable, dict[int, None]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))

    @property
    def free(self) -> int:
        """Blocks without a reference, whether or not they hold a prefix."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that have a reference, 0 to 1."""
        return 1.0 - len(self._free) / (self.blocks - 1)

    def references(self, block: int) -> int:
        """Return how many hold on to a block."""
        return self._references[block]

    def eviction_order(self) -> list[int]:
        """Return the free blocks, the next to be taken first."""
        return list(self._free)

    def held(self) -> dict[Hashable, int]:
        """Return how many blocks hold each prefix."""
        return {prefix: len(blocks) for prefix, blocks in self._by_hash.items()}

    def leading(self, hashes: Sequence[Hashable], most: int) -> list[int]:
        """Return a block for each of the leading hashes that are held, at most `most`."""
        found = []
        for prefix in hashes[:most]:
            blocks = self._by_hash.get(prefix)
            if blocks is None:
                break
            found.append(next(iter(blocks)))
        return found

    def unreferenced(self, blocks: Iterable[int]) -> int:
        """Return how many of the blocks are free: touching them takes that many away."""
        return sum(1 for block in blocks if not self._references[block])

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def take(self, count: int) -> tuple[list[int], list[Hashable]]:
        """Hand out free blocks with one reference each; return them and the prefixes they held.

        Raises ValueError where there are not as many.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        taken = []
        evicted = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            prefix = self._held[block]
            if prefix is not None:
                self._forget(block, prefix)
                evicted.append(prefix)
            self._references[block] = 1
            taken.append(block)
        return taken, evicted

    def hold(self, block: int, prefix: Hashable) -> None:
        """Let a block in use that holds nothing hold a prefix."""
        if self._held[block] is not None:
            raise ValueError(f"block {block} holds a prefix already")
        self._held[block] = prefix
        self._by_hash.setdefault(prefix, {})[block] = None

    def release(self, blocks: Iterable[int]) -> None:
        """Take a reference from each block; those without any become free.

        Blocks come in the order in which they are to be taken again: a request
        gives its own back from the last to the first, so that tails go before
        what they build on.
        """
        empty = []
        for block in blocks:
            if not self._references[block]:
                raise ValueError(f"block {block} has no reference to give back")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._held[block] is None:
                empty.append(block)
            else:
                self._free[block] = None
        for block in reversed(empty):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def _forget(self, block: int, prefix: Hashable) -> None:
        self._held[block] = None
        blocks = self._by_hash[prefix]
        del blocks[block]
        if not blocks:
            del self._by_hash[prefix]
