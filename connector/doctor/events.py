"""Are an engine's KV events heard, are they its own, and can missed ones be had again?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from connector.doctor.listen import (
    Listener,
    Message,
    Published,
    dialled,
    published,
    rank_endpoint,
    replay,
)
from connector.doctor.subject import Exam, Subject

_BLIND = "what its device cache holds is known only from what the gateway sent it"
_GRACE = 1.0
"""Seconds that events may come later than those which another endpoint has brought."""


def endpoint(subject: Subject) -> str | None:
    """Return the configured events endpoint of the subject's rank."""
    events = subject.config.events
    return rank_endpoint(events, subject.rank) if events else None


def replay_endpoint(subject: Subject) -> str | None:
    """Return the configured replay endpoint of the subject's rank."""
    there = subject.config.replay
    return rank_endpoint(there, subject.rank) if there else None


async def connect(exam: Exam, subject: Subject, listener: Listener) -> None:
    """Connect to the publisher; `subject.listener` is set only where that came about."""
    why = await listener.connect(exam.timeout)
    if why is None:
        subject.listener = listener
        return
    if not subject.up:
        return  # said already, and only listened to for the others' sake
    exam.fail(
        "events",
        "unreachable",
        f"no KV events from {listener.endpoint}: {why}; {_BLIND}{_own_view(subject)}",
        subject,
        expected=f"its publisher at {listener.endpoint}",
        remedy=_remedy(subject),
    )


def unconfigured(exam: Exam, subject: Subject) -> None:
    """Say what is lost without events, or without their replay."""
    if subject.config.events is None:
        exam.warn(
            "events",
            "none",
            f"no events endpoint is configured: {_BLIND}{_own_view(subject)}",
            subject,
            expected="an endpoint in `events`",
            remedy=_remedy(subject),
        )
    elif subject.config.replay is None:
        exam.warn(
            "replay",
            "none",
            "no replay endpoint is configured: a gap in its events, or a restart of the gateway, "
            "loses what is known of its device cache",
            subject,
            expected="an endpoint in `replay`",
            remedy=_replay_remedy(subject),
        )


async def hear(exam: Exam, subject: Subject) -> None:
    """Wait for the events of the engine's probe, and see at whose endpoint they come."""
    if subject.listener is None:
        return
    try:
        async with asyncio.timeout(exam.timeout), exam.heard:
            await exam.heard.wait_for(lambda: _elsewhere(exam, subject) or _whole(subject))
    except TimeoutError:
        pass  # what came until now is looked at below
    if _elsewhere(exam, subject) and _at(subject.listener, subject) is None:
        try:
            async with asyncio.timeout(_GRACE), exam.heard:
                await exam.heard.wait_for(lambda: _at(subject.listener, subject))
        except TimeoutError:
            pass  # they came only there
    subject.published = _at(subject.listener, subject)
    if subject.published is not None:
        topic = f", topic {subject.published.topic!r}" if subject.published.topic else ""
        exam.ok(
            "events",
            f"{len(subject.published.hashes)} blocks of the probe were published at "
            f"{subject.listener.endpoint}{topic}",
            subject,
        )
        return
    _unheard(exam, subject, subject.listener)


def _unheard(exam: Exam, subject: Subject, listener: Listener) -> None:
    """Nothing of the probe came to its own endpoint: say what did, and where it went."""
    carried = [
        other
        for other in exam.subjects
        if other is not subject and _at(listener, other) is not None
    ]
    theirs = ", ".join(f"engine {other.name}" for other in carried)
    if elsewhere := _elsewhere(exam, subject):
        found, other = elsewhere
        subject.published = found
        assert other.listener is not None
        exam.fail(
            "events",
            "swapped",
            f"its events come from {other.listener.endpoint}, which is configured for engine "
            f"{other.name}"
            + (f"; {listener.endpoint} carries those of {theirs}" if theirs else ""),
            subject,
            expected=f"its events at {listener.endpoint}",
            remedy=f"exchange `events`, and look at `replay`, of engines {subject.config.id} and "
            f"{other.config.id}",
        )
    elif carried:
        exam.fail(
            "events",
            "other-engine",
            f"{listener.endpoint} carries the events of {theirs}, not its own{_own_view(subject)}",
            subject,
            expected=f"its events at {listener.endpoint}",
            remedy=_remedy(subject),
        )
    else:
        garbled = listener.unreadable
        off = subject.page.prefix_caching is False
        exam.fail(
            "events",
            "silent",
            f"{listener.endpoint} is connected, but no event of the probe came within "
            f"{exam.timeout:g} s"
            + (f"; {garbled} messages were no events" if garbled else "")
            + ("; without prefix caching there are none" if off else "")
            + _own_view(subject),
            subject,
            expected=f"its events at {listener.endpoint}",
            remedy=_remedy(subject),
        )


