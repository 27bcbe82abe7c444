"""Test faults in a container: each has the right outcome and leaves nothing running."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from bridle.bench.shell_policy import ShellPolicy
from bridle.harnesses.adapters import Command
from bridle.harnesses.client import Client, SessionRequest
from bridle.harnesses.episode import Outcome
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.rollout import Job, Rollout, RolloutResult, RolloutSettings
from bridle.harnesses.sandboxes import (
    ContainerProvider,
    DirectoryGone,
    Launch,
    LaunchRefused,
    NotLaunchable,
    SandboxRequest,
)
from bridle.harnesses.sandboxes.container.engine import Engine
from bridle.harnesses.sandboxes.spec import ContainerSpec
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import CommandVerifier

pytestmark = [pytest.mark.containers, pytest.mark.sampled(2)]

POLICY = ShellPolicy(turns=1)


@pytest.fixture(params=["docker", "podman"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(request.param)


async def run(
    url: str, directory: Path, command: str, container: ContainerSpec, **settings: Any
) -> RolloutResult:
    """One session of a shell command, verified by what the command left in the workspace."""
    sandboxes = ContainerProvider()
    task = Task("t", "p", container=container)
    chosen = RolloutSettings(directory, retries=0, **{"timeout_s": 30, **settings})
    async with Client(url) as client:
        adapter = Command(("sh", "-c", command), name="shell")
        verifier = CommandVerifier("test -e done", timeout_s=5)
        rollout = Rollout(client, adapter, LocalFleet(sandboxes, verifier), chosen)
        (result,) = await rollout.collect([Job(task)])
    await sandboxes.close()
    return result


async def until_it_runs(directory: Path) -> None:
    """Waits until the output of an agent has a file."""

    def begun() -> bool:
        return any(directory.glob("place-*/logs/agent.stdout"))

    while not begun():  # noqa: ASYNC110 - the file is the container engine's to write
        await asyncio.sleep(0.05)


async def test_a_fork_bomb_ends_at_the_time_limit_and_is_verified(
    stage: Any, tmp_path: Path
) -> None:
    bomb = "touch done; f() {{ f | f & }}; f; sleep 60"

    result = await run(stage(POLICY).url, tmp_path, bomb, ContainerSpec(pids=100), timeout_s=4)

    assert (result.outcome, result.scores) == (Outcome.TIMEOUT, {"reward": 1.0})


async def test_an_agent_that_fills_its_disk_is_ended_and_has_failed(
    stage: Any, tmp_path: Path
) -> None:
    filling = "touch done; dd if=/dev/zero of=/big bs=1M count=100 2>/dev/null; sleep 60"

    result = await run(stage(POLICY).url, tmp_path, filling, ContainerSpec(storage_mb=20))

    assert (result.outcome, result.exit_code) == (Outcome.AGENT_ERROR, 137)
    assert result.seconds < 20


async def test_an_agent_without_memory_has_failed(stage: Any, tmp_path: Path) -> None:
    eating = "python3 -c 'x = bytearray(10**9); print(len(x))'"

    result = await run(stage(POLICY).url, tmp_path, eating, ContainerSpec(memory_mb=100))

    assert (result.outcome, result.exit_code) == (Outcome.AGENT_ERROR, 137)


async def test_root_in_a_container_neither_ends_nor_traces_what_serves_it(
    stage: Any, tmp_path: Path
) -> None:
    reads = " || ".join(f"ls -l /proc/{one}/fd/" for one in ("1", "$PPID"))
    attack = f"for s in INT TERM QUIT HUP KILL; do kill -s $s 1; done; {reads} || touch done"

    result = await run(stage(POLICY).url, tmp_path, attack, ContainerSpec())

    assert (result.outcome, result.scores) == (Outcome.COMPLETED, {"reward": 1.0})


async def test_a_hanging_test_scores_nothing(stage: Any, tmp_path: Path) -> None:
    hanging = "printf 'sleep 60' > /usr/local/bin/test; chmod +x /usr/local/bin/test; touch done"
    sandboxes = ContainerProvider()
    async with Client(stage(POLICY).url) as client:
        rollout = Rollout(
            client,
            Command(("sh", "-c", hanging)),
            LocalFleet(sandboxes, CommandVerifier("/usr/local/bin/test", timeout_s=2)),
            RolloutSettings(tmp_path, retries=0),
        )
        (result,) = await rollout.collect([Job(Task("t", "p"))])
    await sandboxes.close()

    assert (result.outcome, result.scores) == (Outcome.COMPLETED, {"reward": 0.0})


async def test_a_container_that_is_killed_from_outside_is_infrastructure(
    stage: Any, tmp_path: Path
) -> None:
    running = asyncio.create_task(
        run(stage(POLICY).url, tmp_path, "sleep 60", ContainerSpec(), timeout_s=60)
    )
    await until_it_runs(tmp_path)
    (name,) = (await Engine("docker").check("ps", "-q", "--filter", "name=bridle-")).split()
    await Engine("docker").check("kill", name.decode())

    result = await asyncio.wait_for(running, 20)

    assert result.outcome is Outcome.INFRASTRUCTURE
    assert "lost" in result.error


async def test_an_unreachable_proxy_is_infrastructure(stage: Any, tmp_path: Path) -> None:
    """The agent itself sees a 502, and ends as agents do then."""
    call = 'python3 -c "import urllib.request as u; u.urlopen(\\"$OPENAI_BASE_URL/models\\")"'
    bench = stage(POLICY)
    running = asyncio.create_task(
        run(bench.url, tmp_path, f"sleep 2; {call}", ContainerSpec(), timeout_s=60)
    )
    await until_it_runs(tmp_path)
    bench.stop()

    result = await asyncio.wait_for(running, 30)

    assert result.outcome is Outcome.INFRASTRUCTURE
    log = tmp_path / str(result.session_id) / "logs/agent.stderr"
    assert "502" in log.read_text()


async def test_what_a_process_reports_comes_back(engine: Engine, tmp_path: Path) -> None:
    sandboxes = ContainerProvider(engine=engine)
    place = ("sh", "-c")
    async with sandboxes.open(SandboxRequest(tmp_path)) as sandbox:
        environment = sandbox.place.environment

        def launch(*argv: str, **fields: Any) -> Launch:
            return Launch(argv, environment, **{"timeout_s": 20.0, **fields})

        finished = await sandbox.exec(launch(*place, "echo out; echo err >&2; exit 3"))
        assert (finished.exit_code, finished.stdout.tail, finished.stderr.tail) == (
            3,
            "out\n",
            "err\n",
        )
        for code in (125, 126, 127):
            assert (await sandbox.exec(launch(*place, f"exit {code}"))).exit_code == code
        assert (await sandbox.exec(launch(*place, "kill -9 $$"))).exit_code == 137
        with pytest.raises(NotLaunchable, match="no-such"):
            await sandbox.exec(launch("no-such-command"))
        with pytest.raises(LaunchRefused):
            await sandbox.exec(launch("true", "x" * 3_000_000))
        with pytest.raises(DirectoryGone):
            await sandbox.exec(launch("true", directory=PurePosixPath("/not/there")))
        late = await sandbox.exec(launch(*place, "(setsid sleep 98 &); sleep 99", timeout_s=1.0))
        assert late.timed_out
        left = await sandbox.exec(launch(*place, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"))
        assert "sleep" not in left.stdout.tail.replace("sh -c cat", "")
    await sandboxes.close()
    assert not (await engine.check("ps", "-aq", "--filter", "label=bridle.owner")).strip()


async def test_files_go_in_and_out(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "up/below").mkdir(parents=True)
    (tmp_path / "up/below/file").write_text("uploaded")
    sandboxes = ContainerProvider(engine=engine)
    spec = ContainerSpec(user="1000:1000")
    async with sandboxes.open(SandboxRequest(tmp_path / "d", container=spec)) as sandbox:
        workspace = sandbox.place.workspace
        await sandbox.write({workspace / "a/b": "text", workspace / "c": b"\x00\xff"})
        assert await sandbox.read(workspace / "a/b") == b"text"
        await sandbox.upload(tmp_path / "up", PurePosixPath("/given"))
        script = "cat /given/below/file; stat -c %u a/b; ln -s /etc/passwd link; mkfifo pipe"
        environment = sandbox.place.environment
        finished = await sandbox.exec(Launch(("sh", "-c", script), environment, 20.0))
        assert finished.stdout.tail == "uploaded1000\n"
        await sandbox.download(workspace, tmp_path / "down")
        for path in ("pipe", "a", "none"):
            with pytest.raises(FileNotFoundError):
                await sandbox.read(workspace / path)
        with pytest.raises(FileNotFoundError):
            await sandbox.download(workspace / "none", tmp_path / "none")
        for name in ("x" * 300, "c/below-a-file", "half \ud800"):
            with pytest.raises(LaunchRefused):
                await sandbox.write({workspace / name: "x"})
    await sandboxes.close()

    assert (tmp_path / "down/c").read_bytes() == b"\x00\xff"
    assert not (tmp_path / "down/link").exists()


LEFT = """
truncate -s 1T huge; truncate -s 64M data; ln -s /etc/passwd out; ln -s kept in; mkfifo pipe
mknod null c 1 3; echo yes >kept; mkdir closed; echo no >closed/file; chmod 0 closed kept
mkdir -p $(printf 'd/%.0s' $(seq 100)); (while :; do sleep 0.1 & wait; done) >/dev/null 2>&1 &
"""


async def test_files_are_bounded_before_they_are_copied(engine: Engine, tmp_path: Path) -> None:
    sandboxes = ContainerProvider(engine=engine)
    async with sandboxes.open(SandboxRequest(tmp_path / "d")) as sandbox:
        workspace, environment = sandbox.place.workspace, sandbox.place.environment
        await sandbox.exec(Launch(("sh", "-c", LEFT), environment, 20.0))
        with pytest.raises(FileNotFoundError):
            await sandbox.read(workspace / "huge")
        began = resource.getrusage(resource.RUSAGE_SELF)
        await sandbox.download(workspace, tmp_path / "down")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - began.ru_utime < 20
    await sandboxes.close()

    down = tmp_path / "down"
    assert sorted(path.name for path in down.iterdir()) == ["closed", "d", "data", "in", "kept"]
    assert (down / "in").read_text() == "yes\n"
    assert (down / "closed/file").read_text() == "no\n"
    assert (down / "data").stat().st_size == 64 << 20


async def test_an_archive_larger_than_announced_ends_where_it_may(
    engine: Engine, tmp_path: Path
) -> None:
    sandboxes = ContainerProvider(engine=engine)
    async with sandboxes.open(SandboxRequest(tmp_path / "d")) as sandbox:
        with (tmp_path / "out").open("w+b") as out:
            with pytest.raises(OSError, match="more than 4000000 bytes"):
                await engine.save("exec", sandbox.name, "yes", out=out, most=4_000_000)
            assert out.tell() <= 4_000_000
    await sandboxes.close()


async def test_a_container_whose_processes_end_all_others_is_copied_from(
    engine: Engine, tmp_path: Path
) -> None:
    sandboxes = ContainerProvider(engine=engine)
    killing = "setsid sh -c 'while :; do kill -9 -- -1; done' &"
    async with sandboxes.open(SandboxRequest(tmp_path / "d")) as sandbox:
        evil = f"echo there >left; {killing} sleep 60"
        launch = Launch(("sh", "-c", evil), sandbox.place.environment, 20.0)
        await sandbox.exec(launch)
        await sandbox.download(sandbox.place.workspace, tmp_path / "down")
    await sandboxes.close()
    assert (tmp_path / "down/left").read_text() == "there\n"


@pytest.fixture
def host_service() -> Iterator[int]:
    """A service of this machine that listens on every address."""
    server = http.server.ThreadingHTTPServer(("0.0.0.0", 0), http.server.SimpleHTTPRequestHandler)  # noqa: S104
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()


TRY = """
import json, socket, sys, urllib.error, urllib.request
found = {}
for name, target in json.loads(sys.argv[1]).items():
    try:
        if target.startswith("http"):
            found[name] = urllib.request.urlopen(target, timeout=3).status
        else:
            host, port = target.rsplit(":", 1)
            socket.create_connection((host, int(port)), timeout=3)
            found[name] = "connected"
    except urllib.error.HTTPError as error:
        found[name] = error.code
    except OSError as error:
        found[name] = "unreachable"
