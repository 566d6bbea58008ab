"""`gateway.yaml`: what is refused, and how it is said; the command line around it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from connector.wording import section_in
from gateway.cli import faults_beyond
from gateway.config import ConfigError, GatewayConfig, Upstream, engine_key
from gateway.reading import Reading, load

GOOD = """\
models:
  - name: m
    exact: false
    engines:
      - {id: a, url: "http://127.0.0.1:8101/"}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    return path


def test_defaults_and_relative_paths(tmp_path: Path) -> None:
    text = GOOD.replace("exact: false", "tokenizer: models/m\n    hashing: {seed: 0}")
    config = load(write(tmp_path, text))
    (model,) = config.models
    assert config.listen.port == 8000
    assert config.policy == "pool_aware"
    assert model.tokenizer == tmp_path / "models/m"
    assert model.hashing.seed == "0"
    assert model.engines[0].url == "http://127.0.0.1:8101"


def test_environment_overrides_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_GATEWAY_LISTEN__PORT", "8123")
    monkeypatch.setenv("MOONCAKE_GATEWAY_POLICY", "random")
    config = load(write(tmp_path, "listen: {port: 8001}\n" + GOOD))
    assert (config.listen.port, config.policy) == (8123, "random")


TWO = GOOD + '      - {id: b, url: "http://127.0.0.1:8102"}\n'
TOKENIZER = GOOD.replace("exact: false", "tokenizer: .")


def engine(more: str) -> str:
    """The good configuration with a second engine, which says `more`."""
    return GOOD + f"      - {{id: b, {more}}}\n"


