"""Watches the engines: one probe task each, and the answer to "who can take a turn?".

A probe asks `/health`, then `/metrics`; `/v1/models` is asked when an engine
becomes ready and now and then afterwards. What the fleet learns it hands on
through `Listener`; it knows neither index nor book.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import msgspec

from connector.model import ModelConfig
from gateway.config import Probing
from gateway.fleet.engine import Engine, State
from gateway.fleet.metrics import Page, read_page

log = logging.getLogger("gateway.fleet")


class _Listing(msgspec.Struct):
    data: list[dict[str, Any]]


_listing = msgspec.json.Decoder(_Listing)

# The engines' model cards change only when adapters come and go.
_PROBES_PER_CARDS = 30


class Listener(Protocol):
    """Who wants to know what becomes of the engines."""

    def engine_up(self, engine: Engine) -> None:
        """The engine can take turns (again); nothing is known of its device cache."""
        ...

    def engine_down(self, engine: Engine) -> None:
        """The engine is gone; what was known of its device cache is void."""
        ...

    def engine_reported(self, engine: Engine) -> None:
        """The engine has reported its load."""
        ...


@dataclass(frozen=True, slots=True)
class Hashing:
    """How one model's prefix blocks are hashed, by configuration or by its engines' word."""

    algorithm: str
    block_size: int


class Fleet:
    """All engines of all models."""

    def __init__(
        self,
        models: Iterable[ModelConfig],
        client: httpx.AsyncClient,
        probing: Probing,
        clock: Callable[[], float],
        api_key: str | None = None,
    ) -> None:
        self._models = {model.name: model for model in models}
        self._engines = {
            engine.id: Engine(engine, model.name)
            for model in self._models.values()
            for engine in model.engines
        }
        self._client = client
        self._probing = probing
        self._clock = clock
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._tasks: list[asyncio.Task[None]] = []
        self._hashing: dict[str, Hashing] = {}
        self.listeners: list[Listener] = []

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def engine(self, engine_id: str) -> Engine:
        """Return an engine by id."""
        return self._engines[engine_id]

    def of(self, model: str) -> list[Engine]:
        """Return a model's engines in configured order."""
        return [engine for engine in self._engines.values() if engine.model == model]

    def candidates(self, model: str) -> list[Engine]:
        """Return the engines that can take a turn: ready ones, or, failing those, suspect ones."""
        usable = [engine for engine in self.of(model) if engine.usable]
        ready = [engine for engine in usable if engine.state is State.READY]
        return ready or usable

    def hashing(self, model: str) -> Hashing | None:
        """Return how the model's blocks are hashed; None while no engine has said so."""
        return self._hashing.get(model)

    def start(self) -> None:
        """Begin to watch."""
        for model in self._models.values():
            self._resolve(model)
        self._tasks = [
            asyncio.create_task(self._watch(engine), name=f"probe {engine.id}")
            for engine in self._engines.values()
        ]
        for task in self._tasks:
            task.add_done_callback(_say_if_died)

    async def stop(self) -> None:
        """Stop watching."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def unreachable(self, engine_id: str, cause: str) -> None:
        """Take note that a request could not reach the engine; the next probe decides."""
        engine = self._engines[engine_id]
        if engine.state is State.READY:
            engine.error = cause
            self._move(engine, State.SUSPECT)

    async def _watch(self, engine: Engine) -> None:
        count = 0
        while True:
            engine.probes += 1
            try:
                # The client's own timeout is for each read; this one is for all of it.
                async with asyncio.timeout(3 * self._probing.timeout):
                    page = await self._probe(engine, cards=count % _PROBES_PER_CARDS == 0)
                self._answered(engine, page)
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError) as error:
                self._failed(engine, f"{type(error).__name__}: {error}".rstrip(": "))
            except Exception as error:
                log.exception("the probe of engine %s failed in the gateway itself", engine.id)
                self._failed(engine, f"{type(error).__name__}: {error}")
            else:
                # Cards are asked for again as soon as an engine has come back.
                count = count + 1 if engine.cards else 0
            await asyncio.sleep(self._probing.interval)

    async def _probe(self, engine: Engine, *, cards: bool) -> Page | None:
        base, timeout = engine.config.url, self._probing.timeout
        health = await self._client.get(f"{base}/health", timeout=timeout)
        if health.status_code not in (200, 404):
            raise ValueError(f"/health answered {health.status_code}")
        asked_at = self._clock()
        metrics = await self._client.get(f"{base}/metrics", timeout=timeout)
        page = self._page(engine, metrics)
        if page and page.loads:
            engine.loads, engine.loads_asked_at, engine.loads_at = (
                page.loads,
                asked_at,
                self._clock(),
            )
        if cards or engine.state is not State.READY:
            listing = await self._client.get(
                f"{base}/v1/models", timeout=timeout, headers=self._headers
            )
            if listing.status_code == 200:
                engine.cards = self._cards(engine, listing.content)
            elif health.status_code == 404:
                raise ValueError(f"neither /health nor /v1/models ({listing.status_code})")
        return page

    def _page(self, engine: Engine, answer: httpx.Response) -> Page | None:
        """Read the metrics; an engine whose page cannot be read is alive all the same."""
        if answer.status_code != 200:
            return None
        try:
            page = read_page(answer.text)
        except ValueError as error:
            if engine.metrics_error is None:
                log.warning("the metrics of engine %s cannot be read: %s", engine.id, error)
            engine.metrics_error = str(error)
            return None
        engine.metrics_error = None
        return page

    def _cards(self, engine: Engine, content: bytes) -> list[dict[str, Any]] | None:
        """Return the engine's cards of its model.

        Raises:
            ValueError: if it serves other models only.
        """
        try:
            listed = _listing.decode(content).data
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            log.warning("the model list of engine %s cannot be read", engine.id)
            return None
        cards = [card for card in listed if card.get("id") == engine.model]
        if listed and not cards:
            names = ", ".join(repr(card.get("id")) for card in listed)
            raise ValueError(
                f"it serves {names}, not {engine.model!r}: the model's `name` must be the engines' "
                "--served-model-name"
            )
        return cards

    def _answered(self, engine: Engine, page: Page | None) -> None:
        if page:
            engine.facts = page.facts or engine.facts
        engine.failures, engine.error = 0, None
        self._resolve(self._models[engine.model])
        if engine.state is not State.READY:
            self._move(engine, State.READY)
        if page and page.loads:
            for listener in self.listeners:
                listener.engine_reported(engine)

    def _failed(self, engine: Engine, error: str) -> None:
        before, news = engine.state, error != engine.error
        engine.failures += 1
        engine.error = error
        if engine.state is State.READY:
            self._move(engine, State.SUSPECT)
        if engine.state is State.SUSPECT and engine.failures >= self._probing.failures:
            self._move(engine, State.DOWN)
        if news and engine.state is before and before in (State.STARTING, State.DOWN):
            log.warning(
                "engine %s at %s %s: %s",
                engine.id,
                engine.config.url,
                "has not answered yet" if before is State.STARTING else "is still down",
                error,
                extra={"fields": {"engine": engine.id, "url": engine.config.url, "cause": error}},
            )

    def _move(self, engine: Engine, state: State) -> None:
        before, engine.state, engine.since = engine.state, state, self._clock()
        log.log(
            logging.INFO if state is State.READY else logging.WARNING,
            "engine %s is %s",
            engine.id,
            state,
            extra={"fields": {"engine": engine.id, "was": str(before), "cause": engine.error}},
        )
        for listener in self.listeners:
            # Back from suspicion is no news: it was never given up.
            if state is State.READY and before is not State.SUSPECT:
                listener.engine_up(engine)
            elif state is State.DOWN:
                engine.cards = None
                listener.engine_down(engine)

    def _resolve(self, model: ModelConfig) -> None:
        """Settle how the model is hashed, and name the engines that disagree.

        The configuration's word counts first, then that of the first engine (in
        configured order) that has answered.
        """
        engines = self.of(model.name)
        spoken = next((engine.facts for engine in engines if engine.facts), None)
        algorithm: str | None = model.hashing.algorithm
        if algorithm == "auto":
            algorithm = spoken.algorithm if spoken else None
        size: int | str | None = model.hashing.block_size
        if size == "auto":
            size = spoken.block_size if spoken else None
        if algorithm is None or not isinstance(size, int):
            return
        self._hashing[model.name] = Hashing(algorithm, size)
        for engine in engines:
            mismatch = _mismatch(engine, algorithm, size)
            if mismatch and mismatch != engine.mismatch:
                log.error("engine %s gets no cache credit: %s", engine.id, mismatch)
            engine.mismatch = mismatch


def _say_if_died(task: asyncio.Task[None]) -> None:
    """A watcher never ends by itself: if it did, that is a fault, and must be seen."""
    if not task.cancelled() and (error := task.exception()):
        log.critical(
            "%s has died; its engine is no longer watched", task.get_name(), exc_info=error
        )


def _mismatch(engine: Engine, algorithm: str, block_size: int) -> str | None:
    facts = engine.facts
    if facts is None:
        return None
    if not facts.prefix_caching:
        return "prefix caching is off there (start it with --enable-prefix-caching)"
    if facts.algorithm != algorithm:
        return (
            f"it hashes with {facts.algorithm}, the model with {algorithm} "
            "(--prefix-caching-hash-algo, or hashing.algorithm)"
        )
    if facts.block_size != block_size:
        return (
            f"its blocks hold {facts.block_size} tokens, the model's {block_size} "
            "(--block-size, or hashing.block_size)"
        )
    return None
