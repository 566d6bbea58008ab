"""Bodies of requests to prompts: text and token ids, as the engines make them.

Whole and unhurried: every call renders the whole conversation and tokenises all
of it. Faster ways are held against this one. It covers what an engine does with
text by Hugging Face means; where the outcome hangs on something else (media, a
tokenizer library of its own, flags of the server) it raises Inexact instead of
a guess, and an engine's `/render` must be asked. Bodies that every engine
refuses raise RenderError; where it is not certain that they would, a body
counts as Inexact or is rendered, and the engine judges.

Source: vLLM 0.32, `renderers/hf.py`, `renderers/chat_utils.py`,
`renderers/online_renderer.py` and the request models of its OpenAI server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from connector import tokenizer
from connector.model import ModelConfig
from connector.template import ContentFormat, Template
from connector.tokenizer import TemplateError, TokenizerError

__all__ = [
    "Inexact",
    "Prepared",
    "RenderError",
    "Rendered",
    "Renderer",
    "TemplateError",
    "TokenizerError",
]

Message = dict[str, Any]


class RenderError(ValueError):
    """The body cannot become a prompt, and the client is to be told why (HTTP 400)."""


class Inexact(Exception):
    """The prompt cannot be made here exactly as an engine makes it; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Rendered(NamedTuple):
    """A prompt: its text (None where the client sent token ids) and its token ids."""

    text: str | None
    token_ids: list[int]


class Prepared(NamedTuple):
    """A chat body made ready for its template: what `Template.render` is called with."""

    template: Template
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, str]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    values: dict[str, Any]


