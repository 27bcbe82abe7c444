"""The local sandbox: nothing in, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bridle.errors import UsageError
from bridle.harnesses.permissions import UNSAFE_SANDBOX, Permissions
from bridle.harnesses.sandboxes import (
    ForkedProvider,
    Launch,
    NotLaunchable,
    ProcessProvider,
    ProcessResult,
    SandboxLost,
    SandboxRequest,
    mounts,
    walls,
)
from bridle.harnesses.sandboxes.base import TAIL_BYTES
from bridle.harnesses.sandboxes.walls import NoWalls, missing, walled

MakeLaunch = Callable[..., Any]
TextOf = Callable[[Path], Awaitable[str]]
AssertGone = Callable[[int | Path], Awaitable[None]]


async def shell(make_launch: MakeLaunch, script: str, **fields: object) -> ProcessResult:
    return await make_launch("sh", "-c", script, **fields).run(ProcessProvider())


async def test_output_and_exit_code_come_back(make_launch: MakeLaunch) -> None:
    finished = await shell(make_launch, "echo out; echo err >&2; exit 3")

    assert (finished.exit_code, finished.timed_out) == (3, False)
    assert (finished.stdout.tail, finished.stderr.tail) == ("out\n", "err\n")
    assert 0 < finished.seconds < 10


async def test_a_process_ended_by_a_signal_reports_128_plus_it(make_launch: MakeLaunch) -> None:
    assert (await shell(make_launch, "kill -9 $$")).exit_code == 137


async def test_nothing_is_inherited_but_what_the_launch_says(
    make_launch: MakeLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    finished = await shell(make_launch, "env", environment={"ONLY": "this"})

    names = {line.partition("=")[0] for line in finished.stdout.tail.splitlines()}
    assert "ONLY" in names
    assert "OPENAI_API_KEY" not in names


async def test_it_runs_in_the_workspace_with_the_files_written(make_launch: MakeLaunch) -> None:
    launch = make_launch("sh", "-c", "pwd; echo $PWD; cat a/b.txt; cat")
    async with ProcessProvider().open(SandboxRequest(launch.directory)) as sandbox:
        await sandbox.write({launch.workspace / "a/b.txt": "hello"})
        finished = await sandbox.exec(launch.launch)

    assert finished.stdout.tail == f"{launch.workspace}\n{launch.workspace}\nhello"


async def test_memory_holds_the_end_of_a_long_output_and_the_file_all_of_it(
    make_launch: MakeLaunch,
) -> None:
    finished = await make_launch(sys.executable, "-c", "print('x' * 1_000_000 + 'end')").run(
        ProcessProvider()
    )

    assert len(finished.stdout.tail) == TAIL_BYTES
    assert finished.stdout.tail.endswith("xend\n")
    assert finished.stdout.size == finished.stdout.path.stat().st_size == 1_000_004


async def test_a_cut_character_does_not_break_the_tail(make_launch: MakeLaunch) -> None:
    finished = await make_launch(
        sys.executable, "-c", "import sys; sys.stdout.buffer.write(b'\\xff\\xe2\\x82')"
    ).run(ProcessProvider())

    assert finished.stdout.tail == "\ufffd\ufffd"


STUBBORN_TREE = """
trap '' TERM
(trap '' TERM; echo $(exec sh -c 'echo $PPID') > in_group; sleep 60) &
setsid sh -c 'trap "" TERM; echo $$ > outside; sleep 60' &
(setsid sh -c '(sh -c "echo \\$\\$ > orphan; sleep 60" &)') &
sleep 60
"""
"""Children in the group, in a session of their own, and orphaned, none heeding SIGTERM."""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
async def test_the_time_limit_kills_the_whole_tree(
    make_launch: MakeLaunch, assert_gone: AssertGone
) -> None:
    launch = make_launch("sh", "-c", STUBBORN_TREE, timeout_s=0.7, grace_s=0.2)
    started = time.monotonic()

    finished = await launch.run(ProcessProvider())

    assert finished.timed_out
    assert time.monotonic() - started < 5
    assert all((launch.workspace / name).exists() for name in ("in_group", "outside", "orphan"))
    await assert_gone(launch.workspace)


async def test_a_process_may_tidy_up_within_the_grace_period(make_launch: MakeLaunch) -> None:
    finished = await shell(
        make_launch,
        "trap 'echo tidy; exit 0' TERM; echo up; while :; do sleep 0.05; done",
        timeout_s=0.5,
        grace_s=5,
    )

    assert finished.timed_out
    assert finished.stdout.tail == "up\ntidy\n"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
async def test_servers_left_running_end_with_their_session(
    make_launch: MakeLaunch, assert_gone: AssertGone
) -> None:
    launch = make_launch("sh", "-c", "setsid sleep 60 & echo $! > pid; sleep 0.2; echo done")

    finished = await launch.run(ProcessProvider())

    assert finished.exit_code == 0
    await assert_gone(launch.workspace)


async def test_cancelling_kills_the_process(
    make_launch: MakeLaunch, text_of: TextOf, assert_gone: AssertGone
) -> None:
    launch = make_launch("sh", "-c", "echo $$ > pid; exec sleep 60")
    running = asyncio.create_task(launch.run(ProcessProvider()))
    await text_of(launch.workspace / "pid")

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    await assert_gone(launch.workspace)


async def test_a_file_that_is_no_program_is_not_launchable(
    make_launch: MakeLaunch, tmp_path: Path
) -> None:
    script = tmp_path / "agent"
    script.write_text("echo no first line\n")
    script.chmod(0o755)
    with pytest.raises(NotLaunchable, match="Exec format error"):
        await make_launch(str(script)).run(ProcessProvider())


async def test_a_command_that_does_not_exist_is_not_launchable(make_launch: MakeLaunch) -> None:
    with pytest.raises(NotLaunchable, match="no-such-command"):
        await make_launch("no-such-command").run(ProcessProvider())


isolated = pytest.mark.skipif(missing() is not None, reason=f"no namespaces: {missing()}")


@isolated
async def test_a_session_sees_no_process_but_its_own(
    make_launch: MakeLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "a-key-of-another-process-0123456789"
    other = await asyncio.create_subprocess_exec("sleep", "60", env={"BRIDLE_ADMIN_KEY": secret})
    try:
        look = "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline; echo; ls -d /proc/[0-9]*; kill -0 $0"
        finished = await shell(make_launch, look.replace("$0", str(other.pid)))
    finally:
        other.kill()
        await other.wait()
    assert secret not in finished.stdout.tail
    assert finished.stdout.tail.count("\n/proc/") < 6
    assert finished.exit_code != 0, "and signals none"


@isolated
async def test_what_left_group_session_and_environment_ends_with_the_session(
    make_launch: MakeLaunch, assert_gone: AssertGone
) -> None:
    launch = make_launch("sh", "-c", "(setsid env -i sleep 60 &); sleep 0.2; exit 5")

    finished = await launch.run(ProcessProvider())

    assert finished.exit_code == 5
    await assert_gone(launch.workspace)


@isolated
async def test_hidden_files_and_their_siblings_are_not_there(
    make_launch: MakeLaunch, tmp_path: Path
) -> None:
    key = tmp_path / "admin.key"
    key.write_text("secret")
    for name in ("s.db", "s.db-wal", "s.db.bak", "agent.py"):
        (tmp_path / name).write_text(name)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/s.db").write_text("secret")
    hidden = (key, tmp_path / "s.db", tmp_path / "out", tmp_path / "no folder/file")

    script = f"cd {tmp_path}; umount . out; ls; cat agent.py; ls out; cat out/s.db admin.key"
    named = (str(tmp_path / "agent.py"),)
    finished = await make_launch("sh", "-c", script, shown=named).run(ProcessProvider(hidden))

    assert finished.stdout.tail.splitlines() == ["agent.py", "launches", "out", "agent.py"]
    assert key.read_text() == "secret"


@isolated
async def test_what_is_not_the_sessions_own_is_read_only(
    make_launch: MakeLaunch, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("mine")
    script = (
        f"echo > {tmp_path}/mine; echo > {tmp_path}/new; echo > /etc/new; echo > /dev/new; "
        "echo core > /proc/sys/kernel/core_pattern; echo > own; echo > /tmp/own; cat own /tmp/own"
    )
    named = (str(tmp_path / "mine"),)
    finished = await make_launch("bash", "-c", script, shown=named).run(ProcessProvider())

    assert finished.stdout.tail == "\n\n"
    assert finished.stderr.tail.count("Read-only file system") == 5
    assert (tmp_path / "mine").read_text() == "mine"


@isolated
async def test_neither_disks_nor_sockets_of_the_machine_are_there(
    make_launch: MakeLaunch, tmp_path: Path
) -> None:
    finished = await make_launch("sh", "-c", "ls -l /dev; find /run /tmp -type s").run(
        ProcessProvider()
    )
    kinds = {line[0] for line in finished.stdout.tail.splitlines()[1:]}
    assert kinds <= {"c", "d", "l"}, finished.stdout.tail


ASK = """
import sys, urllib.error, urllib.request
for url in sys.argv[1:]:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            print(reply.status, reply.read().decode())
    except urllib.error.HTTPError as error:
        print(error.code)
    except OSError as error:
        print(type(error).__name__)
