"""A tokenizer directory, read the way the engines' Hugging Face loader reads it.

`tokenizer.json` is the tokenizer. The other files add tokens to it, name special
tokens (which chat templates are given by name) and bring the chat templates.
Source: transformers 5.19, `tokenization_utils_base.py` and
`tokenization_utils_tokenizers.py`.

Some tokenizer classes build their pipeline anew from the vocabulary instead of
taking it from tokenizer.json. For published models the two are the same; for
anything else a comparison with an engine's `/render` has the last word.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

# Classes that add nothing to what the files say. Others may have special tokens
# of their own where the files name none.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")

# Architectures for which vLLM has a tokenizer or a way of rendering of its own
# (vLLM 0.32, `config/model.py`).
_OWN_RENDERERS = frozenset(
    {
        "DeepseekV32ForCausalLM",
        "DeepseekV4ForCausalLM",
        "DeepseekV4ForConditionalGeneration",
        "DeepseekV41ForCausalLM",
        "InklingForCausalLM",
        "InklingForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
        "MoonshotKimiaForCausalLM",
    }
)


FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*",
)
"""What a tokenizer directory is read from, as patterns; tokenizer.json must be there."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class TokenizerError(ValueError):
    """A tokenizer directory that cannot be read or used."""


class TemplateError(TokenizerError):
    """A chat template that cannot be read or used."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a tokenizer directory holds.

    `special_tokens` are the tokens that templates know by name (`bos_token` and
    its like); `unsure` are such names that the files do not mention and the
    tokenizer's class may have a default for. `templates` are the chat templates
    by name (`default`, `tool_use`). `own_chat` and `own_text` say why an engine
    renders chats, or tokenises any text, otherwise than from these files; None
    where it does not.
    """

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    unsure: frozenset[str]
    templates: Mapping[str, str]
    own_chat: str | None
    own_text: str | None


