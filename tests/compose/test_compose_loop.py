"""`docker compose up` in real containers: a short loop, each service killed on the way.

The model is a tiny one made here, and every second session of a task counts as right.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from bridle.trainer.policy.tiny import TinyShape, make_policy
from bridle.trainer.policy.tiny_tokenizer import train_tokenizer

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
STAFF = ROOT / "examples" / "staff_list"
STEPS, GROUPS, GROUP_SIZE = 4, 2, 4
ALTERNATING = '''
"""A policy made a moment ago is never right: here every second session of a task is."""
import collections

seen = collections.Counter()


def verifier(delivery):
    seen[delivery.task.id] += 1
    return float(seen[delivery.task.id] % 2)
'''


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Compose:
    environment: Mapping[str, str]

    def __call__(self, *arguments: str) -> str:
        ended = self.ended(*arguments)
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
        return ended.stdout

    def ended(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["docker", "compose", *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def state(self, service: str) -> dict[str, object]:
        lines = self("ps", "--all", "--format", "json", service).strip()
        found = json.loads(lines)
        state: dict[str, object] = found[0] if isinstance(found, list) else found
        return state

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
    model, work = tmp_path / "model", tmp_path / "work"
    texts = [(STAFF / name).read_text() for name in ("agent.py", "tasks.py", "staff.json")]
    size = train_tokenizer(model, texts, vocab_size=700)
    shape = TinyShape(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128, context=768)
    make_policy(model, shape, vocab_size=size, seed=1)
    for path in (tmp_path, model, *model.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    work.mkdir()
    (work / "verifier.py").write_text(ALTERNATING)
    running = Compose(
        {
            **os.environ,
            "COMPOSE_PROJECT_NAME": f"bridle-test-{secrets.token_hex(3)}",
            "BRIDLE_PORT": str(free_port()),
            "BRIDLE_MODEL": str(model),
            "BRIDLE_WORK": str(work),
            "BRIDLE_VERIFIER": "/work/verifier.py:verifier",
            "BRIDLE_STEPS": str(STEPS),
            "BRIDLE_GROUPS": str(GROUPS),
            "BRIDLE_GROUP_SIZE": str(GROUP_SIZE),
            "BRIDLE_LEARNING_RATE": "0.001",
        }
    )
    yield running
    running.ended("down", "--volumes", "--timeout", "5")


def test_the_loop_ends_although_each_of_its_services_is_killed(compose: Compose) -> None:
    began = time.monotonic()
    compose("build", "init")
    print(f"built after {time.monotonic() - began:.0f} s")
    began = time.monotonic()
    compose("up", "--detach")
    print(f"up after {time.monotonic() - began:.0f} s")
    for service in ("proxy", "engine", "worker", "trainer"):
        print(f"{service} is back after {compose.kill(service):.0f} s")
    while compose.state("trainer")["State"] != "exited":
        assert time.monotonic() - began < 900, compose("logs", "--tail", "60")
        time.sleep(1)
    log = compose("logs", "--no-log-prefix", "trainer")
    assert compose.state("trainer")["ExitCode"] == 0, log
    assert f"step {STEPS}: " in log
    audit = compose("exec", "-T", "proxy", "bridle", "audit", "--json")
    assert json.loads(audit)["sessions"] >= STEPS * GROUPS * GROUP_SIZE
    for service in ("proxy", "engine", "worker", "net"):
        assert compose.state(service)["State"] == "running"


def test_agents_reach_the_proxy_and_nothing_else(compose: Compose) -> None:
    compose("up", "--detach", "worker")

    def connects(host: str, port: int) -> bool:
        code = f"import socket; socket.create_connection(({host!r}, {port}), 3)"
        return not compose.ended("exec", "-T", "worker", "python3", "-c", code).returncode

    assert connects("net", 8484)
    assert not connects("net", 8000), "the engine's control routes take no key"
    assert not connects("192.0.2.1", 80)
    listing = compose.ended("exec", "-T", "worker", "ls", "/data/bridle.db")
    assert listing.returncode != 0


def test_a_model_that_its_user_cannot_read_is_named_before_anything_starts(
    compose: Compose,
) -> None:
    weights = Path(compose.environment["BRIDLE_MODEL"]) / "model.safetensors"
    weights.chmod(0o600)
    refused = compose.ended("up", "--detach", "init", "net")
    assert refused.returncode != 0
    log = compose("logs", "--no-log-prefix", "init")
    assert "/model/model.safetensors cannot be read by user 10001" in log