"""


@isolated
async def test_a_session_sees_no_home_and_no_folder_that_its_command_does_not_name(
    make_launch: MakeLaunch, tmp_path: Path
) -> None:
    for name in ("project/agent.py", "project/.env", "other/answers"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("secret")
    script = f"ls -A {tmp_path}/project {tmp_path} {Path.home()} /home /var"
    named = (str(tmp_path / "project/agent.py"),)

    finished = await make_launch("sh", "-c", script, shown=named).run(ProcessProvider())

    seen = finished.stdout.tail.split()
    assert "agent.py" in seen
    assert not {"other", ".env", ".ssh", ".bridle", ".cache", "lib"} & set(seen), seen


async def test_a_session_sees_the_folders_that_the_user_names(
    make_launch: MakeLaunch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIDLE_SANDBOX_SHOWN", "")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "words.txt").write_text("apple")
    with pytest.raises(UsageError, match="missing, which does not exist"):
        Permissions(shown=(str(tmp_path / "missing"),)).grant()
    Permissions(shown=(str(tmp_path / "data"),)).grant()

    script = f"cat {tmp_path}/data/words.txt; echo more > {tmp_path}/data/words.txt"
    finished = await make_launch("sh", "-c", script).run(ProcessProvider())

    assert finished.stdout.tail == "apple"
    assert "Read-only file system" in finished.stderr.tail


FROM_A_FOLDER = """
from bridle.harnesses.sandboxes.walls import Walls
print(*Walls((), "/tmp").command(), sep="\\n")
"""


def test_the_folder_in_which_bridle_was_started_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "started.py").write_text(FROM_A_FOLDER)
    command = [sys.executable, "-m", "started"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert sys.prefix in shown.stdout.splitlines()
    assert str(tmp_path) not in shown.stdout.splitlines()


CONNECT = """
import os, socket, sys
for name in sys.argv[1:]:
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.connect(name.replace("@", chr(0)))
            print("connected")
        except OSError as error:
            print(type(error).__name__)
