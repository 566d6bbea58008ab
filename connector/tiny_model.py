"""A small Qwen3 with random weights, made on the spot: a model that costs nothing to serve.

Tests and demonstrations need a model directory that vLLM serves like any other
(configuration, weights, tokenizer, chat template), not one that says anything
sensible. The tokenizer is trained on the sources of the running Python's
standard library, so nothing is downloaded. The same parameters give the same
files under the same Python; a directory that was made with them is left alone.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

MARKER = "tiny-model.json"
"""Name of the file that says with which parameters the directory was made."""

FORMAT = 1
"""Raised whenever the same parameters would give other files."""

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's CPU attention has kernels for (0.32, `cpu_attn.py`)."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
CORPUS_BYTES = 1_500_000

# How Qwen's tokenizers cut text before BPE: contractions, words with the character
# before them, single digits, punctuation runs, line ends, spaces.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# ChatML. Reasoning is shown only for the turns after the last question of the user,
# as reasoning models do it: an earlier turn's rendering therefore changes as the
# conversation goes on, which is what a prefix cache has to live with.
CHAT_TEMPLATE = """\
{%- set ns = namespace(question=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set lead = messages[0].content if messages and messages[0].role == 'system' else '' -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if lead -%}{{- lead + '\\n\\n' -}}{%- endif -%}
{{- 'You may call these functions, one JSON signature a line:\\n' -}}
{%- for tool in tools -%}{{- tool | tojson -}}{{- '\\n' -}}{%- endfor -%}
{{- 'To call one, answer <tool_call>{"name": ..., "arguments": {...}}</tool_call>.' -}}
{{- '<|im_end|>\\n' -}}
{%- elif lead -%}
{{- '<|im_start|>system\\n' + lead + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- set content = message.content if message.content is string else '' -%}
{%- if message.role == 'system' and loop.first -%}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if message.reasoning and loop.index0 > ns.question -%}
{{- '<think>\\n' + message.reasoning + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- content -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function else call -%}
{%- if content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>{"name": ' -}}{{- function.name | tojson -}}{{- ', "arguments": ' -}}
{%- if function.arguments is string -%}{{- function.arguments -}}
{%- else -%}{{- function.arguments | tojson -}}{%- endif -%}
{{- '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{- '<|im_start|>user' -}}
{%- endif -%}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""


class TinyModelError(Exception):
    """The directory holds something that is not ours to replace, or the parameters do not fit."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a tiny model is made of; equal shapes give equal files."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int | None = None
    """Width of the feed-forward part; None: three times `hidden`."""
    vocab: int = 4096
    """Entries of the vocabulary, special tokens included."""
    max_position: int = 32768
    """Longest sequence in tokens."""
    seed: int = 0

    def __post_init__(self) -> None:
        least = 256 + len(SPECIAL) + len(ADDED)
        if min(self.layers, self.hidden, self.heads, self.kv_heads, self.max_position) < 1:
            raise TinyModelError("layers, hidden, heads, kv heads and positions must be at least 1")
        if self.heads % self.kv_heads:
            raise TinyModelError(f"{self.heads} heads do not divide by {self.kv_heads} kv heads")
        if self.head_dim not in HEAD_DIMS:
            raise TinyModelError(
                f"vLLM's CPU attention has no kernel for head_dim {self.head_dim}; "
                f"it has {', '.join(map(str, HEAD_DIMS))}"
            )
        if self.vocab < least:
            raise TinyModelError(f"vocab is {self.vocab}; bytes and special tokens take {least}")

    @property
    def feed_forward(self) -> int:
        """Width of the feed-forward part."""
        return self.intermediate or 3 * self.hidden


def write(directory: Path, shape: Shape | None = None) -> bool:
    """Make the model in `directory`; False when one of the same shape is there already.

    Whoever looks sees either no directory or a whole one: it is written beside
    its place and renamed. A tiny model of another shape is replaced; a directory
    that is not a tiny model raises `TinyModelError`.
    """
    shape = shape or Shape()
    directory = directory.absolute()
    if _is_made(directory, shape):
        return False
    if directory.exists() and not (directory / MARKER).is_file():
        raise TinyModelError(
            f"{directory} exists and was not made by this command (it has no {MARKER}); "
            "name another directory or remove it"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        made = work / "made"
        made.mkdir()
        _fill(made, shape)
        if directory.exists():
            directory.rename(work / "replaced")
        try:
            made.rename(directory)
        except OSError:
            if not _is_made(directory, shape):  # else somebody was faster with the same model
                raise
            return False
        return True
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _is_made(directory: Path, shape: Shape) -> bool:
    try:
        made = json.loads((directory / MARKER).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return bool(made == _marker(shape))


def _marker(shape: Shape) -> dict[str, Any]:
    return {"format": FORMAT, **asdict(shape)}


def _fill(directory: Path, shape: Shape) -> None:
    tokenizer = train_tokenizer(shape.vocab)
    tokenizer.save(str(directory / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    ids = {token: vocabulary[token] for token in SPECIAL}
    _dump(directory / "tokenizer_config.json", _tokenizer_config(tokenizer, shape))
    _dump(directory / "config.json", _config(shape, ids))
    _dump(
        directory / "generation_config.json",
        {
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
        },
    )
    tensors = directory / "model.safetensors"
    save_file(weights(shape), tensors, metadata={"format": "pt"})
    tensors.chmod(0o644)  # the library makes it readable for its owner only
    _dump(directory / MARKER, _marker(shape))


def _dump(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _config(shape: Shape, ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.feed_forward,
        "max_position_embeddings": shape.max_position,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": shape.vocab,
    }


def _tokenizer_config(tokenizer: Tokenizer, shape: Shape) -> dict[str, Any]:
    return {
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token in SPECIAL,
            }
            for token in (*SPECIAL, *ADDED)
        },
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def train_tokenizer(vocab: int) -> Tokenizer:
    """A byte-level BPE of `vocab` entries, trained on the standard library's sources."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PreTokenizers(
        [
            Split(Regex(WORDS), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = len(SPECIAL) + len(ADDED)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - added,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in ADDED])
    size = tokenizer.get_vocab_size()
    if size > vocab:
        raise TinyModelError(f"the tokenizer has {size} entries, more than the {vocab} wanted")
    return tokenizer


def _corpus() -> list[str]:
    """Standard-library sources in order of their names, up to `CORPUS_BYTES`."""
    texts: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        texts.append(text)
        size += len(text)
        if size >= CORPUS_BYTES:
            break
    if not texts:
        raise TinyModelError(
            f"no sources in {sysconfig.get_path('stdlib')}; the tokenizer is trained on them"
        )
    return texts


def weights(shape: Shape) -> dict[str, NDArray[np.float32]]:
    """Random float32 weights under the names that Qwen3 checkpoints use.

    Scaled so that every layer keeps its input's magnitude and logits spread by
    about one: then the likeliest token is clearly the likeliest, whatever the
    order in which a batch was summed.
    """
    chance = np.random.default_rng(shape.seed)

    def matrix(out: int, into: int) -> NDArray[np.float32]:
        return (chance.standard_normal((out, into), dtype=np.float32)) / np.float32(into**0.5)

    def ones(size: int) -> NDArray[np.float32]:
        return np.ones(size, dtype=np.float32)

    tensors = {"model.embed_tokens.weight": matrix(shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.self_attn.q_proj.weight": matrix(shape.heads * shape.head_dim, shape.hidden),
            f"{at}.self_attn.k_proj.weight": matrix(shape.kv_heads * shape.head_dim, shape.hidden),
            f"{at}.self_attn.v_proj.weight": matrix(shape.kv_heads * shape.head_dim, shape.hidden),
            f"{at}.self_attn.o_proj.weight": matrix(shape.hidden, shape.heads * shape.head_dim),
            f"{at}.self_attn.q_norm.weight": ones(shape.head_dim),
            f"{at}.self_attn.k_norm.weight": ones(shape.head_dim),
            f"{at}.mlp.gate_proj.weight": matrix(shape.feed_forward, shape.hidden),
            f"{at}.mlp.up_proj.weight": matrix(shape.feed_forward, shape.hidden),
            f"{at}.mlp.down_proj.weight": matrix(shape.hidden, shape.feed_forward),
            f"{at}.input_layernorm.weight": ones(shape.hidden),
            f"{at}.post_attention_layernorm.weight": ones(shape.hidden),
        }
    tensors["model.norm.weight"] = ones(shape.hidden)
    return tensors
