"""Tokenizer directories: what their files say together, as the engines' loader reads them.

The cases were held against transformers 5.19's AutoTokenizer: token ids, special
tokens and templates were the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from connector.tokenizer import TokenizerError, load

Write = Callable[..., Path]


def added(content: str, **flags: bool) -> dict[str, Any]:
    usual = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, "special": True} | usual | flags


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return [tokenizer.id_to_token(token_id) for token_id in ids]


def test_a_bare_tokenizer_json_will_do(directory: Write) -> None:
    files = load(directory())
    assert files.special_tokens == {}
    assert files.templates == {}
    assert (files.own_chat, files.own_text) == (None, None)
    assert "eos_token" in files.unsure


def test_padding_and_truncation_of_the_file_are_dropped(
    directory: Write, tokenizer: Tokenizer
) -> None:
    path = directory()
    padded = Tokenizer.from_str(tokenizer.to_str())
    padded.enable_padding(length=50)
    padded.enable_truncation(3)
    padded.save(str(path / "tokenizer.json"))
    assert (
        load(path).tokenizer.encode("pool of engines").ids
        == tokenizer.encode("pool of engines").ids
    )


def test_special_tokens_have_names(directory: Write) -> None:
    files = load(
        directory(
            {
                "bos_token": None,
                "eos_token": "<|im_end|>",
                "pad_token": {"__type": "AddedToken", **added("<pad>")},
                "image_token": "<image>",
                "extra_special_tokens": {"boi": "<boi>"},
                "add_bos_token": True,
            }
        )
    )
    assert files.special_tokens == {
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
        "image_token": "<image>",
        "boi": "<boi>",
    }
    assert files.unsure == frozenset()
    assert pieces(files.tokenizer, "a<pad><image><boi>") == ["a", "<pad>", "<image>", "<boi>"]


def test_tokens_declared_beside_the_tokenizer_are_added(directory: Write) -> None:
    files = load(
        directory(
            {
                "added_tokens_decoder": {
                    "900": added("<new>"),
                    "901": added("word", special=False, normalized=True, single_word=True),
                    "2": added("<|im_end|>", lstrip=True, rstrip=True),
                },
                "extra_special_tokens": ["<x>"],
            }
        )
    )
    tokens = pieces(files.tokenizer, "<new>word sword<x>")
    assert (tokens[:2], tokens[-1]) == (["<new>", "word"], "<x>")
    assert "word" not in tokens[2:]
    assert pieces(files.tokenizer, "a  <|im_end|> b") == ["a", "<|im_end|>", "b"]


def test_directories_from_before_say_it_in_files_of_their_own(directory: Write) -> None:
    files = load(
        directory(
            {"eos_token": "<old>", "pad_token": "<pad>"},
            **{
                "special_tokens_map.json": {
                    "bos_token": added("<s>", lstrip=True),
                    "eos_token": "</s>",
                    "additional_special_tokens": ["<extra>"],
                },
                "added_tokens.json": {"<pad>": 900, "plain": 901},
            },
        )
    )
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert pieces(files.tokenizer, "a <s></s><extra><pad>plain") == [
        "a",
        "<s>",
        "</s>",
        "<extra>",
        "<pad>",
        "plain",
    ]


def test_special_tokens_may_be_split(directory: Write) -> None:
    whole = load(directory({"split_special_tokens": True})).tokenizer
    assert "<|im_end|>" not in pieces(whole, "a<|im_end|>")


def test_a_class_of_its_own_leaves_doubt_about_what_is_not_said(directory: Write) -> None:
    files = load(directory({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}))
    assert "bos_token" in files.unsure
    assert "eos_token" not in files.unsure


def test_templates_in_files_come_before_those_in_the_configuration(directory: Write) -> None:
    files = load(
        directory(
            {"chat_template": "configured"},
            **{
                "chat_template.jinja": "default\r\n",
                "additional_chat_templates__tool_use.jinja": "tools",
            },
        )
    )
    assert files.templates == {"default": "default\n", "tool_use": "tools"}


def test_a_configuration_may_hold_one_template_or_several(directory: Write) -> None:
    path = directory({"chat_template": "one"})
    assert load(path).templates == {"default": "one"}
    (path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "default", "template": "a"}, '
        '{"name": "tool_use", "template": "b"}]}'
    )
    assert load(path).templates == {"default": "a", "tool_use": "b"}


@pytest.mark.parametrize(
    ("files", "chat", "text"),
    [
        ({"config.json": {"model_type": "qwen3"}}, None, None),
        ({"config.json": {"model_type": "gpt_oss"}}, "Harmony", None),
        ({"chat_template.json": {"chat_template": "x"}}, "processor", None),
        ({"config.json": {"architectures": ["DeepseekV4ForCausalLM"]}}, "V4For", "V4For"),
        ({"tekken.json": {}, "consolidated-1.safetensors": ""}, "mistral", "mistral"),
        ({"tekken.json": {}}, None, None),
    ],
)
def test_models_that_engines_render_their_own_way(
    directory: Write, files: dict[str, Any], chat: str | None, text: str | None
) -> None:
    loaded = load(directory({}, **files))
    for said, expected in ((loaded.own_chat, chat), (loaded.own_text, text)):
        assert (said is None) if expected is None else (said is not None and expected in said)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer.json": "{}"}, "tokenizer.json cannot be read"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json cannot be read"),
        ({"tokenizer_config.json": "[]"}, "no JSON object"),
        ({"tokenizer_config.json": {"bos_token": {}}}, "no added token"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"1": 5}}}, "no added token"),
        ({"tokenizer_config.json": {"extra_special_tokens": 5}}, "neither a list nor a map"),
        ({"tokenizer_config.json": {"chat_template": [1]}}, "no list of templates"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    directory: Write, files: dict[str, Any], said: str
) -> None:
    with pytest.raises(TokenizerError, match=said):
        load(directory({}, **files))


def test_a_directory_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="exact: false"):
        load(tmp_path)


def test_a_template_that_is_not_text_is_refused(directory: Write) -> None:
    path = directory({})
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja cannot be read"):
        load(path)
