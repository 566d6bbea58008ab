"""`gateway.yaml`: what is refused, and how it is said; the command line around it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.config import ConfigError, engine_key, load

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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("polcy: random\n" + GOOD, r":1: polcy: unknown key; did you mean 'policy'\?"),
        (
            "\nupstream:\n  idle_timeout: -1\n" + GOOD,
            r":3: upstream.idle_timeout: Input should be greater than 0 \(given: -1\)",
        ),
        (
            GOOD.replace("url:", "ur:"),
            r":5: models.0.engines.0.ur: unknown key; did you mean 'url'\?",
        ),
        (GOOD.replace("url:", "ur:"), r":5: models.0.engines.0.url: is required"),
        (GOOD.replace("http://", ""), r":5: models.0.engines.0.url: .* is not an http://"),
        (GOOD + GOOD.removeprefix("models:\n"), r"model 'm' occurs twice"),
        (
            GOOD + GOOD.removeprefix("models:\n").replace("name: m", "name: n"),
            r"engine id 'a' occurs in two models",
        ),
        (
            GOOD + "      - {id: a, url: 'http://127.0.0.1:8102'}\n",
            r":2: models.0: engine id 'a' occurs twice",
        ),
        (GOOD.replace("    exact: false\n", ""), r":2: models.0: `tokenizer` is required"),
        (GOOD.replace("127.0.0.1:8101/", ""), r"is not an http://"),
        (GOOD.replace("8101", "99999"), r"is not an http://"),
        (GOOD.replace("8101/", "8101/v1/"), r"must be a base URL: without /v1"),
        (GOOD.replace("http://", "http://u:p@"), r"credentials do not belong into the URL"),
        (GOOD.replace('/"}', '/", events: "tcp://*:5557"}'), r"not an endpoint to connect to"),
        (GOOD.replace('/"}', '/", events: garbage}'), r"not an endpoint to connect to"),
        ("shutdown_grace: .inf\n" + GOOD, r":1: shutdown_grace: .*finite"),
        ("[" * 5000, r"is not YAML"),
        ("policy: round_robbin\n" + GOOD, r":1: policy: .* did you mean 'round_robin'\?"),
        (
            "policies: {session_affinity: {bund: 2}}\n" + GOOD,
            r":1: policies: .* has no option 'bund'; did you mean 'bound'\?",
        ),
        ("models: [\n", r"is not YAML"),
        ("- 1\n", r"must be a mapping"),
        ("listen: {port: 8000}\n", r":1: models: is required"),
    ],
)
def test_faults_name_line_key_and_remedy(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(write(tmp_path, text))


def test_every_fault_gets_a_line_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, "polcy: x\nlisten: {port: 99999}\n" + GOOD))
    assert len(str(caught.value).splitlines()) == 2


def test_an_environment_that_cannot_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_GATEWAY_LISTEN", "tcp://10.0.0.1:80")
    with pytest.raises(ConfigError, match=r"the environment: .*listen.*key by key"):
        load(write(tmp_path, GOOD))


def test_engine_key_must_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(write(tmp_path, "upstream: {api_key_env: NO_SUCH_KEY}\n" + GOOD))
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="'NO_SUCH_KEY', which is not set"):
        engine_key(config.upstream)
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
    text = GOOD + "    hashing: {algorithm: xxhash}\n"
    unseeded = gateway("check", "-c", str(write(tmp_path, text)))
    assert (unseeded.returncode, "seed" in unseeded.stderr) == (2, True)
    text = GOOD.replace("exact: false", "tokenizer: .") + (
        "    pool: {master: 'http://m:1', key: {template: '{nope}'}}\n"
    )
    template = gateway("check", "-c", str(write(tmp_path, text)))
    assert (template.returncode, "Traceback" in template.stderr) == (2, False)
    missing = gateway("check", "-c", str(tmp_path / "none.yaml"))
    assert (missing.returncode, "cannot be read" in missing.stderr) == (2, True)


def test_the_reference_in_the_docs_is_what_the_command_prints() -> None:
    written = Path(__file__).parents[2] / "docs" / "configuration.md"
    printed = gateway("reference")
    assert printed.returncode == 0
    assert written.read_text() == printed.stdout, "run: mooncake-gateway reference > docs/..."
