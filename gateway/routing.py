"""The one place where prompt, index, fleet, book and policy meet: a request becomes a Placement.

    prompt -> residency (device, pending, pool) -> views -> ranking -> decision with its Charge

Between taking the views and taking the Charge nothing waits, so two turns never
decide on the same picture of the fleet. The only wait on the way is the pool
look-up, which carries a deadline of its own.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from connector.blocks import Chain, HashingError
from connector.model import ModelConfig
from gateway.fleet.engine import Engine
from gateway.fleet.fleet import Fleet
from gateway.index.device import DeviceIndex
from gateway.index.history import HistoryIndex
from gateway.index.pool import PoolIndex
from gateway.prompt.reader import Kind, Prompt, PromptReader
from gateway.telemetry.decisions import Attempt, Decisions, Record
from gateway.telemetry.metrics import Metrics
from policies import base
from policies.base import (
    Decision,
    Ending,
    EngineKey,
    EngineView,
    Policy,
    PoolSpan,
    Ranking,
    Role,
    Turn,
    Usage,
)
from policies.book import Book, Charge

log = logging.getLogger("gateway.routing")

REPORT_SECONDS = 300.0
"""How long an engine's report of what it holds is awaited: a turn may queue for minutes."""


class UnknownModel(Exception):
    """No such model is configured."""


class NoEngine(Exception):
    """No engine of the model can take a turn; the text says why, `detail` with the causes.

    The causes may name addresses, and are not for clients.
    """

    def __init__(self, message: str, detail: str | None = None) -> None:
        super().__init__(message)
        self.detail = detail


class Rejected(Exception):
    """The policy refuses the turn; the text says why."""


class UnknownPolicy(Exception):
    """A request names a policy that does not exist, or may not name one."""


@dataclass(frozen=True, slots=True)
class Request:
    """What routing needs to know of a request; `body` is decoded and stays unchanged."""

    id: str
    route: str
    kind: Kind
    model: str
    body: Mapping[str, Any]
    session: str
    size: int
    policy: str | None = None
    unreadable: str | None = None


class Target(NamedTuple):
    """Where an attempt goes: the engine's name, its base URL, and headers for it alone."""

    engine: str
    url: str
    headers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Residency:
    """Where a prompt's blocks are, and what finding out took."""

    device: dict[EngineKey, int]
    pool: tuple[PoolSpan, ...]
    pool_state: str
    pool_seconds: float


@dataclass(slots=True)
class ModelRoom:
    """One model's parts: its configuration, its prompt reader, its pool."""

    config: ModelConfig
    reader: PromptReader
    pool: PoolIndex | None
    hashing_error: str | None = None


class Policies:
    """All policies by name, and which of them acts. Each hears of every decision and outcome."""

    def __init__(
        self, acting: str, options: Mapping[str, Mapping[str, Any]], seed: int = 0
    ) -> None:
        """Make every registered policy.

        Raises:
            policies.base.PolicyError: for unknown names or options.
        """
        for name in options:
            base.options(name)
        self._options = {name: dict(options.get(name, {})) for name in base.names()}
        self._seed = seed
        self._all = {
            name: base.create(name, given, seed=seed) for name, given in self._options.items()
        }
        base.options(acting)
        self.acting = acting

    def __iter__(self) -> Any:
        return iter(self._all.items())

    def act(self, name: str) -> None:
        """Let policy `name` decide from the next turn on.

        Raises:
            policies.base.PolicyError: if there is none.
        """
        base.options(name)
        self.acting = name

    def reconfigure(self, options: Mapping[str, Mapping[str, Any]], seed: int) -> None:
        """Make anew the policies whose options (or seed) have changed; the others keep their state.

        Raises:
            policies.base.PolicyError: for unknown names or options; nothing is changed then.
        """
        for name in options:
            base.options(name)
        wanted = {name: dict(options.get(name, {})) for name in base.names()}
        made = {
            name: base.create(name, given, seed=seed)
            for name, given in wanted.items()
            if given != self._options[name] or seed != self._seed
        }
        self._all |= made
        self._options, self._seed = wanted, seed

    def get(self, name: str) -> Policy:
        """Return a policy by name.

        Raises:
            policies.base.PolicyError: if there is none.
        """
        base.options(name)
        return self._all[name]

    def committed(self, decision: Decision) -> None:
        """Tell all policies."""
        for policy in self._all.values():
            policy.committed(decision)

    def observed(self, outcome: base.Outcome) -> None:
        """Tell all policies."""
        for policy in self._all.values():
            policy.observed(outcome)


