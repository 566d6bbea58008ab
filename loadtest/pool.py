"""A model of the pool that engines share: which blocks, in whose segment, and what is evicted.

Blocks are named by their hashes; each is stored once, in the segment of the
engine that put it first. The pool is finite: the block that was longest not
asked for by an engine goes first. Questions of others (the master's admin
listener) move nothing. The segment of an engine that died stays listed, with
its blocks, until the client's time to live is over; loads from it fail.

Owns no clock: whoever drives it says when an engine died and what time it is now.

Source: Mooncake 0.3.13: placement by writer (`--allocation_strategy=local_first`),
`--client_ttl`. Leases are not timed: their effect, that what engines look up is
kept longest, is the order of eviction here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Segment:
    """One engine's share of the pool. `dead_since` is None while its engine lives.

    An engine that was restarted mounts another segment, of the same name.
    """

    name: str
    dead_since: float | None = None
    held: set[Hashable] = field(default_factory=set)


class Pool:
    """The shared pool: at most `blocks` blocks, over all segments.

    `client_ttl` is in seconds of the caller's clock.
    """

    def __init__(self, blocks: int, *, client_ttl: float = 10.0) -> None:
        if blocks < 1:
            raise ValueError(f"a pool of {blocks} blocks holds nothing")
        self.blocks = blocks
        self.client_ttl = client_ttl
        self.evictions = 0
        self._where: OrderedDict[Hashable, Segment] = OrderedDict()
        self._segments: list[Segment] = []

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._where)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The mounted segments, in the order in which they came."""
        return tuple(self._segments)

    def mount(self, name: str) -> Segment:
        """Mount an empty segment for an engine that starts."""
        segment = Segment(name)
        self._segments.append(segment)
        return segment

    def died(self, segment: Segment, now: float) -> None:
        """Note that a segment's engine is gone."""
        if segment.dead_since is None:
            segment.dead_since = now

    def expire(self, now: float) -> None:
        """Unmount the segments whose engines have been gone for too long."""
        for segment in self.segments:
            if segment.dead_since is not None and now - segment.dead_since >= self.client_ttl:
                self._unmount(segment)

    def clear(self) -> None:
        """Forget all blocks, as a master that was restarted; living engines mount again."""
        for segment in self.segments:
            segment.held.clear()
            if segment.dead_since is not None:
                self._segments.remove(segment)
        self._where.clear()

    def where(self, block: Hashable) -> Segment | None:
        """Return the segment that holds a block; for onlookers, moves nothing."""
        return self._where.get(block)

    def leading(self, blocks: Sequence[Hashable]) -> int:
        """Return how many of the leading blocks are there, for an engine that wants to load them.

        All of them that are there count as asked for, since an engine asks for
        its whole list.
        """
        run = None
        for i, block in enumerate(blocks):
            if block in self._where:
                self._where.move_to_end(block)
            elif run is None:
                run = i
        return len(blocks) if run is None else run

    def loadable(self, blocks: Sequence[Hashable]) -> int:
        """Return how many of the leading blocks can be read: those of living engines."""
        for i, block in enumerate(blocks):
            segment = self._where.get(block)
            if segment is None or segment.dead_since is not None:
                return i
        return len(blocks)

    def missing(self, blocks: Sequence[Hashable]) -> list[int]:
        """Return the positions of the blocks that are not there, for an engine that has them."""
        absent = []
        for i, block in enumerate(blocks):
            if block in self._where:
                self._where.move_to_end(block)
            else:
                absent.append(i)
        return absent

    def put(self, block: Hashable, segment: Segment) -> bool:
        """Store a block in a segment; False where it is there already or the engine is dead."""
        if block in self._where or segment.dead_since is not None:
            return False
        while len(self._where) >= self.blocks:
            oldest, holder = self._where.popitem(last=False)
            holder.held.discard(oldest)
            self.evictions += 1
        self._where[block] = segment
        segment.held.add(block)
        return True

    def _unmount(self, segment: Segment) -> None:
        self._segments.remove(segment)
        for block in segment.held:
            del self._where[block]
