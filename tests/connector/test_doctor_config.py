"""What the doctor reads of a gateway.yaml, and how it names faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from connector.doctor.config import ConfigUnreadable, read

GOOD = """\
listen: {prot: 8000}   # not the doctor's business
policy: nonsense
upstream: {api_key_env: ENGINE_KEY}
models:
  - name: m
    tokenizer: ./files
    chat_template: a.jinja
    engines:
      - {id: a, url: "http://127.0.0.1:8101"}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "gateway.yaml"


def test_only_models_and_the_keys_variable_are_read(file: Path) -> None:
    file.write_text(GOOD)
    configured = read(file)
    (model,) = configured.models
    assert model.tokenizer == file.parent / "files"
    assert model.chat_template == file.parent / "a.jinja"
    assert configured.api_key_env == "ENGINE_KEY"


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("tokenizer:", "tokeniser:", 6, "models.0.tokeniser: unknown key; did you mean 'token"),
        ("id: a,", "", 9, "models.0.engines.0.id: is required"),
        ("http://", "ftp://", 9, "models.0.engines.0.url: 'ftp://127.0.0.1:8101' is not an http"),
        ("name: m", "name: ''", 5, "models.0.name: "),
        ("engines:", "hashing: {block_size: x}\n    engines:", 8, "models.0.hashing.block_size:"),
        ("tokenizer: ./files", "exact: true", 5, "models.0: `tokenizer` is required where `exact`"),
    ],
)
def test_faults_name_line_and_key(file: Path, old: str, new: str, line: int, words: str) -> None:
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigUnreadable) as refused:
        read(file)
    assert f"{file}:{line}: {words}" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("a: [", "is not YAML"),
        ("- a", "must be a mapping"),
        ("listen: {}", "models: is required"),
        ("models: []", "models: must have at least 1 entry"),
    ],
)
def test_what_is_no_configuration(file: Path, text: str | None, words: str) -> None:
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigUnreadable, match=words):
        read(file)
