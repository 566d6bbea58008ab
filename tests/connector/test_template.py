"""Chat templates: the environment they run in, and what is told from their source."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import jinja2
import pytest

from connector.template import Template


def render(source: str, messages: list[dict[str, Any]] | None = None, **call: Any) -> str:
    arguments: dict[str, Any] = {
        "tools": None,
        "documents": None,
        "add_generation_prompt": False,
        "continue_final_message": False,
        "values": {},
    }
    return Template(source).render(messages or [], **arguments | call)


def test_blocks_leave_no_blank_lines() -> None:
    source = "{% for m in messages %}\n  {% if m.x %}\n{{ m.x }}\n  {% endif %}\n{% endfor %}\n."
    assert render(source, [{"x": "a"}, {"x": ""}, {"x": "b"}]) == "a\nb\n."


def test_json_is_written_for_models_not_for_web_pages() -> None:
    value = {"b": "<é&'>", "a": [1, 2.0, None]}
    assert render("{{ v | tojson }}", values={"v": value}) == (
        '{"b": "<é&\'>", "a": [1, 2.0, null]}'
    )
    assert render("{{ v | tojson(ensure_ascii=True) }}", values={"v": "é"}) == '"\\u00e9"'
    assert render("{{ v | tojson(indent=1, sort_keys=true) }}", values={"v": {"b": 1, "a": 2}}) == (
        '{\n "a": 2,\n "b": 1\n}'
    )
    assert render("{{ v | tojson(separators=(',', ':')) }}", values={"v": {"b": 1}}) == '{"b":1}'


def test_loops_can_be_left() -> None:
    source = (
        "{% for m in messages %}{% if m == 2 %}{% continue %}{% endif %}"
        "{% if m == 4 %}{% break %}{% endif %}{{ m }}{% endfor %}"
    )
    assert render(source, [1, 2, 3, 4, 5]) == "13"  # type: ignore[list-item]


def test_generation_blocks_only_pass_through() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert render(source) == "21"


def test_templates_can_refuse_and_tell_the_day() -> None:
    with pytest.raises(jinja2.TemplateError, match="not so"):
        render("{{ raise_exception('not so') }}")
    before = datetime.now().astimezone()
    told = render("{{ strftime_now('%Y-%m-%d') }}")
    assert told in {before.strftime("%Y-%m-%d"), datetime.now().astimezone().strftime("%Y-%m-%d")}


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{% set _ = messages.append(1) %}"]
)
def test_templates_are_kept_in_a_sandbox(source: str) -> None:
    with pytest.raises(jinja2.TemplateError):
        render(source)


def test_what_is_not_a_template_is_refused() -> None:
    with pytest.raises(jinja2.TemplateError):
        Template("{% for %}")


OPENAI = {
    "part": "{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}",
    "item": "{% for m in messages %}{% for p in m['content'] %}{% endfor %}{% endfor %}",
    "filtered": (
        "{% for m in messages | list %}{% for p in m.content | list %}{% endfor %}{% endfor %}"
    ),
    "sliced": "{% for m in messages[1:] %}{% for p in m.content[:2] %}{% endfor %}{% endfor %}",
    "alias": (
        "{% set rest = messages[1:] %}{% set more = rest %}"
        "{% for m in more %}{% for p in m.content %}{% endfor %}{% endfor %}"
    ),
    "variable": (
        "{% for m in messages %}{% set content = m.content %}"
        "{% for p in content %}{% endfor %}{% endfor %}"
    ),
    "macro": (
        "{% macro show(c, deep) %}{% for p in c %}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content, true) }}{% endfor %}"
    ),
    "macro by keyword": (
        "{% macro show(deep, c) %}{% for p in c %}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(c=m.content) }}{% endfor %}"
    ),
}
STRING = {
    "plain": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "nothing": "hello",
    "other field": "{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}",
    "other loop": "{% for t in tools %}{% for p in t.content %}{% endfor %}{% endfor %}",
    "macro that is handed something else": (
        "{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.role) }}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace() %}{% set ns.all = messages %}"
        "{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}"
    ),
    "pairs": (
        "{% for m in messages %}{% for a, b in m.content %}{% endfor %}"
        "{% for p in m.content %}{% endfor %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("source", OPENAI.values(), ids=OPENAI)
def test_templates_that_go_through_the_parts(source: str) -> None:
    assert Template(source).content_format == "openai"


@pytest.mark.parametrize("source", STRING.values(), ids=STRING)
def test_templates_that_take_a_text(source: str) -> None:
    assert Template(source).content_format == "string"


def test_variables_and_roles_are_told_from_the_source() -> None:
    template = Template("{% set a = 1 %}{{ a }}{{ bos_token }}{% if x == 'developer' %}{% endif %}")
    assert template.variables == {"bos_token", "x"}
    assert template.knows_developer
    assert not Template("{{ developer }}").knows_developer


CHAT = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
PARTS = (
    "{% for m in messages %}<{% for p in m.content %}{{ p.text | trim }}{% endfor %}>{% endfor %}"
)


def test_a_final_message_is_left_open() -> None:
    messages = [{"content": "a"}, {"content": "b "}]
    assert render(CHAT, messages, continue_final_message=True) == "<a><b "
    assert messages == [{"content": "a"}, {"content": "b "}]


def test_a_final_message_that_the_template_trims_is_trimmed() -> None:
    messages = [{"content": [{"type": "text", "text": " b "}, {"type": "image"}]}]
    assert render(PARTS, messages, continue_final_message=True) == "<b"
    assert messages[0]["content"][0]["text"] == " b "  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{{ 1 }}", "x"),
        ("{{ messages[0].content[:0] }}", "x"),
        (PARTS, [{"type": "image"}]),
        ("{{ messages[0].content | upper }}", "x"),
    ],
)
def test_a_final_message_that_cannot_be_continued(source: str, content: Any) -> None:
    with pytest.raises(ValueError, match=r"template|final message"):
        render(source, [{"content": content}], continue_final_message=True)
