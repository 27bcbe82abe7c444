"""Tasks with a compose file: the agent reaches its services, and neither reaches anything else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bridle.bench.shell_policy import ShellPolicy
from bridle.harnesses.episode import Outcome
from bridle.harnesses.sandboxes.container.engine import Engine, owner_label
from bridle.run.rollouts import rollout

pytestmark = pytest.mark.containers

COMPOSE = """
services:
  main: {build: ., depends_on: [web]}
  web:
    image: python:3.11-slim
    command: python3 -m http.server 8000 --directory /site
    volumes: ["./page.txt:/site/page.txt", "kept:/kept"]
    healthcheck:
      test: ["CMD", "python3", "-c", "import socket; socket.create_connection(('web', 8000))"]
      interval: 1s
      retries: 30
volumes: {kept: }
"""
FETCH = (
    "python3 -c \"import urllib.request as u; print(u.urlopen('http://web:8000/page.txt').read())\""
)
PROBE = """
import socket, subprocess
print(sorted(name for _, name in socket.if_nameindex()))
for host, port in (("172.17.0.1", 22), ("1.1.1.1", 53), ("172.17.0.1", %d)):
    try:
        socket.create_connection((host, port), 2)
        print("reached", host, port)
    except OSError:
        print("closed")
"""

OPEN = """
import asyncio, sys
from pathlib import Path
from bridle.harnesses.sandboxes import ContainerProvider, Launch, SandboxRequest
from bridle.harnesses.tasks.harbor.config import AgentTable, EnvironmentTable, container_of

async def main():
    offline = EnvironmentTable(network_mode="no-network")
    spec = container_of(Path(sys.argv[1]), offline, AgentTable())
    request = SandboxRequest(Path(sys.argv[2]), container=spec)
    async with ContainerProvider().open(request) as sandbox:
        print("up", flush=True)
        await sandbox.exec(Launch(("sleep", "600"), sandbox.place.environment, 600))

asyncio.run(main())
"""
"""A program that opens a session of a task's environment and stays in it."""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Two tasks, each with a service of its own on the same port."""
    for name in ("one", "two"):
        files = {
            "task.toml": '[environment]\nnetwork_mode = "no-network"\n',
            "instruction.md": "Fetch the page.\n",
            "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /app\n",
            "environment/docker-compose.yaml": COMPOSE,
            "environment/page.txt": f"page of {name}\n",
            "solution/solve.sh": f"{FETCH} > /app/out.txt\n",
            "tests/test.sh": "#!/bin/bash\n"
            f"reward=0; {FETCH} | grep -q 'page of {name}' &&\n"
            f"  grep -q 'page of {name}' /app/out.txt && reward=1\n"
            "echo $reward > /logs/verifier/reward.txt\n",
        }
        for path, text in files.items():
            target = tmp_path / "tasks" / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    return tmp_path / "tasks"


def run(stage: Any, tmp_path: Path, agent: str, tasks: Path, **options: Any) -> list[Any]:
    bench = stage(ShellPolicy(turns=1))
    runs = tmp_path / "runs"
    return rollout(agent, f"harbor:{tasks}", "task", proxy=bench.url, directory=runs, **options)


def volumes() -> list[str]:
    command = ["docker", "volume", "ls", "-q", "--filter", "label=bridle.owner"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("true {prompt}", 0.0)])
def test_each_session_has_services_of_its_own(
    stage: Any, tmp_path: Path, tasks: Path, agent: str, reward: float
) -> None:
    results = run(stage, tmp_path, agent, tasks, parallel=2)

    assert [(one.error, one.scores) for one in results] == [("", {"reward": reward})] * 2
    assert volumes() == []


def test_the_session_reaches_its_services_and_nothing_else(
    stage: Any, tmp_path: Path, tasks: Path
) -> None:
    bench = stage(ShellPolicy(turns=1))
    port = int(bench.engine_url.rpartition(":")[2])
    folder = tasks / "one" / "environment"
    (folder / "probe.py").write_text(PROBE % port)
    (folder / "agent.sh").write_text(f"(python3 /probe.py; {FETCH}) | tr '\\n' ' '\n")
    # The service writes what it reaches into its page.
    serving = "python3 -m http.server 8000 --directory /site"
    (folder / "serve.sh").write_text(
        f"mkdir /site; python3 /probe.py > /site/page.txt; exec {serving}\n"
    )
    with (folder / "Dockerfile").open("a") as dockerfile:
        dockerfile.write("COPY probe.py agent.sh serve.sh /\n")
    compose = COMPOSE.replace("image: python:3.11-slim", "build: .")
    compose = compose.replace(serving, "sh /serve.sh").replace('"./page.txt:/site/page.txt", ', "")
    (folder / "docker-compose.yaml").write_text(compose)

    agent = "sh /agent.sh {prompt}"
    (result,) = run(stage, tmp_path, agent, tasks / "one")

    alone = ["['lo']", "closed", "closed", "closed"]
    page = "\n".join([*alone, ""]).encode()
    assert result.answer.strip() == f"{' '.join(alone)} {page!r}"


def test_a_service_that_does_not_start_ends_the_session_with_its_last_words(
    stage: Any, tmp_path: Path, tasks: Path
) -> None:
    compose = tasks / "one" / "environment" / "docker-compose.yaml"
    text = compose.read_text().replace("python3 -m http.server 8000 --directory /site", "false")
    compose.write_text(text)

    (result,) = run(stage, tmp_path, "oracle", tasks / "one")

    assert result.outcome is Outcome.INFRASTRUCTURE
    assert "services do not start" in result.error
    assert volumes() == []


def test_services_and_volumes_of_a_killed_process_are_swept_and_no_others(
    tmp_path: Path, tasks: Path
) -> None:
    live = "bridle-test-of-a-live-owner"
    label = f"bridle.owner={owner_label()}"
    subprocess.run(["docker", "volume", "create", "--label", label, live], check=True)
    environment = tasks / "one" / "environment"
    with tempfile.TemporaryDirectory() as sockets:
        command = [sys.executable, "-c", OPEN, environment, tmp_path / "session"]
        owner = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": sockets}
        )
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        kept = set(volumes())
        assert len(kept - {live}) == 1
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()

    # The session's container ends with its owner, and its service stays until the sweep.
    assert len(asyncio.run(Engine("docker").sweep())) == 2
    assert volumes() == [live]
    subprocess.run(["docker", "volume", "rm", live], check=True)


@pytest.mark.parametrize("program", ["docker", "podman"])
def test_an_engine_without_compose_refuses_a_task_with_services(
    stage: Any, tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """Docker finds its plugins by ``DOCKER_CONFIG``, and Debian's podman has no compose."""
    if program == "docker":
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    elif not subprocess.run(["podman", "compose", "version"], capture_output=True).returncode:
        pytest.skip("this podman has compose")
    monkeypatch.setenv("BRIDLE_CONTAINERS", program)

    (result,) = run(stage, tmp_path, "oracle", tasks / "one")

    assert result.outcome is Outcome.INFRASTRUCTURE
    assert f"the task has services, and `{program} compose` is not installed" in result.error
