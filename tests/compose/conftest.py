"""The compose files as data and as a deployment in real containers, and what commands may be.

A deployment's model is a tiny one made here, and every second session of a task counts as right.
Where no registry answers, base images are stand-ins made of Debian's packages
(tests/containers/setup).
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.core import TyperGroup

from bridle.cli.program import app
from bridle.cli.settings import shown_settings
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.run.settings import parse_overrides

ROOT = Path(__file__).parents[2]
STAFF = ROOT / "examples" / "staff_list"
WHEELS = ROOT / "deploy" / "wheels"
"""The folder for PyTorch's build without CUDA.

``make test-compose`` puts the build there when pip has one here.
"""
LOOP = {"STEPS": 4, "GROUPS": 2, "GROUP_SIZE": 4}
"""The settings of a shortened loop."""
ALTERNATING = '''
"""A policy made a moment ago is never right: here every second session of a task is."""
import collections

seen = collections.Counter()


def verifier(delivery):
    seen[delivery.task.id] += 1
    return float(seen[delivery.task.id] % 2)
'''
_VARIABLE = re.compile(r"\$\{(\w+)(?::?(?P<kind>[-?])(?P<text>[^}]*))?\}")


class NotSet(Exception):
    """A variable that a file demands is not set."""


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

    return _VARIABLE.sub(fill, value)


@pytest.fixture
def compose_file() -> Any:
    def compose_file(name: str, **variables: str) -> dict[str, Any]:
        document: dict[str, Any] = interpolated(
            yaml.safe_load((ROOT / name).read_text()), variables
        )
        return document

    return compose_file


@pytest.fixture
def require_command(tmp_path: Path) -> Callable[[list[str]], None]:
    """Fails for a command that ``bridle`` does not have, or an option that it does not take."""

    def require(arguments: list[str]) -> None:
        arguments = [part.replace("/data/policy", str(tmp_path)) for part in arguments]
        command: Any = typer.main.get_command(app)
        context = command.context_class(command)
        while isinstance(command, TyperGroup):
            _, found, arguments = command.resolve_command(context, arguments)
            assert found is not None
            command = found
        parsed = command.make_context(command.name, arguments)
        given = parse_overrides(parsed.params.get("assignments") or ())
        assert set(given) <= set(shown_settings(command))

    return require


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Compose:
    environment: Mapping[str, str]

    @property
    def sessions(self) -> int:
        """The number of sessions of the whole loop."""
        return math.prod(int(self.environment[f"BRIDLE_{name}"]) for name in LOOP)

    @property
    def sessions_a_step(self) -> int:
        return self.sessions // int(self.environment["BRIDLE_STEPS"])

    def __call__(self, *arguments: str, given: bytes = b"") -> str:
        ended = self.ended(*arguments, given=given)
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
        return ended.stdout

    def ended(self, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[str]:
        """``given``: what the command reads."""
        command = ["docker", "compose", *arguments]
        ended = subprocess.run(
            command, cwd=ROOT, env=self.environment, input=given, capture_output=True, check=False
        )
        out, err = (each.decode("utf-8", "replace") for each in (ended.stdout, ended.stderr))
        return subprocess.CompletedProcess(command, ended.returncode, out, err)

    def state(self, service: str) -> dict[str, object]:
        lines = self("ps", "--all", "--format", "json", service).strip()
        found = json.loads(lines)
        state: dict[str, object] = found[0] if isinstance(found, list) else found
        return state

    def until_trained(self, timeout_s: float) -> str:
        """Waits until the trainer has ended well; its log."""
        began = time.monotonic()
        while self.state("trainer")["State"] != "exited":
            assert time.monotonic() - began < timeout_s, self("logs", "--tail", "60")
            time.sleep(1)
        log = self("logs", "--no-log-prefix", "trainer")
        assert self.state("trainer")["ExitCode"] == 0, log
        return log

    def kill(self, service: str) -> float:
        """SIGKILL for its process, as if it had crashed; seconds until it is healthy again."""
        container = self("ps", "--quiet", service).strip()
        inspect = ["docker", "inspect", "--format", "{{.State.Pid}}", container]
        before = subprocess.check_output(inspect, env=self.environment, text=True).strip()
        began = time.monotonic()
        os.kill(int(before), 9)
        while True:
            pid = subprocess.check_output(inspect, env=self.environment, text=True).strip()
            if pid not in ("0", before) and self.state(service)["Health"] in ("healthy", ""):
                return time.monotonic() - began
            assert time.monotonic() - began < 240, self("logs", "--tail", "40", service)
            time.sleep(0.5)


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Compose]:
    work = tmp_path / "work"
    model = work / "model"
    texts = [(STAFF / name).read_text() for name in ("agent.py", "tasks.py", "staff.json")]
    size = train_tokenizer(model, texts, vocab_size=700)
    shape = TinyShape(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128, context=768)
    make_policy(model, shape, vocab_size=size, seed=1)
    for path in (tmp_path, work, model, *model.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (work / "verifier.py").write_text(ALTERNATING)
    running = Compose(
        {
            **os.environ,
            "COMPOSE_PROJECT_NAME": f"bridle-test-{secrets.token_hex(3)}",
            "BRIDLE_PORT": str(free_port()),
            "BRIDLE_MODEL": "/work/model",
            "BRIDLE_WORK": str(work),
            "BRIDLE_AGENT": "examples/staff_list/agent.py",
            "BRIDLE_TASKS": "examples/staff_list/tasks.py:train",
            "BRIDLE_VERIFIER": "/work/verifier.py:verifier",
            **{f"BRIDLE_{name}": str(count) for name, count in LOOP.items()},
            "BRIDLE_LEARNING_RATE": "0.001",
            **({"BRIDLE_TORCH_INDEX": ""} if list(WHEELS.glob("torch-*.whl")) else {}),
        }
    )
    yield running
    running.ended("down", "--volumes", "--timeout", "5")
