"""Sessions in containers of an engine on the host, started by the trainer of a compose set-up."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

AGENT = """
import json, os, socket, sys, urllib.error, urllib.request

def attempt(host, port):
    try:
        socket.create_connection((host, port), 3).close()
        return True
    except OSError:
        return False

def get(path):
    try:
        return urllib.request.urlopen(os.environ["OPENAI_BASE_URL"].split("/s/")[0] + path).status
    except urllib.error.HTTPError as error:
        return error.code

body = dict(model="policy", max_tokens=8, messages=[dict(role="user", content=sys.argv[1])])
headers = dict(authorization="Bearer " + os.environ["OPENAI_API_KEY"])
headers["content-type"] = "application/json"
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
places = ["net:8000", "net:8484", "192.0.2.1:80"] + sys.argv[2].split(",")
print(json.dumps(dict(
    reached=[place for place in places if attempt(*place.split(":"))],
    there=[path for path in ("/data", "/keys", "/run/sandboxes.sock") if os.path.exists(path)],
    control=[get("/bridle/v1/sessions"), get("/metrics"), get("/bridle/viewer/")],
    first=open("/proc/1/cmdline").read(),
)))
"""
VERIFIER = """
import collections, json

seen = collections.Counter()


def verifier(delivery):
    '''Every second session of a task counts as right, if it was alone in a container.'''
    found = json.loads(delivery.answer)
    if found["reached"] or found["there"] or "keeper.py" not in found["first"]:
        raise RuntimeError(delivery.answer)
    if found["control"] != [403, 403, 403]:
        raise RuntimeError(delivery.answer)
    seen[delivery.task.id] += 1
    return float(seen[delivery.task.id] % 2)
"""


@pytest.fixture
def sandboxed(compose: Any) -> Iterator[Any]:
    """The deployment with the override; its agent attacks what it may find."""
    host, _, socket = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").partition("://")
    if host != "unix":
        pytest.skip("the container engine is not on this machine")
    own = subprocess.check_output(["hostname", "-I"], text=True).split()
    places = ",".join(
        f"{address}:{compose.environment['BRIDLE_PORT']}" for address in own if ":" not in address
    )
    (Path(compose.environment["BRIDLE_WORK"]) / "verifier.py").write_text(VERIFIER)
    with TemporaryDirectory(prefix="bridle-compose-") as shared:
        Path(shared).chmod(0o755)
        yield replace(
            compose,
            environment={
                **compose.environment,
                "COMPOSE_FILE": "docker-compose.yml:docker-compose.sandboxes.yml",
                "BRIDLE_AGENT": f"python3 -c '{AGENT}' {{prompt}} {places}",
                "BRIDLE_CONTAINER_SOCKET": socket,
                "BRIDLE_CONTAINER_GROUP": str(os.stat(socket).st_gid),
                "BRIDLE_SANDBOXES": shared,
                "BRIDLE_STEPS": "2",
            },
        )


def test_each_session_has_a_container_that_reaches_its_session_alone(sandboxed: Any) -> None:
    sandboxed("build", "init", "trainer")
    sandboxed("up", "--detach")
    log = sandboxed.until_trained(900)
    assert "step 2: " in log
    listed = sandboxed("exec", "-T", "proxy", "bridle", "sessions", "--limit", "1000", "--json")
    outcomes = [each["outcome"] for each in json.loads(listed)]
    assert outcomes == ["completed"] * sandboxed.sessions
    sandboxed("exec", "-T", "proxy", "bridle", "audit")
    form = '{{.Label "bridle.owner"}}'
    command = ["docker", "ps", "--all", "--filter", "label=bridle.owner", "--format", form]
    project = sandboxed.environment["COMPOSE_PROJECT_NAME"]
    assert f"{project}-trainer:" not in subprocess.check_output(command, text=True)
