"""A small tokenizer, made anew for the session."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SENTENCES = (
    "The pool keeps what the engines computed, and hands it to whoever asks next.",
    "A turn is sent where its prefix lies: user, assistant, system, tool.",
    'def answer(question: str) -> str:\n    return {"name": question}\n',
)
SPECIAL = ("<|bos|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A byte-level BPE; with special tokens asked for, a prompt begins with <|bos|>."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    made.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return made


@pytest.fixture
def directory(tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes a tokenizer directory: its configuration, further files."""

    def write(config: dict[str, Any] | None = None, **files: object) -> Path:
        path = tmp_path / "tokenizer"
        path.mkdir()
        tokenizer.save(str(path / "tokenizer.json"))
        if config is not None:
            plain = {"tokenizer_class": "PreTrainedTokenizerFast"}
            (path / "tokenizer_config.json").write_text(json.dumps(plain | config))
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            target = path / name.replace("__", "/")
            target.parent.mkdir(exist_ok=True)
            target.write_text(text)
        return path

    return write
