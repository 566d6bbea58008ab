"""Whole examinations of engines and masters that are odd, or are not there."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeMaster, running
from fake_fleet import free_ports

from connector.doctor.metrics import read_page
from connector.doctor.recipes import Recipe
from connector.doctor.report import Finding, Report
from connector.doctor.run import examine
from connector.model import ModelConfig
from connector.render import Renderer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WELL = {"engine", "hashing", "tokens", "events", "replay", "hashes", "usage"}


@pytest.fixture
def files(directory: Callable[..., Path]) -> Path:
    return directory({"chat_template": CHATML, "eos_token": "<|im_end|>"})


@pytest.fixture
def renderer(files: Path) -> Renderer:
    return Renderer(configured(files, [{"id": "a", "url": "http://127.0.0.1:1"}]))


def configured(files: Path, engines: list[dict[str, Any]], **fields: Any) -> ModelConfig:
    right = {"name": "m", "tokenizer": files, "hashing": {"seed": "0"}, "engines": engines}
    return ModelConfig.model_validate(right | fields)


async def examined(*models: ModelConfig, seconds: float = 10.0, **options: Any) -> Report:
    return await examine(models, seconds=seconds, **options)


def of(report: Report, status: str, engine: str | None = "a") -> set[str]:
    """Return what has this status: checks that are well, causes of those that are not."""
    return {
        f.check if f.cause is None else f"{f.check}: {f.cause}"
        for f in report.findings
        if f.status == status and f.engine == engine
    }


def one(report: Report, check: str, cause: str, engine: str | None = "a") -> Finding:
    (found,) = [
        f for f in report.findings if (f.check, f.cause, f.engine) == (check, cause, engine)
    ]
    return found


async def test_all_well_with_a_pool_and_a_second_engine(files: Path, renderer: Renderer) -> None:
    master = FakeMaster(segments=("s:1", "s:2"))
    a, b = (FakeEngine(renderer, master=master) for _ in "ab")
    async with running(master, a, b, ports=free_ports(4)):
        model = configured(
            files,
            [a.section("a", segments=["s:1"]), b.section("b", segments=["s:2"])],
            pool={"master": master.url},
        )
        report = await examined(model)
    assert report.status == "ok", report.findings
    assert of(report, "ok") == of(report, "ok", "b") == WELL | {"segments", "keys", "sharing"}
    assert of(report, "ok", None) == {"master", "agreement"}
    # Three requests an engine, of one token each, and nothing of the master that takes a lease.
    assert len(a.chats) == len(b.chats) == 3
    assert all(body["max_tokens"] == 1 for _, body in a.chats + b.chats)
    assert set(master.paths) == {"/health", "/get_segments_detail", "/batch_query_keys"}


async def test_nothing_is_there(files: Path) -> None:
    engine, master = free_ports(2)
    model = configured(
        files,
        [{"id": "a", "url": f"http://127.0.0.1:{engine}", "events": f"tcp://127.0.0.1:{engine}"}],
        pool={"master": f"http://127.0.0.1:{master}"},
    )
    report = await examined(model)
    assert report.status == "fail"
    assert of(report, "fail") == {"engine: unreachable"}
    assert "connection refused" in one(report, "engine", "unreachable").found
    assert of(report, "fail", None) == {"master: unreachable"}
    assert "connection refused" in one(report, "master", "unreachable", None).found


async def test_ports_that_accept_and_say_nothing(files: Path, renderer: Renderer) -> None:
    engine = FakeEngine(renderer)
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        port, replay = mute.getsockname()[1], other.getsockname()[1]
        async with running(engine, ports=free_ports(2)):
            wrong = {"events": f"tcp://127.0.0.1:{port}", "replay": f"tcp://127.0.0.1:{replay}"}
            model = configured(
                files,
                [engine.section("a", **wrong), {"id": "b", "url": f"http://127.0.0.1:{port}"}],
                pool={"master": f"http://127.0.0.1:{port}"},
            )
            report = await examined(model, seconds=0.5)
    assert "does not speak ZMQ" in one(report, "events", "unreachable").found
    assert "no replay ended" in one(report, "replay", "unreachable").found
    assert "within 0.5 s" in one(report, "engine", "unreachable", "b").found
    assert "its RPC port" in one(report, "master", "not-http", None).found


@pytest.mark.parametrize(
    ("answers", "cause", "words"),
    [
        ({"/health": (500, "ill")}, "unhealthy", "HTTP 500 (ill)"),
        ({"/v1/models": (404, "")}, "not-an-engine", "no list of models: HTTP 404"),
        ({"/v1/models": (200, "<html>")}, "not-an-engine", "no list of models"),
        ({"/v1/models": (200, '{"data": [{"id": "m2"}, {"id": "x"}]}')}, "model-name", "m2, x"),
    ],
)
async def test_engines_that_are_no_engine_of_the_model(
    files: Path, renderer: Renderer, answers: dict[str, tuple[int, str]], cause: str, words: str
) -> None:
    engine = FakeEngine(renderer, answers=answers)
    async with running(engine, ports=free_ports(2)):
        report = await examined(configured(files, [engine.section("a")]))
    assert of(report, "fail") == {f"engine: {cause}"}
    assert words in one(report, "engine", cause).found
    if cause == "model-name":
        assert "`name: m2`" in (one(report, "engine", cause).remedy or "")


async def test_an_engine_that_wants_a_key(files: Path, renderer: Renderer) -> None:
    engine = FakeEngine(renderer, key="secret")
    async with running(engine, ports=free_ports(2)):
        model = configured(files, [engine.section("a")])
        without, right = await examined(model), await examined(model, api_key="secret")
    assert of(without, "fail") == {"engine: key-refused"}
    assert right.status == "ok"


async def test_an_engine_that_refuses_probes(files: Path, renderer: Renderer) -> None:
    refusal = (429, '{"error": {"message": "come back later"}}')
    engine = FakeEngine(renderer, answers={"/v1/chat/completions": refusal})
    async with running(engine, ports=free_ports(2)):
        report = await examined(configured(files, [engine.section("a")]))
    assert of(report, "fail") == {"probe: not-answered"}
    assert "HTTP 429 (come back later)" in one(report, "probe", "not-answered").found


@pytest.mark.parametrize(
    ("recipe", "hashing", "causes"),
    [
        (Recipe("xxhash", 16, "0"), {"seed": "0"}, set()),
        (Recipe("xxhash_cbor", 16, "5"), {"seed": "0"}, {"seed"}),
        (Recipe("sha256", 16, None), {"seed": "0"}, {"seed"}),
        (Recipe("sha256", 16, "a secret"), {"seed": "0"}, {"unexplained"}),
        (Recipe("sha256", 8, "0"), {"seed": "1", "algorithm": "sha256_cbor", "block_size": 16},
         {"seed", "algorithm", "block-size"}),
    ],
)  # fmt: skip
async def test_hashes_are_explained(
    files: Path, renderer: Renderer, recipe: Recipe, hashing: dict[str, Any], causes: set[str]
) -> None:
    engine = FakeEngine(renderer, recipe=recipe)
    async with running(engine, ports=free_ports(2)):
        report = await examined(configured(files, [engine.section("a")], hashing=hashing))
    assert {cause for cause in of(report, "fail") if cause.startswith("hashes")} == {
        f"hashes: {cause}" for cause in causes
    }
    assert ("hashes" in of(report, "ok")) == (not causes)


async def test_a_random_seed_is_named_before_anything_is_compared(
    files: Path, renderer: Renderer
) -> None:
    engine = FakeEngine(renderer, recipe=Recipe("xxhash", 16, "drawn at start"))
    async with running(engine, ports=free_ports(2)):
        report = await examined(configured(files, [engine.section("a")], hashing={}))
    assert of(report, "fail", None) == {"hashing: random-seed"}
    assert of(report, "fail") == {"hashes: unexplained"}


async def test_engines_that_disagree_are_named(files: Path, renderer: Renderer) -> None:
    a, b = FakeEngine(renderer), FakeEngine(renderer, recipe=Recipe("sha256", 32, "0"))
    async with running(a, b, ports=free_ports(4)):
        report = await examined(configured(files, [a.section("a"), b.section("b")]))
    found = one(report, "agreement", "hashing", None).found
    assert "a: sha256_cbor, blocks of 16 tokens" in found
    assert "b: sha256, blocks of 32 tokens" in found
    assert of(report, "fail") == set()
    assert of(report, "fail", "b") == {
        "hashing: algorithm", "hashing: block-size", "hashes: algorithm", "hashes: block-size"
    }  # fmt: skip
    assert "`auto`: the first engine's" in (one(report, "hashes", "algorithm", "b").expected or "")


async def test_what_metrics_tell(files: Path, renderer: Renderer) -> None:
    off = FakeEngine(
        renderer, labels={"enable_prefix_caching": "False"}, caches=False, publishes=False
    )
    silent = FakeEngine(renderer, tells_hashing=False)
    async with running(off, silent, ports=free_ports(4)):
        model = configured(files, [off.section("a")])
        report = await examined(model, seconds=1.0)
        assert of(report, "fail") == {"hashing: prefix-caching-off", "events: silent",
                                      "replay: other-engine"}  # fmt: skip
        assert "without prefix caching" in one(report, "events", "silent").found
        assert of(report, "warn") == {"usage: no-hit", "hashes: unverified"}
        report = await examined(configured(files, [silent.section("a")]))
        assert of(report, "fail", None) == {"hashing: untold"}
        assert of(report, "warn") == {"hashing: untold"}


@pytest.mark.parametrize("on", [True, False])
async def test_no_events_at_all(files: Path, renderer: Renderer, on: bool) -> None:
    engine = FakeEngine(renderer, events_on=on)
    async with running(engine, ports=free_ports(2)):
        section = engine.section("a")
        if on:
            del section["events"], section["replay"]
        report = await examined(configured(files, [section]))
    if on:
        assert of(report, "warn") == {"events: none", "hashes: unverified"}
        assert f"`events: {engine.events}`" in (one(report, "events", "none").remedy or "")
    else:
        found = one(report, "events", "unreachable")
        assert "the engine says that its events are off" in found.found
        assert "enable_kv_cache_events true" in (found.remedy or "")


async def test_events_and_replay_that_are_odd(files: Path, renderer: Renderer) -> None:
    old, ahead, lying = (
        FakeEngine(renderer, tells_salt=False),
        FakeEngine(renderer, lookahead=[1]),
        FakeEngine(renderer),
    )
    async with running(old, ahead, lying, ports=free_ports(6)):
        lying.publishers[0].lie = True
        engines = [old.section("a"), ahead.section("b"), lying.section("c")]
        report = await examined(configured(files, engines))
    assert of(report, "ok") == WELL, "an event without extra keys is known by its tokens"
    assert of(report, "fail", "b") == {"hashes: lookahead"}
    assert of(report, "fail", "c") == {"replay: differs"}


async def test_usage_that_tells_nothing_or_too_little(files: Path, renderer: Renderer) -> None:
    quiet, wrong = FakeEngine(renderer, tells_cached=False), FakeEngine(renderer)
    usage = {"usage": {"prompt_tokens": 400, "prompt_tokens_details": {"cached_tokens": 16}}}
    wrong.answers["/v1/chat/completions"] = (200, json.dumps(usage))
    async with running(quiet, wrong, ports=free_ports(4)):
        engines = [quiet.section("a"), wrong.section("b")]
        report = await examined(configured(files, engines), seconds=1.0)
    assert of(report, "warn") == {"usage: unreported"}
    found = one(report, "usage", "size", "b")
    assert "16 tokens" in found.found
    assert "384 tokens" in (found.expected or "")


async def test_each_data_parallel_rank_is_examined(files: Path, renderer: Renderer) -> None:
    engine = FakeEngine(renderer, ranks=2)
    async with running(engine, ports=[*neighbours(), *neighbours()]):
        report = await examined(configured(files, [engine.section("a")]))
    assert report.status == "ok", report.findings
    assert {rank for rank, _ in engine.chats} == {0, 1}
    for rank in (0, 1):
        assert {f.check for f in report.findings if f.rank == rank} >= WELL - {"engine"}


def neighbours() -> tuple[int, int]:
    """Return two free ports in a row."""
    while True:
        (port,) = free_ports(1)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port, port + 1


async def test_pool_keys_that_do_not_come(files: Path, renderer: Renderer) -> None:
    master, other = FakeMaster(segments=("s:1",)), FakeMaster()
    saving, idle = FakeEngine(renderer, master=other), FakeEngine(renderer)
    async with running(master, other, saving, idle, ports=free_ports(4)):
        models = [
            configured(files, [engine.section(name, segments=["s:1"])], pool={"master": master.url})
            for engine, name in ((saving, "a"), (idle, "b"))
        ]
        report = await examined(*models, seconds=0.5)
    assert of(report, "fail") == {"keys: absent", "segments: claimed-twice"}
    assert "no sign of a store connector" in one(report, "keys", "absent").found
    assert (
        "segment s:1 is claimed by engine b too" in one(report, "segments", "claimed-twice").found
    )


async def test_more_objects_per_block_than_configured(files: Path, renderer: Renderer) -> None:
    master = FakeMaster()
    engine = FakeEngine(renderer, master=master)
    keys: set[str] = set()

    class TwoRanks(set[str]):
        def __ior__(self, more: Any) -> Any:
            for key in more:
                self.update((key, key.replace("tp_rank:0", "tp_rank:1")))
            return self

    master.keys = TwoRanks(keys)
    async with running(master, engine, ports=free_ports(2)):
        model = configured(files, [engine.section("a")], pool={"master": master.url})
        report = await examined(model)
    assert of(report, "fail") == {"keys: tp-ranks"}
    assert "ranks.tp: 2" in (one(report, "keys", "tp-ranks").remedy or "")
    assert of(report, "warn") == {"segments: none"}


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ((404, "no"), "not-a-master"),
        ((200, "{}"), "not-a-master"),
        ((200, '{"role": "follower", "leader_address": "h:1"}'), "not-serving"),
        ((200, '{"role": "leader", "service_ready": false}'), "not-serving"),
    ],
)
async def test_masters_that_do_not_serve(
    files: Path, renderer: Renderer, answer: tuple[int, str], cause: str
) -> None:
    master, engine = FakeMaster(answers={"/health": answer}), FakeEngine(renderer)
    async with running(master, engine, ports=free_ports(2)):
        model = configured(files, [engine.section("a")], pool={"master": master.url})
        report = await examined(model)
    assert of(report, "fail", None) == {f"master: {cause}"}
    assert of(report, "ok") == WELL


async def test_an_unreadable_tokenizer_and_unusable_keys(
    files: Path, renderer: Renderer, tmp_path: Path
) -> None:
    engine = FakeEngine(renderer)
    async with running(engine, ports=free_ports(2)):
        model = configured(
            tmp_path / "nothing",
            [engine.section("a")],
            pool={"master": engine.url, "key": {"template": "{model}"}},
        )
        report = await examined(model)
    assert {"config: tokenizer", "config: pool-key"} <= of(report, "fail", None)
    assert of(report, "ok") == WELL - {"tokens"}, "the rest goes by the engine's own tokens"


async def test_special_tokens_and_ids(files: Path, renderer: Renderer, tmp_path: Path) -> None:
    """The configured tokenizer differs from the engine's in one small thing at a time."""
    engine = FakeEngine(renderer)
    content = json.loads((files / "tokenizer.json").read_text())
    named = json.loads((files / "tokenizer_config.json").read_text())

    def written(name: str, template: str = CHATML, **changed: Any) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "tokenizer.json").write_text(json.dumps(content | changed))
        (path / "tokenizer_config.json").write_text(json.dumps(named | {"chat_template": template}))
        return path

    # <|im_start|> and <|im_end|> with one another's id.
    other = {1: 2, 2: 1}
    swapped = [
        token | {"id": other.get(token["id"], token["id"])} for token in content["added_tokens"]
    ]
    vocab = {text: other.get(index, index) for text, index in content["model"]["vocab"].items()}
    swapped_model = content["model"] | {"vocab": vocab}

    async with running(engine, ports=free_ports(2)):
        for path, cause, words in (
            (written("plain", post_processor=None), "special-tokens", "completions are not"),
            (written("bos", "<|bos|>" + CHATML), "special-tokens", "the configuration puts"),
            (written("text", "Hi." + CHATML), "template", "plain text is cut alike"),
            (written("none", "{{ raise_exception('no') }}"), "template", "refuses even a single"),
            (written("ids", added_tokens=swapped, model=swapped_model), "tokenizer", "other ids"),
        ):
            report = await examined(configured(path, [engine.section("a")]))
            assert of(report, "fail") == {f"tokens: {cause}"}, path
            assert words in one(report, "tokens", cause).found


async def test_approximate_models_are_only_reached(files: Path, renderer: Renderer) -> None:
    engine = FakeEngine(renderer)
    async with running(engine, ports=free_ports(2)):
        report = await examined(configured(files, [engine.section("a")], exact=False))
    assert [(f.check, f.status) for f in report.findings] == [("engine", "ok")]
    assert engine.chats == []


def test_pages_that_are_odd() -> None:
    assert read_page("").algorithm is None
    page = read_page('vllm:cache_config_info{block_size="None",enable_prefix_caching="False"} 1\n')
    assert (page.block_size, page.prefix_caching) == (None, False)
    page = read_page(
        'vllm:prefix_cache_hits_total{engine="0"} 2\nvllm:prefix_cache_hits_total{engine="1"} 3\n'
    )
    assert page.device_hits == 5
