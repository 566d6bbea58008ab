"""Bodies become prompts: exact where they can be, and saying so where not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connector.blocks import Hasher, HashingError
from connector.model import ModelConfig
from connector.render import Renderer, RenderError
from connector.tiny_model import Shape, write
from gateway.prompt.reader import Kind, Prompt, PromptReader, Threads

MODEL: dict[str, Any] = {"name": "m", "engines": [{"id": "a", "url": "http://x"}]}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write(directory, Shape())
    return directory


@pytest.fixture(scope="module")
def threads() -> Iterator[Threads]:
    made = Threads()
    yield made
    made.shutdown()


@pytest.fixture
def reader(tiny: Path, threads: Threads) -> PromptReader:
    made = PromptReader(ModelConfig(tokenizer=tiny, **MODEL), threads)
    made.hash_with("sha256_cbor", 16)
    return made


async def read(reader: PromptReader, kind: Kind, body: dict[str, Any]) -> Prompt:
    return await reader.read(kind, body, len(json.dumps(body)))


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"model": "m", "messages": messages, **fields}


@pytest.mark.parametrize("text", ["short", "long " * 3000])
async def test_chat_is_rendered_tokenised_and_hashed(
    reader: PromptReader, tiny: Path, text: str
) -> None:
    prompt = await read(reader, "chat", chat(text))
    ids = Renderer(ModelConfig(tokenizer=tiny, **MODEL)).chat(chat(text)).token_ids
    assert prompt.exact
    assert prompt.token_ids == ids
    assert prompt.chain == Hasher("sha256_cbor", 16, None).chain(ids)


async def test_a_conversation_shares_its_blocks_and_histories_part(reader: PromptReader) -> None:
    system = "the same beginning " * 40
    first = (await read(reader, "chat", chat(system))).chain
    second = (await read(reader, "chat", chat(system, "yes", "and now?"))).chain
    other = (await read(reader, "chat", chat(system, "no", "and now?"))).chain
    shared = len(first) - 1
    assert first.ids[:shared] == second.ids[:shared] == other.ids[:shared]
    assert second.ids != other.ids


async def test_cache_salt_changes_every_hash(reader: PromptReader) -> None:
    plain = await read(reader, "chat", chat("x " * 200))
    salted = await read(reader, "chat", chat("x " * 200, cache_salt="s"))
    assert plain.token_ids == salted.token_ids
    assert not set(plain.chain.ids) & set(salted.chain.ids)


async def test_completion_shapes_are_told_apart(reader: PromptReader) -> None:
    ids = [1, 2, 3] * 20
    as_ids = await read(reader, "completions", {"prompt": ids})
    as_text = await read(reader, "completions", {"prompt": ",".join(map(str, ids))})
    as_list = await read(reader, "completions", {"prompt": [ids]})
    assert as_ids.token_ids == as_list.token_ids == ids
    assert as_ids.chain == as_list.chain
    assert as_text.token_ids != ids
    several = await read(reader, "completions", {"prompt": ["one", "two"]})
    assert (several.exact, several.reason) == (False, "the body holds 2 prompts")


async def test_what_cannot_be_exact_says_why_and_still_has_a_prefix(reader: PromptReader) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 600}}
    text = {"type": "text", "text": "look " * 400}
    body = chat("x")
    body["messages"][0]["content"] = [text, picture]
    one = await read(reader, "chat", body)
    assert not one.exact
    assert one.reason
    body["messages"].append({"role": "assistant", "content": "a picture"})
    two = await read(reader, "chat", body)
    shared = len(one.chain) - 1
    assert shared > 3
    assert two.chain.ids[:shared] == one.chain.ids[:shared]
    other = chat("x")
    other["messages"][0]["content"] = [
        text,
        {**picture, "image_url": {"url": "data:image/png;base64," + "B" * 600}},
    ]
    assert (await read(reader, "chat", other)).chain.ids != one.chain.ids


async def test_before_the_engines_hashing_is_known_prompts_are_approximate(
    tiny: Path, threads: Threads
) -> None:
    fresh = PromptReader(ModelConfig(tokenizer=tiny, **MODEL), threads)
    prompt = await read(fresh, "chat", chat("hi"))
    assert (prompt.exact, prompt.reason) == (False, "the engines' hashing is not known (yet)")


async def test_impossible_hashes_and_prompts_are_refused(reader: PromptReader) -> None:
    with pytest.raises(HashingError, match="seed"):
        reader.hash_with("xxhash", 16)
    with pytest.raises(RenderError):
        await read(reader, "completions", {"prompt": {"no": "prompt"}})


@pytest.mark.parametrize("ids", [[2**64] * 40, [-1] * 40, [10**3000] * 16])
async def test_ids_that_no_vocabulary_has_are_the_engines_to_judge(
    reader: PromptReader, ids: list[int]
) -> None:
    prompt = await reader.read("completions", {"prompt": ids}, 400)
    assert not prompt.exact
    assert prompt.reason


async def test_bodies_beyond_all_measure_are_not_tokenised(reader: PromptReader) -> None:
    body = chat("word " * 1_000_000)
    prompt = await read(reader, "chat", body)
    assert (prompt.exact, prompt.reason) == (False, "the body is longer than 4194304 bytes")
    assert len(prompt.chain) > 10_000


async def test_long_bodies_do_not_hold_up_ordinary_ones(reader: PromptReader) -> None:
    long = [
        asyncio.create_task(read(reader, "chat", chat(f"{i} " + "word " * 300_000)))
        for i in range(3)
    ]
    await asyncio.sleep(0)
    assert (await read(reader, "chat", chat("an ordinary turn " * 300))).exact
    assert not long[-1].done()
    assert all(prompt.exact for prompt in await asyncio.gather(*long))