# What is written; the line, the key and words of the remedy that its fault must name.
FAULTS = [
    # Keys that do not exist: the nearest is named.
    ("polcy: random\n" + GOOD, 1, "polcy", "unknown key; did you mean 'policy'?"),
    (GOOD.replace("url:", "ur:"), 5, "models.0.engines.0.ur", "did you mean 'url'?"),
    (GOOD.replace("url:", "ur:"), 5, "models.0.engines.0.url", "is required: Base URL"),
    ("log: {colour: 1}\n" + GOOD, 1, "log.colour", "unknown key; known: level, format, access"),
    ("_env_file: x\n" + GOOD, 1, "_env_file", "unknown key"),
    ("1: 2\n" + GOOD, 1, "1", "keys must be text"),
    ("listen: {port: 8000}\n", 1, "models", "is required: The served models."),
    # Types and ranges, in plain words.
    (
        "\nupstream:\n  idle_timeout: -1\n" + GOOD,
        3,
        "upstream.idle_timeout",
        "must be greater than 0 (given: -1)",
    ),
    ("shutdown_grace: .inf\n" + GOOD, 1, "shutdown_grace", "must be a finite number"),
    (
        "listen:\n" + GOOD,
        1,
        "listen",
        "must be a section of keys, as `key: value`; known: host, port (given: null)",
    ),
    ("log: {level: infos}\n" + GOOD, 1, "log.level", "did you mean 'info'?"),
    ("models: []\n", 1, "models", "must have at least 1 entry"),
    ("models:\n  - m\n", 2, "models.0", "must be a section of keys"),
    (GOOD.replace("- {id: a", "  {id: a"), 4, "models.0.engines", "must be a list"),
    (
        GOOD.replace("id: a", "id: a b"),
        5,
        "models.0.engines.0.id",
        "write letters, digits and . _ : - only",
    ),
    (
        GOOD + "    hashing: {block_size: 0}\n",
        6,
        "models.0.hashing.block_size",
        "must be 'auto', or at least 1 (given: 0)",
    ),
    # Addresses.
    (GOOD.replace("http://", ""), 5, "models.0.engines.0.url", "is not an http:// or https:// URL"),
    (GOOD.replace("127.0.0.1:8101/", ""), 5, "models.0.engines.0.url", "is not an http://"),
    (GOOD.replace("8101", "99999"), 5, "models.0.engines.0.url", "is not an http://"),
    (GOOD.replace("8101/", "8101/v1/"), 5, "models.0.engines.0.url", "without /v1"),
    (
        GOOD.replace("http://", "http://u:p@"),
        5,
        "models.0.engines.0.url",
        "see upstream.api_key_env",
    ),
    (
        engine('url: "http://h:1", events: "tcp://*:5557"'),
        6,
        "models.0.engines.1.events",
        "write tcp://HOST:PORT",
    ),
    (
        engine('url: "http://h:1", events: garbage'),
        6,
        "models.0.engines.1.events",
        "write tcp://HOST:PORT",
    ),
    (
        engine('url: "http://h:1", segments: [127.0.0.2]'),
        6,
        "models.0.engines.1.segments",
        "write HOST:PORT",
    ),
    (
        engine('url: "http://h:1", segments: ["h:99999"]'),
        6,
        "models.0.engines.1.segments",
        "write HOST:PORT",
    ),
    # What may stand only once: the second is blamed, the first named.
    (
        TWO.replace("id: b", "id: a"),
        6,
        "models.0.engines.1.id",
        "(first: models.0.engines.0.id at gateway.yaml:5); ids must be unique: rename one",
    ),
    (
        TWO.replace("8102", "8101"),
        6,
        "models.0.engines.1.url",
        "(first: models.0.engines.0.url at gateway.yaml:5); every engine answers",
    ),
    (TWO.replace("127.0.0.1:8102", "LOCALHOST:8101"), 6, "models.0.engines.1.url", "given again"),
    (
        engine('url: "http://h:1", events: "tcp://h:5557", replay: "tcp://h:5557"'),
        6,
        "models.0.engines.1.replay",
        "(first: models.0.engines.1.events at gateway.yaml:6)",
    ),
    (
        TWO.replace("}", ', segments: ["h:1"]}'),
        6,
        "models.0.engines.1.segments.0",
        "a segment is owned by one engine: remove it",
    ),
    (
        GOOD + GOOD.removeprefix("models:\n"),
        6,
        "models.1.name",
        "(first: models.0.name at gateway.yaml:2); names must differ",
    ),
    (
        GOOD + GOOD.removeprefix("models:\n").replace("name: m", "name: n"),
        9,
        "models.1.engines.0.url",
        "(first: models.0.engines.0.url at gateway.yaml:5)",
    ),
    ("admin: {port: 8000}\n" + GOOD, 1, "admin.port", "give each a port of its own"),
    (
        'listen: {host: "::", port: 1}\nadmin: {host: 10.0.0.1, port: 1}\n' + GOOD,
        2,
        "admin.port",
        "(first: listen.port at gateway.yaml:1)",
    ),
    (GOOD + "    exact: false\n", 6, "models.0.exact", "is given 2 times, in lines 3 and 6"),
    # Policies.
    ("policy: round_robbin\n" + GOOD, 1, "policy", "did you mean 'round_robin'?"),
    (
        "policies:\n  x: {}\n" + GOOD,
        2,
        "policies.x",
        "there is no policy 'x'; known: least_requests",
    ),
    (
        "policies: {session_affinity: {bund: 2}}\n" + GOOD,
        1,
        "policies.session_affinity.bund",
        "did you mean 'bound'?",
    ),
    (
        "policies: {pool_aware: {work: '2'}}\n" + GOOD,
        1,
        "policies.pool_aware.work",
        "must be a number, not '2'",
    ),
    (
        "policies: {pool_aware: {work: -1}}\n" + GOOD,
        1,
        "policies.pool_aware.work",
        "must be at least 0",
    ),
    # Files and variables that the configuration names.
    (
        GOOD.replace("    exact: false\n", ""),
        2,
        "models.0",
        "name the directory that holds tokenizer.json, or set `exact: false`",
    ),
    (TOKENIZER, 3, "models.0.tokenizer", "has no tokenizer.json; name the directory"),
    (
        TOKENIZER.replace(": .", ": /no/such/directory"),
        3,
        "models.0.tokenizer",
        "or set `exact: false`",
    ),
    (
        TOKENIZER.replace(": .", ": Qwen/Qwen3-0.6B"),
        3,
        "models.0.tokenizer",
        "`hf download Qwen/Qwen3-0.6B config.json tokenizer.json",
    ),
    (TOKENIZER.replace(": .", ": ./broken"), 3, "models.0.tokenizer", "copy it anew"),
    (
        GOOD + "    chat_template: none.jinja\n",
        6,
        "models.0.chat_template",
        "name the engines' --chat-template, or remove it",
    ),
    (
        GOOD + "    hashing: {algorithm: xxhash}\n",
        6,
        "models.0.hashing.algorithm",
        "or use sha256_cbor",
    ),
    (
        GOOD + "    pool: {master: 'http://m:1', key: {template: '{nope}'}}\n",
        6,
        "models.0.pool.key",
        "unknown field {nope}; known are",
    ),
    (
        "upstream:\n  api_key_env: NO_SUCH_KEY\n" + GOOD,
        2,
        "upstream.api_key_env",
        "export it, or remove",
    ),
]


def judged(path: Path) -> list[str]:
    """The lines that `check` prints, file names without their folder."""
    reading = Reading(path)
    error = reading.error([*reading.faults, *faults_beyond(reading)])
    return str(error).replace(f"{path.parent}/", "").splitlines()