class Placement:
    """A turn's decision, carried out: its targets in order, its Charge, its record.

    The proxy drives it: `trying` for each attempt, `failed` for one that could
    not answer, `first_token`, and `ended` exactly once.
    """

    def __init__(
        self,
        router: Router,
        decision: Decision,
        charge: Charge,
        targets: Sequence[Target],
        record: Record,
        chain: Chain,
        began: float,
        *,
        reports: bool = False,
    ) -> None:
        self.reports = reports
        """Whether the engine is to announce anew what it holds of the prompt."""
        self.decision = decision
        self.targets = targets
        self.record = record
        self._router = router
        self._charge = charge
        self._chain = chain
        self._began = began

    def trying(self, index: int) -> None:
        """Move the Charge to the engine of this attempt."""
        candidate = self.decision.ranking.prefill[index]
        if candidate.key != self._charge.decision.key:
            now = self._router.clock()
            moved = Decision(
                turn=self.decision.turn,
                policy=self.decision.policy,
                ranking=self.decision.ranking,
                key=candidate.key,
                expected=self.decision.turn.cached(candidate.key),
                at=now,
            )
            self._charge.move(moved, now)
            self.record.engine = str(candidate.key)
            self.record.expected = _cached(moved)
        if self.reports:
            self._router.report_expected(candidate.key, self._chain)
        self.record.attempts.append(Attempt(str(candidate.key)))

    def failed(self, index: int, cause: str, detail: str, *, unreachable: bool) -> None:
        """Take note that this attempt could not answer."""
        self.record.attempts[-1].failed, self.record.attempts[-1].detail = cause, detail
        engine = self.decision.ranking.prefill[index].key.engine
        self._router.metrics.attempt_failed(engine, cause)
        if unreachable:
            self._router.fleet.unreachable(engine, cause)

    def first_token(self) -> None:
        """Take note of the first byte of a streamed answer."""
        now = self._router.clock()
        self._charge.first_token(now)
        self.record.ttft_seconds = now - self._began

    def ended(self, ending: Ending, status: int, usage: Usage | None) -> None:
        """Release the Charge and close the record."""
        now = self._router.clock()
        outcome = self._charge.release(ending, now, usage)
        if outcome is None:
            return
        record = self.record
        record.ending, record.status, record.seconds = str(ending), status, now - self._began
        if usage:
            record.reported = {
                "prompt": usage.prompt,
                "cached": usage.cached,
                "output": usage.output,
            }
        self._router.ended(outcome, self._chain, record)


@dataclass(slots=True)
class Explanation:
    """What would be decided for a body, and on what grounds."""

    prompt: Prompt
    residency: Residency
    turn: Turn
    views: tuple[EngineView, ...]
    rankings: dict[str, Ranking] = field(default_factory=dict)


