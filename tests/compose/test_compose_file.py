"""The compose file keeps to the specification, and to what Bridle promises of its services."""

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
NEEDED = {"BRIDLE_ADMIN_KEY": "secret", "BRIDLE_POLICY": "/somewhere/policy"}
PROFILES = ("cpu", "gpu")


@pytest.fixture(params=PROFILES)
def services(request: pytest.FixtureRequest, project: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = project(request.param, **NEEDED).services
    return found


def option(service: dict[str, Any], name: str) -> str | None:
    values = [part.partition("=")[2] for part in service["command"] if part.startswith(f"{name}=")]
    return values[0] if values else None


def test_it_is_valid_by_the_compose_specifications_schema(project: Any) -> None:
    vendored = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((vendored / "compose-spec.json").read_text())
    document = project("cpu", **NEEDED).document
    jsonschema.validate(document, schema)
    document["services"]["proxy"]["comand"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)


@pytest.mark.parametrize("missing", NEEDED)
def test_without_a_key_or_a_policy_nothing_starts(project: Any, missing: str) -> None:
    given = {name: value for name, value in NEEDED.items() if name != missing}
    with pytest.raises(Exception, match=missing):
        project("cpu", **given)


def test_every_command_is_one_of_bridles_with_options_that_it_has(
    services: dict[str, dict[str, Any]],
) -> None:
    for service in services.values():
        name, *arguments = service["command"]
        assert name == "bridle"
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


def test_what_listens_off_loopback_asks_for_a_key(services: dict[str, dict[str, Any]]) -> None:
    off = {name for name, each in services.items() if option(each, "--host") is not None}
    assert off == {"proxy", "worker"}
    for name in off:
        assert services[name]["environment"]["BRIDLE_ADMIN_KEY"] == "secret"


def test_the_engine_is_on_a_loopback_that_agents_do_not_share(
    services: dict[str, dict[str, Any]],
) -> None:
    (engine,) = (each for each in services.values() if "engine" in each["command"])
    assert engine["network_mode"] == "service:proxy"
    assert option(engine, "--host") is None
    assert "network_mode" not in services["worker"]
    assert option(services["worker"], "--proxy") == "http://proxy:8484"


def test_agents_see_neither_the_store_nor_the_policy(services: dict[str, dict[str, Any]]) -> None:
    mounted = [volume.split(":")[1] for volume in services["worker"]["volumes"]]
    assert mounted == ["/sessions"]


def test_each_image_runs_as_a_user_of_its_own_without_privileges(
    services: dict[str, dict[str, Any]],
) -> None:
    stages = re.split(r"^FROM .* AS ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    users = {stage.split()[0]: re.findall(r"^USER (\w+)", stage, re.MULTILINE) for stage in stages}
    for service in services.values():
        assert users[service["build"]["target"]] == ["bridle"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_services_start_after_what_they_need_and_all_that_serve_are_asked_for_their_health(
    project: Any,
) -> None:
    assert project("cpu", **NEEDED).order() == ["proxy", "engine", "worker", "trainer"]
    gpu = project("gpu", **NEEDED)
    assert gpu.order() == ["proxy", "vllm", "worker", "trainer-gpu"]
    for services in (project("cpu", **NEEDED).services, gpu.services):
        (trainer,) = (name for name, each in services.items() if "healthcheck" not in each)
        assert "trainer" in services[trainer]["command"]
        for service in services.values():
            for how in service.get("depends_on", {}).values():
                assert how["condition"] == "service_healthy"


def test_engine_and_trainer_each_get_a_gpu(project: Any) -> None:
    def gpus(**variables: str) -> dict[str, list[str]]:
        reserved = {}
        for name, service in project("gpu", **NEEDED, **variables).services.items():
            resources = service.get("deploy", {}).get("resources", {})
            for device in resources.get("reservations", {}).get("devices", ()):
                assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
                reserved[name] = device["device_ids"]
        return reserved

    assert gpus() == {"vllm": ["0"], "trainer-gpu": ["1"]}
    assert gpus(BRIDLE_TRAINER_GPU="0") == {"vllm": ["0"], "trainer-gpu": ["0"]}
    assert not any("deploy" in each for each in project("cpu", **NEEDED).services.values())