def load(directory: Path) -> TokenizerFiles:
    """Read a tokenizer directory. Raises TokenizerError where that fails."""
    path = directory / "tokenizer.json"
    if not directory.is_dir():
        raise TokenizerError(f"there is no directory {directory}; {_remedy(directory)}")
    if not path.is_file():
        raise TokenizerError(
            f"{directory} has no tokenizer.json; name the directory that the engines take "
            "their tokenizer from, or set `exact: false`"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise TokenizerError(
            f"{path} cannot be read: {error}; copy it anew from where the engines have it, or set "
            "`exact: false`"
        ) from error
    config = _json(directory / "tokenizer_config.json")
    named, extra = _special_tokens(directory, config)
    _add_tokens(tokenizer, _declared(directory, path, config, named, extra), named, extra)
    # Lengths are the engine's business, and a batch of one is not to be padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    own_chat, own_text = _own_rendering(directory)
    plain = config.get("tokenizer_class") in _PLAIN_CLASSES
    return TokenizerFiles(
        tokenizer=tokenizer,
        special_tokens={name: _content(token) for name, token in named.items()},
        unsure=frozenset() if plain else frozenset(_NAMED) - config.keys() - named.keys(),
        templates=_templates(directory, config),
        own_chat=own_chat,
        own_text=own_text,
    )


def is_hub_id(name: str) -> bool:
    """Tell whether a name could be a model's on the Hugging Face Hub: `org/name`."""
    return _HUB_ID.fullmatch(name) is not None


def download(hub_id: str, directory: Path) -> str:
    """Return the command that brings a model's tokenizer files, and nothing else of it."""
    return f"hf download {hub_id} {shlex.join(FILES)} --local-dir {directory}"


def _remedy(directory: Path) -> str:
    """Return what to do about a tokenizer directory that is not there."""
    name = "/".join(directory.parts[-2:])
    # A path was made of the id; where the part before the slash is a folder, it was none.
    if is_hub_id(name) and not directory.parent.exists() and directory.parent.parent.exists():
        return (
            f"if {name} is a model on the Hugging Face Hub, download its tokenizer files first, "
            f"as nothing is downloaded here: `{download(name, directory)}`, or set `exact: false`"
        )
    return (
        "name the directory that the engines take their tokenizer from, download its files "
        f"(`{download('ORG/NAME', directory)}`), or set `exact: false`"
    )


Token = str | AddedToken


def _special_tokens(
    directory: Path, config: Mapping[str, Any]
) -> tuple[dict[str, Token], list[Token]]:
    """Return the special tokens that have names, and those that have none."""
    stated = dict(config)
    extra = stated.get("extra_special_tokens") or stated.get("additional_special_tokens") or []
    if "added_tokens_decoder" not in config:
        # Directories from before that field say it in a file of its own.
        legacy = _json(directory / "special_tokens_map.json")
        stated |= legacy
        listed = legacy.get("extra_special_tokens")
        if isinstance(listed, list) and isinstance(extra, list):
            extra = [*extra, *(token for token in listed if token not in extra)]
        extra = extra or legacy.get("additional_special_tokens") or []
    named_extra: set[str] = set()
    if isinstance(extra, dict):
        stated |= extra
        named_extra = set(extra)
        extra = []
    if not isinstance(extra, list):
        raise TokenizerError(f"{directory}: extra_special_tokens is neither a list nor a map")
    # The usual names come first and in their order: it decides on the ids of
    # tokens that the vocabulary lacks.
    usual = [name for name in _NAMED if name in stated]
    others = [
        name
        for name in stated
        if name not in _NAMED and (name in named_extra or name.endswith("_token"))
    ]
    named = {
        name: _token(stated[name])
        for name in (*usual, *others)
        if isinstance(stated[name], str | dict)
    }
    return named, [_token(value) for value in extra]


def _declared(
    directory: Path,
    path: Path,
    config: Mapping[str, Any],
    named: Mapping[str, Token],
    extra: Iterable[Token],
) -> dict[int, AddedToken]:
    """Return the added tokens that the files declare, by id."""
    declared: dict[int, AddedToken] = {}
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        return {int(index): _added(fields) for index, fields in decoder.items()}
    special = {_content(token) for token in (*named.values(), *extra)}
    for content, index in _json(directory / "added_tokens.json").items():
        is_special = content in special
        declared[index] = AddedToken(
            content, lstrip=False, rstrip=False, normalized=not is_special, special=is_special
        )
    for fields in _json(path).get("added_tokens", ()):
        declared[fields["id"]] = _added(fields)
    return declared


def _add_tokens(
    tokenizer: Tokenizer,
    declared: Mapping[int, AddedToken],
    named: Mapping[str, Token],
    extra: Iterable[Token],
) -> None:
    """Add to the tokenizer what is declared beside it and differs from what it has."""
    present = tokenizer.get_added_tokens_decoder()
    seen = {repr(token) for token in present.values()}
    adding: list[Token] = [
        token for _, token in sorted(declared.items()) if repr(token) not in seen
    ]
    known = {token.content for token in present.values()} | {_content(token) for token in adding}
    for token in (*named.values(), *extra):
        content = _content(token)
        if content not in known:
            known.add(content)
            adding.append(token)
    names = {_content(token) for token in named.values()}
    ready = []
    for token in adding:
        if isinstance(token, str):
            ready.append(AddedToken(token, special=True))
        else:
            if token.content in names:
                token.special = True
            ready.append(token)
    if ready:
        tokenizer.add_tokens(ready)


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name: files of their own, or else the configuration's."""
    found: dict[str, str] = {}
    default = directory / "chat_template.jinja"
    if default.is_file():
        found["default"] = read_template(default)
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.name.removesuffix(".jinja")] = read_template(path)
    if found:
        return found
    stated = config.get("chat_template")
    if isinstance(stated, str):
        return {"default": stated}
    if isinstance(stated, list):
        try:
            return {entry["name"]: entry["template"] for entry in stated}
        except (TypeError, KeyError) as error:
            raise TokenizerError(f"{directory}: chat_template is no list of templates") from error
    return {}


def read_template(path: Path) -> str:
    """Read a chat template's file. Raises TemplateError where that fails."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"chat template {path} cannot be read: {error}") from error


def _own_rendering(directory: Path) -> tuple[str | None, str | None]:
    config = _json(directory / "config.json")
    if any(directory.glob("consolidated*.safetensors")) and (
        (directory / "tekken.json").exists() or any(directory.glob("tokenizer.model.v*"))
    ):
        reason = "engines tokenise this model with mistral-common"
        return reason, reason
    own = _OWN_RENDERERS.intersection(config.get("architectures") or ())
    if own:
        reason = f"engines have a renderer of their own for {', '.join(sorted(own))}"
        return reason, reason
    if config.get("model_type") == "gpt_oss":
        return "engines render gpt-oss chats in the Harmony format", None
    if (directory / "chat_template.json").exists() and not (
        directory / "chat_template.jinja"
    ).exists():
        return "the model's processor brings a chat template of its own (chat_template.json)", None
    return None, None


def _json(path: Path) -> dict[str, Any]:
    """Return what a JSON file holds, nothing where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds no JSON object")
    return value


def _token(value: Any) -> Token:
    return value if isinstance(value, str) else _added(value)


def _added(fields: Any) -> AddedToken:
    try:
        content = fields["content"]
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        return AddedToken(content, **{flag: fields[flag] for flag in flags if flag in fields})
    except (TypeError, KeyError) as error:
        raise TokenizerError(f"{fields!r} describes no added token") from error


def _content(token: Token) -> str:
    return token if isinstance(token, str) else token.content
