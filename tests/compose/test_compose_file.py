"""The compose files keep to the specification, and to what Bridle promises of its services."""

from __future__ import annotations

import importlib.resources
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

ROOT = Path(__file__).parents[2]
MAIN = "docker-compose.yml"
FILES = (
    MAIN,
    "docker-compose.gpu.yml",
    "docker-compose.postgres.yml",
    "docker-compose.monitoring.yml",
    "docker-compose.sandboxes.yml",
)
DEMANDED = {
    "BRIDLE_POSTGRES_PASSWORD": "secret",
    "BRIDLE_GRAFANA_PASSWORD": "secret",
    "BRIDLE_AGENT": "codex",
}
"""Variables without which a file is refused."""


@pytest.fixture
def services(compose_file: Any) -> dict[str, dict[str, Any]]:
    """The services of the main file, with no variable set."""
    found: dict[str, dict[str, Any]] = compose_file(MAIN)["services"]
    return found


@pytest.mark.parametrize("name", FILES)
def test_it_is_valid_by_the_compose_specifications_schema(compose_file: Any, name: str) -> None:
    vendored = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((vendored / "compose-spec.json").read_text())
    document = compose_file(name, **DEMANDED)
    jsonschema.validate(document, schema)
    next(iter(document["services"].values()))["comand"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("docker-compose.postgres.yml", "BRIDLE_POSTGRES_PASSWORD"),
        ("docker-compose.monitoring.yml", "BRIDLE_GRAFANA_PASSWORD"),
        ("docker-compose.sandboxes.yml", "BRIDLE_AGENT"),
    ],
)
def test_what_a_file_demands_is_named(compose_file: Any, name: str, variable: str) -> None:
    with pytest.raises(Exception, match=variable):
        compose_file(name)


@pytest.mark.parametrize("name", FILES[:2])
def test_every_command_is_one_of_bridles_with_options_that_it_has(
    compose_file: Any, name: str, require_command: Callable[[list[str]], None]
) -> None:
    for service in compose_file(name)["services"].values():
        program, *arguments = service.get("command", ["sleep"])
        if program == "bridle":
            require_command(arguments)
        else:
            assert program in ("sleep", "/app/init.sh", "/app/train.sh")


def test_the_trainers_commands_take_what_the_file_sets(
    services: dict[str, dict[str, Any]], require_command: Callable[[list[str]], None]
) -> None:
    script = (ROOT / "deploy" / "image" / "train.sh").read_text().replace("\\\n", "")
    variables = services["trainer"]["environment"] | {"engine": "http://net:8000"}
    script = script.replace("${BRIDLE_SANDBOX:-}", "container")
    commands = re.findall(r"^\s*exec bridle (.*)$", script, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["demo", "train"]
    for command in commands:
        filled = re.sub(r"\$(\w+)", lambda name: str(variables[name[1]]), command)
        require_command(shlex.split(filled))


def test_what_is_published_is_published_on_loopback(services: dict[str, dict[str, Any]]) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_engine_and_proxy_share_a_namespace_that_neither_owns(
    services: dict[str, dict[str, Any]],
) -> None:
    for name in ("engine", "proxy"):
        assert services[name]["network_mode"] == "service:net"
    assert services["net"]["command"] == ["sleep", "infinity"]


def test_agents_run_on_a_network_without_a_way_out_where_everything_asks_for_a_key(
    compose_file: Any, services: dict[str, dict[str, Any]]
) -> None:
    assert services["trainer"]["networks"] == ["inside"]
    inside = compose_file(MAIN)["networks"]["inside"]
    assert inside["internal"] is True
    assert inside["driver_opts"] == {"com.docker.network.bridge.inhibit_ipv4": "true"}
    for name in ("engine", "proxy", "trainer"):
        environment = services[name]["environment"]
        assert environment["BRIDLE_ENGINE_API_KEY_FILE"] == "/keys/engine"
        assert environment["BRIDLE_UPSTREAM_API_KEY_FILE"] == "/keys/engine"
        assert environment["BRIDLE_ADMIN_KEY_FILE"] == "/keys/admin"


def test_each_image_runs_as_a_user_of_its_own_without_privileges(
    services: dict[str, dict[str, Any]],
) -> None:
    stages = re.split(r"^FROM .* AS ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    users = {stage.split()[0]: re.findall(r"^USER (\w+)", stage, re.MULTILINE) for stage in stages}
    found = {name: user for name, user in users.items() if user}
    assert found == {"recorder": ["10001"], "bridle": ["10001"], "vllm": ["10001"]}
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_engine_and_trainer_each_get_a_gpu(compose_file: Any) -> None:
    def gpus(**variables: str) -> dict[str, list[str]]:
        reserved = {}
        for name, service in compose_file(FILES[1], **variables)["services"].items():
            resources = service.get("deploy", {}).get("resources", {})
            for device in resources.get("reservations", {}).get("devices", ()):
                assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
                reserved[name] = device["device_ids"]
        return reserved

    assert gpus() == {"engine": ["0"], "trainer": ["1"]}
    assert gpus(BRIDLE_TRAINER_GPU="0") == {"engine": ["0"], "trainer": ["0"]}


def overrides() -> list[tuple[str, ...]]:
    """Every combination of the files that go over the main one."""
    found = sorted(path.name for path in ROOT.glob("docker-compose.*.yml"))
    sizes = range(len(found) + 1)
    return [names for size in sizes for names in itertools.combinations(found, size)]


@pytest.mark.skipif(shutil.which("docker") is None, reason="docker compose reads them")
@pytest.mark.parametrize("names", overrides(), ids=" ".join)
def test_compose_itself_accepts_every_combination_of_files(names: tuple[str, ...]) -> None:
    variables = os.environ | DEMANDED
    command = ["docker", "compose", "--profile", "record"]
    if subprocess.run([*command, "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker has no compose plugin")
    files = [word for name in (MAIN, *names) for word in ("--file", str(ROOT / name))]
    read = subprocess.run(
        [*command, *files, "config", "--quiet"],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert read.returncode == 0, read.stderr


def test_hadolint_has_nothing_to_say_of_the_dockerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    command = [hadolint, "--config", ROOT / ".hadolint.yaml", ROOT / "Dockerfile"]
    linted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize("arguments", [["train", "--worker", "x"], ["worker"], ["bench", "x"]])
def test_the_check_of_commands_finds_what_bridle_has_not(
    require_command: Callable[[list[str]], None], arguments: list[str]
) -> None:
    with pytest.raises(Exception, match="No such"):
        require_command(arguments)
