"""Do engines find again what they have computed, and load from the pool what others have?"""

from __future__ import annotations

import asyncio

from connector.doctor.ask import Answer
from connector.doctor.engine import ask, page, usage
from connector.doctor.subject import Exam, Subject


async def device(exam: Exam, subject: Subject) -> None:
    """Send the probe again: its device cache must hit, and its usage say how much."""
    assert subject.probe is not None
    before = (await page(exam, subject)).device_hits
    answer = await ask(exam, subject, subject.probe)
    if not answer.ok:
        _not_answered(exam, subject, answer)
        return
    expected, cached = _expected(subject), cached_tokens(answer)
    if cached:
        _size(exam, "usage", subject, cached, expected, "a repeated chat is a device hit of")
        return
    hit = (await page(exam, subject)).device_hits - before
    if hit > 0:
        exam.warn(
            "usage",
            "unreported",
            f"its answers do not tell cached tokens (its metrics count {hit:.0f}): the gateway "
            "cannot hold its expectation against them, nor learn what was cached before it came",
            subject,
            expected="usage.prompt_tokens_details.cached_tokens",
            remedy="start the engine with --enable-prompt-tokens-details",
        )
    else:
        exam.warn(
            "usage",
            "no-hit",
            "a chat that was repeated at once found nothing cached",
            subject,
            expected=f"{expected} cached tokens",
            remedy="see whether prefix caching is on (--enable-prefix-caching), and whether the "
            "device cache is so full that blocks go at once (vllm:kv_cache_usage_perc)",
        )


async def shared(exam: Exam) -> None:
    """Let every engine answer another's probe: it must load from the pool what that saved."""
    everyone = [subject for subject in exam.reached if subject.prompt_tokens is not None]
    pairs = []
    for at, reader in enumerate(everyone):
        # The next one round that saved: with two engines each takes the other's.
        others = everyone[at + 1 :] + everyone[:at]
        saved = (s for s in others if s.pooled and s.config is not reader.config)
        if (writer := next(saved, None)) is not None:
            pairs.append((reader, writer))
    await asyncio.gather(*(_load(exam, reader, writer) for reader, writer in pairs))


async def _load(exam: Exam, reader: Subject, writer: Subject) -> None:
    assert writer.probe is not None
    before = (await page(exam, reader)).pool_hits
    answer = await ask(exam, reader, writer.probe)
    if not answer.ok:
        exam.fail(
            "sharing",
            "load-failed",
            f"a chat whose blocks engine {writer.name} saved is not answered: {answer.why()}",
            reader,
            expected="an answer",
            remedy='set "kv_load_failure_policy": "recompute" in its --kv-transfer-config, and '
            "see that it can reach the other engine's segment",
        )
        return
    expected, cached = _expected(writer), cached_tokens(answer)
    if cached:
        what = f"what engine {writer.name} computed is a pool hit of"
        _size(exam, "sharing", reader, cached, expected, what)
        return
    loaded = (await page(exam, reader)).pool_hits - before
    if loaded > 0:
        exam.ok(
            "sharing",
            f"its metrics count {loaded:.0f} tokens loaded from the pool, where engine "
            f"{writer.name} had put them",
            reader,
        )
        return
    exam.fail(
        "sharing",
        "no-hit",
        f"it computed anew what engine {writer.name} had saved in the pool",
        reader,
        expected=f"{expected} tokens from the pool",
        remedy="see that both engines have the same master, cache_prefix, basename of --model, "
        "hash algorithm, block size and PYTHONHASHSEED, and that its kv_role may load (kv_both "
        "or kv_consumer)",
    )


def cached_tokens(answer: Answer) -> int:
    """Return what an answer's usage says was cached; 0 where it says nothing.

    vLLM leaves the field out both without --enable-prompt-tokens-details and for
    a prompt of which nothing was cached.
    """
    details = usage(answer).get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else 0


def _expected(subject: Subject) -> int:
    """Return how many tokens of a subject's probe can be cached: whole blocks, and not all."""
    size = subject.block_size
    tokens = subject.prompt_tokens or len(subject.token_ids)
    return (tokens - 1) // size * size if size and tokens else 0


def _size(exam: Exam, check: str, subject: Subject, cached: int, expected: int, what: str) -> None:
    if not expected or cached == expected:
        exam.ok(check, f"{what} {cached} tokens", subject)
        return
    exam.warn(
        check,
        "size",
        f"{what} {cached} tokens",
        subject,
        expected=f"{expected} tokens: all whole blocks of the prompt, but for its last token",
        remedy="see whether blocks were evicted meanwhile (vllm:kv_cache_usage_perc, the "
        "master's /metrics/summary); else the engine caches by other rules than are known here",
    )


def _not_answered(exam: Exam, subject: Subject, answer: Answer) -> None:
    exam.fail(
        "usage",
        "not-answered",
        f"a repeated chat is not answered: {answer.why()}",
        subject,
        expected="an answer of one token",
        remedy="look into the engine's log",
    )
