"""Services of Harbor tasks as their compose file states them, and what is refused of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from bridle.harnesses.sandboxes.spec import ContainerSpec
from bridle.harnesses.tasks.harbor.config import AgentTable, EnvironmentTable, container_of
from bridle.harnesses.tasks.task import TaskError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "Dockerfile").write_text("FROM python:3.11-slim\n")
    (tmp_path / "page.html").write_text("hello")
    return tmp_path


def read(folder: Path, text: str) -> ContainerSpec:
    (folder / "docker-compose.yaml").write_text(text)
    return container_of(folder, EnvironmentTable(), AgentTable())


def test_services_are_read_with_their_names_mounts_and_order(folder: Path) -> None:
    spec = read(
        folder,
        """
services:
  main:
    build: {context: .}
    command: ["sh", "-c", "sleep infinity"]
    environment: [STAGE=test]
    volumes: ["${HOST_AGENT_LOGS_PATH}:/logs"]
    depends_on: [db]
  db:
    image: postgres:17
    environment: {POSTGRES_PASSWORD: "${UNKNOWN:-x$$y}", TRUST: true}
    ports: ["5432:5432"]
    networks: {default: {aliases: [store]}}
    volumes: ["data:/var/lib/postgresql/data", "./page.html:/page.html"]
    depends_on: {main: {condition: service_started}, cache: {condition: service_healthy}}
  cache: {build: ., command: "cache --size ${SIZE:-3}"}
volumes: {data: }
""",
    )
    assert (spec.build, spec.environment, spec.volumes) == (
        str(folder),
        {"STAGE": "test"},
        ("data",),
    )
    assert spec.hosts == ("cache", "db", "main", "store")
    db: Any = spec.services["db"]
    assert db["environment"] == {"POSTGRES_PASSWORD": "x$$y", "TRUST": "true"}
    assert db["depends_on"] == {"cache": {"condition": "service_healthy"}}
    assert db["volumes"] == [
        {"type": "volume", "source": "data", "target": "/var/lib/postgresql/data"},
        {
            "type": "bind",
            "source": str(folder / "page.html"),
            "target": "/page.html",
            "read_only": True,
        },
    ]
    assert "ports" not in db
    assert spec.services["cache"]["build"] == str(folder)
    assert spec.services["cache"]["command"] == "cache --size 3"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("services: {db: {image: x, privileged: true}}", "'privileged'"),
        ("services: {db: {image: x, network_mode: host}}", "'network_mode'"),
        ("services: {db: {image: x, env_file: /etc/passwd}}", "'env_file'"),
        ("services: {db: {image: x, volumes: ['/var/run:/run']}}", "no part of the task"),
        ("services: {db: {image: x, volumes: ['../..:/up']}}", "no part of the task"),
        ("services: {db: {build: ../..}}", "no part of the task"),
        ("services: {db: {build: {context: ., network: host}}}", "'network'"),
        ("services: {db: {image: x, command: $HOME}}", "no task may read"),
        ("services: {db: {image: x, environment: [AWS_SECRET]}}", "no task may read"),
        ("services: {db: {command: run}}", "no image"),
        ("services: {main: {build: ., command: ./serve}}", "runs './serve'"),
        ("services: {main: {build: ., volumes: ['data:/data']}}", "main mounts data"),
        ("services: {db: {image: x, networks: [inner]}}", "several networks"),
        ("services: {db: {image: x}}\nvolumes: {data: {driver: nfs}}", "has options"),
        ("services: {db: {image: x}}\ninclude: [/etc/x.yaml]", "'include'"),
        ("services: [db]", "no table"),
        ("services: {", "cannot be read"),
    ],
)
def test_what_a_sandbox_does_not_give_is_refused(folder: Path, text: str, why: str) -> None:
    with pytest.raises(TaskError, match=why):
        read(folder, text)


def test_without_a_reader_of_yaml_the_package_to_install_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(TaskError, match=r"to read a compose file, pip install .*\[compose\]'"):
        read(folder, "services: {db: {image: x}}")


def test_a_hook_in_another_service_is_refused(folder: Path) -> None:
    from bridle.harnesses.tasks.harbor.config import read_config

    hook = '[[verifier.collect]]\ncommand = "dump"\nservice = "db"\n'
    (folder / "task.toml").write_text(hook)
    with pytest.raises(TaskError, match="another service than main"):
        read_config(folder)