print(json.dumps(found))
"""


async def test_a_session_reaches_its_own_url_and_nothing_else(
    stage: Any, tmp_path: Path, host_service: int, engine: Engine
) -> None:
    bench = stage(POLICY)
    address = subprocess.run(  # noqa: ASYNC221
        ["hostname", "-I"], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    async with Client(bench.url) as client:
        mine = await client.create_session(SessionRequest())
        other = await client.create_session(SessionRequest())
    sandboxes = ContainerProvider(engine=engine)
    one = SandboxRequest(tmp_path / "1", mine.base_urls)
    two = SandboxRequest(tmp_path / "2", other.base_urls)
    async with sandboxes.open(one) as sandbox, sandboxes.open(two):
        own = sandbox.url(mine.base_urls["openai"])
        root = own.partition("/s/")[0]
        targets = {
            "own models": f"{own}/models",
            "other session": f"{root}/s/{other.id}/v1/models",
            "by a detour": f"{own}/../../{other.id}/v1/models",
            "control": f"{root}/bridle/v1/sessions",
            "health": f"{root}/healthz",
            "host service": f"{address}:{host_service}",
            "host loopback": f"127.0.0.1:{host_service}",
            "engine": bench.engine_url.removeprefix("http://"),
            "bridge": "172.17.0.1:22",
            "internet": "1.1.1.1:53",
            "name": "pypi.org:443",
        }
        argv = ("python3", "-c", TRY, json.dumps(targets))
        finished = await sandbox.exec(Launch(argv, sandbox.place.environment, 60))
    await sandboxes.close()

    found = json.loads(finished.stdout.tail)
    refused = dict.fromkeys(("other session", "by a detour", "control", "health"), 403)
    expected = {**dict.fromkeys(targets, "unreachable"), **refused, "own models": 200}
    assert found == expected


async def test_an_allowlist_opens_its_hosts_and_no_others(
    tmp_path: Path, host_service: int
) -> None:
    address = subprocess.run(  # noqa: ASYNC221
        ["hostname", "-I"], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    spec = ContainerSpec(network="allowlist", allowed_hosts=(address, "*.example.test"))
    targets = {
        "allowed": f"http://{address}:{host_service}/",
        "other": f"http://10.255.255.1:{host_service}/",
        "past the proxy": f"{address}:{host_service}",
        "below a domain, not there": "http://a.example.test/",
    }
    sandboxes = ContainerProvider()
    async with sandboxes.open(SandboxRequest(tmp_path, container=spec)) as sandbox:
        argv = ("python3", "-c", TRY, json.dumps(targets))
        finished = await sandbox.exec(Launch(argv, sandbox.place.environment, 60))
    await sandboxes.close()

    assert json.loads(finished.stdout.tail) == {
        "allowed": 200,
        "other": 403,
        "past the proxy": "unreachable",
        "below a domain, not there": 502,
    }


KILLED = """
import asyncio, sys
from pathlib import Path
from bridle.harnesses.sandboxes import ContainerProvider, Launch, SandboxRequest

async def main():
    async with ContainerProvider().open(SandboxRequest(Path(sys.argv[1]))) as sandbox:
        print("up", flush=True)
        await sandbox.exec(Launch(("sleep", "600"), sandbox.place.environment, 600))

asyncio.run(main())
"""


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder for the sockets' folder of a process, whose path must be short."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


async def test_the_containers_of_a_killed_process_end_and_are_swept(
    tmp_path: Path, sockets: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KILLED, str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(sockets)},
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGKILL)
    await process.wait()
    engine = Engine("docker")

    for _ in range(100):
        running = await engine.check("ps", "-q", "--filter", "label=bridle.owner")
        if not running.strip():
            break
        await asyncio.sleep(0.1)
    assert not running.strip(), "its first process ends with its owner"

    assert len(await engine.sweep()) == 1