@pytest.mark.parametrize(("text", "line", "key", "remedy"), FAULTS)
def test_a_fault_names_line_key_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: int, key: str, remedy: str
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    lines = judged(write(tmp_path, text))
    [said] = [said for said in lines if said.startswith(f"gateway.yaml:{line}: {key}: ")]
    assert remedy in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("models: [\n", r"gateway.yaml:2: is not YAML: .* look for a quote, bracket"),
        ("a: 1\nb: c: d\n", r"gateway.yaml:2: is not YAML: mapping values are not allowed"),
        ("a: 1\nb: 2024-13-45\n", r"gateway.yaml:2: is not YAML: '2024-13-45' is no timestamp"),
        ("a: 1\nb: \0\n", r"gateway.yaml:2: is not YAML: .*U\+0000; remove it"),
        ("a: 'x\nb: 1\n", r"unexpected end of stream \(it begins in line 1\)"),
        ("[" * 5000, r"is not YAML of a sane depth"),
        ("- 1\n", r"gateway.yaml:1: must be a mapping of settings, e.g. `models:"),
        ("", r"must be a mapping"),
    ],
)
def test_a_file_that_is_no_yaml_is_named_with_the_line(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load(write(tmp_path, text))
    assert "<unicode string>" not in str(caught.value)


def test_faults_of_all_phases_are_named_at_once(tmp_path: Path) -> None:
    text = (
        "polcy: x\n"
        "listen: {port: 99999}\n"
        "policies: {pool_aware: {copies: 0, work: x, wrk: 1}, pool_awre: {}}\n"
        "upstream: {api_key_env: NO_SUCH_KEY}\n"
        "upstream: {api_key_env: NO_SUCH_KEY}\n"
        + TWO.replace("id: b", "id: a").replace("exact: false", "tokenizer: nowhere")
        + "      - {id: 'a b'}\n"
        "    hashing: {algorithm: xxhash}\n"
        "    chat_template: none\n"
    )
    keys = [said.split(": ")[1] for said in judged(write(tmp_path, text))]
    assert sorted(keys) == sorted(
        [
            "polcy",
            "listen.port",
            "policies.pool_aware.copies",
            "policies.pool_aware.work",
            "policies.pool_aware.wrk",
            "policies.pool_awre",
            "upstream",
            "upstream.api_key_env",
            "models.0.tokenizer",
            "models.0.engines.1.id",
            "models.0.engines.2.id",
            "models.0.engines.2.url",
            "models.0.hashing.algorithm",
            "models.0.chat_template",
        ]
    )


def leaves(section: type[BaseModel], data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every key of a section and of those below it, with the mapping that holds it."""
    for key, info in section.model_fields.items():
        yield data, key
        below = section_in(info.annotation)
        if below is not None:
            held = data.setdefault(key, {})
            yield from leaves(below, held[0] if isinstance(held, list) else held)


@pytest.mark.parametrize(
    "wrong", [None, [], {}, "\u00e9 ", -1, 1.5, True, [[1]], {1: [2]}, 10**400]
)
def test_no_fault_is_told_in_the_words_of_a_library(tmp_path: Path, wrong: object) -> None:
    data = yaml.safe_load(GOOD)
    data["models"][0] |= {"pool": {"master": "http://m:1"}}
    for section, key in list(leaves(GatewayConfig, data)):
        kept = section.get(key)
        section[key] = wrong
        path = write(tmp_path, yaml.safe_dump(data))
        for said in map(str, Reading(path).faults):
            assert not re.search(
                r"[Ii]nput|instance of|[Tt]uple|dictionary|pattern|pydantic|Value error|valid ",
                said,
            ), said
        del section[key]
        if kept is not None:
            section[key] = kept


def test_ports_that_are_no_collision(tmp_path: Path) -> None:
    for apart in (
        "listen: {port: 0}\nadmin: {port: 0}\n",
        "listen: {host: 10.0.0.1, port: 1}\nadmin: {host: 127.0.0.1, port: 1}\n",
    ):
        assert load(write(tmp_path, apart + GOOD))


def test_merged_keys_are_not_given_twice(tmp_path: Path) -> None:
    text = GOOD.replace("- {id: a", "- &first {id: a") + (
        "      - {<<: *first, id: b, url: 'http://127.0.0.1:8102'}\n"
    )
    [model] = load(write(tmp_path, text)).models
    assert [engine.id for engine in model.engines] == ["a", "b"]


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("LISTEN__PORT", "x", "listen.port: must be a whole number (given: 'x')"),
        ("LISTEN__PROT", "1", "listen.prot: unknown key; did you mean 'port'?"),
        ("LISTEN", "tcp://10.0.0.1:80", "listen: must be a section of keys"),
        ("LISTEN", '{"port": -1}', "listen.port: must be at least 0 (given: -1)"),
        ("MODELS", "garbage", "models: must be a list"),
        ("MODELS", '[{"name": "n"}]', "models.0.engines: is required"),
        ("POLICY", "rnadom", "policy: there is no policy 'rnadom'; did you mean 'random'?"),
        ("POLICIES__POOL_AWARE__WORK", "much", "policies.pool_aware.work: "),
        ("POLICIES__POOL_AWARE__COPIES", "1.5", "policies.pool_aware.copies: "),
        ("UPSTREAM__API_KEY_ENV", "NO_SUCH_KEY", "upstream.api_key_env: names the environment"),
        ("ADMIN__PORT", "8000", "admin.port: listen and admin would both bind port 8000"),
    ],
)
def test_a_fault_from_the_environment_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    monkeypatch.setenv(f"MOONCAKE_GATEWAY_{variable}", value)
    text = "listen: {host: localhost}\n" + GOOD.replace("exact: false", "tokenizer: nowhere")
    lines = judged(write(tmp_path, text))
    [said] = [said for said in lines if "in the environment" in said]
    assert said.startswith(f"MOONCAKE_GATEWAY_{variable} in the environment: {says}")


def test_variables_that_are_meant_for_the_gateway_and_name_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kubernetes makes these for a Service of that name.
    monkeypatch.setenv("MOONCAKE_GATEWAY_PORT_8000_TCP", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("MOONCAKE_GATEWAY_SERVICE_HOST", "10.0.0.1")
    path = write(tmp_path, GOOD)
    assert load(path)
    monkeypatch.setenv("MOONCAKE_GATEWAY_POLCY", "random")
    monkeypatch.setenv("MOONCAKE_GATEWAY_LSTEN__PORT", "1")
    assert sorted(judged(path)) == [
        "the environment: MOONCAKE_GATEWAY_LSTEN__PORT: names no setting; did you mean "
        "MOONCAKE_GATEWAY_LISTEN?",
        "the environment: MOONCAKE_GATEWAY_POLCY: names no setting; did you mean "
        "MOONCAKE_GATEWAY_POLICY?",
    ]


def test_policies_can_be_tuned_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_GATEWAY_POLICIES__POOL_AWARE__WORK", "2")
    monkeypatch.setenv("MOONCAKE_GATEWAY_POLICIES__POOL_AWARE__COPIES", "3")
    monkeypatch.setenv("MOONCAKE_GATEWAY_POLICIES__SESSION_AFFINITY", '{"bound": "1.5"}')
    config = load(write(tmp_path, "policies: {pool_aware: {doubling: 9}}\n" + GOOD))
    assert config.policies == {
        "pool_aware": {"work": 2.0, "copies": 3, "doubling": 9},
        "session_affinity": {"bound": 1.5},
    }


def test_engine_key_must_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(write(tmp_path, "upstream: {api_key_env: NO_SUCH_KEY}\n" + GOOD))
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(
        ConfigError, match=r"upstream.api_key_env: .*'NO_SUCH_KEY', which is not set"
    ):
        engine_key(config.upstream)
    with pytest.raises(ConfigError, match="not the key itself") as caught:
        engine_key(Upstream(api_key_env="sk-1234"))
    assert "1234" not in str(caught.value)
    monkeypatch.setenv("NO_SUCH_KEY", "k")
    assert engine_key(config.upstream) == "k"


def gateway(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway", *arguments], capture_output=True, text=True, check=False
    )


def test_check_accepts_and_refuses(tmp_path: Path) -> None:
    good = gateway("check", "-c", str(write(tmp_path, GOOD)))
    assert (good.returncode, good.stderr) == (0, "")
    assert re.search(r"ok: 1 model\(s\), 1 engine\(s\), policy pool_aware", good.stdout)
    text = GOOD.replace("exact: false", "tokenizer: ./nowhere")
    bad = gateway("check", "-c", str(write(tmp_path, text)))
    assert bad.returncode == 2
    assert re.search(r"gateway.yaml:3: models.0.tokenizer: .*nowhere", bad.stderr)
    assert "Traceback" not in bad.stderr
    served = gateway("serve", "-c", str(write(tmp_path, "polcy: x\n" + text)))
    assert served.returncode == 2
    assert re.search(r"gateway.yaml:1: polcy: .*\n.*gateway.yaml:4: models.0.tok", served.stderr)
    missing = gateway("check", "-c", str(tmp_path / "none.yaml"))
    assert (missing.returncode, "cannot be read" in missing.stderr) == (2, True)


def test_version() -> None:
    shown = gateway("--version")
    assert (shown.returncode, shown.stdout.split()[-1]) == (0, version("mooncake-gateway"))


def test_the_reference_in_the_docs_is_what_the_command_prints() -> None:
    written = Path(__file__).parents[2] / "docs" / "configuration.md"
    printed = gateway("reference")
    assert printed.returncode == 0
    assert written.read_text() == printed.stdout, "run: mooncake-gateway reference > docs/..."
