"""What engines will hold because of what was just sent there, before their events say so.

Owns the predictions: for each charged turn, its prompt's block chain is claimed
for its engine. Claims live in one radix tree over all engines, whose nodes are
stretches of chains. Since a block's id stands for its whole prefix, two chains
that agree at a block agree before it, and where they part is found by bisection;
so a claim, its end and a look-up cost O(nodes on the path * log blocks), however
long the prompt, and nothing is copied per block.

A node knows for each engine who claims it and when the first of them will have
computed it. A parent's claims include its children's, so the deepest node that
an engine claims tells when the whole run up to there is ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from policies.base import EngineKey, Pending

LINGERING_MAX = 20_000
"""Claims of ended turns kept at most; beyond, the oldest go before their time."""


class Claim:
    """One turn's prompt on one engine; compared and hashed by identity."""

    __slots__ = ("confirmed", "key", "node")

    def __init__(self, key: EngineKey, *, confirmed: bool) -> None:
        self.key = key
        # Whether its prompt is known to have been computed, or will never be seen to be.
        self.confirmed = confirmed
        # The node where the chain ends; None once the claim is dropped.
        self.node: _Node | None = None


class _Holding:
    """Who claims a node on one engine, when the first of them will have computed it, and
    how many of them are confirmed."""

    __slots__ = ("claims", "confirmed", "ready_at")

    def __init__(self, claims: dict[Claim, float], ready_at: float, confirmed: int) -> None:
        self.claims = claims
        self.ready_at = ready_at
        self.confirmed = confirmed


class _Node:
    """Blocks `start` to `end` of `chain`, after those of the parents."""

    __slots__ = ("chain", "children", "end", "ends", "holdings", "parent", "start")

    def __init__(self, chain: Sequence[int], start: int, end: int, parent: _Node | None) -> None:
        self.chain = chain
        self.start = start
        self.end = end
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.holdings: dict[EngineKey, _Holding] = {}
        # How many claims end here: a node without any and with one child is one with its child.
        self.ends = 0

    def shared(self, chain: Sequence[int], limit: int) -> int:
        """Return where `chain` and this node part; its block at `start` is known to agree."""
        low, high = self.start + 1, min(self.end, limit)
        if self.chain[high - 1] == chain[high - 1]:
            return high
        while low < high:
            middle = (low + high) // 2
            if self.chain[middle] == chain[middle]:
                low = middle + 1
            else:
                high = middle
        return low


class Predictions:
    """The claims of a fleet. Times are seconds on the caller's clock.

    Args:
        ttl: how long the claim of an ended turn is kept; by then the engine's
            events have arrived, or it has none and the caller's own history serves.
    """

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._root = _Node((), 0, 0, None)
        self._by_engine: dict[EngineKey, set[Claim]] = {}
        self._lingering: deque[tuple[float, Claim]] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._by_engine.values()))

    def claim(
        self,
        key: EngineKey,
        chain: Sequence[int],
        ready_at: float,
        now: float,
        *,
        silent: bool = False,
    ) -> Claim | None:
        """Predict that engine `key` will hold `chain` at `ready_at`; None for an empty chain.

        `silent` says that no first token will be seen (the answer comes whole), so
        that `ready_at` is all there is to go by.
        """
        self._expire(now)
        if not len(chain):
            return None
        claim = Claim(key, confirmed=silent)
        node, depth = self._root, 0
        while depth < len(chain):
            child = node.children.get(chain[depth])
            if child is None:
                child = _Node(chain, depth, len(chain), node)
                node.children[chain[depth]] = child
            else:
                end = child.shared(chain, len(chain))
                if end < child.end:
                    child = _split(node, child, end)
            holding = child.holdings.get(key)
            if holding is None:
                child.holdings[key] = _Holding({claim: ready_at}, ready_at, int(silent))
            else:
                holding.confirmed += silent
                holding.claims[claim] = ready_at
                holding.ready_at = min(holding.ready_at, ready_at)
            node, depth = child, child.end
        node.ends += 1
        claim.node = node
        self._by_engine.setdefault(key, set()).add(claim)
        return claim

    def ready(self, claim: Claim, now: float) -> None:
        """Note that the claim's prompt has been computed."""
        node, news = claim.node, not claim.confirmed
        claim.confirmed = True
        while node is not None and node.parent is not None:
            holding = node.holdings[claim.key]
            holding.confirmed += news
            holding.claims[claim] = min(holding.claims[claim], now)
            holding.ready_at = min(holding.ready_at, now)
            node = node.parent

    def linger(self, claim: Claim, now: float) -> None:
        """Keep the claim for its time to live from now on."""
        if claim.node is not None:
            self._lingering.append((now + self._ttl, claim))
            if len(self._lingering) > LINGERING_MAX:
                self.drop(self._lingering.popleft()[1])
        self._expire(now)

    def drop(self, claim: Claim) -> None:
        """Take the claim back; nothing happens when it is gone already."""
        node, claim.node = claim.node, None
        if node is None:
            return
        claims = self._by_engine[claim.key]
        claims.discard(claim)
        if not claims:
            del self._by_engine[claim.key]
        node.ends -= 1
        while node.parent is not None:
            parent = node.parent
            holding = node.holdings[claim.key]
            ready_at = holding.claims.pop(claim)
            holding.confirmed -= claim.confirmed
            if not holding.claims:
                del node.holdings[claim.key]
            elif ready_at == holding.ready_at:
                holding.ready_at = min(holding.claims.values())
            if not node.holdings:
                del parent.children[node.chain[node.start]]
            elif not node.ends and len(node.children) == 1:
                _merge(parent, node)
            node = parent

    def forget(self, key: EngineKey) -> None:
        """Drop every claim on an engine: it has lost its cache."""
        for claim in list(self._by_engine.get(key, ())):
            self.drop(claim)

    def leading(
        self, chain: Sequence[int], block_size: int, now: float
    ) -> dict[EngineKey, Pending]:
        """Return for each engine the leading run of `chain` that it will hold, in tokens."""
        self._expire(now)
        found: dict[EngineKey, Pending] = {}
        node, depth = self._root, 0
        while depth < len(chain):
            child = node.children.get(chain[depth])
            if child is None:
                break
            end = child.shared(chain, len(chain))
            for key, holding in child.holdings.items():
                ready_at = holding.ready_at
                if ready_at < now and not holding.confirmed:
                    ready_at = 2 * now - ready_at
                found[key] = Pending(end * block_size, ready_at)
            if end < child.end:
                break
            node, depth = child, end
        return found

    def _expire(self, now: float) -> None:
        # The time to live is one for all, so the queue is in order of expiry.
        while self._lingering and self._lingering[0][0] <= now:
            self.drop(self._lingering.popleft()[1])


def _split(parent: _Node, node: _Node, at: int) -> _Node:
    """Put a node for the blocks before `at` above `node`, which keeps the claims that end in it."""
    upper = _Node(node.chain, node.start, at, parent)
    upper.children[node.chain[at]] = node
    upper.holdings = {
        key: _Holding(dict(holding.claims), holding.ready_at, holding.confirmed)
        for key, holding in node.holdings.items()
    }
    parent.children[node.chain[node.start]] = upper
    node.start, node.parent = at, upper
    return upper


def _merge(parent: _Node, node: _Node) -> None:
    """Undo a split whose reason has gone: the only child takes the node's blocks and place."""
    (child,) = node.children.values()
    child.start, child.parent = node.start, parent
    parent.children[node.chain[node.start]] = child
