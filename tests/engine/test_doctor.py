"""The doctor names what is wrong with the gateway's side of a healthy fleet (must show 4)."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleet import Ports
from typer.testing import CliRunner

from connector.cli import app
from connector.stack import Stack
from connector.tiny_model import Shape, write

ROOT = Path(__file__).parents[2]

Models = list[dict[str, Any]]


class Told:
    """What the command said, as JSON and to people, and the status it exited with."""

    def __init__(self, status: int, document: dict[str, Any], words: str) -> None:
        self.status = status
        self.document = document
        self.words = words

    @property
    def failed(self) -> set[str]:
        """Failed checks with their causes."""
        return {f"{f['check']}: {f['cause']}" for f in self._of("fail")}

    @property
    def warned(self) -> set[str]:
        return {f"{f['check']}: {f['cause']}" for f in self._of("warn")}

    def proved(self, engine: str) -> set[str]:
        """Checks that are well for an engine."""
        return {f["check"] for f in self._of("ok") if f["engine"] == engine}

    def finding(self, cause: str, engine: str | None = "a") -> dict[str, Any]:
        """Return the finding of a check and cause, which people must have been shown too."""
        (found,) = [
            f
            for f in self.document["findings"]
            if f"{f['check']}: {f['cause']}" == cause and f["engine"] == engine
        ]
        assert cause in self.words
        assert f"→ {found['remedy']}" in self.words
        assert set(found) >= {"check", "engine", "status", "expected", "found", "remedy"}
        return found

    def _of(self, status: str) -> Iterator[dict[str, Any]]:
        return (f for f in self.document["findings"] if f["status"] == status)


def command(*arguments: str | Path) -> tuple[int, str]:
    """Run the command in this process; return its status and what it wrote to stdout."""
    result = CliRunner().invoke(
        app, ["doctor", *map(str, arguments)], env={"COLUMNS": "100"}, catch_exceptions=False
    )
    assert result.stderr == ""
    return result.exit_code, result.stdout


Doctor = Callable[..., Told]


@pytest.fixture
def models(stack: Stack) -> Models:
    """Return the right configuration, to be spoilt."""
    return copy.deepcopy(stack.gateway_config())


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    """Return a function that examines a configuration, both ways of printing."""

    def examine(models: Models, *arguments: str) -> Told:
        path = tmp_path / "gateway.yaml"
        path.write_text(yaml.safe_dump({"policy": "not judged here", "models": models}))
        shared = ("-c", path, "--timeout", "6", *(arguments or ("--model", "tiny")))
        status, printed = command(*shared, "--json")
        again, words = command(*shared)
        assert status == again
        return Told(status, json.loads(printed), " ".join(words.split()))

    return examine


def tiny(models: Models) -> dict[str, Any]:
    (model,) = [model for model in models if model["name"] == "tiny"]
    return model


def test_all_is_well_when_it_is(doctor: Doctor, models: Models) -> None:
    told = doctor(models, "--timeout", "15")
    assert told.status == 0
    assert (told.failed, told.warned) == (set(), set())
    assert told.document["status"] == "ok"
    per_engine = {
        "engine", "hashing", "tokens", "events", "replay", "hashes", "segments", "keys", "usage"
    }  # fmt: skip
    assert told.proved("a") == told.proved("b") == per_engine | {"sharing"}
    assert told.proved("c") == per_engine, "nobody shares its pool keys"
    assert "All is well" in told.words
    assert "✗" not in told.words


def test_wrong_seed(doctor: Doctor, models: Models) -> None:
    tiny(models)["hashing"]["seed"] = "42"
    told = doctor(models)
    assert told.status == 1
    assert told.failed == {"hashes: seed"}
    found = told.finding("hashes: seed")
    assert 'the engine hashes with sha256_cbor and seed "0"' in found["found"]
    assert found["expected"] == 'seed "42"'
    assert 'set `hashing.seed: "0"`' in found["remedy"]
    assert told.proved("a") >= {"tokens", "events", "keys", "usage", "sharing"}


def test_seed_left_out(doctor: Doctor, models: Models) -> None:
    del tiny(models)["hashing"]["seed"]
    told = doctor(models)
    assert told.failed == {"hashes: seed"}
    assert "no seed (PYTHONHASHSEED not set)" in told.finding("hashes: seed")["expected"]


def test_wrong_block_size(doctor: Doctor, models: Models) -> None:
    tiny(models)["hashing"]["block_size"] = 16
    told = doctor(models)
    assert told.status == 1
    assert told.failed == {"hashing: block-size", "hashes: block-size"}
    found = told.finding("hashes: block-size")
    assert "blocks hold 32 tokens" in found["found"]
    assert "16" in found["expected"]
    assert "set `hashing.block_size: 32`" in found["remedy"]


def test_wrong_algorithm(doctor: Doctor, models: Models) -> None:
    tiny(models)["hashing"]["algorithm"] = "sha256"
    told = doctor(models)
    assert told.status == 1
    assert told.failed == {"hashing: algorithm", "hashes: algorithm"}
    found = told.finding("hashes: algorithm")
    assert "the engine hashes with sha256_cbor" in found["found"]
    assert found["expected"] == "sha256"
    assert "set `hashing.algorithm: sha256_cbor`" in found["remedy"]


def test_all_of_hashing_wrong_and_no_events(doctor: Doctor, models: Models) -> None:
    model = tiny(models)
    model["hashing"] = {"algorithm": "xxhash", "block_size": 128, "seed": "7"}
    for engine in model["engines"]:
        del engine["events"], engine["replay"]
    told = doctor(models)
    assert {"hashes: seed", "hashes: block-size", "hashes: algorithm"} <= told.failed
    assert "the hashes in keys of the pool" in told.finding("hashes: seed")["found"]
    assert "events: none" in told.warned


def test_wrong_cache_prefix(doctor: Doctor, models: Models) -> None:
    tiny(models)["pool"]["key"]["cache_prefix"] = "blue"
    told = doctor(models)
    assert told.status == 1
    assert told.failed == {"keys: cache-prefix"}
    found = told.finding("keys: cache-prefix")
    assert "the keys in the pool have no cache_prefix" in found["found"]
    assert found["expected"] == "cache_prefix 'blue'"
    assert 'set `pool.key.cache_prefix: ""`' in found["remedy"]
    assert "sharing" in told.proved("a"), "the engines agree, whatever the gateway thinks"


def test_missing_cache_prefix(doctor: Doctor, models: Models) -> None:
    (model,) = [model for model in models if model["name"] == "tiny-64"]
    model["pool"]["key"]["cache_prefix"] = ""
    told = doctor(models, "--model", "tiny-64")
    assert told.failed == {"keys: cache-prefix"}
    assert "'other'" in told.finding("keys: cache-prefix", "c")["found"]


def test_wrong_model_in_keys(doctor: Doctor, models: Models) -> None:
    tiny(models)["pool"]["key"]["model"] = "large"
    told = doctor(models)
    assert told.failed == {"keys: model"}
    found = told.finding("keys: model")
    assert "the keys in the pool name the model 'tiny'" in found["found"]
    assert "set `pool.key.model: tiny`" in found["remedy"]


def test_wrong_ranks_and_groups(doctor: Doctor, models: Models) -> None:
    tiny(models)["pool"]["key"] |= {"ranks": {"tp": 2}, "groups": [0, 1]}
    told = doctor(models)
    assert told.failed == {"keys: tp-ranks", "keys: groups"}
    assert "set `pool.key.ranks.tp: 1`" in told.finding("keys: tp-ranks")["remedy"]


def test_other_template_of_keys(doctor: Doctor, models: Models) -> None:
    tiny(models)["pool"]["key"]["template"] = "{model}/{tp}/{hash}"
    told = doctor(models)
    assert told.failed == {"keys: template"}
    assert "tiny@tp_rank:0@pcp0" in told.finding("keys: template")["found"]


def test_wrong_tokenizer(doctor: Doctor, models: Models, tmp_path: Path) -> None:
    write(tmp_path / "other", Shape(vocab=2048))
    tiny(models)["tokenizer"] = str(tmp_path / "other")
    told = doctor(models)
    assert told.status == 1
    assert told.failed == {"tokens: tokenizer"}
    found = told.finding("tokens: tokenizer")
    assert "the engine has another tokenizer" in found["found"]
    assert "around it" in found["found"]
    assert "around it" in found["expected"]
    assert f"set `tokenizer` (now {tmp_path / 'other'})" in found["remedy"]
    assert told.proved("a") >= {"hashes", "keys", "sharing"}, "these go by the engine's tokens"


def test_altered_chat_template(doctor: Doctor, models: Models, model: Path, tmp_path: Path) -> None:
    source = json.loads((model / "tokenizer_config.json").read_text())["chat_template"]
    path = tmp_path / "altered.jinja"
    path.write_text(source.replace("<|im_start|>assistant", "<|im_start|>robot"))
    assert path.read_text() != source
    tiny(models)["chat_template"] = str(path)
    told = doctor(models)
    assert told.failed == {"tokens: template"}
    found = told.finding("tokens: template")
    assert "another chat template" in found["found"]
    assert "plain text is cut alike" in found["found"]
    assert "assistant" in found["found"]
    assert "robot" in found["expected"]
    assert "set `chat_template`" in found["remedy"]


def test_other_template_arguments(doctor: Doctor, models: Models) -> None:
    tiny(models)["default_chat_template_kwargs"] = {"enable_thinking": False}
    told = doctor(models)
    assert told.failed == {"tokens: template"}
    assert "default_chat_template_kwargs" in told.finding("tokens: template")["remedy"]


def test_events_unreachable(doctor: Doctor, models: Models, ports: Ports) -> None:
    engine = tiny(models)["engines"][0]
    right = engine["events"]
    engine["events"] = f"tcp://127.0.0.1:{ports.next()}"
    told = doctor(models)
    assert told.status == 1
    assert told.failed == {"events: unreachable"}
    found = told.finding("events: unreachable")
    assert f"no KV events from {engine['events']}: connection refused" in found["found"]
    assert f"set `events: {right}` of engine a" in found["remedy"]
    assert told.proved("a") >= {"replay", "hashes"}, "the replay tells the hashes"


def test_events_at_an_http_port_and_at_the_replay_port(doctor: Doctor, models: Models) -> None:
    a, b = tiny(models)["engines"]
    a["events"] = a["url"].replace("http://", "tcp://")
    b["events"], b["replay"] = b["replay"], b["events"]
    told = doctor(models)
    assert told.failed == {"events: unreachable", "replay: unreachable"}
    for engine in "ab":
        assert "no publisher of events" in told.finding("events: unreachable", engine)["found"]


def test_events_of_two_engines_swapped(doctor: Doctor, models: Models) -> None:
    a, b = tiny(models)["engines"]
    a["events"], b["events"] = b["events"], a["events"]
    told = doctor(models)
    assert told.status == 1
    assert told.failed == {"events: swapped"}
    for own, other in ((a, b), (b, a)):
        found = told.finding("events: swapped", own["id"])
        assert f"its events come from {other['events']}" in found["found"]
        assert f"configured for engine {other['id']}" in found["found"]
        assert "exchange `events`" in found["remedy"]
    assert told.proved("a") >= {"hashes", "keys"}


def test_replays_swapped(doctor: Doctor, models: Models) -> None:
    a, b = tiny(models)["engines"]
    a["replay"], b["replay"] = b["replay"], a["replay"]
    told = doctor(models)
    assert told.failed == {"replay: other-engine"}
    assert "it replays those of engine b" in told.finding("replay: other-engine")["found"]


def test_master_unreachable(doctor: Doctor, models: Models, ports: Ports) -> None:
    tiny(models)["pool"]["master"] = f"http://127.0.0.1:{ports.next()}"
    told = doctor(models)
    assert told.status == 1
    assert told.failed == {"master: unreachable"}
    found = told.finding("master: unreachable", None)
    assert "connection refused" in found["found"]
    assert "--metrics_port" in found["remedy"]
    assert told.proved("a") >= {"tokens", "events", "hashes", "usage"}


def test_rpc_port_given_for_the_master(doctor: Doctor, models: Models, stack: Stack) -> None:
    tiny(models)["pool"]["master"] = f"http://127.0.0.1:{stack.fleet.master.rpc_port}"
    told = doctor(models)
    assert told.status == 1
    assert told.failed == {"master: not-http"}
    found = told.finding("master: not-http", None)
    assert "speaks no HTTP" in found["found"]
    assert "RPC port" in found["found"]
    assert "not its RPC port" in found["remedy"]


def test_an_engine_given_for_the_master(doctor: Doctor, models: Models) -> None:
    model = tiny(models)
    model["pool"]["master"] = model["engines"][0]["url"]
    told = doctor(models)
    assert told.failed == {"master: not-a-master"}


def test_segment_not_mounted_and_another_unclaimed(doctor: Doctor, models: Models) -> None:
    engine = tiny(models)["engines"][0]
    (right,) = engine["segments"]
    engine["segments"] = ["127.0.0.99:17101"]
    told = doctor(models)
    assert told.failed == {"segments: not-mounted"}
    assert right in told.finding("segments: not-mounted")["found"]
    assert told.warned == {"segments: unclaimed"}
    assert right in told.finding("segments: unclaimed", None)["found"]


def test_wrong_names_and_urls(doctor: Doctor, models: Models, ports: Ports) -> None:
    a, b = tiny(models)["engines"]
    (c,) = next(model for model in models if model["name"] == "tiny-64")["engines"]
    a["url"] = f"http://127.0.0.1:{ports.next()}"
    b["url"] = c["url"]
    told = doctor(models)
    assert told.status == 1
    assert told.failed >= {"engine: unreachable", "engine: model-name"}
    assert "connection refused" in told.finding("engine: unreachable")["found"]
    assert "it serves tiny-64, not tiny" in told.finding("engine: model-name", "b")["found"]


def test_one_engine_alone(doctor: Doctor, models: Models) -> None:
    told = doctor(models, "--engine", "b")
    assert told.status == 0
    assert {f["engine"] for f in told.document["findings"]} == {"b", None}
    assert "sharing" not in told.proved("b")


def test_the_command_as_a_process(models: Models, tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump({"models": models}))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "connector", "doctor", "-c", path, "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["counts"]["fail"] == 0


def test_approximate_models_are_only_reached(doctor: Doctor, models: Models) -> None:
    model = tiny(models)
    model["exact"] = False
    told = doctor(models)
    assert told.status == 0
    assert told.proved("a") == {"engine"}
