"""The compose file as data, and its services as processes of this machine.

A container is its image, its mounts and its network. Here the image is this checkout on the PATH, a
mount is a directory whose name stands for the mount point, and every service's name is loopback;
command, environment, order and health checks are the file's own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
_VARIABLE = re.compile(r"\$\{(\w+)(?::(?P<kind>[-?])(?P<text>[^}]*))?\}")


class NotSet(Exception):
    """A variable that the file demands is not set."""


def interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    """``value`` with ``${NAME}``, ``${NAME:-default}`` and ``${NAME:?message}`` filled in."""
    if isinstance(value, dict):
        return {key: interpolated(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [interpolated(each, variables) for each in value]
    if not isinstance(value, str):
        return value

    def fill(found: re.Match[str]) -> str:
        name, text = found[1], found["text"] or ""
        if variables.get(name):
            return variables[name]
        if found["kind"] == "?":
            raise NotSet(f"{name}: {text}")
        return text

    filled = _VARIABLE.sub(fill, value)
    assert "${" not in filled, filled
    return filled


@pytest.fixture(scope="session")
def compose_text() -> str:
    return (ROOT / "docker-compose.yml").read_text()


@dataclass
class Project:
    """The file with its variables filled in, for one profile."""

    document: dict[str, Any]
    profile: str

    @property
    def services(self) -> dict[str, dict[str, Any]]:
        return {
            name: service
            for name, service in self.document["services"].items()
            if self.profile in service["profiles"]
        }

    def order(self) -> list[str]:
        """Each service after those that it depends on."""
        ordered: list[str] = []

        def add(name: str, above: tuple[str, ...]) -> None:
            assert name not in above, f"{name} waits for itself: {above}"
            for other, how in self.services[name].get("depends_on", {}).items():
                if other in self.services:
                    add(other, (*above, name))
                else:
                    assert how.get("required") is False, f"{name} waits for {other} for ever"
            if name not in ordered:
                ordered.append(name)

        for name in self.services:
            add(name, ())
        return ordered


@pytest.fixture
def project(compose_text: str) -> Any:
    def project(profile: str, **variables: str) -> Project:
        return Project(interpolated(yaml.safe_load(compose_text), variables), profile)

    return project


@dataclass
class Processes:
    """Services of a project, running."""

    project: Project
    directory: Path
    mounts: Mapping[str, Path]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        service = self.project.services[name]
        log = (self.directory / f"{name}.log").open("ab")
        with log:
            self.running[name] = subprocess.Popen(
                [self._here(part) for part in service["command"]],
                env=self._environment(service),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def healthy(self, name: str) -> None:
        """Return when the service's own health check passes, as a container engine would ask."""
        service = self.project.services[name]
        check = service["healthcheck"]
        assert check["test"][0] == "CMD"
        command = [self._here(part) for part in check["test"][1:]]
        deadline = time.monotonic() + seconds(check["start_period"]) + 60
        while True:
            assert self.running[name].poll() is None, self.log(name)
            ended = subprocess.run(
                command,
                env=self._environment(service),
                capture_output=True,
                timeout=seconds(check["timeout"]) + 30,
            )
            if ended.returncode == 0:
                return
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.5)

    def log(self, name: str) -> str:
        return f"{name}:\n" + (self.directory / f"{name}.log").read_text()[-4000:]

    def stop(self) -> dict[str, int]:
        """How each service ended after SIGTERM, the last one started first."""
        ended: dict[str, int] = {}
        for name, process in reversed(self.running.items()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                ended[name] = process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                ended[name] = process.wait()
        return ended

    def _environment(self, service: Mapping[str, Any]) -> dict[str, str]:
        image = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        base = {
            "PATH": f"{self.directory / 'bin'}:/usr/bin:/bin",
            "HOME": str(self.directory / "home"),
        }
        stated = {
            name: self._here(str(text)) for name, text in service.get("environment", {}).items()
        }
        return {**base, **image, **stated}

    def _here(self, text: str) -> str:
        for target, directory in self.mounts.items():
            text = re.sub(rf"(?<![\w/.]){re.escape(target)}(?=/|$)", str(directory), text)
        names = "|".join(self.project.document["services"])
        return re.sub(rf"//({names}):", "//127.0.0.1:", text)


def seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text[:-1])


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Any]:
    started: list[Processes] = []

    def processes(project: Project, mounts: Mapping[str, Path]) -> Processes:
        binaries = tmp_path / "bin"
        binaries.mkdir()
        (tmp_path / "home").mkdir()
        for name, words in (("bridle", "-m bridle"), ("python3", "")):
            script = binaries / name
            script.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
            script.chmod(0o755)
        started.append(Processes(project, tmp_path, mounts))
        return started[-1]

    yield processes
    for each in started:
        each.stop()
