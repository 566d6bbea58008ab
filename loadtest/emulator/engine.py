"""One emulated engine: its process, so to speak, with its port, publisher and pool segment.

What lives as long as the fleet is here (id, ports, faults); what ends with the
process is an incarnation: the model with its cache, the publisher and its
numbers, the metrics, the segment's owner.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

from connector.blocks import Hasher
from connector.render import Inexact, Renderer, RenderError
from loadtest.emulator import bodies, control, wire
from loadtest.emulator.bodies import Body, Refused, Wish
from loadtest.emulator.exchange import Choice, Exchange
from loadtest.emulator.faults import NO_FAULTS, OF_ENGINE, Faults
from loadtest.emulator.listener import Handler, Listener, abort, application
from loadtest.emulator.metrics import CONTENT_TYPE, Metrics
from loadtest.emulator.publisher import Publisher
from loadtest.emulator.runner import Runner
from loadtest.emulator.settings import Settings
from loadtest.emulator.words import Words
from loadtest.engine import Engine
from loadtest.pool import Pool, Segment

T = TypeVar("T")

# A body larger than this is rendered in a thread: the others' tokens go on meanwhile.
_LARGE = 32 * 1024


class Prompts:
    """What all engines of a fleet share: tokenizer, template, hashing, answers."""

    def __init__(self, settings: Settings, renderer: Renderer, hasher: Hasher) -> None:
        self.settings = settings
        self.renderer = renderer
        self.hasher = hasher
        self.words = Words(renderer.tokenizer)
        self.vocabulary = renderer.tokenizer.get_vocab_size()

    def chat(self, body: Body) -> list[int]:
        """Return the token ids of a chat's prompt. Raises Refused."""
        transfer = body.get("kv_transfer_params")
        given = transfer.get("prompt_token_ids") if isinstance(transfer, dict) else None
        if isinstance(given, list) and all(type(token) is int for token in given):
            return given
        if not body.get("messages"):
            raise Refused(
                "Cannot apply chat template to an empty conversation. Provide at least one message."
            )
        try:
            return self.renderer.chat(body).token_ids
        except RenderError as error:
            raise Refused(str(error)) from error
        except Inexact as error:
            raise Refused(f"the emulator cannot render this as an engine would: {error}") from error

    def completion(self, body: Body) -> list[list[int]]:
        """Return the token ids of a completion's prompts. Raises Refused."""
        prompt = body.get("prompt")
        if not prompt or not isinstance(prompt, str | list):
            raise bodies.no_prompt(body)
        try:
            return [rendered.token_ids for rendered in self.renderer.completion(body)]
        except (RenderError, Inexact) as error:
            raise Refused(str(error)) from error

    def choices(self, prompts: list[list[int]], wanted: Wish, *, chat: bool) -> list[Choice]:
        """Return the choices that answer prompts, `wanted.n` each."""
        settings = self.settings
        made: list[Choice] = []
        for prompt in prompts:
            bodies.check_prompt(prompt, settings.context, self.vocabulary)
            length = min(
                wanted.max_tokens or settings.default_max_tokens, settings.context - len(prompt)
            )
            for n in range(wanted.n):
                answer = self.words.answer(prompt, n, length, opening=chat)
                answer, pieces, stop = self._stopped(answer, wanted.stop)
                chain = self.hasher.chain(prompt + answer, salt=wanted.salt)
                made.append(
                    Choice(
                        index=len(made),
                        prompt=len(prompt),
                        output=len(answer),
                        hashes=list(chain),
                        report_hits=wanted.report_hits,
                        prompt_ids=prompt,
                        answer=answer,
                        pieces=pieces,
                        finish="length" if stop is None else "stop",
                        stop=stop,
                        chain=chain,
                        salt=wanted.salt,
                    )
                )
        return made

    def _stopped(
        self, answer: list[int], stops: tuple[str, ...]
    ) -> tuple[list[int], list[str], str | None]:
        """Cut an answer at the first stop string, which is not part of it."""
        pieces = self.words.pieces(answer)
        if stops:
            text = "".join(pieces)
            found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
            if found:
                at, stop = min(found)
                length = 0
                for i, piece in enumerate(pieces):
                    length += len(piece)
                    if length >= at + len(stop):
                        kept = pieces[: i + 1]
                        _cut(kept, at)
                        return answer[: i + 1], kept, stop
        return answer, pieces, None


