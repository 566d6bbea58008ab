"""The emulated engine holds, evicts, loads, announces and answers what the real one does.

The same requests go one after another to a real engine and to an emulated one of
the same size, tokenizer, hashing and seed, through a growing conversation, one
that shares its system prompt, identical repeats, a salt, token ids, and more
prompts than the device cache holds. Compared are, turn by turn, the tokens of
the prompt, how many of them were cached (device and pool together, as vLLM
reports them), the blocks announced as stored (hash, parent, tokens, extra keys)
and removed on the device, in order, and those announced as put into the pool;
then renderings, tokenisations, refusals, and the metrics that a gateway reads.

Not compared is what is random in the real one: answers. Each has one token, of
which no block is held. Before a comparison the cache is washed with prompts of
its own, so that both engines start from the same order of eviction. Batches are
not compared, only the order of events in them.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from fleet import CHAT, END_OF_REPLAY, prompt, until
from prometheus_client.parser import text_string_to_metric_families

from connector.blocks import Hasher
from connector.events import AnyEvent, BlockStored, decode
from connector.stack import Stack

COMPLETIONS = "/v1/completions"
STEP_TOKENS = 2048
"""`--max-num-batched-tokens` of the real engines: vLLM's default on a CPU."""


@dataclass
class Side:
    """A real engine, or an emulated one."""

    url: str
    replay: str
    master: str
    model: str
    client: httpx.Client
    seen: int = 0

    def ask(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.client.post(f"{self.url}{path}", json={"model": self.model} | body)

    def cached(self, path: str, body: dict[str, Any]) -> tuple[int, int]:
        """Send a turn; return its prompt's tokens, and how many of them were cached."""
        answer = self.ask(path, body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def pooled(self) -> set[str]:
        """Return the hashes of the blocks that the pool has, from whatever engine."""
        keys = self.client.get(f"{self.master}/get_all_keys").text.split()
        return {key.rpartition("@")[2] for key in keys}

    def events(self) -> list[AnyEvent]:
        """Return the events since the last call."""
        events: list[AnyEvent] = []
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.rcvtimeo = 10_000
            dealer.connect(self.replay)
            dealer.send_multipart([b"", self.seen.to_bytes(8, "big")])
            while True:
                _, _, seq, payload = dealer.recv_multipart()
                if seq == END_OF_REPLAY:
                    return events
                self.seen = int.from_bytes(seq, "big") + 1
                events += decode(payload).events


@dataclass
class Pair:
    """A real engine and its emulation, and how both hash."""

    real: Side
    emulated: Side
    hasher: Hasher
    blocks: int

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.real, self.emulated


@contextlib.contextmanager
def emulator(*options: str) -> Iterator[dict[str, Any]]:
    """Run `mooncake-loadtest emulate`; yield where it is."""
    process = subprocess.Popen(
        [sys.executable, "-m", "loadtest", "emulate", "--json", "--with-parent", *options],
        stdout=subprocess.PIPE,
    )
    with process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["ready"]
        finally:
            process.terminate()
        assert process.wait(timeout=10) == 0


@pytest.fixture(scope="module", params=["a", "c"])
def pair(request: pytest.FixtureRequest, stack: Stack, model: Path) -> Iterator[Pair]:
    settings = stack.fleet.engine_settings(request.param)
    assert settings.num_blocks is not None
    options = {
        "--engines": 1,
        "--tokenizer": model,
        "--model": settings.name,
        "--block-size": settings.block_size,
        "--blocks": settings.num_blocks,
        "--hash-algorithm": settings.hash_algorithm,
        "--seed": settings.seed,
        "--max-model-len": 8192,
        "--max-num-seqs": 8,
        "--max-num-batched-tokens": STEP_TOKENS,
    }
    written = [str(word) for option in options.items() for word in option]
    with emulator(*written) as ready, httpx.Client(timeout=120, trust_env=False) as client:
        engine = ready["engines"][0]
        real = Side(
            settings.url,
            f"tcp://127.0.0.1:{settings.replay_port}",
            stack.fleet.master.url,
            settings.name,
            client,
        )
        emulated = Side(engine["url"], engine["replay"], ready["master"], settings.name, client)
        hasher = Hasher(settings.hash_algorithm, settings.block_size, settings.seed)
        made = Pair(real, emulated, hasher, settings.num_blocks)
        wash(made)
        yield made


def ids(seed: str, count: int) -> list[int]:
    """Return token ids that no other seed's begin with."""
    return random.Random(seed).choices(range(300, 4000), k=count)


def send(pair: Pair, path: str, body: dict[str, Any]) -> list[tuple[int, int]]:
    """Send a turn to both, wait until its blocks are in the pool; return what each hit."""
    body = {"max_tokens": 1, "temperature": 0, **body}
    found = []
    for side in pair.sides:
        found.append(side.cached(path, body))
        render = {key: value for key, value in body.items() if key != "max_tokens"}
        rendered = side.ask(f"{path}/render", render).json()
        tokens = (rendered if path == CHAT else rendered[0])["token_ids"]
        chain = pair.hasher.chain(tokens, salt=body.get("cache_salt"))
        wanted = {chain.hex(i) for i in range(len(chain))}
        until(side.pooled, wanted.issubset)
        until(lambda side=side: usage(side), lambda value: value == 0)
    return found


def usage(side: Side) -> float:
    """Return the share of an engine's blocks that are in use."""
    text = side.client.get(f"{side.url}/metrics").text
    return next(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:kv_cache_usage_perc"
    )


def wash(pair: Pair) -> None:
    """Fill the cache one and a half times, so that its order no longer tells of before."""
    size = pair.hasher.block_size
    each = 6400 // size
    for i in range(pair.blocks * 3 // (2 * each) + 1):
        send(pair, COMPLETIONS, {"prompt": ids(f"wash {i}", each * size + 1)})


def conversations(pair: Pair) -> list[tuple[str, dict[str, Any]]]:
    """Return the turns that are compared, in order."""
    size = pair.hasher.block_size
    system = {"role": "system", "content": prompt("parity system", 12)}
    turns: list[tuple[str, dict[str, Any]]] = []
    for name, rounds in (("first", 5), ("second", 3)):
        messages = [system]
        for i in range(rounds):
            messages.append({"role": "user", "content": prompt(f"{name} {i}", 9 + 4 * i)})
            turns.append((CHAT, {"messages": list(messages)}))
            messages.append({"role": "assistant", "content": prompt(f"{name} answer {i}", 5)})
    repeat = turns[4]
    turns += [repeat, repeat]
    for salt in ("one", "two", "one"):
        turns.append((CHAT, repeat[1] | {"cache_salt": salt}))
    whole = ids("whole blocks", 6 * size)
    for tokens in (whole, whole, whole[:-1], [*whole, 7], whole[: 2 * size], whole):
        turns.append((COMPLETIONS, {"prompt": tokens}))
    turns.append((COMPLETIONS, {"prompt": prompt("a text", 20)}))
    each = 6400 // size
    large = [ids(f"large {i}", each * size + 9) for i in range(pair.blocks // each + 1)]
    turns += [(COMPLETIONS, {"prompt": tokens}) for tokens in large]
    # Evicted by now, in part or whole: what the device lost comes from the pool.
    turns += [repeat, turns[0], (COMPLETIONS, {"prompt": large[0]})]
    turns += [(COMPLETIONS, {"prompt": whole}), turns[7], turns[7]]
    turns.append((COMPLETIONS, {"prompt": [*large[-1][: each * size // 2], *ids("fork", 500)]}))
    turns.append((COMPLETIONS, {"prompt": large[-1]}))
    return turns


def blocks(events: list[AnyEvent], medium: str) -> list[tuple[Any, ...]]:
    """Return the events of a medium, block by block: how chunks cut them is left out."""
    found: list[tuple[Any, ...]] = []
    for event in events:
        if getattr(event, "medium", None) != medium:
            continue
        if not isinstance(event, BlockStored):
            found += [("removed", block, event.group_idx) for block in event.block_hashes]
            continue
        parent = event.parent_block_hash
        for i, block in enumerate(event.block_hashes):
            tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
            extra = event.extra_keys[i] if event.extra_keys else None
            kind = (event.block_size, event.group_idx, event.kv_cache_spec_kind)
            found.append(("stored", block, parent, tokens, extra, kind))
            parent = block
    return found


def test_the_same_conversations_hit_store_evict_and_load_the_same(pair: Pair) -> None:
    for side in pair.sides:
        side.events()
    loads = 0
    for number, (path, body) in enumerate(conversations(pair)):
        real, emulated = send(pair, path, body)
        what = f"turn {number}: {str(body)[:80]}"
        assert emulated == real, what
        before, after = (side.events() for side in pair.sides)
        assert blocks(after, "GPU") == blocks(before, "GPU"), what
        assert blocks(after, "cpu") == blocks(before, "cpu"), what
        loads += real[1] > 0 and any(event[0] == "removed" for event in blocks(before, "GPU"))
    assert loads > 2, "no turn came after evictions of what it needed"


TURNS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "naïve café \N{GRINNING FACE}\r\n日本"}]}),
    (CHAT, {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}),
    (COMPLETIONS, {"prompt": "def read(self):"}),
    (COMPLETIONS, {"prompt": ["one", "two"]}),
    (COMPLETIONS, {"prompt": [5, 6, 7]}),
]


@pytest.mark.parametrize(("path", "body"), TURNS)
def test_renderings_are_the_same(pair: Pair, path: str, body: dict[str, Any]) -> None:
    body = body | {"max_tokens": 4, "temperature": 0, "cache_salt": "s"}

    def rendered(side: Side) -> Any:
        found = side.ask(f"{path}/render", body).json()
        listed = found if isinstance(found, list) else [found]
        for one in listed:
            del one["request_id"]
        return found

    assert rendered(pair.emulated) == rendered(pair.real)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hello there", "return_token_strs": True}),
        ("/tokenize", TURNS[0][1]),
        ("/detokenize", {"tokens": [5, 6, 7, 1000]}),
    ],
)
def test_tokenisations_are_the_same(pair: Pair, path: str, body: dict[str, Any]) -> None:
    assert pair.emulated.ask(path, body).json() == pair.real.ask(path, body).json()


M: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": "x"}),
    (CHAT, M | {"model": "nope"}),
    (CHAT, M | {"model": 5}),
    *((CHAT, M | {"max_tokens": value}) for value in (0, -1, "x", 99_999)),
    *((CHAT, M | {"temperature": value}) for value in ("x", -1)),
    *((CHAT, M | {"n": value}) for value in (0, "many")),
    (CHAT, M | {"n": 2, "temperature": 0}),
    (CHAT, M | {"stream": "perhaps"}),
    (CHAT, M | {"stream_options": {"include_usage": True}}),
    *((CHAT, M | {"cache_salt": value}) for value in (5, "")),
    (CHAT, M | {"tools": []}),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 9000}], "max_tokens": 4}),
    *((COMPLETIONS, {"prompt": value}) for value in ([], "", None, {"a": 1}, [5, 99_999])),
    (COMPLETIONS, {}),
    ("/tokenize", {}),
]


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_bad_bodies_are_refused_in_the_same_words(
    pair: Pair, path: str, body: dict[str, Any]
) -> None:
    real, emulated = (side.ask(path, body) for side in pair.sides)
    assert emulated.status_code == real.status_code
    assert emulated.json() == real.json()


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{bad", "application/json"),
        (b"[]", "application/json"),
        (b'"x"', "application/json"),
        (b"{}", "text/plain"),
    ],
)
def test_what_is_no_json_object_is_refused_in_the_same_words(
    pair: Pair, content: bytes, kind: str
) -> None:
    real, emulated = (
        side.client.post(f"{side.url}{CHAT}", content=content, headers={"Content-Type": kind})
        for side in pair.sides
    )
    assert emulated.status_code == real.status_code == 400
    assert emulated.json() == real.json()


