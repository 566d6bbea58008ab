"""From bodies to prompts: what a template is given, what the ids are, and who is told what.

The expectations follow vLLM 0.32, whose render server gave the same ids as this
renderer for thousands of random conversations over some twenty templates.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from connector.model import ModelConfig
from connector.render import Inexact, Renderer, RenderError, TokenizerError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DUMP = "{{ messages | tojson }}"
# The same, but by its loop it asks for parts.
DUMP_PARTS = DUMP + "{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

Make = Callable[..., Renderer]


@pytest.fixture
def make(directory: Callable[..., Path]) -> Make:
    """Returns a function that makes a renderer from a template, by default CHATML."""

    def renderer(
        template: str | list[dict[str, str]] | None = CHATML,
        *,
        config: Mapping[str, Any] | None = None,
        files: Mapping[str, Any] | None = None,
        **model: Any,
    ) -> Renderer:
        stated = {"eos_token": "<|im_end|>", "chat_template": template, **(config or {})}
        path = directory(stated, **(files or {}))
        fields = {"name": "m", "tokenizer": path, "engines": [{"id": "a", "url": "http://h"}]}
        return Renderer(ModelConfig.model_validate(fields | model))

    return renderer


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def chat(*messages: object, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **fields}


def seen(renderer: Renderer, *messages: object, **fields: Any) -> Any:
    """What a dumping template was given as messages."""
    return json.loads(renderer.chat_text(chat(*messages, **fields)))


# Text and ids


def test_a_chat_becomes_text_and_ids(make: Make, tokenizer: Tokenizer) -> None:
    rendered = make().chat(chat({"role": "system", "content": "Be brief."}, user("The pool?")))
    assert rendered.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nThe pool?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert rendered.token_ids == tokenizer.encode(rendered.text, add_special_tokens=False).ids
    assert rendered.token_ids[0] == tokenizer.token_to_id("<|im_start|>")


def test_special_tokens_in_front_are_the_templates_business_or_asked_for(make: Make) -> None:
    renderer = make()
    bare = renderer.chat(chat(user("x"))).token_ids
    assert renderer.chat(chat(user("x"), add_special_tokens=True)).token_ids == [0, *bare]


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_text_comes_back_from_its_ids(renderer: Renderer, text: str) -> None:
    rendered = renderer.chat(chat(user(text)))
    decoded = renderer.tokenizer.decode(rendered.token_ids, skip_special_tokens=False)
    assert (
        decoded == rendered.text == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.fixture(scope="module")
def renderer(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHATML)
    return Renderer(
        ModelConfig.model_validate(
            {"name": "m", "tokenizer": path, "engines": [{"id": "a", "url": "http://h"}]}
        )
    )


def test_threads_share_a_renderer(renderer: Renderer) -> None:
    bodies = [chat(user(f"turn {n} of the pool")) for n in range(40)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(renderer.chat, bodies)) == [renderer.chat(body) for body in bodies]


def test_a_body_is_left_as_it_was(make: Make) -> None:
    call = CALL | {"function": {"name": "f", "arguments": '{"a": 1}'}}
    body = chat(
        {"role": "developer", "content": [{"type": "text", "text": "d"}]},
        {"role": "assistant", "content": "ok ", "tool_calls": [call], "reasoning_content": "r"},
        add_generation_prompt=False,
        continue_final_message=True,
        chat_template_kwargs={"x": None},
    )
    before = copy.deepcopy(body)
    make(DUMP_PARTS + "{{ messages[-1].content[0].text }}").chat_text(body)
    assert body == before


# Content


@pytest.mark.parametrize(
    ("content", "text", "parts"),
    [
        ("a", "a", [{"type": "text", "text": "a"}]),
        ("", "", [{"type": "text", "text": ""}]),
        (None, "", []),
        ([], "", []),
        (
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "a\nb",
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        ),
        (
            # an empty part makes no line, yet is a part
            [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, "b"],
            "a\nb",
            [{"type": "text", "text": t} for t in ("a", "", "b")],
        ),
        (
            [
                {"type": "refusal", "refusal": "no"},
                {"type": "thinking", "thinking": "hm", "closed": True},
                {"type": "input_text", "text": "in"},
                {"type": "output_text", "text": "out"},
                {"type": "text", "text": None},
            ],
            "no\nhm\nin\nout",
            [{"type": "text", "text": t} for t in ("no", "hm", "in", "out")],
        ),
        (
            [{"zeta": 1, "cache_control": {"type": "ephemeral"}, "text": "a", "type": "text"}],
            "a",
            [{"type": "text", "text": "a", "zeta": 1, "cache_control": {"type": "ephemeral"}}],
        ),
        (
            [{"type": "tool_reference", "name": "f"}],
            "f",
            [{"type": "tool_reference", "name": "f"}],
        ),
    ],
)
@pytest.mark.parametrize("template", [DUMP, DUMP_PARTS])
def test_content_is_a_text_or_parts_as_the_template_likes(
    make: Make, template: str, content: object, text: str, parts: list[Any]
) -> None:
    expected = text if template == DUMP else parts
    assert seen(make(template), user(content)) == [{"role": "user", "content": expected}]


def test_a_configured_content_format_overrides_what_was_found(make: Make) -> None:
    given = make(DUMP, chat_template_content_format="openai")
    assert seen(given, user("a")) == [user([{"type": "text", "text": "a"}])]


def test_a_tools_answer_is_a_text_unless_it_refers_to_tools(make: Make) -> None:
    renderer = make(DUMP_PARTS)
    texts = [
        {"type": "text", "text": "a"},
        {"type": "text", "text": ""},
        {"type": "text", "text": "b"},
    ]
    reference = {"type": "tool_reference", "name": "f"}
    tool = {"role": "tool", "tool_call_id": "1"}
    assert seen(
        renderer,
        tool | {"content": texts},
        tool | {"content": []},
        tool | {"content": [texts[0], reference]},
    ) == [
        {"role": "tool", "content": "a\n\nb", "tool_call_id": "1"},
        {"role": "tool", "content": "", "tool_call_id": "1"},
        {"role": "tool", "content": [texts[0], reference], "tool_call_id": "1"},
    ]


def test_a_header_that_changes_with_every_request_is_dropped(make: Make) -> None:
    header = "x-anthropic-billing-header: cch=1"
    assert seen(
        make(DUMP),
        {"role": "system", "content": f"{header}\nBe brief."},
        {"role": "system", "content": header},
        {"role": "system", "content": [{"type": "text", "text": header}, "rest"]},
        user(header),
    ) == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": ""},
        {"role": "system", "content": "rest"},
        user(header),
    ]


# Messages


def test_fields_of_a_message(make: Make) -> None:
    assert seen(
        make(DUMP),
        {"name": "bob", "content": "a", "role": "user", "task": "t", "other": 1},
        {"role": "wizard", "content": "b", "tool_call_id": "1", "reasoning": "r"},
    ) == [
        {"role": "user", "content": "a", "name": "bob", "task": "t"},
        {"role": "wizard", "content": "b"},
    ]


def test_an_assistants_reasoning_goes_by_two_names(make: Make) -> None:
    both = {"reasoning": "r", "reasoning_content": "r"}
    base = {"role": "assistant", "content": "a"}
    assert seen(
        make(DUMP),
        base | {"reasoning_content": "r"},
        base | {"reasoning": "r", "reasoning_content": "other"},
        base | {"reasoning": None, "reasoning_content": None},
    ) == [base | both, base | both, base]


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"b": 1, "a": [null, 2.50]}', {"b": 1, "a": [None, 2.5]}),
        ("", {}),
        ("[]", {}),
        ("42", {}),
        ("not json", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_arguments_of_tool_calls_become_objects(
    make: Make, arguments: object, parsed: object
) -> None:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": arguments}}
    (message,) = seen(make(DUMP), {"role": "assistant", "content": None, "tool_calls": [call]})
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": parsed}


def test_a_tool_call_that_is_written_out_has_its_fields_in_the_engines_order(make: Make) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}{% endfor %}"
    )
    call = {
        "index": 0,
        "type": "function",
        "function": {"name": "f", "more": 1, "arguments": '{"z": 1, "a": "é"}'},
        "id": "1",
    }
    text = make(template).chat_text(chat({"role": "assistant", "tool_calls": [call]}))
    assert text == (
        '{"id": "1", "function": {"arguments": {"z": 1, "a": "é"}, "name": "f", "more": 1}, '
        '"type": "function", "index": 0}'
    )


def test_empty_tool_calls_are_none(make: Make) -> None:
    base = {"role": "assistant", "content": "a"}
    assert seen(make(DUMP), base | {"tool_calls": []}, base | {"tool_calls": None}) == [base, base]


def test_developer_messages_become_one_system_message_in_front(make: Make) -> None:
    assert seen(
        make(DUMP),
        user("a"),
        {"role": "developer", "content": [{"type": "text", "text": "d"}]},
        {"role": "system", "content": ""},
        {"role": "system", "content": "s"},
    ) == [{"role": "system", "content": "d\n\ns"}, user("a")]


def test_a_developer_message_that_leads_keeps_its_shape(make: Make) -> None:
    renderer = make(DUMP_PARTS)
    part = {"type": "text", "text": "d"}
    developer = {"role": "developer", "content": "d"}
    system = {"role": "system", "content": "s"}
    assert seen(renderer, developer, user("a")) == [
        {"role": "system", "content": [part]},
        user([{"type": "text", "text": "a"}]),
    ]
    assert seen(renderer, system, developer) == [{"role": "system", "content": "s\n\nd"}]


def test_system_messages_alone_stay_where_they_are(make: Make) -> None:
    system = {"role": "system", "content": "s"}
    assert seen(make(DUMP), user("a"), system, system) == [user("a"), system, system]


def test_a_template_that_knows_developers_gets_them(make: Make) -> None:
    renderer = make(DUMP + "{% if messages[0].role == 'developer' %}{% endif %}")
    developer = {"role": "developer", "content": "d"}
    assert seen(renderer, user("a"), developer) == [user("a"), developer | {"tools": None}]
    with pytest.raises(Inexact, match="developer message with tools"):
        renderer.chat(chat(developer | {"tools": [{"type": "function"}]}))


# Tools and arguments of the template


def test_tools_are_written_out_as_the_engine_knows_them(make: Make) -> None:
    tools = [
        {
            "cache_control": {},
            "function": {"zz": 1, "parameters": {"b": None, "a": 1}, "name": "f", "strict": False},
        },
        {"type": "function", "function": {"name": "g", "strict": None}, "defer_loading": True},
        {"function": {"name": "h", "description": "é", "defer_loading": True}},
    ]
    text = make("{{ tools | tojson }}").chat_text(chat(user("a"), tools=tools))
    assert text == (
        '[{"type": "function", "function": {"name": "f", "description": null, '
        '"parameters": {"b": null, "a": 1}, "strict": false}}, '
        '{"type": "function", "function": {"name": "g", "description": null, "parameters": null, '
        '"defer_loading": true}, "defer_loading": true}, '
        '{"type": "function", "function": {"name": "h", "description": "é", "parameters": null, '
        '"defer_loading": true}}]'
    )


def test_tools_may_have_a_template_of_their_own(make: Make) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    renderer = make(
        [{"name": "default", "template": "default"}, {"name": "tool_use", "template": "tools"}]
    )
    assert renderer.chat_text(chat(user("a"))) == "default"
    assert renderer.chat_text(chat(user("a"), tools=tools)) == "tools"


def test_a_configured_template_is_the_only_one(make: Make, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    path = tmp_path / "own.jinja"
    path.write_text("own")
    renderer = make([{"name": "tool_use", "template": "tools"}], chat_template=path)
    assert renderer.chat_text(chat(user("a"), tools=tools)) == "own"


def test_tools_are_left_out_where_the_engines_leave_them_out(make: Make) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    renderer = make("{{ tools is none }}", exclude_tools_when_tool_choice_none=True)
    assert renderer.chat_text(chat(user("a"), tools=tools)) == "False"
    assert renderer.chat_text(chat(user("a"), tools=tools, tool_choice="none")) == "True"


ARGUMENTS = (
    "{{ [add_generation_prompt, enable_thinking, reasoning_effort, documents, a, b] | string }}"
    "{{ padding }}{{ eos_token }}{{ bos_token }}"
)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "[True, Undefined, Undefined, None, 'server', None]<|im_end|>"),
        (
            {"add_generation_prompt": False},
            "[False, Undefined, Undefined, None, 'server', None]<|im_end|>",
        ),
        (
            {"reasoning_effort": "low"},
            "[True, True, 'low', None, 'server', None]<|im_end|>",
        ),
        (
            {"reasoning_effort": "none"},
            "[True, False, 'none', None, 'server', None]<|im_end|>",
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "[True, False, 'low', None, 'server', None]<|im_end|>",
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": None}},
            "[True, Undefined, 'low', None, 'server', None]<|im_end|>",
        ),
        (
            {"chat_template_kwargs": {"reasoning_effort": "high", "add_generation_prompt": False}},
            "[True, Undefined, 'high', None, 'server', None]<|im_end|>",
        ),
        (
            {"chat_template_kwargs": {"a": "request", "b": 1, "c": 2, "padding": True}},
            "[True, Undefined, Undefined, None, 'request', 1]<|im_end|>",
        ),
        (
            {"chat_template_kwargs": {"a": None, "b": "auto", "bos_token": "<b>"}},
            "[True, Undefined, Undefined, None, 'server', None]<|im_end|><b>",
        ),
        (
            {"documents": [{"title": "t"}]},
            "[True, Undefined, Undefined, [{'title': 't'}], 'server', None]<|im_end|>",
        ),
        (
            {"chat_template_kwargs": {"documents": [{"t": "x"}]}},
            "[True, Undefined, Undefined, [{'t': 'x'}], 'server', None]<|im_end|>",
        ),
    ],
)
def test_arguments_of_the_template_and_their_order(
    make: Make, fields: dict[str, Any], text: str
) -> None:
    renderer = make(ARGUMENTS, default_chat_template_kwargs={"a": "server", "b": None, "d": 1})
    assert renderer.chat_text(chat(user("x"), **fields)) == text


def test_a_final_message_can_be_left_open(make: Make) -> None:
    open_end = {"add_generation_prompt": False, "continue_final_message": True}
    text = make().chat_text(chat(user("a"), {"role": "assistant", "content": "So "}, **open_end))
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nSo "


# Completions


def test_completions_take_texts_and_ids(make: Make, tokenizer: Tokenizer) -> None:
    renderer = make()
    ids = tokenizer.encode("the pool", add_special_tokens=False).ids
    assert renderer.completion({"prompt": "the pool"}) == [("the pool", [0, *ids])]
    assert renderer.completion({"prompt": "the pool", "add_special_tokens": False}) == [
        ("the pool", ids)
    ]
    assert renderer.completion({"prompt": ["a", "the pool"]}) == [
        ("a", [0, *tokenizer.encode("a", add_special_tokens=False).ids]),
        ("the pool", [0, *ids]),
    ]
    assert renderer.completion({"prompt": ids}) == [(None, ids)]
    assert renderer.completion({"prompt": [[1, 2], [3]]}) == [(None, [1, 2]), (None, [3])]


# What is refused


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "`messages` must be a list"),
        ({"messages": "hi"}, "`messages` must be a list"),
        ({"messages": []}, "must not be empty"),
        (chat("hi"), r"`messages\[0\]` must be an object"),
        (chat(user("a"), {"content": "b"}), r"`messages\[1\].role` must be a string"),
        (chat({"role": 5, "content": "b"}), "role` must be a string"),
        (chat(user(5)), r"`messages\[0\].content` must be a string or a list"),
        (chat(user({"text": "a"})), "must be a string or a list"),
        (chat(user([5])), r"content\[0\]` must be an object"),
        (chat(user([{"type": "text", "text": 5}])), r"content\[0\].text` must be a string"),
        (chat(user([{"type": "thinking"}])), "thinking` must be a string"),
        (chat({"role": "assistant", "tool_calls": 5}), "tool_calls` must be a list"),
        (chat({"role": "assistant", "tool_calls": [5]}), r"tool_calls\[0\]` must be an object"),
        (
            chat({"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}),
            "must be a call of a function",
        ),
        (chat(user("a"), tools={}), "`tools` must be a list"),
        (chat(user("a"), tools=[5]), r"`tools\[0\]` must be an object"),
        (chat(user("a"), chat_template_kwargs=[1]), "`chat_template_kwargs` must be an object"),
        (chat(user("a"), reasoning_effort=1), "`reasoning_effort` must be a string"),
        (chat(user("a"), continue_final_message=True), "needs `add_generation_prompt`"),
    ],
)
def test_chats_that_every_engine_refuses(make: Make, body: dict[str, Any], said: str) -> None:
    with pytest.raises(RenderError, match=said):
        make().chat(body)


def test_what_the_template_refuses_is_passed_on(make: Make) -> None:
    with pytest.raises(RenderError, match="only one system message"):
        make("{{ raise_exception('only one system message') }}").chat(chat(user("a")))


def test_a_final_message_that_the_template_alters_is_refused(make: Make) -> None:
    open_end = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(RenderError, match="does not render the final message"):
        make("{{ messages[-1].content | upper }}").chat(chat(user("a"), **open_end))


@pytest.mark.parametrize("prompt", [None, "", 5, {"a": 1}])
def test_completions_that_every_engine_refuses(make: Make, prompt: object) -> None:
    with pytest.raises(RenderError, match="`prompt`"):
        make().completion({"prompt": prompt})


# What only an engine can tell

FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (chat(user([{"type": "image_url", "image_url": {"url": "x"}}])), "'image_url', not text"),
        (chat(user([{"type": "input_audio", "input_audio": {}}])), "'input_audio', not text"),
        (chat(user([{"type": "prompt_embeds", "data": "x"}])), "'prompt_embeds', not text"),
        (chat(user([{"text": "a"}])), "None, not text"),
        (chat(user([{"type": ["text"], "text": "a"}])), "not text"),
        (chat(user([{"type": "text", "text": "a", "uuid": "u"}])), "uuid"),
        (chat(user("a"), chat_template="x"), "`chat_template` is set"),
        (chat(user("a"), truncate_prompt_tokens=5), "`truncate_prompt_tokens` is set"),
        (chat(user("a"), kv_transfer_params={"prompt_token_ids": [1]}), "brings token ids"),
        (chat(user("a"), add_generation_prompt=None), "`add_generation_prompt` is no boolean"),
        (chat(user("a"), add_special_tokens="yes"), "`add_special_tokens` is no boolean"),
        (chat(user("a"), documents=[5]), "`documents`"),
        (chat(user("a"), documents=[{"a": 1}]), "`documents`"),
        (chat(user("a"), tools=[]), "`tools` is empty"),
        (chat(user("a"), tools=[{"type": "web_search"}]), r"`tools\[0\]`"),
        (chat(user("a"), tools=[FUNCTION, {"function": {"name": 5}}]), r"`tools\[1\]`"),
        (chat(user("a"), tools=[{"function": {"name": "f", "strict": "yes"}}]), r"`tools\[0\]`"),
        (chat(user("a"), chat_template_kwargs={"tokenize": True}), "name tokenize"),
        (chat(user("a"), chat_template_kwargs={"tools": [], "messages": []}), "messages, tools"),
        (
            chat(
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"function": {"name": "f", "arguments": '{"a": ' + "9" * 5000 + "}"}}
                    ],
                }
            ),
            "arguments`: Exceeds",
        ),
    ],
)
def test_chats_that_only_an_engine_can_render(make: Make, body: dict[str, Any], said: str) -> None:
    with pytest.raises(Inexact, match=said) as caught:
        make().chat(body)
    assert caught.value.reason == str(caught.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": "a", "suffix": "b"}, "`suffix`"),
        ({"prompt_embeds": "AA=="}, "`prompt_embeds`"),
        ({"prompt": "a", "truncate_prompt_tokens": 3}, "`truncate_prompt_tokens`"),
        ({"prompt": ["a", 1]}, "mixes"),
        ({"prompt": [1.0]}, "mixes"),
        ({"prompt": [True]}, "mixes"),
        ({"prompt": [-1]}, "mixes"),
        ({"prompt": "a", "add_special_tokens": 1}, "no boolean"),
    ],
)
def test_completions_that_only_an_engine_can_render(
    make: Make, body: dict[str, Any], said: str
) -> None:
    with pytest.raises(Inexact, match=said):
        make().completion(body)


def test_a_model_without_a_template_still_completes(make: Make) -> None:
    renderer = make(None)
    with pytest.raises(Inexact, match="no chat template"):
        renderer.chat(chat(user("a")))
    assert renderer.completion({"prompt": "a"})


def test_models_with_renderers_of_their_own_are_left_to_the_engines(make: Make) -> None:
    renderer = make(files={"config.json": {"model_type": "gpt_oss"}})
    with pytest.raises(Inexact, match="Harmony"):
        renderer.chat(chat(user("a")))
    assert renderer.completion({"prompt": "a"})


def test_a_tokenizer_of_another_library_is_left_to_the_engines(make: Make) -> None:
    renderer = make(files={"tekken.json": {}, "consolidated.safetensors": ""})
    with pytest.raises(Inexact, match="mistral"):
        renderer.chat(chat(user("a")))
    with pytest.raises(Inexact, match="mistral"):
        renderer.completion({"prompt": "a"})


def test_special_tokens_that_the_files_do_not_say_are_left_to_the_engines(make: Make) -> None:
    renderer = make("{{ pad_token }}", config={"tokenizer_class": "Qwen2Tokenizer"})
    with pytest.raises(Inexact, match="default for pad_token"):
        renderer.chat(chat(user("a")))


def test_files_that_cannot_be_used_are_named(make: Make, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no Jinja template"):
        make("{% for %}")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Renderer(
            ModelConfig.model_validate(
                {
                    "name": "m",
                    "tokenizer": tmp_path / "tokenizer",
                    "chat_template": tmp_path / "none.jinja",
                    "engines": [{"id": "a", "url": "http://h"}],
                }
            )
        )


def test_a_model_that_needs_no_tokenizer_has_no_renderer() -> None:
    fields = {"name": "m", "exact": False, "engines": [{"id": "a", "url": "http://h"}]}
    with pytest.raises(TokenizerError, match="no tokenizer"):
        Renderer(ModelConfig.model_validate(fields))
