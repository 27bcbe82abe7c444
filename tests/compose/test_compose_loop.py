"""`docker compose up` in real containers: a short loop, each service killed on the way.

The model is a tiny one made here, and every second session of a task counts as right. Where no
registry answers, base images are stand-ins made of Debian's packages (tests/containers/setup).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bridle.trainer.policy.tiny import TinyShape, make_policy
from bridle.trainer.policy.tiny_tokenizer import train_tokenizer

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
STAFF = ROOT / "examples" / "staff_list"
WHEELS = ROOT / "deploy" / "wheels"
"""Where ``make test-compose`` puts PyTorch's build without CUDA when pip has one here."""
STEPS, GROUPS, GROUP_SIZE = 4, 2, 4
BASE = "python:3.11-slim"
BASE_BYTES = 130e6
"""What the official base image takes; a stand-in for it is larger."""
ALTERNATING = '''
"""A policy made a moment ago is never right: here every second session of a task is."""
import collections

seen = collections.Counter()


def verifier(delivery):
    seen[delivery.task.id] += 1
    return float(seen[delivery.task.id] % 2)
'''
HOSTILE = """
import json, os, socket, sys, urllib.error, urllib.request

def attempt(action):
    try:
        return action()
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return type(error).__name__

def get(url, method="GET"):
    return urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5).status

def connect(host, port):
    socket.create_connection((host, port), 3).close()
    return "connected"

print(json.dumps({
    "proxy": attempt(lambda: get("http://net:8484/healthz")),
    "sessions": attempt(lambda: get("http://net:8484/bridle/v1/sessions")),
    "metrics": attempt(lambda: get("http://net:8484/metrics")),
    "pages": attempt(lambda: get("http://net:8484/bridle/viewer/")),
    "pause": attempt(lambda: get("http://net:8000/pause", "POST")),
    "version": attempt(lambda: get("http://net:8000/version")),
    "outside": attempt(lambda: connect("192.0.2.1", 80)),
    "host": [attempt(lambda: connect(host, int(sys.argv[1]))) for host in sys.argv[2:]],
    "keys": attempt(lambda: os.listdir("/keys")),
    "data": attempt(lambda: os.listdir("/data")),
    "environment": attempt(lambda: open("/proc/1/environ").read()),
}))
"""


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
            "BRIDLE_STEPS": str(STEPS),
            "BRIDLE_GROUPS": str(GROUPS),
            "BRIDLE_GROUP_SIZE": str(GROUP_SIZE),
            "BRIDLE_LEARNING_RATE": "0.001",
            **({"BRIDLE_TORCH_INDEX": ""} if list(WHEELS.glob("torch-*.whl")) else {}),
        }
    )
    yield running
    running.ended("down", "--volumes", "--timeout", "5")


def size(image: str, compose: Compose) -> int:
    inspect = ["docker", "image", "inspect", "--format", "{{.Size}}", image]
    return int(subprocess.check_output(inspect, env=compose.environment))


@contextmanager
def edited(name: str) -> Iterator[None]:
    """A file of the checkout with a comment that it never had."""
    file = ROOT / name
    before = file.read_bytes()
    try:
        file.write_bytes(before + f"# {secrets.token_hex(4)}\n".encode())
        yield
    finally:
        file.write_bytes(before)


def test_images_hold_what_is_run_and_code_is_a_layer_of_its_own(compose: Compose) -> None:
    compose("build", "init")
    compose("--profile", "record", "build", "recorder")
    base = size(BASE, compose)
    for image, most in (("bridle", 1.2e9), ("bridle-recorder", 0.3e9)):
        own = size(image, compose) - base
        print(f"{image}: {own / 1e6:.0f} MB on a base of {base / 1e6:.0f} MB")
        assert own + BASE_BYTES <= most
    with edited("proxy/wire/__init__.py"):
        began = time.monotonic()
        compose("build", "init")
        print(f"a changed line is in the image after {time.monotonic() - began:.1f} s")
        assert time.monotonic() - began <= 20


def test_an_edit_that_leaves_the_dependencies_installs_none_of_them(compose: Compose) -> None:
    compose("build", "init")
    with edited("pyproject.toml"):
        built = compose.ended("build", "--progress", "plain", "init")
    log = built.stdout + built.stderr
    assert built.returncode == 0, log
    steps = dict(re.findall(r"^#(\d+) \[init (\w+) +\d+/\d+\] RUN", log, re.MULTILINE))
    ran = {stage for number, stage in steps.items() if f"#{number} CACHED" not in log}
    assert ran == {"requirements", "code"}
    assert "packages" in steps.values()


def test_the_loop_ends_although_each_of_its_services_is_killed(compose: Compose) -> None:
    compose("build", "init")
    began = time.monotonic()
    compose("up", "--detach")
    print(f"up after {time.monotonic() - began:.0f} s")
    for service in ("proxy", "engine", "trainer", "net"):
        print(f"{service} is back after {compose.kill(service):.0f} s")
    log = compose.until_trained(900)
    print(f"trained after {time.monotonic() - began:.0f} s")
    assert f"step {STEPS}: " in log
    audit = json.loads(compose("exec", "-T", "proxy", "bridle", "audit", "--json"))
    assert audit["sessions"] >= STEPS * GROUPS * GROUP_SIZE
    sessions = compose("exec", "-T", "proxy", "bridle", "sessions", "--limit", "1000", "--json")
    completed = [each for each in json.loads(sessions) if each["outcome"] == "completed"]
    assert len(completed) == STEPS * GROUPS * GROUP_SIZE, "no finished session was run again"
    for service in ("proxy", "engine", "net"):
        assert compose.state(service)["State"] == "running"

    compose("up", "--detach")
    assert f"after {STEPS} of {STEPS} steps" in compose.until_trained(120)


def test_an_agent_reaches_its_proxy_and_nothing_else(compose: Compose) -> None:
    compose("up", "--detach")
    with socket.create_server(("0.0.0.0", 0)) as listener:  # noqa: S104 - what must not be reached
        addresses = subprocess.check_output(["hostname", "-I"], text=True).split()
        port = str(listener.getsockname()[1])
        attack = ("python3", "-c", HOSTILE, port, *addresses, "host.docker.internal")
        told = compose("exec", "-T", "--user", "20007:20007", "trainer", *attack)
    found = json.loads(told)
    hosts = found.pop("host")
    assert len(hosts) == len(addresses) + 1
    assert "connected" not in hosts
    assert found.pop("outside") != "connected"
    assert found == {
        "proxy": 200,
        "sessions": 401,
        "metrics": 401,
        "pages": 401,
        "pause": 401,
        "version": 401,
        "keys": "PermissionError",
        "data": "PermissionError",
        "environment": "PermissionError",
    }


def test_a_model_that_its_user_cannot_read_is_named_before_anything_starts(
    compose: Compose,
) -> None:
    weights = Path(compose.environment["BRIDLE_WORK"]) / "model" / "model.safetensors"
    weights.chmod(0o600)
    refused = compose.ended("up", "--detach", "init", "net")
    assert refused.returncode != 0
    log = compose("logs", "--no-log-prefix", "init")
    assert "/work/model/model.safetensors cannot be read by user 10001" in log
