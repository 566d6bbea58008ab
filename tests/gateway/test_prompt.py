"""Bodies become prompts: exact where they can be, and saying so where not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from connector.blocks import Hasher, HashingError
from connector.model import ModelConfig
from connector.render import Renderer, RenderError
from connector.tiny_model import Shape, write
from gateway.prompt.reader import PromptReader

MODEL: dict[str, Any] = {"name": "m", "engines": [{"id": "a", "url": "http://x"}]}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write(directory, Shape())
    return directory


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def reader(tiny: Path, threads: ThreadPoolExecutor) -> PromptReader:
    made = PromptReader(ModelConfig(tokenizer=tiny, **MODEL), threads)
    made.hash_with("sha256_cbor", 16)
    return made


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"model": "m", "messages": messages, **fields}


@pytest.mark.parametrize("text", ["short", "long " * 3000])
async def test_chat_is_rendered_tokenised_and_hashed(
    reader: PromptReader, tiny: Path, text: str
) -> None:
    prompt = await reader.read("chat", chat(text))
    ids = Renderer(ModelConfig(tokenizer=tiny, **MODEL)).chat(chat(text)).token_ids
    assert prompt.exact
    assert prompt.token_ids == ids
    assert prompt.chain == Hasher("sha256_cbor", 16, None).chain(ids)


async def test_a_conversation_shares_its_blocks_and_histories_part(reader: PromptReader) -> None:
    system = "the same beginning " * 40
    first = (await reader.read("chat", chat(system))).chain
    second = (await reader.read("chat", chat(system, "yes", "and now?"))).chain
    other = (await reader.read("chat", chat(system, "no", "and now?"))).chain
    shared = len(first) - 1
    assert first.ids[:shared] == second.ids[:shared] == other.ids[:shared]
    assert second.ids != other.ids


async def test_cache_salt_changes_every_hash(reader: PromptReader) -> None:
    plain = await reader.read("chat", chat("x " * 200))
    salted = await reader.read("chat", chat("x " * 200, cache_salt="s"))
    assert plain.token_ids == salted.token_ids
    assert not set(plain.chain.ids) & set(salted.chain.ids)


async def test_completion_shapes_are_told_apart(reader: PromptReader) -> None:
    ids = [1, 2, 3] * 20
    as_ids = await reader.read("completions", {"prompt": ids})
    as_text = await reader.read("completions", {"prompt": ",".join(map(str, ids))})
    as_list = await reader.read("completions", {"prompt": [ids]})
    assert as_ids.token_ids == as_list.token_ids == ids
    assert as_ids.chain == as_list.chain
    assert as_text.token_ids != ids
    several = await reader.read("completions", {"prompt": ["one", "two"]})
    assert (several.exact, several.reason) == (False, "the body holds 2 prompts")


async def test_what_cannot_be_exact_says_why_and_still_has_a_prefix(reader: PromptReader) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 600}}
    text = {"type": "text", "text": "look " * 400}
    body = chat("x")
    body["messages"][0]["content"] = [text, picture]
    one = await reader.read("chat", body)
    assert not one.exact
    assert one.reason
    body["messages"].append({"role": "assistant", "content": "a picture"})
    two = await reader.read("chat", body)
    shared = len(one.chain) - 1
    assert shared > 3
    assert two.chain.ids[:shared] == one.chain.ids[:shared]
    other = chat("x")
    other["messages"][0]["content"] = [
        text,
        {**picture, "image_url": {"url": "data:image/png;base64," + "B" * 600}},
    ]
    assert (await reader.read("chat", other)).chain.ids != one.chain.ids


async def test_before_the_engines_hashing_is_known_prompts_are_approximate(
    tiny: Path, threads: ThreadPoolExecutor
) -> None:
    fresh = PromptReader(ModelConfig(tokenizer=tiny, **MODEL), threads)
    prompt = await fresh.read("chat", chat("hi"))
    assert (prompt.exact, prompt.reason) == (False, "the engines' hashing is not known (yet)")


async def test_impossible_hashes_and_prompts_are_refused(reader: PromptReader) -> None:
    with pytest.raises(HashingError, match="seed"):
        reader.hash_with("xxhash", 16)
    with pytest.raises(RenderError):
        await reader.read("completions", {"prompt": {"no": "prompt"}})
