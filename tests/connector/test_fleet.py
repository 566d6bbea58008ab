"""The fleet file, and the gateway section that follows from it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from connector.fleet import (
    PYTHON_VARIABLE,
    FleetError,
    FleetFile,
    gateway_models,
    guessed_ranks,
    load,
    without_tokenizer,
)
from connector.model import ModelConfig


def fleet(**changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "engine": {"model": "org/tiny", "device": "cpu", "env": {"A": "1", "B": "1"}},
        "engines": [
            {"id": "a", "port": 8101, "events_port": 5557, "replay_port": 6557},
            {"id": "b", "port": 8102, "segment": "127.0.0.3:17102"},
        ],
    }
    return {**content, **changes}


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_engines_share_and_override() -> None:
    content = fleet()
    content["engines"][1] |= {"block_size": 64, "env": {"B": "2"}}
    a, b = FleetFile.model_validate(content).engines
    assert (a.model, a.block_size, a.env) == ("org/tiny", 32, {"A": "1", "B": "1"})
    assert (b.model, b.block_size, b.env) == ("org/tiny", 64, {"A": "1", "B": "2"})


def test_a_validated_fleet_survives_json() -> None:
    first = FleetFile.model_validate(fleet())
    assert FleetFile.model_validate_json(first.model_dump_json()) == first


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"fleet.yaml:1: is not YAML"),
        ("- a", "must be a mapping of settings"),
        (fleet(mastr={}), r"mastr: unknown key; did you mean 'master'"),
        (
            fleet(engine={"model": "m", "blok_size": 32}),
            r"\A\S+:\d+: engine.blok_size: unknown key; did you mean 'block_size'\?\Z",
        ),
        (fleet(engine={}), r"engines.0.model: is required"),
        (fleet(engines=[]), "engines: must have at least 1 entry"),
        (
            fleet(engine={"model": "m", "dtype": 1}),
            r"\A\S+:\d+: engine.dtype: must be text[^\n]*\Z",
        ),
        (
            fleet(engine={"model": "m", "device": "cpu", "block_size": 48}),
            r"\A\S+:\d+: engine: block_size 48 is not a multiple of 32, as a CPU needs\Z",
        ),
        (
            "engine: {model: m}\nengines:\n- {id: a, port: 1}\n- {id: b, port: 1, port: 2}\n",
            r"fleet.yaml:4: engines.1.port: is given 2 times, in lines 4 and 4",
        ),
        (
            "engine: {model: m}\nengines:\n- {id: a, port: 1}\n- {id: b, port: 1}\n",
            r"fleet.yaml:4: engines.1.port: port 1 is given again "
            r"\(first: engines.0.port at \S+fleet.yaml:3\); take another",
        ),
        (
            fleet(engines=[{"id": "a", "port": 1, "segment": "h"}]),
            "segment: 'h' is no .* HOST:PORT",
        ),
        (fleet(engines=[{"id": "a"}]), "engines.0.port: is required"),
        (fleet(engines=[{"id": "a/b", "port": 1}]), "engines.0.id"),
        (
            fleet(engines=[{"id": "a", "port": 8101}, {"id": "a", "port": 8102}]),
            r"engines.1.id: engine id a is given again \(first: engines.0.id at",
        ),
        (
            fleet(engines=[{"id": "a", "port": 9003}]),
            r"engines.0.port: port 9003 is given again \(first: master.http_port at",
        ),
        (
            fleet(engines=[{"id": n, "port": p, "lookup_rpc_port": 1} for n, p in ("a1", "b2")]),
            "engines.1.lookup_rpc_port: lookup_rpc_port 1 is given again",
        ),
        (
            fleet(
                engines=[{"id": n, "port": p, "segment": "127.0.0.2:1"} for n, p in ("a1", "b2")]
            ),
            "engines.1.segment: segment 127.0.0.2:1 is given again",
        ),
    ],
)
def test_wrong_files_are_named_by_place(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(FleetError, match=message):
        load(written(tmp_path, content))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"none.yaml: cannot be read: No such file"):
        load(tmp_path / "none.yaml")


def test_gateway_section_follows_from_the_fleet(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    model.mkdir()
    content = fleet()
    content["engine"] |= {
        "model": str(model),
        "served_name": "served",
        "hash_algorithm": "sha256",
        "block_size": 64,
        "seed": 7,
        "cache_prefix": "blue",
        "default_chat_template_kwargs": {"enable_thinking": False},
    }
    [section] = gateway_models(FleetFile.model_validate(content))
    parsed = ModelConfig.model_validate(section)
    assert parsed.name == "served"
    assert parsed.exact
    assert parsed.tokenizer == model
    assert parsed.hashing.model_dump() == {"algorithm": "sha256", "block_size": 64, "seed": "7"}
    assert parsed.default_chat_template_kwargs == {"enable_thinking": False}
    assert parsed.pool is not None
    assert parsed.pool.master == "http://127.0.0.1:9003"
    assert parsed.pool.key.model == "tiny"
    assert parsed.pool.key.cache_prefix == "blue"
    a, b = parsed.engines
    assert a.url == "http://127.0.0.1:8101"
    assert (a.events, a.replay) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:6557")
    assert (b.events, b.segments) == (None, ("127.0.0.3:17102",))


def test_a_model_without_files_here_stays_exact_unless_told_otherwise() -> None:
    fleet_file = FleetFile.model_validate(fleet())
    [section] = gateway_models(fleet_file)
    parsed = ModelConfig.model_validate(section)
    assert (parsed.exact, section["tokenizer"], parsed.name) == (True, "org/tiny", "tiny")
    [(name, remedy)] = without_tokenizer(fleet_file).items()
    assert name == "org/tiny"
    assert "`hf download org/tiny config.json tokenizer.json" in remedy
    assert "set `exact: false`" in remedy
    content = fleet()
    content["engine"] |= {"exact": False}
    told = FleetFile.model_validate(content)
    [section] = gateway_models(told)
    assert (section["exact"], "tokenizer" in section) == (False, False)
    assert without_tokenizer(told) == {}


def test_a_directory_that_is_not_there_is_named_as_a_path(tmp_path: Path) -> None:
    content = fleet()
    content["engine"] |= {"model": str(tmp_path / "none")}
    fleet_file = FleetFile.model_validate(content)
    assert gateway_models(fleet_file)[0]["tokenizer"] == str(tmp_path / "none")
    assert f"--local-dir {tmp_path}/none`" in without_tokenizer(fleet_file)[f"{tmp_path}/none"]
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "tokenizer.json").touch()
    assert without_tokenizer(fleet_file) == {}


def test_two_models_in_one_fleet() -> None:
    content = fleet()
    content["engines"][1] |= {"model": "org/other", "block_size": 64}
    first, second = gateway_models(FleetFile.model_validate(content))
    assert [engine["id"] for engine in first["engines"]] == ["a"]
    assert [engine["id"] for engine in second["engines"]] == ["b"]
    assert second["hashing"]["block_size"] == 64


def test_engines_of_one_name_must_hash_alike() -> None:
    content = fleet()
    content["engines"][1] |= {"block_size": 64}
    with pytest.raises(FleetError, match="a and b both serve 'tiny' but differ in hashing"):
        gateway_models(FleetFile.model_validate(content))


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        ('{"num_key_value_heads": 2, "num_attention_heads": 8}', 2),
        ('{"num_attention_heads": 8}', 4),
        ('{"text_config": {"num_key_value_heads": 8}}', 4),
        ('{"kv_lora_rank": 512, "num_key_value_heads": 128}', 1),
        (None, 4),
    ],
)
def test_ranks_that_store(tmp_path: Path, config: str | None, ranks: int) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    content = fleet(
        engine={"model": str(tmp_path), "tensor_parallel_size": 4},
        engines=[{"id": "a", "port": 8101}],
    )
    fleet_file = FleetFile.model_validate(content)
    [section] = gateway_models(fleet_file)
    assert section["pool"]["key"]["ranks"]["tp"] == ranks
    # Without the model's config.json it is a guess, and said to be one.
    assert ("ranks.tp is taken for 4" in "".join(guessed_ranks(fleet_file))) == (config is None)


def test_the_example_is_a_fleet() -> None:
    example = load(Path(__file__).parents[2] / "examples" / "real" / "fleet.yaml")
    assert [engine.id for engine in example.engines] == ["a", "b"]
    assert len({engine.segment for engine in example.engines}) == 2


def test_engines_of_two_machines_may_have_the_same_ports() -> None:
    engines = [
        {"id": name, "host": host, "port": 8000, "events_port": 5557, "replay_port": 6557}
        for name, host in (("a", "10.0.0.2"), ("b", "10.0.0.3"))
    ]
    made = FleetFile.model_validate(fleet(engines=engines))
    assert [engine.url for engine in made.engines] == [
        "http://10.0.0.2:8000",
        "http://10.0.0.3:8000",
    ]


def test_loopback_addresses_are_of_one_machine() -> None:
    engines = [
        {"id": name, "host": host, "port": port, "events_port": 5557}
        for name, host, port in (("a", "127.0.0.1", 1), ("b", "127.0.0.2", 2))
    ]
    with pytest.raises(ValidationError, match="5557"):
        FleetFile.model_validate(fleet(engines=engines))


def test_a_bare_interpreter_is_sought_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    program = tmp_path / "python-of-vllm"
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = FleetFile.model_validate(fleet() | {"python": "python-of-vllm"})
    assert found.interpreter == program
    assert found.master_binary == tmp_path / "mooncake_master"
