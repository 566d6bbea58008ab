"""Conversations become turns with the history before each; what cannot be read is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.trace.conversations import read
from loadtest.trace.lines import TraceError
from loadtest.trace.turn import Own

EXAMPLE = Path(__file__).parents[2] / "examples/conversations.jsonl"

SYSTEM = {"role": "system", "content": "be brief"}
ASK = {"role": "user", "content": "one?"}
SAID = {"role": "assistant", "content": "recorded one"}
AGAIN = {"role": "user", "content": "two?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}, {"id": "2"}]}
RESULTS = [{"role": "tool", "tool_call_id": number, "content": "r"} for number in "12"]


def written(tmp_path: Path, *objects: dict[str, Any]) -> Path:
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in objects), encoding="utf-8")
    return path


def histories(path: Path, **options: Any) -> list[list[Any]]:
    return [list(turn.messages) for turn in read(path, **options)]


def test_every_user_message_is_a_turn(tmp_path: Path) -> None:
    path = written(tmp_path, {"session": "s", "messages": [SYSTEM, ASK, SAID, AGAIN]})
    assert histories(path) == [[SYSTEM, ASK], [SYSTEM, ASK, SAID, AGAIN]]
    assert [(turn.session, turn.number) for turn in read(path)] == [("s", 1), ("s", 2)]


def test_own_answers_replace_recorded_ones(tmp_path: Path) -> None:
    path = written(tmp_path, {"session": "s", "messages": [SYSTEM, ASK, SAID, AGAIN]})
    assert histories(path, answers="own")[1] == [SYSTEM, ASK, Own(1), AGAIN]


def test_own_answers_stand_where_none_is_recorded(tmp_path: Path) -> None:
    path = written(tmp_path, {"messages": [ASK, AGAIN, SAID, ASK]})
    assert histories(path)[1:] == [[ASK, Own(1), AGAIN], [ASK, Own(1), AGAIN, SAID, ASK]]
    assert {turn.session for turn in read(path)} == {"line-1"}


@pytest.mark.parametrize("answers", ["recorded", "own"])
def test_tool_results_begin_a_turn_and_keep_their_call(tmp_path: Path, answers: str) -> None:
    path = written(tmp_path, {"session_id": "s", "messages": [ASK, CALL, *RESULTS, SAID]})
    assert histories(path, answers=answers) == [[ASK], [ASK, CALL, *RESULTS]]


def test_tools_go_with_every_turn_of_a_conversation(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    path = written(tmp_path, {"session": "s", "messages": [ASK, SAID, AGAIN], "tools": tools})
    assert [turn.body["tools"] for turn in read(path)] == [tools, tools]


def test_requests_are_turns_of_their_session(tmp_path: Path) -> None:
    first = {"model": "x", "messages": [ASK], "session_id": "s", "top_p": 0.5}
    second = {"model": "x", "messages": [ASK, SAID, AGAIN], "session_id": "s"}
    alone = {"model": "x", "messages": [SYSTEM]}
    turns = read(written(tmp_path, first, second, alone))
    assert [(t.session, t.number) for t in turns] == [("s", 1), ("s", 2), ("line-3", 1)]
    assert turns[0].body == {"model": "x", "top_p": 0.5}
    assert list(turns[1].messages) == [ASK, SAID, AGAIN]


def test_lmcache_rows_are_recognised(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "input": "x" * at, "output": "", "session_id": "s"} for at in (2, 1)]
    turns = read(written(tmp_path, *rows))
    assert [(t.number, t.messages[0]["content"]) for t in turns] == [(1, "x"), (2, "xx")]


@pytest.mark.parametrize(
    ("line", "options", "says"),
    [
        ({"messages": []}, {}, ":1: messages: must be a list"),
        ({"messages": [{"content": "x"}]}, {}, ":1: .*`role`"),
        ({"messages": [SYSTEM]}, {}, ":1: messages: there is no user message"),
        ({"messages": [ASK], "sesion": "s"}, {}, ":1: sesion: unknown in a conversation"),
        ({"messages": [ASK], "session": 3}, {}, ":1: session: must be text, is int"),
        ({"model": "x", "messages": [ASK]}, {"answers": "own"}, ":1: .*own answers"),
        ({"prompt": "x"}, {}, ":1: neither a chat .* nor a row"),
        ({"input": "x"}, {}, ":1: .*timestamp"),
        ({"messages": [ASK]}, {"format_": "lmcache"}, ":1: .*timestamp"),
        ([1], {}, ":1: Expected `object`"),
    ],
)
def test_what_cannot_be_played_is_named(
    tmp_path: Path, line: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(TraceError, match=says):
        read(written(tmp_path, line), **options)


def test_bad_lines_are_named_by_number(tmp_path: Path) -> None:
    path = written(tmp_path, {"session": "s", "messages": [ASK]})
    path.write_text(path.read_text() + "\n{not json\n")
    with pytest.raises(TraceError, match=r"talk.jsonl:3: JSON is malformed"):
        read(path)


def test_a_session_is_one_conversation(tmp_path: Path) -> None:
    same = {"session": "s", "messages": [ASK]}
    with pytest.raises(TraceError, match=r":2: session 's' was line 1 already"):
        read(written(tmp_path, same, same))


def test_an_empty_file_holds_no_conversation(tmp_path: Path) -> None:
    for format_ in ("auto", "chat", "lmcache"):
        with pytest.raises(TraceError, match="holds no conversation"):
            read(written(tmp_path), format_)  # type: ignore[arg-type]


def test_the_example_shares_its_beginning() -> None:
    turns = read(EXAMPLE)
    assert len({turn.session for turn in turns}) == 4
    assert len(turns) == 18
    assert len({json.dumps(turn.messages[0]) for turn in turns}) == 1
