"""Reads chats: one JSON object a line, a whole conversation or one request.

A conversation has a `session` (or `session_id`) and `messages`, and may have
`tools`. It is played turn by turn: a turn is everything up to a user message, or
up to the tool messages that an assistant message follows or that end it. A line
that names a `model` is the body of a chat request and one turn of its session;
it is sent as it stands, but for its model and for what streaming needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from loadtest.trace.lines import TraceError, lines
from loadtest.trace.turn import Message, Own, Turn

Answers = Literal["recorded", "own"]

_SESSION = ("session", "session_id")
_CONVERSATION = (*_SESSION, "messages", "tools")


class _Message(msgspec.Struct):
    role: str


_messages = list[_Message]


def read(path: Path, answers: Answers = "recorded") -> list[Turn]:
    """Read a file of chats in its order.

    `recorded` keeps the assistant messages of a conversation in later turns'
    history; `own`, and where there is none, takes the engine's own answer.
    A message that calls tools stays in any case: the tools' answers are to it.

    Raises:
        TraceError: for a line that is neither a conversation nor a request.
        OSError: if the file cannot be read.
    """
    found: list[Turn] = []
    count: Counter[str] = Counter()
    played: dict[str, int] = {}
    for number, line in lines(path):
        try:
            fields = _line(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, TraceError) as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        session = next((str(fields.pop(key)) for key in _SESSION if key in fields), "")
        session = session or f"line-{number}"
        messages = fields.pop("messages")
        if "model" in fields:
            if answers == "own":
                raise TraceError(
                    f"{path}:{number}: a request holds its history; own answers are for "
                    "conversations (lines without `model`)"
                )
            count[session] += 1
            found.append(Turn(session, count[session], messages, fields))
            continue
        if session in played:
            raise TraceError(
                f"{path}:{number}: session {session!r} was line {played[session]} already"
            )
        played[session] = number
        # Answers that the engine gives itself are to be the same each time.
        turns = list(_turns(session, messages, {"temperature": 0, **fields}, answers))
        if not turns:
            raise TraceError(f"{path}:{number}: messages: there is no user message in it")
        found += turns
    return found


def _line(line: bytes) -> dict[str, Any]:
    fields = msgspec.json.decode(line, type=dict[str, Any])
    if not isinstance(fields.get("messages"), list) or not fields["messages"]:
        raise TraceError("messages: must be a list of messages, not empty")
    # Checked here and kept as they are: a message may hold more than we know of.
    msgspec.convert(fields["messages"], _messages)
    for key in _SESSION:
        if key in fields and not isinstance(fields[key], str):
            raise TraceError(f"{key}: must be text, is {type(fields[key]).__name__}")
    if "model" not in fields:
        unknown = sorted(fields.keys() - set(_CONVERSATION))
        if unknown:
            raise TraceError(
                f"{unknown[0]}: unknown in a conversation (known: {', '.join(_CONVERSATION)}); "
                "a line that is a request's body has a `model`"
            )
    return fields


def _turns(
    session: str, messages: list[dict[str, Any]], body: dict[str, Any], answers: Answers
) -> Iterator[Turn]:
    history: list[Message] = []
    number = 0
    answered = True
    for position, message in enumerate(messages):
        role = message["role"]
        following = messages[position + 1]["role"] if position + 1 < len(messages) else None
        if role == "assistant":
            if answered or answers == "recorded" or message.get("tool_calls"):
                history.append(message)
            else:
                history.append(Own(number))
            answered = True
            continue
        if not answered:
            history.append(Own(number))
            answered = True
        history.append(message)
        if role == "user" or (role == "tool" and following in ("assistant", None)):
            number += 1
            answered = False
            yield Turn(session, number, tuple(history), body)