async def ask_replay(exam: Exam, subject: Subject) -> None:
    """Ask for the probe's events again: they must be the same."""
    there = replay_endpoint(subject)
    if there is None or subject.probe is None:
        return
    heard = _at(subject.listener, subject) if subject.listener else None
    answer = await replay(exam.context, there, heard.seqs[0] if heard else 0, exam.timeout)
    if isinstance(answer, str):
        exam.fail(
            "replay",
            "unreachable",
            f"no replay from {there}: {answer}; a gap in its events, or a restart of the gateway, "
            "loses what is known of its device cache",
            subject,
            expected=f"its replay at {there}",
            remedy=_replay_remedy(subject),
        )
        return
    again = published(answer, subject.probe.salt, subject.token_ids)
    if again is None:
        # Another engine numbers its events otherwise: look at all of them, from its first event on.
        every = answer if heard is None else await replay(exam.context, there, 0, exam.timeout)
        answer = answer if isinstance(every, str) else every
        whose = [
            other.name
            for other in exam.subjects
            if other is not subject
            and other.probe is not None
            and published(answer, other.probe.salt, other.token_ids)
        ]
        exam.fail(
            "replay",
            "other-engine",
            f"{there} answers, but does not know the probe's events"
            + (f": it replays those of engine {', '.join(whose)}" if whose else ""),
            subject,
            expected=f"its replay at {there}",
            remedy=_replay_remedy(subject),
        )
        return
    # Live events may have been unreachable: then the replay has to do for the hashes.
    subject.published = subject.published or again
    if heard is not None and not _same(subject.listener, heard, answer):
        exam.fail(
            "replay",
            "differs",
            f"{there} replays other messages than were published under the same numbers",
            subject,
            expected="the same bytes",
            remedy="see whether a proxy or another publisher stands between; restart the engine",
        )
        return
    exam.ok("replay", f"{there} replays the probe's events", subject)


def _same(listener: Listener | None, heard: Published, answer: Sequence[Message]) -> bool:
    live = {message.seq: message.payload for message in listener.messages} if listener else {}
    again = {message.seq: message.payload for message in answer}
    return all(live.get(seq) == again.get(seq) for seq in heard.seqs)


def _at(listener: Listener | None, subject: Subject) -> Published | None:
    """Find a subject's probe in what a listener has heard."""
    if listener is None or subject.probe is None:
        return None
    return published(listener.messages, subject.probe.salt, subject.token_ids)


def _whole(subject: Subject) -> bool:
    """Whether all full blocks of the probe have been published at its own endpoint."""
    found = _at(subject.listener, subject)
    tokens = subject.prompt_tokens or len(subject.token_ids)
    return found is not None and len(found.token_ids) + found.block_size > tokens


def _elsewhere(exam: Exam, subject: Subject) -> tuple[Published, Subject] | None:
    """Find the subject's probe at another engine's endpoint."""
    for other in exam.subjects:
        if other is subject or other.listener is None:
            continue
        if endpoint(other) != endpoint(subject) and (found := _at(other.listener, subject)):
            return found, other
    return None


def _own_view(subject: Subject) -> str:
    """Return what the engine says of its own publisher."""
    source = subject.source
    if source is None:
        return ""
    if not source.enabled:
        return "; the engine says that its events are off"
    return f"; the engine says that it publishes at {source.endpoint}"


def _remedy(subject: Subject) -> str:
    source, engine = subject.source, subject.config.id
    if source is not None and not source.enabled:
        return (
            "start the engine with --kv-events-config (enable_kv_cache_events true, publisher "
            'zmq, endpoint "tcp://*:PORT", replay_endpoint "tcp://*:PORT2")'
        )
    if source is not None:
        if not _binds(source.endpoint):
            return (
                f"let the engine bind: with endpoint {source.endpoint} it dials out, and the "
                'gateway dials too; write "tcp://*:PORT" in its --kv-events-config'
            )
        right = dialled(source.endpoint, subject.config.url)
        if right != endpoint(subject):
            base = rank_endpoint(right, -subject.rank) if subject.rank else right
            return f"set `events: {base}` of engine {engine}, and look at its `replay`"
        return f"let the port of {right} through to the gateway's host"
    return (
        f"correct `events` of engine {engine}; start the engine with --kv-events-config "
        '(enable_kv_cache_events true, publisher zmq, endpoint "tcp://*:PORT")'
    )


def _replay_remedy(subject: Subject) -> str:
    source, engine = subject.source, subject.config.id
    if source is not None and source.enabled and source.replay_endpoint:
        right = dialled(source.replay_endpoint, subject.config.url)
        if right != replay_endpoint(subject):
            base = rank_endpoint(right, -subject.rank) if subject.rank else right
            return f"set `replay: {base}` of engine {engine}: the engine says that it replays there"
        return f"let the port of {right} through to the gateway's host"
    return (
        'start the engine with replay_endpoint "tcp://*:PORT" in its --kv-events-config, and set '
        f"`replay` of engine {engine}"
    )


def _binds(there: str) -> bool:
    """Whether vLLM binds this endpoint, or dials it."""
    return "*" in there or "::" in there or there.startswith(("ipc://", "inproc://"))