class Renderer:
    """Renders for one model. Reads tokenizer and templates once; may be shared by threads.

    Raises TokenizerError where a file cannot be read or a template is none. A
    model whose engines render by means of their own is no error here: each call
    raises Inexact.
    """

    def __init__(self, model: ModelConfig) -> None:
        if model.tokenizer is None:
            raise TokenizerError(f"model {model.name!r} has no tokenizer")
        self._model = model
        files = tokenizer.load(model.tokenizer)
        self.tokenizer = files.tokenizer
        self._special_tokens = files.special_tokens
        self._unsure = files.unsure
        self._own_chat = files.own_chat
        self._own_text = files.own_text
        if model.chat_template is not None:
            templates = {"default": tokenizer.read_template(model.chat_template)}
        else:
            templates = dict(files.templates)
        self._template = _compiled(templates.get("default"))
        self._tool_template = _compiled(templates.get("tool_use")) or self._template

    def chat(self, body: Mapping[str, Any]) -> Rendered:
        """Render the body of a chat completion. Raises RenderError or Inexact."""
        text = self.chat_text(body)
        special = _flag(body, "add_special_tokens", default=False)
        return Rendered(text, self.encode(text, add_special_tokens=special))

    def chat_text(self, body: Mapping[str, Any]) -> str:
        """Return the text of a chat completion's prompt. Raises RenderError or Inexact."""
        prepared = self.prepare(body)
        template, messages, tools, documents, generation, continued, values = prepared
        try:
            return template.render(
                messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=generation,
                continue_final_message=continued,
                values=values,
            )
        except Exception as error:
            # Templates refuse input by raising, and stumble over input they did
            # not expect: engines answer both with 400 and the reason.
            raise RenderError(f"the chat template refused the request: {error}") from error

    def completion(self, body: Mapping[str, Any]) -> list[Rendered]:
        """Render the prompts of a completion body, in order. Raises RenderError or Inexact."""
        if self._own_text:
            raise Inexact(self._own_text)
        for field in ("prompt_embeds", "suffix", "truncate_prompt_tokens"):
            if body.get(field) is not None:
                raise Inexact(f"`{field}` is set")
        special = _flag(body, "add_special_tokens", default=True)
        prompt = body.get("prompt")
        if prompt is None or prompt == "":
            raise RenderError("`prompt` is missing or empty")
        if isinstance(prompt, str):
            return [Rendered(prompt, self.encode(prompt, add_special_tokens=special))]
        if not isinstance(prompt, Sequence):
            raise RenderError("`prompt` must be a string, a list of strings or token ids")
        if prompt and _are_ids(prompt):
            return [Rendered(None, list(prompt))]
        if all(isinstance(item, str) for item in prompt):
            return [
                Rendered(item, self.encode(item, add_special_tokens=special)) for item in prompt
            ]
        if all(isinstance(item, list) and _are_ids(item) for item in prompt):
            return [Rendered(None, list(item)) for item in prompt]
        raise Inexact("`prompt` mixes kinds of prompts")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenise a text."""
        # Unlike `encode`, the batch form lets other threads run meanwhile.
        (encoding,) = self.tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return list(encoding.ids)

    def prepare(self, body: Mapping[str, Any]) -> Prepared:
        """Turn a chat body into a call of its template. Raises RenderError or Inexact."""
        if self._own_chat or self._own_text:
            raise Inexact(self._own_chat or self._own_text or "")
        for field in ("chat_template", "truncate_prompt_tokens"):
            if body.get(field) is not None:
                raise Inexact(f"`{field}` is set")
        transfer = body.get("kv_transfer_params")
        if isinstance(transfer, Mapping) and transfer.get("prompt_token_ids") is not None:
            raise Inexact("`kv_transfer_params` brings token ids")
        tools = self._tools(body)
        template = self._tool_template if tools is not None else self._template
        if template is None:
            raise Inexact("the tokenizer has no chat template; an engine may have a fallback")
        doubtful = self._unsure & template.variables
        if doubtful:
            raise Inexact(f"the tokenizer's class may have a default for {', '.join(doubtful)}")
        given = self._model.chat_template_content_format
        messages = _conversation(body, template.content_format if given == "auto" else given)
        if not template.knows_developer and any(m["role"] == "developer" for m in messages):
            messages = _with_one_system_message(messages)
        return self._prepared(body, template, messages, tools)

    def _prepared(
        self,
        body: Mapping[str, Any],
        template: Template,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
    ) -> Prepared:
        generation = _flag(body, "add_generation_prompt", default=True)
        continued = _flag(body, "continue_final_message", default=False)
        if continued and generation:
            raise RenderError(
                "`continue_final_message` needs `add_generation_prompt` to be set to false"
            )
        effort = body.get("reasoning_effort")
        if effort is not None and not isinstance(effort, str):
            raise RenderError("`reasoning_effort` must be a string")
        documents = body.get("documents")
        own = body.get("chat_template_kwargs")
        if own is None:
            own = {}
        if not isinstance(own, Mapping):
            raise RenderError("`chat_template_kwargs` must be an object")

        # Server's defaults, then the request's kwargs, then its fields. A null and
        # an "auto" of the request count as not given.
        fields: dict[str, Any] = {"documents": documents, "reasoning_effort": effort}
        if effort is not None and "enable_thinking" not in own:
            fields["enable_thinking"] = effort != "none"
        request = dict(own) | {name: value for name, value in fields.items() if _is_given(value)}
        merged = dict(self._model.default_chat_template_kwargs)
        merged |= {name: value for name, value in request.items() if _is_given(value)}
        reserved = _RESERVED & merged.keys()
        if reserved:
            raise Inexact(f"template arguments name {', '.join(sorted(reserved))}")
        values = {
            name: value
            for name, value in merged.items()
            if name in template.variables and name not in _SWALLOWED
        }
        return Prepared(
            template=template,
            messages=messages,
            tools=tools,
            documents=_documents(merged.get("documents")),
            add_generation_prompt=generation,
            continue_final_message=continued,
            values={**self._special_tokens, **values},
        )

    def _tools(self, body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        tools = body.get("tools")
        if tools is None:
            return None
        if not isinstance(tools, list):
            raise RenderError("`tools` must be a list")
        if not tools:
            raise Inexact("`tools` is empty, which engines judge differently")
        dumped = [_tool(index, tool) for index, tool in enumerate(tools)]
        if (
            self._model.exclude_tools_when_tool_choice_none
            and body.get("tool_choice", "auto") == "none"
        ):
            return None
        return dumped


# Names that the template's call itself takes: an engine refuses them or changes
# its ways.
_RESERVED = frozenset(
    {
        "chat_template",
        "conversation",
        "messages",
        "model_config",
        "return_assistant_tokens_mask",
        "self",
        "tokenize",
        "tokenizer",
        "tools",
    }
)
# Names that the call takes for itself and the template never sees.
_SWALLOWED = frozenset(
    {
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "max_length",
        "padding",
        "return_dict",
        "return_tensors",
        "tokenizer_kwargs",
        "truncation",
    }
)


def _compiled(source: str | None) -> Template | None:
    if source is None:
        return None
    try:
        return Template(source)
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template is no Jinja template: {error}") from error


def _is_given(value: Any) -> bool:
    return value is not None and value != "auto"


def _flag(body: Mapping[str, Any], field: str, *, default: bool) -> bool:
    value = body.get(field, default)
    if isinstance(value, bool):
        return value
    raise Inexact(f"`{field}` is no boolean")


def _are_ids(prompt: Sequence[Any]) -> bool:
    return all(type(item) is int and item >= 0 for item in prompt)


def _documents(documents: Any) -> list[dict[str, str]] | None:
    if documents is None:
        return None
    if isinstance(documents, list) and all(
        isinstance(document, dict) and all(isinstance(text, str) for text in document.values())
        for document in documents
    ):
        return documents
    raise Inexact("`documents` are no list of objects with texts")


def _tool(index: int, tool: Any) -> dict[str, Any]:
    """Return a tool as the engine's request model writes it out again.

    The order of the fields is the model's, unknown ones are dropped, a missing
    description or list of parameters is null.
    """
    if not isinstance(tool, dict):
        raise RenderError(f"`tools[{index}]` must be an object")
    function = tool.get("function")
    deferred = tool.get("defer_loading")
    if (
        tool.get("type", "function") != "function"
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("description"), str | None)
        or not isinstance(function.get("parameters"), dict | None)
        or not isinstance(function.get("strict"), bool | None)
        or not isinstance(function.get("defer_loading"), bool | None)
        or not isinstance(deferred, bool | None)
    ):
        raise Inexact(f"`tools[{index}]` is no function tool of the usual shape")
    dumped = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    if function.get("strict") is not None:
        dumped["strict"] = function["strict"]
    inner = function.get("defer_loading")
    if inner is None:
        inner = deferred
    if inner is not None:
        dumped["defer_loading"] = inner
    whole: dict[str, Any] = {"type": "function", "function": dumped}
    if deferred is not None:
        whole["defer_loading"] = deferred
    return whole


def _conversation(body: Mapping[str, Any], content_format: ContentFormat) -> list[Message]:
    """Return the messages as a template is given them."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise RenderError("`messages` must be a list")
    if not messages:
        raise RenderError("`messages` must not be empty")
    return [
        _message(f"messages[{index}]", message, content_format)
        for index, message in enumerate(messages)
    ]


