"""Does the configuration make the same token ids of a chat, and of plain text, as the engine?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from connector.doctor.engine import CHAT
from connector.doctor.subject import Exam, Subject
from connector.render import Inexact, Renderer

AROUND = 6
"""Tokens shown on either side of the first difference."""

_TOKENIZER_REMEDY = (
    "set `tokenizer` (now {now}) to a copy of the directory that the engine takes its tokenizer "
    "from (--tokenizer, else --model)"
)
_TEMPLATE_REMEDY = (
    "set `chat_template` to a copy of the engine's --chat-template (null: the tokenizer's own), "
    "and `default_chat_template_kwargs` and `chat_template_content_format` to its flags of those "
    "names"
)


async def learn(exam: Exam, subject: Subject) -> None:
    """Ask the engine for the probe's token ids: its render route, else /tokenize."""
    assert subject.probe is not None
    url, body = subject.config.url, subject.probe.render_body
    answer = await exam.asker.post(f"{url}{CHAT}/render", body)
    subject.theirs = ids_in(answer.object().get("token_ids")) if answer.ok else None
    if subject.theirs is None:
        # Open without --enable-scale-out, and exact for plain chats such as the probe.
        subject.theirs = await _tokenized(exam, subject, body)


async def compare(exam: Exam, subject: Subject) -> None:
    """Hold the engine's ids, or what is known of them, against the configuration's."""
    ours, published = subject.ours, subject.published
    if ours is None or exam.renderer is None:
        return
    if subject.theirs is not None:
        theirs, what = subject.theirs, f"all {len(ours)} token ids of a chat"
    elif published is not None:
        theirs = published.token_ids
        ours = ours[: len(theirs)]
        what = f"the {len(theirs)} token ids of a chat that its events tell"
    elif subject.prompt_tokens == len(ours):
        exam.warn(
            "tokens",
            "count-only",
            f"its render routes are closed and no event told its tokens: only their number, "
            f"{len(ours)}, could be compared, and is the same",
            subject,
            remedy="start the engine with --enable-scale-out, or let its events be heard",
        )
        return
    else:
        theirs, what = [], ""
    if theirs != ours:
        await _explain(exam, subject, exam.renderer, ours, theirs)
    elif await _special_tokens_agree(exam, subject, exam.renderer):
        exam.ok("tokens", f"{what} are the engine's own", subject)


async def _explain(
    exam: Exam, subject: Subject, renderer: Renderer, ours: Sequence[int], theirs: Sequence[int]
) -> None:
    """Say whether the tokenizer, the template or a special token is another."""
    assert subject.probe is not None
    text = subject.probe.text
    plain = await _tokenized(exam, subject, {"prompt": text, "add_special_tokens": False})
    mine = renderer.encode(text, add_special_tokens=False)
    if plain is not None and plain != mine:
        found, expected = await _around(exam, subject, renderer, mine, plain)
        exam.fail(
            "tokens",
            "tokenizer",
            f"the engine has another tokenizer: it cuts plain text otherwise, {found}",
            subject,
            expected=expected,
            remedy=_TOKENIZER_REMEDY.format(now=exam.model.tokenizer),
        )
        return
    if not theirs:
        exam.fail(
            "tokens",
            "count",
            f"the engine makes {subject.prompt_tokens} tokens of a chat; which, it does not say",
            subject,
            expected=f"{len(ours)} tokens",
            remedy=f"{_TOKENIZER_REMEDY.format(now=exam.model.tokenizer)}, or {_TEMPLATE_REMEDY}",
        )
        return
    found, expected = await _around(exam, subject, renderer, ours, theirs)
    if list(theirs[1:]) == list(ours) or list(theirs) == list(ours[1:]):
        more, without = ("engine", "configuration")
        if len(theirs) < len(ours):
            more, without = without, more
        exam.fail(
            "tokens",
            "special-tokens",
            f"the {more} puts a special token before the chat, the {without} does not: {found}",
            subject,
            expected=expected,
            remedy="compare `tokenizer`'s post_processor and bos_token with the engine's files, "
            f"and see whether the chat template writes the token; or {_TEMPLATE_REMEDY}",
        )
        return
    text_there = await _detokenized(exam, subject, theirs)
    if plain is not None and text_there == renderer.chat_text(subject.probe.body):
        exam.fail(
            "tokens",
            "tokenizer",
            f"the engine has other ids for the special tokens of a chat: {found}",
            subject,
            expected=expected,
            remedy=_TOKENIZER_REMEDY.format(now=exam.model.tokenizer),
        )
        return
    alike = " (plain text is cut alike)" if plain is not None else ""
    exam.fail(
        "tokens",
        "template" if plain is not None else "tokenizer-or-template",
        "the engine has another chat template, or other arguments for it" + alike + f": {found}",
        subject,
        expected=expected,
        remedy=_TEMPLATE_REMEDY
        if plain is not None
        else f"{_TOKENIZER_REMEDY.format(now=exam.model.tokenizer)}, or {_TEMPLATE_REMEDY}",
    )


async def _special_tokens_agree(exam: Exam, subject: Subject, renderer: Renderer) -> bool:
    """Compare a plain completion, to which engines add special tokens and chats do not."""
    assert subject.probe is not None
    text = subject.probe.text
    theirs = await _tokenized(exam, subject, {"prompt": text, "add_special_tokens": True})
    try:
        ((_, ours),) = renderer.completion({"prompt": text})
    except Inexact:
        return True  # the gateway does not hash completions of this model exactly, and says so
    if theirs is None or theirs == ours:
        return True
    found, expected = await _around(exam, subject, renderer, ours, theirs)
    exam.fail(
        "tokens",
        "special-tokens",
        f"chats are cut alike, but completions are not: {found}",
        subject,
        expected=expected,
        remedy=_TOKENIZER_REMEDY.format(now=exam.model.tokenizer)
        + "; the post_processor of tokenizer.json adds the special tokens",
    )
    return False


async def _around(
    exam: Exam, subject: Subject, renderer: Renderer, ours: Sequence[int], theirs: Sequence[int]
) -> tuple[str, str]:
    """Return in words where two lists of ids part: what the engine has there, and what we do."""
    at = first_difference(ours, theirs)
    window = slice(max(0, at - AROUND), at + AROUND)
    there = await _detokenized(exam, subject, theirs[window])
    here = renderer.tokenizer.decode(list(ours[window]), skip_special_tokens=False)
    return (
        f"of {len(theirs)} tokens the one at {at} is {_at(theirs, at)}"
        + (f", around it {there!r}" if there else ""),
        f"of {len(ours)} tokens the one at {at} is {_at(ours, at)}, around it {here!r}",
    )


async def _tokenized(exam: Exam, subject: Subject, body: dict[str, Any]) -> list[int] | None:
    body = {"model": exam.model.name, **body}
    answer = await exam.asker.post(f"{subject.config.url}/tokenize", body)
    return ids_in(answer.object().get("tokens")) if answer.ok else None


async def _detokenized(exam: Exam, subject: Subject, ids: Sequence[int]) -> str | None:
    body = {"model": exam.model.name, "tokens": list(ids)}
    answer = await exam.asker.post(f"{subject.config.url}/detokenize", body)
    text = answer.object().get("prompt") if answer.ok else None
    return text if isinstance(text, str) else None


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the first position at which two lists differ; the shorter's length if none does."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def ids_in(value: object) -> list[int] | None:
    """Return a list of token ids as it came in JSON; None for anything else."""
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return value
    return None


def _at(ids: Sequence[int], at: int) -> str:
    return f"id {ids[at]}" if at < len(ids) else "missing"
