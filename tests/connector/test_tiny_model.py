"""The tiny model: files, determinism, what it replaces and what it leaves alone."""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from connector import tiny_model
from connector.tiny_model import Shape, TinyModelError, write


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    assert write(directory)
    return directory


def test_is_whole_and_nothing_else_is_left(made: Path) -> None:
    assert sorted(path.name for path in made.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tiny-model.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert list(made.parent.iterdir()) == [made]
    config = json.loads((made / "config.json").read_text())
    tensors = load_file(made / "model.safetensors")
    assert config["max_position_embeddings"] == 32768
    assert tensors["model.embed_tokens.weight"].shape == (4096, 64)
    assert tensors["model.layers.1.self_attn.k_proj.weight"].shape == (2 * 32, 64)
    assert len(tensors) == 2 + 11 * 2


def test_is_made_once(made: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    assert not write(made)
    assert {path: path.stat().st_mtime_ns for path in made.iterdir()} == before


def test_same_parameters_give_the_same_files(made: Path, tmp_path: Path) -> None:
    assert write(tmp_path / "again")
    for path in made.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_another_shape_replaces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_model, "CORPUS_BYTES", 50_000)
    first, second = Shape(vocab=400), Shape(vocab=400, seed=1, layers=1)
    assert write(tmp_path / "m", first)
    weights = (tmp_path / "m" / "model.safetensors").read_bytes()
    assert write(tmp_path / "m", second)
    assert (tmp_path / "m" / "model.safetensors").read_bytes() != weights
    assert json.loads((tmp_path / "m" / "config.json").read_text())["num_hidden_layers"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_strangers_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("{}")
    with pytest.raises(TinyModelError, match="was not made by this command"):
        write(tmp_path / "theirs")
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["config.json"]


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(shape: Shape) -> None:
        raise MemoryError

    monkeypatch.setattr(tiny_model, "CORPUS_BYTES", 50_000)
    monkeypatch.setattr(tiny_model, "weights", fail)
    with pytest.raises(MemoryError):
        write(tmp_path / "m", Shape(vocab=400))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "do not divide"),
        ({"head_dim": 16}, "no kernel for head_dim 16"),
        ({"vocab": 256}, "bytes and special tokens take 265"),
        ({"layers": 0}, "at least 1"),
    ],
)
def test_shapes_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TinyModelError, match=message):
        Shape(**changes)


def test_tokenizer_is_lossless_and_keeps_special_tokens_whole(made: Path) -> None:
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    text = "<|im_start|>user\nZürich 2026 \U0001f680\n\tx = [1]<think>hm</think><|im_end|>\n"
    encoding = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    assert {"<|im_start|>", "<think>", "<|im_end|>"} <= set(encoding.tokens)
    assert tokenizer.get_vocab_size() == 4096
    assert max(encoding.ids) < 4096
    # A trained vocabulary, not bytes.
    assert len(tokenizer.encode("def __init__(self, name):").ids) < 12


def render(made: Path, messages: list[dict[str, Any]], **more: Any) -> str:
    template = json.loads((made / "tokenizer_config.json").read_text())["chat_template"]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template).render(messages=messages, **more)


def test_template_plain(made: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 < 2?"},
    ]
    assert render(made, messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1 < 2?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render(made, [], add_generation_prompt=True, enable_thinking=False) == (
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_template_tools(made: Path) -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "look it up",
            "tool_calls": [
                {"type": "function", "function": {"name": "get", "arguments": {"city": "Bern"}}},
                {"type": "function", "function": {"name": "now", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "noon"},
    ]
    text = render(made, messages, tools=[{"type": "function", "function": {"name": "get"}}])
    assert '{"type": "function", "function": {"name": "get"}}\n' in text
    assert (
        "<|im_start|>assistant\n<think>\nlook it up\n</think>\n\n"
        '<tool_call>{"name": "get", "arguments": {"city": "Bern"}}</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n"
        "<tool_response>\nnoon\n</tool_response><|im_end|>\n"
    ) in text


def test_template_forgets_reasoning_of_earlier_turns(made: Path) -> None:
    turn = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "because"},
    ]
    assert "because" in render(made, turn)
    assert "because" not in render(made, [*turn, {"role": "user", "content": "c"}])
