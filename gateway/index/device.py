"""Owns what is known of the engines' device caches: which blocks each engine holds.

The same block can lie in several device blocks of an engine, and each evicted
copy is announced by a removal of its own; so blocks are counted, per engine and
KV-cache group. Only events of medium `GPU` speak of the device (vLLM says `GPU`
on CPU engines too; engines from before the field say nothing and mean it); what
offload connectors announce under other media lies elsewhere and is passed over.

Next to what was *heard* stands *hearsay*: blocks that were on the device before
the gateway listened, inferred from an engine's own cached-token counts. Hearsay
is believed until the block is announced as removed, makes way when the device
has no room for it, and becomes an ordinary count of one when the block is
announced as stored: rather one copy too few than a block that is never dropped.

An engine can be asked to announce a prompt's cached blocks anew (*reports*). On
the wire that looks like second copies, which it is not; so whoever asks says so
first (`expect_report`), and the next event that begins with that prompt's first
block names what is there without adding to it.

Everything here is synchronous and belongs to one event loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import takewhile

from connector.blocks import Chain
from connector.events import BlockRemoved, BlockStored
from policies.base import EngineKey


class _Group:
    """The device blocks of one engine and KV-cache group."""

    __slots__ = ("block_size", "heard", "hearsay")

    def __init__(self) -> None:
        self.block_size = 0  # tokens per block of this group; 0 until one was stored
        self.heard: dict[int, int] = {}  # block id -> copies
        self.hearsay: dict[int, None] = {}  # block ids, oldest first; never also in `heard`

    def blocks(self, ids: array[int], block_size: int) -> array[int]:
        """Return this group's block ids of a chain that is hashed every `block_size` tokens."""
        stride, odd = divmod(self.block_size or block_size, block_size)
        if odd or not stride:
            return ids[:0]  # hashed at another granularity: no id of the chain can match
        # A group with bigger blocks names them by the hash of their last hash block.
        return ids if stride == 1 else ids[stride - 1 :: stride]

    def leading(self, ids: array[int], block_size: int) -> int:
        """Count the leading tokens of a chain that this group holds without a break."""
        # Where there is no hearsay, which is the usual case, the walk stays in C.
        holds = self.__contains__ if self.hearsay else self.heard.__contains__
        run = len(list(takewhile(holds, self.blocks(ids, block_size))))
        return run * (self.block_size or block_size)

    def __contains__(self, block: int) -> bool:
        return block in self.heard or block in self.hearsay


class Report:
    """A report that is awaited of an engine; compared by identity."""

    __slots__ = ("first",)

    def __init__(self, first: int) -> None:
        self.first = first


class _Engine:
    """The device cache of one engine; `copies` is the sum of all heard counts."""

    __slots__ = ("copies", "groups", "limit", "reports")

    def __init__(self, limit: int | None) -> None:
        self.groups: dict[int, _Group] = {}
        self.reports: dict[tuple[int, int], list[Report]] = {}  # by (group, first block)
        self.copies = 0
        self.limit = limit

    def clear(self) -> None:
        self.groups.clear()
        self.reports.clear()
        self.copies = 0

    def trim_hearsay(self) -> None:
        """Drop the oldest hearsay that no longer fits on the device beside what was heard."""
        if self.limit is None:
            return
        excess = self.copies + sum(len(g.hearsay) for g in self.groups.values()) - self.limit
        for group in self.groups.values():
            while excess > 0 and group.hearsay:
                del group.hearsay[next(iter(group.hearsay))]
                excess -= 1