def _message(where: str, message: Any, content_format: ContentFormat) -> Message:
    if not isinstance(message, dict):
        raise RenderError(f"`{where}` must be an object")
    role = message.get("role")
    if not isinstance(role, str):
        raise RenderError(f"`{where}.role` must be a string")
    parts = list(_parts(where, role, message.get("content")))
    result: Message = {"role": role, "content": parts}
    if content_format == "string":
        texts = [_part_text(part) for part in parts]
        result["content"] = "\n".join(text for text in texts if text)
    elif role == "tool" and all(part["type"] == "text" for part in parts):
        # Most templates take a tool's answer as a text, whatever they do with
        # others. Here an empty part counts for a line; above it does not.
        result["content"] = "\n".join(_part_text(part) for part in parts)
    if role == "assistant":
        calls = _tool_calls(where, message.get("tool_calls"))
        if calls:
            result["tool_calls"] = calls
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            # Templates know it by either name.
            result["reasoning"] = result["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        result["tool_call_id"] = message["tool_call_id"]
    for field in ("name", "task"):
        if isinstance(message.get(field), str):
            result[field] = message[field]
    if role == "developer":
        if message.get("tools") is not None:
            raise Inexact(f"`{where}` is a developer message with tools")
        result["tools"] = None
    return result


def _part_text(part: Mapping[str, Any]) -> str:
    text: str = part["name" if part["type"] == "tool_reference" else "text"]
    return text


# Fields of content parts that mean something to an engine; any others are handed
# to the template.
_PART_FIELDS = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "closed",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "name",
        "prompt_cache_breakpoint",
        "refusal",
        "text",
        "thinking",
        "type",
        "uuid",
        "video_embeds",
        "video_url",
    }
)
# Where each kind of text part keeps its text.
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_BILLING = "x-anthropic-billing-header"


