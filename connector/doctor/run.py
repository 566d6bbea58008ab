"""The order of an examination: from what must be there to what follows from it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import zmq.asyncio

from connector.doctor import engine, events, hashing, hits, master, pool, tokens
from connector.doctor.ask import asker
from connector.doctor.listen import Listener
from connector.doctor.report import Report
from connector.doctor.subject import Exam, Subject
from connector.model import ModelConfig, PoolConfig
from connector.pool import KeySchema
from connector.render import Renderer, TokenizerError

Saying = Callable[[str], None]


async def examine(
    models: Sequence[ModelConfig],
    *,
    only: Sequence[str] = (),
    engines: Sequence[str] = (),
    seconds: float = 15.0,
    api_key: str | None = None,
    saying: Saying = lambda what: None,
) -> Report:
    """Examine the models, one after the other.

    `only` names those to examine, `engines` their engines; none means all. The
    others still count as owners of segments. `seconds` bounds every single wait.
    `api_key` is sent to engines, never to masters. `saying` is told what is being
    done, for people who wait.
    """
    report = Report()
    context = zmq.asyncio.Context()
    try:
        async with asker(seconds, api_key) as asks:
            for model in models:
                chosen = [e for e in model.engines if not engines or e.id in engines]
                if chosen and (not only or model.name in only):
                    subjects = [Subject(config) for config in chosen]
                    exam = Exam(model, asks, context, report, seconds, subjects)
                    await _model(exam, models, saying)
    finally:
        context.destroy(linger=0)
    return report


async def _model(exam: Exam, models: Sequence[ModelConfig], saying: Saying) -> None:
    name, config = exam.model.name, exam.model.pool
    saying(f"{name}: looking for engines and master")
    await _each(exam.subjects, lambda subject: engine.reach(exam, subject))
    hashing.versions(exam)
    if not exam.model.exact:
        return  # no tokens and no hashes of this model's prompts are ever computed
    exam.subjects = [
        rank
        for ranks in await asyncio.gather(*(_ranks(exam, subject) for subject in exam.subjects))
        for rank in ranks
    ]
    exam.renderer = _renderer(exam)
    spell = pool.schema(exam, config) if config else None
    if config:
        if await master.reach(exam, config):
            await master.segments(exam, config, models)
        else:
            spell = None
    hashing.resolve(exam)
    for subject in exam.reached:
        hashing.facts(exam, subject)
        events.unconfigured(exam, subject)
    answered = await _probed(exam, saying)
    saying(f"{name}: comparing tokens and hashes")
    await _each(answered, lambda subject: tokens.compare(exam, subject))
    await _each(answered, lambda subject: hashing.hashes(exam, subject))
    if config and spell:
        saying(f"{name}: looking for the probes' blocks in the pool")
        await _pooled(exam, config, spell, answered)
    for subject in answered:
        hashing.unverified(exam, subject)
    hashing.agreement(exam)
    saying(f"{name}: asking again")
    await _each(answered, lambda subject: hits.device(exam, subject))
    if config and spell:
        await hits.shared(exam)


async def _probed(exam: Exam, saying: Saying) -> list[Subject]:
    """Send every engine its probe and follow it through events and replay.

    Returns those that answered.
    """
    name = exam.model.name
    async with AsyncExitStack() as listening:
        saying(f"{name}: connecting to KV events")
        listeners = [
            (
                subject,
                await listening.enter_async_context(Listener(exam.context, endpoint, exam.heard)),
            )
            for subject in exam.subjects
            if (endpoint := events.endpoint(subject))
        ]
        await asyncio.gather(*(events.connect(exam, *pair) for pair in listeners))
        saying(f"{name}: sending probes")
        await _each(exam.reached, lambda subject: _probe(exam, subject))
        answered = [s for s in exam.reached if s.prompt_tokens is not None]
        saying(f"{name}: waiting for KV events")
        await _each(answered, lambda subject: events.hear(exam, subject))
        await _each(answered, lambda subject: events.ask_replay(exam, subject))
    return answered


async def _probe(exam: Exam, subject: Subject) -> None:
    engine.prepare(exam, subject)
    await tokens.learn(exam, subject)
    await engine.send(exam, subject)


async def _pooled(
    exam: Exam, config: PoolConfig, spell: KeySchema, answered: Sequence[Subject]
) -> None:
    await _each(answered, lambda subject: pool.keys(exam, config, spell, subject))


async def _ranks(exam: Exam, subject: Subject) -> list[Subject]:
    return await engine.ranks(exam, subject) if subject.up else [subject]


def _renderer(exam: Exam) -> Renderer | None:
    try:
        return Renderer(exam.model)
    except (TokenizerError, OSError) as error:
        exam.fail(
            "config",
            "tokenizer",
            str(error),
            expected="a tokenizer and a chat template that can be read",
            remedy="set `tokenizer` to a copy of the directory that the engines take theirs from, "
            "and `chat_template` to a file that can be read",
        )
        return None


async def _each(subjects: Sequence[Subject], do: Callable[[Subject], Awaitable[None]]) -> None:
    await asyncio.gather(*(do(subject) for subject in subjects))