def shape(value: Any) -> Any:
    """Return a JSON value with its types for what it says."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        shapes = [shape(inner) for inner in value]
        # How many tokens a chunk holds is a matter of timing.
        return shapes[:1] if all(isinstance(inner, str) for inner in shapes) else shapes
    return type(value).__name__


STREAMED: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
    lambda body: body,
    lambda body: body | {"stream_options": {"include_usage": True}},
    lambda body: body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    lambda body: body | {"return_token_ids": True},
    lambda body: body | {"n": 2, "temperature": 1},
]


@pytest.mark.parametrize("option", range(len(STREAMED)))
@pytest.mark.parametrize(("path", "body"), TURNS[1:3])
def test_answers_and_chunks_have_the_same_shape(
    pair: Pair, path: str, body: dict[str, Any], option: int
) -> None:
    wanted = STREAMED[option](body | {"max_tokens": 3, "temperature": 0, "ignore_eos": True})

    def streamed(side: Side) -> list[Any]:
        text = side.ask(path, wanted | {"stream": True}).text
        data = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert data.pop() == "[DONE]"
        chunks = [json.loads(line) for line in data]
        # Two choices' chunks come in any order; a busy vLLM puts several tokens into one chunk.
        return sorted({str(shape(chunk)) for chunk in chunks})

    assert streamed(pair.emulated) == streamed(pair.real)
    whole = {key: value for key, value in wanted.items() if key != "stream_options"}
    answers = [side.ask(path, whole).json() for side in pair.sides]
    assert shape(answers[1]) == shape(answers[0])
    counts = [{key: answer["usage"][key] for key in answer["usage"]} for answer in answers]
    assert counts[1]["total_tokens"] == counts[0]["total_tokens"]


def test_metrics_have_the_same_names_and_labels(pair: Pair) -> None:
    def families(side: Side) -> dict[str, set[tuple[str, frozenset[str]]]]:
        text = side.client.get(f"{side.url}/metrics").text
        return {
            family.name: {
                (sample.name, frozenset(sample.labels))
                for sample in family.samples
                if not sample.name.endswith("_created")
            }
            for family in text_string_to_metric_families(text)
            if family.name.startswith("vllm:") and not family.name.endswith("_created")
        }

    real, emulated = (families(side) for side in pair.sides)
    info = "vllm:cache_config_info"
    (labels,) = emulated.pop(info)
    assert {labels[0]} == {name for name, _ in real[info]}
    assert labels[1] <= next(iter(real[info]))[1]
    for name, samples in emulated.items():
        assert samples == real[name], name


def test_the_other_routes_answer_alike(pair: Pair) -> None:
    for path in ("/health", "/ping", "/version", "/load", "/v1/models", "/nowhere", CHAT):
        real, emulated = (side.client.get(f"{side.url}{path}") for side in pair.sides)
        assert emulated.status_code == real.status_code, path
        assert emulated.headers.get("Allow") == real.headers.get("Allow"), path
        if real.content:
            assert shape(emulated.json()) == shape(real.json()), path
    real, emulated = (side.client.get(f"{side.url}/kv_event_sources") for side in pair.sides)
    assert shape(emulated.json()) == shape(real.json())
    for path in ("/health", "/role", "/ha_status", "/leader", "/kv_events/status", "/nowhere"):
        real, emulated = (side.client.get(f"{side.master}{path}") for side in pair.sides)
        assert (emulated.status_code, emulated.text) == (real.status_code, real.text), path
    real, emulated = (side.client.get(f"{side.master}/batch_query_keys") for side in pair.sides)
    assert (emulated.status_code, emulated.json()) == (real.status_code, real.json())