"""


@isolated
@pytest.mark.parametrize("confined", [True, False])
async def test_no_unix_socket_of_the_machine_can_be_connected(
    tmp_path: Path, confined: bool
) -> None:
    """Neither in the folder of the agent, nor in another, nor an abstract one."""
    named = [str(tmp_path / "agent/s.sock"), str(tmp_path / "s.sock")]
    named += ["@bridle-test-" + tmp_path.name] if confined else []
    (tmp_path / "agent").mkdir()
    script = tmp_path / "agent/agent.py"
    script.write_text(CONNECT)
    servers = []
    for name in named:
        server = socket.socket(socket.AF_UNIX)
        server.bind(name.replace("@", chr(0)))
        server.listen()
        servers.append(server)
    argv = (sys.executable, str(script), *named)
    async with ProcessProvider(confined=confined).open(
        SandboxRequest(tmp_path / "session")
    ) as sandbox:
        launch = Launch(argv, {"PATH": os.defpath}, 30.0, shown=(str(script),))
        finished = await sandbox.exec(launch)
    for server in servers:
        server.close()

    assert "connected" not in finished.stdout.tail, finished.stdout.tail
    assert len(finished.stdout.tail.split()) == len(named), finished.stderr.tail


@isolated
async def test_a_confined_session_reaches_its_own_url_and_nothing_else(
    tmp_path: Path,
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(target) + target)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/s/mine/v1"
    request = SandboxRequest(tmp_path / "session", {"openai": url})
    script = tmp_path / "agent.py"
    script.write_text(ASK)
    for provider in (ProcessProvider(confined=True), ForkedProvider(confined=True)):
        async with provider.open(request) as sandbox:
            inner = sandbox.url(url)
            others = (f"http://127.0.0.1:{port}/s/mine/v1", inner.replace("mine", "yours"))
            asked = (sys.executable, str(script), f"{inner}/models", *others)
            launch = Launch(asked, {"PATH": os.defpath}, 30.0, shown=(str(script),))
            finished = await sandbox.exec(launch)
        await provider.close()
        expected = ["200 /s/mine/v1/models", "URLError", "403"]
        assert finished.stdout.tail.splitlines() == expected, finished.stderr.tail
    server.close()


@isolated
async def test_walls_that_cannot_be_built_are_named_and_lose_the_session_alone(
    make_launch: MakeLaunch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "agent.py"
    script.write_text("print('never')")
    monkeypatch.setattr(mounts, "programs_of", lambda _: ("/never-made/gone",))
    for provider in (ProcessProvider(), ForkedProvider()):
        with pytest.raises(SandboxLost, match=r"cannot wall off a session: bwrap: .*gone"):
            await make_launch(sys.executable, str(script)).run(provider)
        await provider.close()


async def test_temporary_files_are_the_sessions_own_and_go_with_it(tmp_path: Path) -> None:
    script = "import tempfile; print(tempfile.mkstemp()[1])"
    async with ProcessProvider().open(SandboxRequest(tmp_path / "session")) as sandbox:
        launch = Launch((sys.executable, "-c", script), sandbox.place.environment, 30.0)
        made = Path((await sandbox.exec(launch)).stdout.tail.strip())
        own = sandbox._enclosure.temporary
        assert os.stat(own.parent).st_mode == 0o40700
        assert made.name in os.listdir(own)
    assert not await asyncio.to_thread(own.parent.exists)


@pytest.fixture
def no_walls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which bubblewrap may make no namespaces."""
    program = tmp_path / "bin/bwrap"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho bwrap: no new namespace >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv(UNSAFE_SANDBOX, raising=False)
    monkeypatch.setattr(walls, "missing", missing.__wrapped__)
    walls._warn.cache_clear()


@pytest.mark.usefixtures("no_walls")
@pytest.mark.parametrize("provider", [ProcessProvider, ForkedProvider])
def test_a_machine_without_walls_refuses_sessions_and_names_the_ways_out(provider: Any) -> None:
    with pytest.raises(NoWalls) as refused:
        provider()
    for said in ("new namespace", "apt-get install", "agent.sandbox=container", "--unsafe-sandbox"):
        assert said in str(refused.value)


@pytest.mark.usefixtures("no_walls")
async def test_sessions_run_without_walls_where_the_user_permits_it_and_say_so_once(
    make_launch: MakeLaunch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(UNSAFE_SANDBOX, "1")
    for _ in range(2):
        assert (await shell(make_launch, "echo out")).stdout.tail == "out\n"
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("sandbox_not_isolated: ")


def test_without_bubblewrap_there_are_no_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv(UNSAFE_SANDBOX, raising=False)
    monkeypatch.setattr(walls, "missing", missing.__wrapped__)
    with pytest.raises(NoWalls, match="bubblewrap is not installed"):
        walled(None)
    assert not walled("users that keep sessions apart, too")