def _parts(where: str, role: str, content: Any) -> Iterator[dict[str, Any]]:
    """Yield a message's content as parts of type `text` or `tool_reference`."""
    if content is None:
        return
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RenderError(f"`{where}.content` must be a string or a list of parts")
    for index, part in enumerate(content):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        elif not isinstance(part, dict):
            raise RenderError(f"`{where}.content[{index}]` must be an object")
        kind = part.get("type")
        if part.get("uuid") is not None:
            raise Inexact(f"`{where}.content[{index}]` has a uuid")
        if kind == "tool_reference" and isinstance(part.get("name"), str):
            yield {"type": "tool_reference", "name": part["name"]}
            continue
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise Inexact(f"`{where}.content[{index}]` is of type {kind!r}, not text")
        text = part.get(_TEXT_PARTS[kind])
        if text is None and kind in ("text", "refusal"):
            continue
        if not isinstance(text, str):
            raise RenderError(f"`{where}.content[{index}].{_TEXT_PARTS[kind]}` must be a string")
        if role == "system" and kind == "text" and text.startswith(_BILLING):
            # A line of Claude Code's that changes with every request: engines
            # drop it, for it would spoil the prefix cache.
            text = text.partition("\n")[2]
            if not text:
                continue
        extra = {name: value for name, value in part.items() if name not in _PART_FIELDS}
        yield {"type": "text", "text": text, **extra}


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Return an assistant's tool calls with their arguments as objects.

    Fields come in the order in which an engine's request model knows them: a
    template may write a whole call out.
    """
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise RenderError(f"`{where}.tool_calls` must be a list")
    result = []
    for index, call in enumerate(calls):
        at = f"{where}.tool_calls[{index}]"
        if not isinstance(call, dict):
            raise RenderError(f"`{at}` must be an object")
        function = call.get("function")
        if call.get("type", "function") != "function" or not isinstance(function, dict):
            raise RenderError(f"`{at}` must be a call of a function")
        function = _ordered(function, "arguments", "name")
        function["arguments"] = _arguments(at, function.get("arguments"))
        result.append(_ordered(call | {"function": function}, "id", "function", "type"))
    return result


def _ordered(fields: dict[str, Any], *first: str) -> dict[str, Any]:
    return {name: fields[name] for name in first if name in fields} | fields


def _arguments(where: str, arguments: Any) -> dict[str, Any]:
    """Return a call's arguments as an object: an empty one where they are none."""
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            # It is history: refusing it would end the conversation for good.
            return {}
        except (ValueError, RecursionError) as error:
            raise Inexact(f"`{where}.function.arguments`: {error}") from error
    return arguments if isinstance(arguments, dict) else {}


def _with_one_system_message(messages: list[Message]) -> list[Message]:
    """Return a conversation with developer messages as system ones, all in one at its start.

    A single system message that is the first already stays as it is.
    """
    turned = [
        {name: value for name, value in m.items() if name != "tools"} | {"role": "system"}
        if m["role"] == "developer"
        else m
        for m in messages
    ]
    system = [m for m in turned if m["role"] == "system"]
    if len(system) == 1 and turned[0] is system[0]:
        return turned
    texts = [_text(m["content"]) for m in system]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(m for m in turned if m["role"] != "system")]


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)