class DeviceIndex:
    """Device residency of every engine, by 64-bit block id (the low bits of a block's hash).

    `limit` is the number of device blocks of an engine (vLLM's `num_gpu_blocks`,
    which all groups share) until `set_limit` says better; None leaves it open.
    More counted copies than device blocks prove that removals were lost: the
    engine is flushed and begins anew. So memory is bounded at insert.

    Counters, for telemetry: `events` applied, `ignored` (another medium),
    `unknown` blocks removed that were never heard of, `flushes` (for whatever
    reason), `overflows` (flushes because of the limit), `reported` (reports applied).

    A sliding-window group holds only the end of a long prompt; as the leading
    run is the least over all groups, such engines get credit for short prompts
    only. That errs to the safe side and is a limit of this index.
    """

    def __init__(self, *, limit: int | None = None) -> None:
        self.events = 0
        self.ignored = 0
        self.unknown = 0
        self.flushes = 0
        self.overflows = 0
        self.reported = 0
        self._limit = limit
        self._engines: dict[EngineKey, _Engine] = {}

    def store(self, key: EngineKey, event: BlockStored) -> None:
        """Count one more copy of each block of the event on engine `key`."""
        if not _on_device(event.medium):
            self.ignored += 1
            return
        self.events += 1
        engine = self._engine(key)
        group = engine.groups.get(event.group_idx or 0)
        if group is None:
            group = engine.groups[event.group_idx or 0] = _Group()
        group.block_size = event.block_size
        heard, hearsay = group.heard, group.hearsay
        blocks = event.block_hashes
        if engine.reports and self._is_report(engine, event):
            self.reported += 1
            blocks = [block for block in blocks if block not in heard]
        for block in blocks:
            heard[block] = heard.get(block, 0) + 1
            if hearsay:
                hearsay.pop(block, None)
        engine.copies += len(blocks)
        if engine.limit is not None and engine.copies > engine.limit:
            self.overflows += 1
            self.flush(key)
        elif hearsay:
            engine.trim_hearsay()

    def expect_report(self, key: EngineKey, first: int) -> Report:
        """Expect that engine `key` announces anew what it holds of a prompt with this first block.

        Where that prompt is not cached there its first blocks are announced as
        stored instead, which then serves as the report. One report comes for each
        group. What is returned is to be handed to `withdraw_report` in the end.
        """
        report = Report(first)
        engine = self._engine(key)
        for group in engine.groups or (0,):
            engine.reports.setdefault((group, first), []).append(report)
        return report

    def withdraw_report(self, key: EngineKey, report: Report) -> None:
        """Expect this report no more, if it has not come."""
        engine = self._engines.get(key)
        if engine is not None:
            for place in [place for place in engine.reports if place[1] == report.first]:
                left = [one for one in engine.reports[place] if one is not report]
                engine.reports[place] = left
                if not left:
                    del engine.reports[place]

    def remove(self, key: EngineKey, event: BlockRemoved) -> None:
        """Count one copy less of each block of the event; the last one removes the block."""
        if not _on_device(event.medium):
            self.ignored += 1
            return
        self.events += 1
        engine = self._engines.get(key)
        group = engine.groups.get(event.group_idx or 0) if engine else None
        if engine is None or group is None:
            self.unknown += len(event.block_hashes)
            return
        heard = group.heard
        for block in event.block_hashes:
            copies = heard.get(block, 0)
            if copies > 1:
                heard[block] = copies - 1
                engine.copies -= 1
            elif copies:
                del heard[block]
                engine.copies -= 1
            elif block in group.hearsay:
                del group.hearsay[block]
            else:
                self.unknown += 1

    def flush(self, key: EngineKey) -> None:
        """Forget all blocks of engine `key`: it was cleared, restarted, or events were lost."""
        engine = self._engines.get(key)
        self.flushes += 1
        if engine is not None:
            engine.clear()

    def forget(self, key: EngineKey) -> None:
        """Remove engine `key` itself, with its limit."""
        self._engines.pop(key, None)

    def set_limit(self, key: EngineKey, blocks: int | None) -> None:
        """Tell how many device blocks engine `key` has; what exceeds that is flushed at once."""
        engine = self._engine(key)
        engine.limit = blocks
        if blocks is not None and engine.copies > blocks:
            self.overflows += 1
            self.flush(key)
        engine.trim_hearsay()

    def retained(self, key: EngineKey, chain: Chain, tokens: int) -> int:
        """Believe that engine `key` holds the first `tokens` tokens of a chain in all its groups.

        For what an engine reports as cached though no event told of it: blocks
        from before the gateway came. Returns how many blocks were news.
        """
        engine = self._engine(key)
        if not engine.groups:
            engine.groups[0] = _Group()
        count = 0
        for group in engine.groups.values():
            blocks = group.blocks(chain.ids[: tokens // chain.block_size], chain.block_size)
            news = [b for b in blocks if b not in group]
            if engine.limit is not None:
                # The head of a chain is worth more than its tail.
                news = news[: max(0, engine.limit - engine.copies)]
            group.hearsay.update(dict.fromkeys(news))
            count += len(news)
        engine.trim_hearsay()
        return count

    def doubted(self, key: EngineKey, chain: Chain, tokens: int) -> int:
        """Believe no longer what was inferred of a chain beyond its first `tokens` tokens.

        For an engine that reports less as cached than it was believed to hold: a
        removal was missed, or hearsay was wrong. What its events told stays, since
        they will also tell of its end. Returns how many blocks were given up.
        """
        engine = self._engines.get(key)
        count = 0
        for group in engine.groups.values() if engine else ():
            if not group.hearsay:
                continue
            blocks = group.blocks(chain.ids, chain.block_size)
            for block in blocks[tokens // (group.block_size or chain.block_size) :]:
                if block in group.hearsay:
                    del group.hearsay[block]
                    count += 1
        return count

    def leading(
        self, chain: Chain, *, keys: Iterable[EngineKey] | None = None
    ) -> dict[EngineKey, int]:
        """Return the leading tokens of a chain on each engine that holds its first block.

        The work is proportional to the leading runs found. With `keys` only
        these engines are looked at.
        """
        ids = chain.ids
        found: dict[EngineKey, int] = {}
        if not ids:
            return found
        engines = (
            self._engines.items()
            if keys is None
            else ((key, self._engines[key]) for key in keys if key in self._engines)
        )
        for key, engine in engines:
            tokens = min(
                (g.leading(ids, chain.block_size) for g in engine.groups.values()), default=0
            )
            if tokens:
                found[key] = tokens
        return found

    def announced(self, key: EngineKey, chain: Chain) -> bool:
        """Tell whether engine `key` has itself named the last block of a chain, in any group."""
        engine = self._engines.get(key)
        if engine is None:
            return False
        lasts = (g.blocks(chain.ids, chain.block_size)[-1:] for g in engine.groups.values())
        return any(
            last[0] in group.heard
            for group, last in zip(engine.groups.values(), lasts, strict=True)
            if last
        )

    def size(self, key: EngineKey) -> int:
        """Return how many different blocks engine `key` is believed to hold, over all groups."""
        engine = self._engines.get(key)
        if engine is None:
            return 0
        return sum(len(g.heard) + len(g.hearsay) for g in engine.groups.values())

    def keys(self) -> tuple[EngineKey, ...]:
        """Return the engines known here, in the order they appeared."""
        return tuple(self._engines)

    def _is_report(self, engine: _Engine, event: BlockStored) -> bool:
        """Tell whether an event is a report that was asked for, and count it as come."""
        if event.parent_block_hash is not None or not event.block_hashes:
            return False
        place = (event.group_idx or 0, event.block_hashes[0])
        expected = engine.reports.get(place)
        if not expected:
            return False
        expected.pop(0)
        if not expected:
            del engine.reports[place]
        return True

    def _engine(self, key: EngineKey) -> _Engine:
        engine = self._engines.get(key)
        if engine is None:
            engine = self._engines[key] = _Engine(self._limit)
        return engine


def _on_device(medium: str | None) -> bool:
    return medium is None or medium == "GPU" or medium.upper() == "GPU"