class Router:
    """Places turns."""

    def __init__(
        self,
        rooms: Mapping[str, ModelRoom],
        fleet: Fleet,
        device: DeviceIndex,
        history: HistoryIndex,
        book: Book,
        policies: Policies,
        decisions: Decisions,
        metrics: Metrics,
        *,
        policy_header: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rooms = rooms
        self.fleet = fleet
        self.policies = policies
        self.decisions = decisions
        self.metrics = metrics
        self.clock = clock
        self.book = book
        self._device = device
        self._history = history
        self.policy_header = policy_header
        self.on_ended: list[Callable[[base.Outcome, Chain, Record], None]] = []
        # Which turns ask for a report is no part of a decision, so it need not be repeatable.
        self._chance = random.Random()
        self._masked: dict[str, tuple[str, ...]] = {}
        self._unmasking: dict[str, asyncio.TimerHandle] = {}

    async def place(self, request: Request) -> Placement:
        """Decide where a request goes, and take its Charge.

        Raises:
            UnknownModel, NoEngine, Rejected, UnknownPolicy: as named.
            connector.render.RenderError: if the body cannot be a prompt.
        """
        began = self.clock()
        name = self._policy_for(request)
        room = self._room(request.model)
        if not self.fleet.candidates(request.model):
            raise self._nowhere(request.model)
        prompt = await self._read(room, request)
        read = self.clock()
        residency = await self._find(room, prompt)
        found = self.clock()

        # From here to the Charge nothing waits.
        engines = self.fleet.candidates(request.model)
        if not engines:
            raise self._nowhere(request.model)
        turn = self._turn(request, prompt, residency, engines)
        views = self.book.views([key for engine in engines for key in engine.keys], found)
        policy = self.policies.get(name)
        ranking = policy.rank(turn, views, found)
        if ranking.reject is not None:
            raise Rejected(ranking.reject)
        if not ranking.prefill:
            raise NoEngine(f"no engine of model {request.model!r} has a role that may prefill")
        best = ranking.prefill[0]
        decision = Decision(turn, name, ranking, best.key, turn.cached(best.key), found)
        charge = self.book.charge(decision, found)
        self.policies.committed(decision)
        decided = self.clock()

        record = Record(
            id=request.id,
            at=time.time(),
            route=request.route,
            model=request.model,
            policy=name,
            session=request.session,
            prompt_tokens=prompt.tokens,
            blocks=len(prompt.chain),
            exact=prompt.exact,
            inexact_reason=prompt.reason,
            pool_state=residency.pool_state,
            engine=str(best.key),
            reason=best.reason,
            expected=_cached(decision),
            ranking=[
                {"engine": str(c.key), "cost": c.cost, "reason": c.reason, **_terms(c)}
                for c in ranking.prefill
            ],
            prompt_seconds=read - began,
            pool_seconds=residency.pool_seconds,
            decide_seconds=decided - found,
        )
        self.decisions.add(record)
        self.metrics.decided(record)
        if room.pool is not None and prompt.exact and len(prompt.chain):
            room.pool.verify_later(prompt.chain)
        targets = [self._target(candidate.key) for candidate in ranking.prefill]
        share = room.config.full_reports
        reports = (
            share > 0
            and prompt.exact
            and len(prompt.chain) > 0
            and "vllm_xargs" not in request.body
            and self._chance.random() < share
        )
        return Placement(
            self, decision, charge, targets, record, prompt.chain, began, reports=reports
        )

    async def explain(self, request: Request) -> Explanation:
        """Return what every policy would decide, without deciding.

        Raises:
            UnknownModel: if no such model is configured.
            connector.render.RenderError: if the body cannot be a prompt.
        """
        room = self._room(request.model)
        prompt = await self._read(room, request)
        residency = await self._find(room, prompt)
        now = self.clock()
        engines = self.fleet.candidates(request.model)
        turn = self._turn(request, prompt, residency, engines)
        views = self.book.views([key for engine in engines for key in engine.keys], now)
        rankings = {name: policy.rank(turn, views, now) for name, policy in self.policies}
        return Explanation(prompt, residency, turn, views, rankings)

    def report_expected(self, key: EngineKey, chain: Chain) -> None:
        """Take note that an engine is being asked to announce what it holds of a chain.

        Its report comes with the turn's first step; what has not come much later never will.
        """
        if self.fleet.engine(key.engine).config.events is None:
            return
        report = self._device.expect_report(key, chain.ids[0])
        loop = asyncio.get_running_loop()
        loop.call_later(REPORT_SECONDS, self._device.withdraw_report, key, report)

    def ended(self, outcome: base.Outcome, chain: Chain, record: Record) -> None:
        """Let policies, history and metrics learn from a turn's end."""
        self.policies.observed(outcome)
        self.metrics.ended(record)
        for tell in self.on_ended:
            tell(outcome, chain, record)
        key = outcome.decision.key
        answered = outcome.first_token_at is not None or outcome.ending is Ending.DONE
        if self._by_history(key, exact=record.exact):
            if answered:
                self._history.record(key, chain.ids)
        elif outcome.usage is not None and outcome.usage.cached is not None:
            self._learn(outcome.decision, chain, outcome.usage, outcome.usage.cached)

    def _learn(self, decision: Decision, chain: Chain, usage: Usage, cached: int) -> None:
        """Learn from what an engine says was cached which blocks it held unheard of.

        Whether they lay on its device all along or came from the pool just now:
        they are on its device when the turn ends. Those from before this gateway
        listened no event will ever name.
        """
        key, known = decision.key, decision.turn.device.get(decision.key, 0)
        if key in decision.turn.uncredited or usage.prompt != decision.turn.prompt_tokens:
            return  # its blocks are not ours
        if cached > known:
            self.metrics.learned(decision.turn.model, self._device.retained(key, chain, cached))
        elif cached < min(known, decision.turn.cacheable):
            self._device.doubted(key, chain, cached)

    def close(self) -> None:
        """Drop what was to happen later."""
        for handle in self._unmasking.values():
            handle.cancel()

    # What the fleet tells (gateway.fleet.fleet.Listener).

    def engine_up(self, engine: Engine) -> None:
        """Let the engine take part in decisions, and later credit its pool segments again."""
        if engine.id in self._masked:
            # The master goes on listing the dead instance's blocks until their lease ends.
            pool = self.rooms[engine.model].config.pool
            hold = pool.client_ttl if pool else 0.0
            loop = asyncio.get_running_loop()
            self._unmasking[engine.id] = loop.call_later(hold, self._unmask, engine.id)
        self.engine_reported(engine)

    def engine_down(self, engine: Engine) -> None:
        """Forget what is believed of the engine by own history, and mask its pool segments.

        What its KV events told stays: the subscriber itself notices whether the
        process that comes back is another one.
        """
        for key in engine.keys:
            self._history.forget(key)
            self.book.forget(key)
        if pending := self._unmasking.pop(engine.id, None):
            pending.cancel()
        self._masked[engine.id] = engine.config.segments
        self._mask()

    def engine_reported(self, engine: Engine) -> None:
        """Enter the engine's load in the book."""
        for key in engine.keys:
            self.book.add(
                key,
                role=Role(engine.config.role),
                segments=frozenset(engine.config.segments),
                model=engine.model,
            )
            if engine.facts is not None:
                self._device.set_limit(key, engine.facts.blocks)
            load = engine.loads[key.rank]
            if engine.loads_at is not None:
                self.book.report(
                    key,
                    running=load.running,
                    waiting=load.waiting,
                    kv_usage=load.kv_usage,
                    at=engine.loads_at,
                    asked_at=engine.loads_asked_at,
                )

    def engine_restarted(self, key: EngineKey) -> None:
        """Forget predictions for an engine whose events say that it began anew."""
        self.book.forget(key)

    def _unmask(self, engine_id: str) -> None:
        self._masked.pop(engine_id, None)
        self._unmasking.pop(engine_id, None)
        self._mask()

    def _mask(self) -> None:
        # Placement is random by default: any engine's segment may hold any model's blocks.
        segments = [segment for masked in self._masked.values() for segment in masked]
        for room in self.rooms.values():
            if room.pool is not None:
                room.pool.mask(segments)

    def _room(self, model: str) -> ModelRoom:
        room = self.rooms.get(model)
        if room is None:
            raise UnknownModel(model)
        return room

    def _policy_for(self, request: Request) -> str:
        if request.policy is None:
            return self.policies.acting
        if not self.policy_header:
            raise UnknownPolicy(
                "a request may not name its policy here (policy_header is off); "
                "leave X-Gateway-Policy out"
            )
        try:
            base.options(request.policy)
        except base.PolicyError as error:
            raise UnknownPolicy(str(error)) from error
        return request.policy

    async def _read(self, room: ModelRoom, request: Request) -> Prompt:
        hashing = self.fleet.hashing(request.model)
        if hashing is not None and room.config.exact:
            try:
                room.reader.hash_with(hashing.algorithm, hashing.block_size)
                room.hashing_error = None
            except HashingError as error:
                if room.hashing_error is None:
                    log.error("model %s cannot be hashed exactly: %s", request.model, error)
                room.hashing_error = str(error)
        return await room.reader.read(request.kind, request.body, request.size, request.unreadable)

    async def _find(self, room: ModelRoom, prompt: Prompt) -> Residency:
        chain = prompt.chain
        if not prompt.exact:
            device = self._historic(room.config.name, chain, exact=False)
            return Residency(device, (), "inexact", 0.0)
        pool: tuple[PoolSpan, ...] = ()
        state, seconds = "none", 0.0
        if room.pool is not None and len(chain):
            answer = await room.pool.lookup(chain)
            pool, state, seconds = answer.spans, str(answer.state), answer.seconds
            self.metrics.pool_looked_up(room.config.name, state)
        device = self._device.leading(chain)
        device |= self._historic(room.config.name, chain, exact=True)
        return Residency(device, pool, state, seconds)

    def _historic(self, model: str, chain: Chain, *, exact: bool) -> dict[EngineKey, int]:
        """Return leading tokens by own history, for the engines known in no better way."""
        keys = [
            key
            for engine in self.fleet.of(model)
            for key in engine.keys
            if self._by_history(key, exact=exact)
        ]
        found = self._history.leading(chain.ids, keys)
        return {key: blocks * chain.block_size for key, blocks in found.items()}

    def _by_history(self, key: EngineKey, *, exact: bool) -> bool:
        return not exact or self.fleet.engine(key.engine).config.events is None

    def _turn(
        self, request: Request, prompt: Prompt, residency: Residency, engines: Sequence[Engine]
    ) -> Turn:
        disagree = frozenset(key for engine in engines if engine.mismatch for key in engine.keys)
        return Turn(
            id=request.id,
            model=request.model,
            prompt_tokens=prompt.tokens,
            block_size=prompt.chain.block_size,
            chain=prompt.chain.ids,
            device=residency.device,
            pending=self.book.pending(prompt.chain.ids, prompt.chain.block_size, self.clock()),
            pool=residency.pool,
            session=request.session,
            exact=prompt.exact,
            uncredited=disagree,
            streams=request.body.get("stream") is True,
        )

    def _target(self, key: EngineKey) -> Target:
        engine = self.fleet.engine(key.engine)
        several = len(engine.keys) > 1
        headers = (("X-data-parallel-rank", str(key.rank)),) if several else ()
        return Target(str(key), engine.config.url, headers)

    def _nowhere(self, model: str) -> NoEngine:
        return NoEngine(self._no_engine(model, causes=False), self.why_no_engine(model))

    def why_no_engine(self, model: str) -> str:
        """Return, in words, the state of each engine of a model that can take no turn."""
        return self._no_engine(model, causes=True)

    def _no_engine(self, model: str, *, causes: bool) -> str:
        states = ", ".join(
            f"{engine.id} is {engine.state}"
            + (f" ({engine.error})" if causes and engine.error else "")
            for engine in self.fleet.of(model)
        )
        return f"no engine of model {model!r} can take a request now: {states}"


def _cached(decision: Decision) -> dict[str, int]:
    return {"device": decision.expected.device, "pool": decision.expected.pool}


def _terms(candidate: base.Candidate) -> dict[str, Any]:
    return {"terms": dict(candidate.terms)} if candidate.terms else {}
