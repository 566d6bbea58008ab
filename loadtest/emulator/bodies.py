"""Request bodies: what is read of them, and how vLLM refuses bad ones.

Covers what clients commonly get wrong. Fields that the emulator does not know
are passed over, as are those that would only change what is said (sampling,
tools to be called, response formats).

Source: answers of vLLM 0.32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

Body = dict[str, Any]


class Refused(Exception):
    """A request that is answered with an error of vLLM's shape."""

    def __init__(
        self,
        message: str,
        *,
        kind: str = "BadRequestError",
        param: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True)
class Wish:
    """What a completion's body asks for, beside its prompt."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    max_tokens: int | None
    n: int
    stop: tuple[str, ...]
    return_token_ids: bool
    salt: str | None
    report_hits: bool


def read(body: bytes, content_type: str) -> Body:
    """Decode a body. Raises Refused."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        raise _invalid_text("Unsupported Media Type: Only 'application/json' is allowed")
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = _slowly(body)
    if not isinstance(found, dict):
        raise _invalid(
            [
                _wrong(
                    "model_attributes_type",
                    "body",
                    "Input should be a valid dictionary or object to extract fields from",
                    found,
                )
            ]
        )
    return found


def wish(body: Body, *, chat: bool) -> Wish:
    """Check the fields that a chat and a completion share, and return them. Raises Refused."""
    faults: list[dict[str, Any]] = []
    for name in ("max_tokens", "max_completion_tokens", "n"):
        _number(body, name, faults)
    _number(body, "temperature", faults, whole=False)
    for name in ("stream", "return_token_ids"):
        _flag(body, name, faults)
    if not isinstance(body.get("model"), str | None):
        faults.append(
            _wrong("string_type", "body.model", "Input should be a valid string", body["model"])
        )
    if chat:
        _messages(body, faults)
    if faults:
        raise _invalid(faults)
    stream = bool(_as_flag(body.get("stream", False)))
    options = body.get("stream_options")
    if options is not None and not stream:
        raise _parameter("Stream options can only be defined when `stream=True`.", "stream_options")
    options = options if isinstance(options, Mapping) else {}
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise _parameter(
            "Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt"
        )
    if chat and body.get("tools") == []:
        raise _parameter(
            "`tools` must not be an empty array. Either provide at least one tool or omit the "
            "field entirely.",
            "tools",
        )
    extra = body.get("vllm_xargs")
    report = extra.get("kv_cache_report_mode") if isinstance(extra, Mapping) else None
    most = body.get("max_completion_tokens") if chat else None
    return Wish(
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        max_tokens=_whole(most if most is not None else body.get("max_tokens")),
        n=_whole(body.get("n")) or (0 if body.get("n") is not None else 1),
        stop=_stops(body.get("stop")),
        return_token_ids=bool(_as_flag(body.get("return_token_ids", False))),
        salt=salt,
        report_hits=report == "full",
    )


def check_model(body: Body, served: str) -> None:
    """Check that the body names the served model, or none. Raises Refused."""
    name = body.get("model")
    if name and name != served:
        raise Refused(
            f"The model `{name}` does not exist. Valid aliases: {served}.",
            kind="NotFoundError",
            param="model",
            status=404,
        )


def check_sampling(body: Body, wanted: Wish, context: int) -> None:
    """Check how much is asked for, and how it is to be drawn. Raises Refused."""
    most = wanted.max_tokens
    if most is not None and most < 1:
        raise _parameter(f"max_tokens must be at least 1, got {most}.", "max_tokens", most)
    if most is not None and most > context:
        raise _parameter(
            f"max_tokens={most} cannot be greater than max_model_len={context}. "
            "Please request fewer output tokens.",
            "max_tokens",
            most,
        )
    temperature = body.get("temperature")
    heat = 1.0 if temperature is None else float(temperature)
    if heat < 0:
        raise _parameter(f"temperature must be non-negative, got {heat}.", "temperature", heat)
    if wanted.n < 1:
        raise Refused(f"n must be at least 1, got {wanted.n}.")
    if wanted.n > 1 and heat == 0:
        raise Refused(f"n must be 1 when using greedy sampling, got {wanted.n}.")


def check_prompt(ids: Sequence[int], context: int, vocabulary: int) -> None:
    """Check a prompt's tokens. Raises Refused."""
    if not ids:
        raise Refused("The decoder prompt cannot be empty")
    if len(ids) >= context:
        # Long texts are cut by the tokenizer before they are counted.
        count = min(len(ids), context + 1)
        least = "at least " if count == context + 1 else ""
        raise _parameter(
            f"This model's maximum context length is {context} tokens. However, your prompt "
            f"contains {least}{count} input tokens, which exceeds this limit even without any "
            "output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
            count,
        )
    highest = max(ids)
    if highest >= vocabulary:
        raise Refused(f"Token id {highest} is out of vocabulary")


