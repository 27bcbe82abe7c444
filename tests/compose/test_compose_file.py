"""The compose files keep to the specification, and to what Bridle promises of its services."""

from __future__ import annotations

import importlib.resources
import json
import re
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import typer.main

from bridle.cli.program import app

ROOT = Path(__file__).parents[2]
MAIN = "docker-compose.yml"
FILES = (MAIN, "docker-compose.gpu.yml", "docker-compose.postgres.yml")
PASSWORD = {"BRIDLE_POSTGRES_PASSWORD": "secret"}


@pytest.fixture
def services(compose_file: Any) -> dict[str, dict[str, Any]]:
    """Those of the main file, with nothing set."""
    found: dict[str, dict[str, Any]] = compose_file(MAIN)["services"]
    return found


@pytest.mark.parametrize("name", FILES)
def test_it_is_valid_by_the_compose_specifications_schema(compose_file: Any, name: str) -> None:
    vendored = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((vendored / "compose-spec.json").read_text())
    document = compose_file(name, **PASSWORD)
    jsonschema.validate(document, schema)
    next(iter(document["services"].values()))["comand"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)


def test_without_a_password_there_is_no_postgres(compose_file: Any) -> None:
    with pytest.raises(Exception, match="BRIDLE_POSTGRES_PASSWORD"):
        compose_file("docker-compose.postgres.yml")


@pytest.mark.parametrize("name", FILES[:2])
def test_every_command_is_one_of_bridles_with_options_that_it_has(
    compose_file: Any, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for service in compose_file(name)["services"].values():
        program, *arguments = service.get("command", ["sleep"])
        if program != "bridle":
            assert program in ("sleep", "/app/init.sh", "ray")
            continue
        arguments = [part.replace("=/data/policy", f"={tmp_path}") for part in arguments]
        command: click.Command = typer.main.get_command(app)
        context = click.Context(command)
        while isinstance(command, click.Group):
            _, found, arguments = command.resolve_command(context, arguments)
            assert found is not None
            command = found
        command.make_context(command.name, arguments)  # raises for what it does not take


def test_what_is_published_is_published_on_loopback(services: dict[str, dict[str, Any]]) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_engine_proxy_and_trainer_share_a_namespace_that_none_of_them_owns(
    services: dict[str, dict[str, Any]],
) -> None:
    for name in ("engine", "proxy", "trainer"):
        assert services[name]["network_mode"] == "service:net"
    assert services["net"]["command"] == ["sleep", "infinity"]
    assert not any(part.startswith("--host") for part in services["engine"]["command"])


def test_agents_see_the_proxy_on_a_network_without_a_way_out(
    compose_file: Any, services: dict[str, dict[str, Any]]
) -> None:
    worker = services["worker"]
    assert worker["networks"] == ["inside"]
    assert compose_file(MAIN)["networks"]["inside"] == {"internal": True}
    assert "--proxy=http://net:8484" in services["trainer"]["command"]
    mounted = [volume.split(":")[1] for volume in worker["volumes"]]
    assert mounted == ["/sessions", "/work"], "no key but those of its sessions"


def test_each_image_runs_as_a_user_of_its_own_without_privileges(
    services: dict[str, dict[str, Any]],
) -> None:
    stages = re.split(r"^FROM .* AS ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    users = {stage.split()[0]: re.findall(r"^USER (\w+)", stage, re.MULTILINE) for stage in stages}
    assert users == {"base": [], "recorder": ["bridle"], "bridle": ["bridle"], "vllm": ["bridle"]}
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
