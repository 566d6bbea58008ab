"""What a policy is given, what it answers, and how policies are found by name.

A policy is a frozen idea of where a turn should go. It sees one `Turn` and the
fleet as a sequence of `EngineView`s, and answers with a `Ranking`: every
eligible engine in order, so that the fallbacks of a failed attempt are already
decided. `rank` is pure. Whatever a policy remembers moves only in `committed`
and `observed`, which also reach instances that merely shadow the acting one.

Units: tokens are counted in tokens, time in seconds on a monotonic clock that
the caller hands in, costs in seconds unless a policy's docstring says
otherwise. Nothing here reads a clock or draws chance from the process.
"""

from __future__ import annotations

import abc
import dataclasses
import difflib
import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

LOCAL_DISCOUNT = 0.5
"""What a memory span costs in a segment of the engine itself, as a share of one across the network:
the bytes are copied once within the host instead of crossing it, the wire and it again."""


class EngineKey(NamedTuple):
    """One schedulable engine: a configured engine id and its data-parallel rank."""

    engine: str
    rank: int = 0

    def __str__(self) -> str:
        return self.engine if self.rank == 0 else f"{self.engine}/{self.rank}"


class Role(StrEnum):
    """What an engine may be asked to do."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Tier(StrEnum):
    """Where in the pool a block's bytes lie, cheapest first."""

    MEMORY = "memory"
    SSD = "ssd"
    DISK = "disk"


class PoolSpan(NamedTuple):
    """A stretch of the pool's leading run that lies in one tier of one segment."""

    tokens: int
    tier: Tier
    segment: str


class Pending(NamedTuple):
    """Leading tokens that an engine will hold once prefills already sent to it are done."""

    tokens: int
    ready_at: float


class Cached(NamedTuple):
    """Prompt tokens that one engine need not compute: on its device, and beyond in the pool."""

    device: int
    pool: int

    @property
    def total(self) -> int:
        """Device and pool tokens together; what the engine's `cached_tokens` should say."""
        return self.device + self.pool


@dataclass(frozen=True, slots=True)
class Turn:
    """One request as a policy sees it: its prompt and where its prefix blocks are.

    `chain` holds the low 64 bits of each full block's hash; a hash takes in its
    parent's, so each id stands for the whole prefix up to it. `device` counts the
    leading tokens that an engine is known to hold; `pending` those it will hold
    when the prefills in flight there are done. `pool` is the leading unbroken
    run of the shared pool *from the first token on*, in order: an engine loads
    from the pool only what follows its own device hit inside that run (the
    store connector looks the whole prefix up from block 0). `uncredited` names
    engines whose hashes are not the model's: nothing is expected of them.
    `streams` is false for a turn whose answer comes whole and shows no first token.
    """

    id: str
    model: str
    prompt_tokens: int
    block_size: int
    chain: Sequence[int] = ()
    device: Mapping[EngineKey, int] = field(default_factory=lambda: MappingProxyType({}))
    pending: Mapping[EngineKey, Pending] = field(default_factory=lambda: MappingProxyType({}))
    pool: tuple[PoolSpan, ...] = ()
    session: str = ""
    expected_output: int = 256
    exact: bool = True
    uncredited: frozenset[EngineKey] = frozenset()
    streams: bool = True

    @property
    def cacheable(self) -> int:
        """The most prompt tokens that can come from a cache: one is always computed."""
        if self.prompt_tokens < 1:
            return 0
        return (self.prompt_tokens - 1) // self.block_size * self.block_size

    @property
    def pool_run(self) -> int:
        """Tokens of the pool's leading run."""
        return sum(span.tokens for span in self.pool)

    def cached(self, key: EngineKey) -> Cached:
        """Expect of engine `key`: device tokens (heard of or pending), then pool tokens beyond."""
        if key in self.uncredited:
            return Cached(0, 0)
        pending = self.pending.get(key)
        known = self.device.get(key, 0)
        device = min(max(known, pending.tokens if pending else 0), self.cacheable)
        return Cached(device, max(0, min(self.pool_run, self.cacheable) - device))

    def fetched(self, key: EngineKey) -> tuple[PoolSpan, ...]:
        """Return the spans that engine `key` would load: the pool's run less its device tokens."""
        return self.beyond(self.cached(key).device)

    def beyond(self, device: int) -> tuple[PoolSpan, ...]:
        """Return the spans that an engine with `device` leading tokens would load."""
        skip, left = device, min(self.pool_run, self.cacheable) - device
        spans = []
        for tokens, tier, segment in self.pool:
            skipped = min(skip, tokens)
            skip -= skipped
            take = min(tokens - skipped, left)
            if take > 0:
                spans.append(PoolSpan(take, tier, segment))
                left -= take
        return tuple(spans)


