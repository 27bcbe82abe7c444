"""The local sandbox: nothing in, nothing left behind."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bridle.harnesses.sandboxes import NotLaunchable, ProcessProvider, ProcessResult, SandboxRequest
from bridle.harnesses.sandboxes.base import TAIL_BYTES

MakeLaunch = Callable[..., Any]
TextOf = Callable[[Path], Awaitable[str]]
AssertGone = Callable[[int], Awaitable[None]]


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
    for name in ("in_group", "outside", "orphan"):
        await assert_gone(int((launch.workspace / name).read_text()))


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
    await assert_gone(int((launch.workspace / "pid").read_text()))


async def test_cancelling_kills_the_process(
    make_launch: MakeLaunch, text_of: TextOf, assert_gone: AssertGone
) -> None:
    launch = make_launch("sh", "-c", "echo $$ > pid; exec sleep 60")
    running = asyncio.create_task(launch.run(ProcessProvider()))
    pid_file = launch.workspace / "pid"
    pid = int(await text_of(pid_file))

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    await assert_gone(pid)


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
