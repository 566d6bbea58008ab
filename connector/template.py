"""A chat template: Jinja as the engines run it, and what can be told from its source.

The environment is that of Hugging Face's `apply_chat_template` (transformers
5.19, `utils/chat_template_utils.py`); how a template wants its messages is
found out as vLLM finds it out (vLLM 0.32, `renderers/hf.py`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes as ast
import jinja2.parser
import jinja2.sandbox

ContentFormat = Literal["string", "openai"]

# Put behind the last message to find where it ends in the text.
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class Template:
    """One compiled chat template. Raises jinja2.TemplateError for a source that is none.

    `content_format` is "openai" where the template goes through the parts of a
    message's content, "string" where it takes the content as a text; `variables`
    are the names it is given values for, and `knows_developer` says whether it
    tells the developer role from others.
    """

    def __init__(self, source: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._compiled = environment.from_string(source)
        tree = environment.parse(source)
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        self.content_format: ContentFormat = _content_format(tree)
        self.knows_developer = "'developer'" in source or '"developer"' in source

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        documents: list[dict[str, str]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        values: Mapping[str, Any],
    ) -> str:
        """Render a conversation; `values` are further variables, special tokens among them.

        Raises ValueError where a final message to be continued cannot be, and
        whatever the template raises: nothing about a template is certain.
        """
        if continue_final_message:
            messages, final = self._marked(messages)
        text = self._compiled.render(
            messages=messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **values,
        )
        return _cut(text, final) if continue_final_message else text

    def _marked(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """Return the messages with a mark at the last one's end, and that one's text."""
        if "content" not in self.source:
            raise ValueError("the chat template takes no content that could be continued")
        last = copy.deepcopy(messages[-1])
        content = last["content"]
        if isinstance(content, str):
            last["content"] = content + _MARK
            return [*messages[:-1], last], content
        for part in reversed(content):
            if "text" in part:
                text: str = part["text"]
                part["text"] = text + _MARK
                return [*messages[:-1], last], text
        raise ValueError("the final message has no text that could be continued")


def _cut(text: str, final: str) -> str:
    """Return `text` up to the mark. Raises ValueError where the template lost it."""
    if final.strip() not in text or _MARK.strip() not in text:
        raise ValueError("the chat template does not render the final message as it is")
    at = text.rindex(_MARK.strip())
    kept = text[at : at + len(_MARK)] == _MARK
    # A mark without its blank was trimmed, and so was what stood before it.
    return text[:at] if kept else text[:at].rstrip()


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks what a model wrote, for training; here it only passes through."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> ast.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return ast.CallBlock(self.call_method("_passed"), [], [], body).set_lineno(line)

    def _passed(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    # The engine takes its local time; so do we, and share its day if not its second.
    return datetime.now().strftime(pattern)  # noqa: DTZ005


class _UndecidedError(Exception):
    """The template does something with messages that the search does not follow."""


def _content_format(tree: ast.Template) -> ContentFormat:
    try:
        return "openai" if any(_loops_over_content(tree)) else "string"
    except _UndecidedError:
        return "string"


def _loops_over_content(tree: ast.Template) -> Iterator[bool]:
    """Yield True for each loop over the parts of a message's content, in order of the source.

    Such a loop goes over `message.content`, where `message` comes from a loop over
    the messages; over a macro's parameter that is handed such content; or, outside
    of macros, over a variable with the name `content`.
    """
    messages = _aliases(tree, "messages")
    items = [
        _name(loop.target)
        for loop in tree.find_all(ast.For)
        if any(_is_variable(_stripped(loop.iter), name) for name in messages)
    ]

    def is_content(node: ast.Node) -> bool:
        stripped = _stripped(node)
        return any(_is_attribute(stripped, item, "content") for item in items)

    in_macros: set[int] = set()
    handed: dict[int, set[str]] = {}
    for macro in tree.find_all(ast.Macro):
        parameters = _handed(tree, macro, is_content)
        for loop in macro.find_all(ast.For):
            in_macros.add(id(loop))
            if parameters:
                handed[id(loop)] = parameters
    for loop in tree.find_all(ast.For):
        name = loop.iter.name if isinstance(loop.iter, ast.Name) else None
        if (
            is_content(loop.iter)
            or name in handed.get(id(loop), ())
            or (name == "content" and id(loop) not in in_macros)
        ):
            _name(loop.target)
            yield True


def _aliases(tree: ast.Template, name: str) -> list[str]:
    """Return `name` and the variables that it, or a slice of it, is assigned to."""
    found = [name]
    for alias in found:  # grows while it is walked
        for assignment in tree.find_all(ast.Assign):
            if _is_variable(_stripped(assignment.node), alias):
                target = _name(assignment.target)
                if target not in found:
                    found.append(target)
    return found


def _handed(
    tree: ast.Template, macro: ast.Macro, is_content: Callable[[ast.Node], bool]
) -> set[str]:
    """Return the parameters of `macro` that some call hands a message's content."""
    names = [argument.name for argument in macro.args]
    handed = set()
    for call in tree.find_all(ast.Call):
        if isinstance(call.node, ast.Name) and call.node.name == macro.name:
            handed |= {
                name
                for name, argument in zip(names, call.args, strict=False)
                if is_content(argument)
            }
            handed |= {
                keyword.key
                for keyword in call.kwargs
                if isinstance(keyword, ast.Keyword)
                and keyword.key in names
                and is_content(keyword.value)
            }
    return handed


def _stripped(node: ast.Node | None) -> ast.Node | None:
    """Return what filters, tests and slices are put on."""
    while isinstance(node, ast.Filter | ast.Test) or (
        isinstance(node, ast.Getitem) and isinstance(node.arg, ast.Slice)
    ):
        node = node.node
    return node


def _is_variable(node: ast.Node | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.ctx == "load" and node.name == name


def _is_attribute(node: ast.Node | None, name: str, attribute: str) -> bool:
    if isinstance(node, ast.Getitem):
        return (
            isinstance(node.arg, ast.Const)
            and node.arg.value == attribute
            and _is_variable(node.node, name)
        )
    if isinstance(node, ast.Getattr):
        return node.attr == attribute and _is_variable(node.node, name)
    return False


def _name(target: ast.Node) -> str:
    if not isinstance(target, ast.Name):
        raise _UndecidedError
    return target.name