def missing(*fields: str, body: Body) -> Refused:
    """Return the refusal of a body that lacks all of `fields`, of which one must be there."""
    return _invalid([_wrong("missing", f"body.{name}", "Field required", body) for name in fields])


def no_prompt(body: Body) -> Refused:
    """Return the refusal of a completion whose prompt is none."""
    prompt = body.get("prompt")
    if prompt == []:
        return Refused("You must pass at least one prompt")
    if not prompt:
        return _parameter(
            "Either prompt or prompt_embeds must be provided and non-empty.", "prompt"
        )
    lists = _wrong("list_type", "body.prompt", "Input should be a valid list", prompt)
    texts = _wrong("string_type", "body.prompt", "Input should be a valid string", prompt)
    return _invalid([lists, lists, texts, lists])


def _slowly(body: bytes) -> Any:
    """Decode what the fast decoder would not: for its error, or for what is no strict JSON."""
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise _invalid(
            [
                _wrong("json_invalid", f"body.{error.pos}", "JSON decode error", {})
                | {"ctx": {"error": error.msg}}
            ]
        ) from error
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise Refused("There was an error parsing the body", kind="Bad Request") from error


def _messages(body: Body, faults: list[dict[str, Any]]) -> None:
    if "messages" not in body:
        faults.append(_wrong("missing", "body.messages", "Field required", body))
        return
    messages = body["messages"]
    if not isinstance(messages, list):
        faults.append(
            _wrong("list_type", "body.messages", "Input should be a valid list", messages)
        )
        return
    for i, message in enumerate(messages):
        at = f"body.messages.{i}"
        if not isinstance(message, dict):
            faults.append(_wrong("dict_type", at, "Input should be a valid dictionary", message))
        elif "role" not in message:
            faults.append(_wrong("missing", f"{at}.role", "Field required", message))
        elif not isinstance(message.get("content"), str | list | None):
            faults.append(
                _wrong(
                    "string_type",
                    f"{at}.content",
                    "Input should be a valid string",
                    message["content"],
                )
            )


def _number(body: Body, name: str, faults: list[dict[str, Any]], *, whole: bool = True) -> None:
    value = body.get(name)
    kind, noun = ("int", "integer") if whole else ("float", "number")
    if value is None or isinstance(value, int):
        return
    if isinstance(value, float):
        if whole and not value.is_integer():
            faults.append(
                _wrong(
                    "int_from_float",
                    f"body.{name}",
                    "Input should be a valid integer, got a number with a fractional part",
                    value,
                )
            )
        return
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            faults.append(
                _wrong(
                    f"{kind}_parsing",
                    f"body.{name}",
                    f"Input should be a valid {noun}, unable to parse string as "
                    f"{'an' if whole else 'a'} {noun}",
                    value,
                )
            )
        return
    faults.append(_wrong(f"{kind}_type", f"body.{name}", f"Input should be a valid {noun}", value))


def _flag(body: Body, name: str, faults: list[dict[str, Any]]) -> None:
    value = body.get(name)
    if value is None or _as_flag(value) is not None:
        return
    if isinstance(value, str | int | float):
        faults.append(
            _wrong(
                "bool_parsing",
                f"body.{name}",
                "Input should be a valid boolean, unable to interpret input",
                value,
            )
        )
    else:
        faults.append(_wrong("bool_type", f"body.{name}", "Input should be a valid boolean", value))


_FLAGS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


def _as_flag(value: object) -> bool | None:
    """Return what a value says as a flag; None where it says nothing."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _FLAGS.get(value.lower())
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    return None


def _whole(value: object) -> int | None:
    return (
        None if value is None else int(float(str(value)) if not isinstance(value, int) else value)
    )


def _stops(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value]
    return tuple(s for s in value if isinstance(s, str) and s) if isinstance(value, list) else ()


def _wrong(kind: str, where: str, text: str, value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        shown = f"<dict of {len(value)} items>"
    elif isinstance(value, list):
        shown = f"<list of {len(value)} items>"
    else:
        shown = str(value)
    return {"type": kind, "loc": where, "msg": text, "input": shown}


def _invalid(faults: Sequence[dict[str, Any]]) -> Refused:
    count = f"{len(faults)} validation error{'s' if len(faults) > 1 else ''}"
    lines = [f"  {fault}" for fault in faults[:10]]
    if len(faults) > 10:
        lines.append(f"  ...and {len(faults) - 10} more errors")
    return Refused("\n".join([f"{count}:", *lines]), kind="Bad Request", param=faults[0]["loc"])


def _invalid_text(text: str) -> Refused:
    return Refused(f"1 validation error:\n  {text}", kind="Bad Request")


def _parameter(text: str, name: str, value: object = None) -> Refused:
    shown = f"parameter={name}" if value is None else f"parameter={name}, value={value}"
    return Refused(f"{text} ({shown})", param=name)
