"""Is an engine there, does it serve the model, and does it answer the probe?"""

from __future__ import annotations

import difflib
from typing import Any

from connector.doctor.ask import Answer
from connector.doctor.listen import Source
from connector.doctor.metrics import Page, read_page
from connector.doctor.probe import Probe
from connector.doctor.subject import Exam, Subject, some
from connector.render import Inexact, RenderError

CHAT = "/v1/chat/completions"


async def reach(exam: Exam, subject: Subject) -> None:
    """Ask for health, models, version, metrics; `subject.up` says whether to go on."""
    url = subject.config.url
    health = await exam.asker.get(f"{url}/health", engine=True)
    if not health.status:
        exam.fail(
            "engine",
            "unreachable",
            f"nothing serves HTTP at {url}: {health.why()}",
            subject,
            expected="a vLLM server",
            remedy=f"start the engine, or correct `url` of engine {subject.config.id}",
        )
        return
    # An engine behind a proxy may show no /health; the gateway takes that, too.
    if not health.ok and health.status != 404:
        exam.fail(
            "engine",
            "unhealthy",
            f"{url}/health answers {health.why()}",
            subject,
            expected="HTTP 200",
            remedy="look into the engine's log",
        )
        return
    models = await exam.asker.get(f"{url}/v1/models", engine=True)
    if models.status in (401, 403):
        exam.fail(
            "engine",
            "key-refused",
            f"{url}/v1/models answers {models.why()}",
            subject,
            expected="the engine's --api-key in the variable that `upstream.api_key_env` names",
            remedy="set `upstream.api_key_env`, and export the variable (or use --api-key-env)",
        )
        return
    served = _served(models)
    if exam.model.name not in served:
        _not_served(exam, subject, models, list(served))
        return
    subject.up = True
    limit = served[exam.model.name].get("max_model_len")
    subject.max_model_len = limit if isinstance(limit, int) and limit > 0 else None
    version = (await exam.asker.get(f"{url}/version", engine=True)).object().get("version")
    subject.version = version if isinstance(version, str) else None
    subject.page = await page(exam, subject)
    told = f"vLLM {subject.version}" if subject.version else "an engine that tells no version"
    exam.ok("engine", f"{told} serves {exam.model.name} at {url}", subject)


def _not_served(exam: Exam, subject: Subject, models: Answer, served: list[str]) -> None:
    url, name = subject.config.url, exam.model.name
    if not served:
        exam.fail(
            "engine",
            "not-an-engine",
            f"{url}/v1/models gives no list of models: {models.why()[:200]}",
            subject,
            expected=f"a vLLM server that serves {name}",
            remedy=f"correct `url` of engine {subject.config.id}: the engine's HTTP server, "
            "without /v1",
        )
        return
    close = (difflib.get_close_matches(name, served, n=1) or served[:1])[0]
    exam.fail(
        "engine",
        "model-name",
        f"it serves {some(served)}, not {name}",
        subject,
        expected=f"the model {name}",
        remedy=f"set the model's `name: {close}` (the engine's --served-model-name), or correct "
        f"`url` of engine {subject.config.id}",
    )


async def ranks(exam: Exam, subject: Subject) -> list[Subject]:
    """Return a subject for each of the engine's data-parallel ranks, itself the first."""
    answer = await exam.asker.get(f"{subject.config.url}/kv_event_sources", engine=True)
    said = answer.object() if answer.ok else {}
    sources = {int(key): value for key, value in said.items() if key.isdecimal()}
    subject.source = Source.read(sources.get(0))
    subject.ranks = max(1, len(sources))
    others = [
        Subject(
            subject.config,
            rank=rank,
            ranks=subject.ranks,
            up=True,
            version=subject.version,
            max_model_len=subject.max_model_len,
            page=subject.page,
            source=Source.read(sources[rank]),
        )
        for rank in sorted(sources)
        if rank
    ]
    return [subject, *others]


async def page(exam: Exam, subject: Subject) -> Page:
    """Scrape the engine's metrics; an empty page where that fails."""
    answer = await exam.asker.get(f"{subject.config.url}/metrics", engine=True)
    try:
        return read_page(answer.text) if answer.ok else Page()
    except ValueError:
        return Page()


def prepare(exam: Exam, subject: Subject) -> None:
    """Make the engine's probe, and its tokens as the configuration has them."""
    sizes = (exam.way.block_size if exam.way else 0, subject.page.block_size or 0)
    size = max(sizes) or 128
    for plain in (False, True):
        subject.probe = Probe(exam.model.name, size, subject.max_model_len, plain=plain)
        if exam.renderer is None:
            return
        try:
            subject.ours = exam.renderer.chat(subject.probe.body).token_ids
        except RenderError:
            continue  # perhaps a template that takes no system message: the user's alone
        except Inexact as inexact:
            exam.warn(
                "tokens",
                "inexact",
                f"chats cannot be rendered exactly outside the engine: {inexact.reason}",
                subject,
                expected="a chat template that the gateway can render",
                remedy="set `chat_template` if the engines have --chat-template; models with a "
                "renderer of their own are routed by their text and the gateway's own history",
            )
        return
    exam.fail(
        "tokens",
        "template",
        "the configured chat template refuses even a single user message",
        subject,
        expected="a template that renders chats as the engine does",
        remedy="correct `chat_template` and `default_chat_template_kwargs`",
    )


async def send(exam: Exam, subject: Subject) -> None:
    """Send the probe; `subject.prompt_tokens` stays None where it is not answered."""
    assert subject.probe is not None
    answer = await ask(exam, subject, subject.probe)
    if not answer.ok:
        exam.fail(
            "probe",
            "not-answered",
            f"a chat of {len(subject.probe.text.split())} words is not answered: {answer.why()}",
            subject,
            expected="an answer of one token",
            remedy="raise --timeout if the engine is busy or slow; else look into its log",
        )
        return
    tokens = usage(answer).get("prompt_tokens")
    subject.prompt_tokens = tokens if isinstance(tokens, int) else 0


async def ask(exam: Exam, subject: Subject, probe: Probe) -> Answer:
    """Send any probe to an engine."""
    return await exam.asker.post(f"{subject.config.url}{CHAT}", probe.body, subject.headers)


def usage(answer: Answer) -> dict[str, Any]:
    """Return an answer's usage; empty where it has none."""
    found = answer.object().get("usage")
    return found if isinstance(found, dict) else {}


def _served(answer: Answer) -> dict[str, dict[str, Any]]:
    cards = answer.object().get("data") if answer.ok else None
    if not isinstance(cards, list):
        return {}
    return {
        card["id"]: card
        for card in cards
        if isinstance(card, dict) and isinstance(card.get("id"), str)
    }
