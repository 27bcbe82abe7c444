"""`docker compose up` in real containers: a short loop, each service killed on the way."""

from __future__ import annotations

import json
import re
import secrets
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
BASE = "python:3.11-slim"
BASE_BYTES = 130e6
"""The size of the official base image; a stand-in for it is larger."""
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
    "pages": attempt(lambda: urllib.request.urlopen("http://net:8484/bridle/viewer/sessions").url),
    "pause": attempt(lambda: get("http://net:8000/pause", "POST")),
    "version": attempt(lambda: get("http://net:8000/version")),
    "outside": attempt(lambda: connect("192.0.2.1", 80)),
    "host": [attempt(lambda: connect(host, int(sys.argv[1]))) for host in sys.argv[2:]],
    "keys": attempt(lambda: os.listdir("/keys")),
    "data": attempt(lambda: os.listdir("/data")),
    "environment": attempt(lambda: open("/proc/1/environ").read()),
}))
"""


def size(image: str, compose: Any) -> int:
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


def test_images_hold_what_is_run_and_code_is_a_layer_of_its_own(compose: Any) -> None:
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


@pytest.mark.sampled(0)
def test_an_edit_that_leaves_the_dependencies_installs_none_of_them(compose: Any) -> None:
    compose("build", "init")
    with edited("pyproject.toml"):
        built = compose.ended("build", "--progress", "plain", "init")
    log = built.stdout + built.stderr
    assert built.returncode == 0, log
    steps = dict(re.findall(r"^#(\d+) \[init (\w+) +\d+/\d+\] RUN", log, re.MULTILINE))
    ran = {stage for number, stage in steps.items() if f"#{number} CACHED" not in log}
    assert ran == {"requirements", "code"}
    assert "packages" in steps.values()


def test_the_loop_ends_although_each_of_its_services_is_killed(compose: Any) -> None:
    compose("build", "init")
    began = time.monotonic()
    compose("up", "--detach")
    print(f"up after {time.monotonic() - began:.0f} s")
    for service in ("proxy", "engine", "trainer", "net"):
        print(f"{service} is back after {compose.kill(service):.0f} s")
    log = compose.until_trained(900)
    print(f"trained after {time.monotonic() - began:.0f} s")
    steps = int(compose.environment["BRIDLE_STEPS"])
    assert f"step {steps}: " in log
    audit = json.loads(compose("exec", "-T", "proxy", "bridle", "audit", "--json"))
    assert audit["sessions"] >= compose.sessions
    listed = compose("exec", "-T", "proxy", "bridle", "sessions", "--limit", "1000", "--json")
    ended = Counter(each["outcome"] for each in json.loads(listed))
    print(dict(ended))
    assert ended["completed"] == compose.sessions, f"no finished session was run again: {ended}"
    for service in ("proxy", "engine", "net"):
        assert compose.state(service)["State"] == "running"

    compose("up", "--detach")
    assert f"after {steps} of {steps} steps" in compose.until_trained(120)


def test_an_agent_reaches_its_proxy_and_nothing_else(compose: Any) -> None:
    running = replace(compose, environment={**compose.environment, "BRIDLE_STEPS": "500"})
    running("up", "--detach")
    with socket.create_server(("0.0.0.0", 0)) as listener:  # noqa: S104 - what must not be reached
        addresses = subprocess.check_output(["hostname", "-I"], text=True).split()
        port = str(listener.getsockname()[1])
        attack = ("python3", "-c", HOSTILE, port, *addresses, "host.docker.internal")
        # A user of sessions that none of these has: what a session leaves is ended with it.
        told = running("exec", "-T", "--user", "24001:24001", "trainer", *attack)
    found = json.loads(told)
    hosts = dict(zip((*addresses, "host.docker.internal"), found.pop("host"), strict=True))
    assert "connected" not in hosts.values(), hosts
    assert found.pop("outside") != "connected"
    assert found == {
        "proxy": 200,
        "sessions": 401,
        "metrics": 401,
        "pages": "http://net:8484/bridle/viewer/login",
        "pause": 401,
        "version": 401,
        "keys": "PermissionError",
        "data": "PermissionError",
        "environment": "PermissionError",
    }


def test_a_model_that_its_user_cannot_read_is_named_before_anything_starts(
    compose: Any,
) -> None:
    weights = Path(compose.environment["BRIDLE_WORK"]) / "model" / "model.safetensors"
    weights.chmod(0o600)
    refused = compose.ended("up", "--detach", "init", "net")
    assert refused.returncode != 0
    log = compose("logs", "--no-log-prefix", "init")
    assert "/work/model/model.safetensors cannot be read by user 10001" in log