def _cut(pieces: list[str], length: int) -> None:
    for i, piece in enumerate(pieces):
        pieces[i] = piece[: max(0, length)]
        length -= len(piece)


@dataclass(slots=True)
class _Incarnation:
    runner: Runner
    publisher: Publisher | None
    segment: Segment | None


class EmulatedEngine:
    """One engine; `segment` names its share of the pool, None where there is no pool."""

    def __init__(
        self,
        engine_id: str,
        prompts: Prompts,
        *,
        port: int = 0,
        pool: Pool | None = None,
        segment: str | None = None,
        faults: Faults = NO_FAULTS,
    ) -> None:
        settings = prompts.settings
        self.id = engine_id
        self.segment = segment
        self.faults = faults
        self.possible = OF_ENGINE
        self.incarnations = 0
        self.events_port = 0
        self.replay_port = 0
        self._prompts = prompts
        self._settings = settings
        self._pool = pool
        self._listener = Listener(settings.host, port)
        self._life: _Incarnation | None = None
        self._changes = asyncio.Lock()
        self._moving = asyncio.Event()
        self._created = int(time.time())
        self._frozen: bytes | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return self._listener.url

    @property
    def events(self) -> str | None:
        """Endpoint of its KV events."""
        return _endpoint(self._settings.host, self.events_port)

    @property
    def replay(self) -> str | None:
        """Endpoint of their replay."""
        return _endpoint(self._settings.host, self.replay_port)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._life is not None

    def status(self) -> dict[str, Any]:
        """Return what the control listener says of it."""
        return {
            "id": self.id,
            "url": self.url,
            "alive": self.alive,
            "incarnations": self.incarnations,
            "faults": self.faults.model_dump(),
        }

    # -- its life --------------------------------------------------------------

    async def start(self) -> None:
        """Start a new incarnation, with an empty cache; nothing where it runs."""
        async with self._changes:
            if self._life is not None:
                return
            settings = self._settings
            publisher = None
            if settings.events:
                publisher = Publisher(
                    f"kv@{self.id}", settings.host, self.events_port, self.replay_port
                )
                await publisher.start()
                self.events_port, self.replay_port = publisher.port, publisher.replay_port
            segment = None
            if self._pool is not None and self.segment is not None:
                segment = self._pool.mount(self.segment)
            model = Engine(settings.limits, settings.rates, pool=self._pool, segment=segment)
            metrics = Metrics(settings.model, settings.limits, settings.algorithm, settings.context)
            runner = Runner(model, metrics, publisher, pool=self._pool is not None)
            self._life = _Incarnation(runner, publisher, segment)
            self.incarnations += 1
            self._frozen = None
            self.set_faults(self.faults)
            await self._listener.open(self._application())

    async def stop(self) -> None:
        """End as a process that is killed: connections break, the port refuses."""
        async with self._changes:
            life, self._life = self._life, None
            if life is None:
                return
            life.runner.stop()
            if life.segment is not None and self._pool is not None:
                self._pool.died(life.segment, asyncio.get_running_loop().time())
            await self._listener.close()
            if life.publisher is not None:
                await life.publisher.stop()

    async def restart(self) -> None:
        """Stop and start."""
        await self.stop()
        await self.start()

    def set_faults(self, faults: Faults) -> None:
        """Put faults in force, in place of those before."""
        self.faults = faults
        life = self._life
        if life is not None:
            life.runner.pace(0.0 if faults.hang else self._settings.speed / faults.slow)
            if life.publisher is not None:
                life.publisher.drop = faults.drop_events
        if faults.hang:
            self._moving.clear()
        else:
            self._moving.set()

    # -- its routes ------------------------------------------------------------

    def _application(self) -> web.Application:
        def hangs(handler: Handler) -> Handler:
            async def answer(request: web.Request) -> web.StreamResponse:
                await self._moving.wait()
                try:
                    return await handler(request)
                except _Gone:
                    return _broken(request)

            return answer

        def infers(handler: Handler) -> Handler:
            async def answer(request: web.Request) -> web.StreamResponse:
                await self._moving.wait()
                if self.faults.reset:
                    return _broken(request)
                try:
                    if self.faults.error is not None:
                        raise _fault(self.faults.error)
                    return await handler(request)
                except Refused as refused:
                    return _json(refused.body, status=refused.status)
                except (_Gone, ConnectionError):
                    return _broken(request)

            return answer

        chat, completions = "/v1/chat/completions", "/v1/completions"
        return application(
            web.post(chat, infers(self._chat)),
            web.post(completions, infers(self._completion)),
            web.post(f"{chat}/render", infers(self._render_chat)),
            web.post(f"{completions}/render", infers(self._render_completion)),
            web.post("/tokenize", infers(self._tokenize)),
            web.post("/detokenize", infers(self._detokenize)),
            web.get("/v1/models", hangs(self._models)),
            web.get("/health", hangs(self._empty)),
            web.get("/ping", hangs(self._empty)),
            web.post("/ping", hangs(self._empty)),
            web.get("/version", hangs(self._version)),
            web.get("/load", hangs(self._load)),
            web.get("/metrics", hangs(self._metrics)),
            web.get("/kv_event_sources", hangs(self._event_sources)),
            *control.routes(self),
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body, wanted = await self._read(request, chat=True)
        prompt = await self._ids(self._prompts.chat, body, request)
        bodies.check_sampling(body, wanted, self._settings.context)
        return await self._answer(request, [prompt], wanted, chat=True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body, wanted = await self._read(request, chat=False)
        prompts = await self._ids(self._prompts.completion, body, request)
        bodies.check_sampling(body, wanted, self._settings.context)
        return await self._answer(request, prompts, wanted, chat=False)

    async def _answer(
        self, request: web.Request, prompts: list[list[int]], wanted: Wish, *, chat: bool
    ) -> web.StreamResponse:
        runner = self._running().runner
        choices = self._prompts.choices(prompts, wanted, chat=chat)
        exchange = Exchange(choices)
        shape = wire.Shape(
            exchange,
            wanted,
            name=_name(request, chat=chat),
            created=int(time.time()),
            model=self._settings.model,
            chat=chat,
        )
        try:
            runner.submit(exchange)
        except ValueError as error:
            raise Refused(str(error)) from error
        try:
            if wanted.stream:
                return await self._stream(request, exchange, shape, wanted, chat=chat)
            await exchange.whole()
            if self.faults.reset_after == 0:
                raise _Gone
            return web.Response(body=shape.whole(), content_type="application/json")
        finally:
            runner.abort(choices)

    async def _stream(
        self,
        request: web.Request,
        exchange: Exchange,
        shape: wire.Shape,
        wanted: Wish,
        *,
        chat: bool,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        sent = 0

        async def send(chunk: bytes) -> None:
            nonlocal sent
            most = self.faults.reset_after
            if most is not None and sent >= most:
                raise _Gone
            await response.write(chunk)
            sent += 1

        roles = chat
        async for choice, token in exchange.tokens():
            if roles:
                roles = False
                for chunk in shape.roles():
                    await send(chunk)
            await send(shape.chunk(choice, token))
        if wanted.include_usage:
            await send(shape.usage())
        await send(wire.DONE)
        await response.write_eof()
        return response

    async def _render_chat(self, request: web.Request) -> web.StreamResponse:
        body, wanted = await self._read(request, chat=True)
        prompt = await self._ids(self._prompts.chat, body, request)
        name = _name(request, chat=True)
        return _json(wire.rendered(name, prompt, body, wanted, self._settings.model))

    async def _render_completion(self, request: web.Request) -> web.StreamResponse:
        body, wanted = await self._read(request, chat=False)
        prompts = await self._ids(self._prompts.completion, body, request)
        name = _name(request, chat=False)
        names = [name] if len(prompts) == 1 else [f"{name}-{i}" for i in range(len(prompts))]
        return _json(
            [
                wire.rendered(name, prompt, body, wanted, self._settings.model)
                for name, prompt in zip(names, prompts, strict=True)
            ]
        )

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = bodies.read(await request.read(), request.headers.get("Content-Type", ""))
        bodies.check_model(body, self._settings.model)
        if "messages" in body:
            ids = self._prompts.chat(body)
        elif isinstance(body.get("prompt"), str):
            special = body.get("add_special_tokens", True) is not False
            ids = self._prompts.renderer.encode(body["prompt"], add_special_tokens=special)
        else:
            raise bodies.missing("prompt", "messages", body=body)
        tokenizer = self._prompts.renderer.tokenizer
        texts = [tokenizer.id_to_token(token) for token in ids]
        return _json(
            {
                "count": len(ids),
                "max_model_len": self._settings.context,
                "tokens": ids,
                "token_strs": texts if body.get("return_token_strs") else None,
            }
        )

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        body = bodies.read(await request.read(), request.headers.get("Content-Type", ""))
        bodies.check_model(body, self._settings.model)
        ids = body.get("tokens")
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise bodies.missing("tokens", body=body)
        tokenizer = self._prompts.renderer.tokenizer
        return _json({"prompt": tokenizer.decode(ids, skip_special_tokens=False)})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        settings = self._settings
        root = str(settings.tokenizer)
        return _json(wire.models(settings.model, root, self._created, settings.context))

    async def _empty(self, request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def _version(self, request: web.Request) -> web.StreamResponse:
        return _json({"version": wire.VERSION})

    async def _load(self, request: web.Request) -> web.StreamResponse:
        return _json({"server_load": self._running().runner.load})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        if self._frozen is None or not self.faults.freeze_metrics:
            runner = self._running().runner
            runner.refresh()
            self._frozen = runner.metrics.page()
        return web.Response(body=self._frozen, headers={"Content-Type": CONTENT_TYPE})

    async def _event_sources(self, request: web.Request) -> web.StreamResponse:
        publisher = self._running().publisher
        return _json({} if publisher is None else {"0": publisher.source()})

    def _running(self) -> _Incarnation:
        if self._life is None:
            raise _Gone
        return self._life

    async def _read(self, request: web.Request, *, chat: bool) -> tuple[Body, Wish]:
        body = bodies.read(await request.read(), request.headers.get("Content-Type", ""))
        wanted = bodies.wish(body, chat=chat)
        bodies.check_model(body, self._settings.model)
        return body, wanted

    async def _ids(self, render: Callable[[Body], T], body: Body, request: web.Request) -> T:
        if (request.content_length or 0) > _LARGE:
            return await asyncio.to_thread(render, body)
        return render(body)


class _Gone(Exception):
    """The connection is to be broken: a fault, or the engine was stopped."""


def _broken(request: web.Request) -> web.Response:
    """Break a request's connection; what is returned reaches nobody."""
    abort(request.transport)
    return web.Response(status=500)


def _endpoint(host: str, port: int) -> str | None:
    return f"tcp://{host}:{port}" if port else None


def _name(request: web.Request, *, chat: bool) -> str:
    given = request.headers.get("X-Request-Id")
    return f"{'chatcmpl' if chat else 'cmpl'}-{given or uuid.uuid4().hex[:16]}"


def _json(content: object, status: int = 200) -> web.Response:
    body = wire.encode(content)
    return web.Response(body=body, status=status, content_type="application/json")


def _fault(status: int) -> Refused:
    return Refused(
        f"The emulator was told to answer {status}.", kind="EmulatedError", status=status
    )