@dataclass(frozen=True, slots=True)
class Rates:
    """What an engine's work costs, in seconds; priors until the book has learned better.

    The priors are those of a mid-size model on one current accelerator: 10,000
    prompt tokens per second computed, 100,000 fetched from memory of the pool
    (about 8 GB/s at 80 KB per token), a tenth of that from SSD.
    """

    prefill: float = 1e-4
    fetch: Mapping[Tier, float] = field(
        default_factory=lambda: MappingProxyType(
            {Tier.MEMORY: 1e-5, Tier.SSD: 1e-4, Tier.DISK: 2e-4}
        )
    )
    overhead: float = 0.02
    decode: float = 0.02

    def fetch_seconds(
        self, spans: Sequence[PoolSpan], local: frozenset[str] = frozenset()
    ) -> float:
        """Return what loading `spans` costs an engine that owns the segments `local`.

        Memory of its own counts `LOCAL_DISCOUNT`; on SSD and disk the medium is
        the bottleneck, wherever it stands.
        """
        seconds = 0.0
        for tokens, tier, segment in spans:
            near = tier is Tier.MEMORY and segment in local
            seconds += tokens * self.fetch[tier] * (LOCAL_DISCOUNT if near else 1.0)
        return seconds


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine as the book knows it at a moment; replaced, never changed.

    `running` and `waiting` count requests of everybody, corrected by what this
    gateway has begun and ended since the engine last reported. Of this
    gateway's own turns, `queued_prefill` are prompt tokens still to be computed
    there, `queued_fetch` seconds of pool loads still to come, `decode_tokens`
    the context (prompt and expected output) of those that have their first
    token. `foreign_prefill` is a guess at the tokens to compute for others'
    waiting requests. `age` is how old the engine's own report is, in whole
    seconds rounded down (so that a view does not change with every look) and
    infinite when there has been none. `overdue` is by how many seconds the first
    token of this gateway's oldest waiting turn is later than was estimated, in
    whole seconds rounded down: an engine that hangs shows it.
    """

    key: EngineKey
    role: Role = Role.BOTH
    segments: frozenset[str] = frozenset()
    running: int = 0
    waiting: int = 0
    queued_prefill: int = 0
    queued_fetch: float = 0.0
    decode_tokens: int = 0
    kv_usage: float = 0.0
    rates: Rates = Rates()
    age: float = float("inf")
    foreign_prefill: int = 0
    overdue: float = 0.0

    @property
    def load(self) -> int:
        """Requests in the engine, running and waiting."""
        return self.running + self.waiting


class Candidate(NamedTuple):
    """An engine's place in a ranking, and why it stands there."""

    key: EngineKey
    cost: float
    reason: str
    terms: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Ranking:
    """Every eligible engine in order, for each leg of a turn.

    `prefill` and `decode` are one object where roles are not apart.
    """

    prefill: tuple[Candidate, ...]
    decode: tuple[Candidate, ...]
    reject: str | None = None

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Ranking:
        """Rank a fleet whose engines do both prefill and decode."""
        order = tuple(candidates)
        return cls(order, order)

    @classmethod
    def by_role(cls, candidates: Sequence[Candidate], fleet: Sequence[EngineView]) -> Ranking:
        """Rank a fleet in one order, leaving out of each leg the engines not meant for it."""
        order = tuple(candidates)
        roles = {view.key: view.role for view in fleet}
        if all(role is Role.BOTH for role in roles.values()):
            return cls(order, order)
        return cls(
            tuple(c for c in order if roles[c.key] is not Role.DECODE),
            tuple(c for c in order if roles[c.key] is not Role.PREFILL),
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """A ranking that was acted on: turn `turn` was sent to `key`, expecting `expected` there."""

    turn: Turn
    policy: str
    ranking: Ranking
    key: EngineKey
    expected: Cached
    at: float


class Ending(StrEnum):
    """How a turn ended.

    `refused` is the engine's judgement of the request (a 4xx answer), `failed`
    a fault of the engine or on the way to it.
    """

    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Usage:
    """The engine's own count for one turn; `cached` is None where it was not reported."""

    prompt: int
    cached: int | None
    output: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a decision.

    `first_token_at` is None when no byte of an answer came, or it came whole.
    """

    decision: Decision
    ending: Ending
    first_token_at: float | None
    ended_at: float
    usage: Usage | None = None


class Policy(Protocol):
    """The contract of a routing policy; see the module's first lines."""

    def rank(self, turn: Turn, fleet: Sequence[EngineView], now: float) -> Ranking:
        """Order the fleet for this turn; pure, so ranking twice ranks alike."""
        ...

    def committed(self, decision: Decision) -> None:
        """Take note that this decision was acted on (by this policy or by the one it shadows)."""
        ...

    def observed(self, outcome: Outcome) -> None:
        """Take note of how a decision ended."""
        ...


class PolicyError(ValueError):
    """A policy or an option of one that does not exist or has an impossible value."""


@dataclass
class BasePolicy(abc.ABC):
    """Common ground of the policies here: a seed for chance, and nothing remembered.

    Options are the subclass's dataclass fields, each with a plain default whose
    type is the option's type; `__post_init__` raises `PolicyError` for a value
    out of range. What a policy remembers is a field with `init=False`.
    """

    seed: int = field(default=0, kw_only=True)

    @abc.abstractmethod
    def rank(self, turn: Turn, fleet: Sequence[EngineView], now: float) -> Ranking:
        """Order the fleet for this turn; pure, so ranking twice ranks alike."""

    def committed(self, decision: Decision) -> None:  # noqa: B027 - most policies need neither
        """Remember nothing."""

    def observed(self, outcome: Outcome) -> None:  # noqa: B027
        """Learn nothing."""

    def chance(self, turn: Turn) -> random.Random:
        """Return the randomness of this turn: the same for the same seed and turn id."""
        digest = hashlib.blake2b(f"{self.seed}/{turn.id}".encode(), digest_size=8).digest()
        return random.Random(int.from_bytes(digest, "big"))


P = TypeVar("P", bound=type[BasePolicy])
_REGISTRY: dict[str, type[BasePolicy]] = {}


def register(name: str) -> Callable[[P], P]:
    """Register a policy class, a dataclass whose fields are its options, under its field name.

    Raises:
        PolicyError: if the name is taken.
    """

    def put(cls: P) -> P:
        if name in _REGISTRY:
            raise PolicyError(f"policy {name!r} is registered twice")
        _REGISTRY[name] = cls
        return cls

    return put


def names() -> list[str]:
    """Return the registered policies' names, sorted."""
    return sorted(_REGISTRY)


def options(name: str) -> dict[str, Any]:
    """Return a policy's options with their defaults.

    Raises:
        PolicyError: if there is no such policy.
    """
    cls = _find(name)
    return {f.name: f.default for f in dataclasses.fields(cls) if f.init and f.name != "seed"}


def summary(name: str) -> str:
    """Return the first sentence of what a policy says of itself.

    Raises:
        PolicyError: if there is no such policy.
    """
    return (_find(name).__doc__ or "").strip().partition("\n\n")[0].replace("\n    ", " ")


def create(name: str, given: Mapping[str, Any] | None = None, *, seed: int = 0) -> Policy:
    """Make a policy by name with the options of the configuration.

    Raises:
        PolicyError: for an unknown policy or option (the nearest name is
            suggested) and for a value of the wrong type or range.
    """
    cls = _find(name)
    defaults = options(name)
    values: dict[str, Any] = {}
    for key, value in (given or {}).items():
        if key not in defaults:
            raise PolicyError(f"policy {name!r} has no option {key!r}{_nearest(key, defaults)}")
        values[key] = _fit(name, key, value, type(defaults[key]))
    return cls(**values, seed=seed)


def _fit(name: str, key: str, value: object, kind: type) -> object:
    # YAML writes 2 where a float is meant, and True is no number.
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise PolicyError(
            f"policy {name!r}: option {key!r} must be {kind.__name__}, not {type(value).__name__}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise PolicyError(f"policy {name!r}: option {key!r} must be a finite number, not {value}")
    return value


def _find(name: str) -> type[BasePolicy]:
    if name not in _REGISTRY:
        raise PolicyError(f"there is no policy {name!r}{_nearest(name, _REGISTRY)}")
    return _REGISTRY[name]


def _nearest(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(known)) or 'none'}"
