"""The warm sandbox: a script cannot tell that it was forked."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bridle.harnesses.sandboxes import (
    ForkedProvider,
    NotLaunchable,
    ProcessResult,
    SandboxLost,
)
from bridle.harnesses.sandboxes.walls import missing

isolated = pytest.mark.skipif(missing() is not None, reason=f"no namespaces: {missing()}")

MakeLaunch = Callable[..., Any]
TextOf = Callable[[Path], Awaitable[str]]
AssertGone = Callable[[int | Path], Awaitable[None]]
RunScript = Callable[..., "asyncio.Future[ProcessResult]"]


@pytest.fixture
async def warm() -> AsyncIterator[ForkedProvider]:
    sandbox = ForkedProvider()
    yield sandbox
    await sandbox.close()


@pytest.fixture
def run(warm: ForkedProvider, make_launch: MakeLaunch, tmp_path: Path) -> Callable[..., object]:
    """Writes a script and runs it warm."""

    def start(source: str, *arguments: str, **fields: object) -> object:
        script = tmp_path / "script" / f"agent{abs(hash(source))}.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(source)
        return make_launch(sys.executable, str(script), *arguments, **fields).run(warm)

    return start


LOOK_AROUND = """
import json, os, sys
from beside import HELPER
class Local: pass
import pickle
pickle.dumps(Local())
print(json.dumps({
    "name": __name__, "file": __file__, "argv": sys.argv, "cwd": os.getcwd(),
    "environment": sorted(os.environ), "value": os.environ["VALUE"], "helper": HELPER,
    "path0": sys.path[0], "stdin": sys.stdin.read(), "ours": "harnesses" in sys.modules,
    "leader": os.getpgid(0) == os.getpid(), "tty": sys.stdout.isatty(),
}))
"""


async def test_a_script_finds_itself_as_if_started_by_python(
    run: RunScript, tmp_path: Path, make_launch: MakeLaunch
) -> None:
    (tmp_path / "script").mkdir()
    (tmp_path / "script/beside.py").write_text("HELPER = 'beside'\n")
    environment = {"VALUE": "1", "PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}

    finished = await run(LOOK_AROUND, "a", "b c", environment=environment)
    script = next((tmp_path / "script").glob("agent*.py"))
    cold = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, script, "a", "b c"],
        cwd=finished.stdout.path.parent.parent / "workspace",
        env={**environment, "PWD": ""},
        input=b"",
        capture_output=True,
        start_new_session=True,
        check=True,
    )

    assert finished.exit_code == 0, finished.stderr.tail
    assert finished.stdout.tail == cold.stdout.decode()


async def test_sessions_do_not_see_each_other(run: RunScript) -> None:
    source = (
        "import builtins, os, sys, pathlib\n"
        "print(getattr(builtins, 'left', None), os.environ.get('LEFT'), sys.argv[1])\n"
        "builtins.left = 1; os.environ['LEFT'] = '1'; pathlib.Path('mine').write_text('x')\n"
        "print(len(os.listdir('.')))\n"
    )

    finished = await asyncio.gather(*(run(source, str(number)) for number in range(8)))

    assert [f.stdout.tail for f in finished] == [f"None None {n}\n1\n" for n in range(8)]


async def test_random_numbers_differ_between_sessions(run: RunScript) -> None:
    pytest.importorskip("numpy")
    source = "import random, numpy, uuid\nprint(random.random(), numpy.random.rand(), uuid.uuid4())"

    finished = [await run(source) for _ in range(4)]

    columns = zip(*(f.stdout.tail.split() for f in finished), strict=True)
    assert all(len(set(column)) == 4 for column in columns)


@pytest.mark.parametrize(
    ("source", "code", "error"),
    [
        ("raise ValueError('broken')", 1, "ValueError: broken"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no luck')", 1, "no luck\n"),
        ("import sys; sys.exit()", 0, ""),
        ("import os; os.abort()", 134, ""),
        ("import os; os._exit(9)", 9, ""),
        ("def broken(:", 1, "SyntaxError"),
        ("import ctypes; ctypes.string_at(0)", 139, ""),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(5)",
            130,
            "",
        ),
    ],
)
async def test_a_crash_ends_one_session_and_no_other(
    run: RunScript, source: str, code: int, error: str
) -> None:
    finished = await run(source)

    assert finished.exit_code == code
    assert error in finished.stderr.tail
    assert (await run("print('next')")).stdout.tail == "next\n"


async def test_a_traceback_shows_the_script_and_not_the_machinery(run: RunScript) -> None:
    finished = await run("def f():\n    raise ValueError('broken')\nf()\n")

    assert "in f" in finished.stderr.tail
    assert "zygote" not in finished.stderr.tail
    assert "runpy" not in finished.stderr.tail


async def test_an_exit_does_what_an_interpreters_exit_does(run: RunScript, tmp_path: Path) -> None:
    source = (
        "import atexit, threading, time, sys\n"
        "unclosed = open('unclosed', 'w'); unclosed.write('flushed')\n"
        "def keep(): return unclosed\n"
        "atexit.register(lambda: print('at exit'))\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "print('main')\n"
    )

    finished = await run(source)

    assert finished.stdout.tail == "main\nthread\nat exit\n"
    workspace = finished.stdout.path.parent.parent / "workspace"
    assert (workspace / "unclosed").read_text() == "flushed"


async def test_the_time_limit_kills_the_script_and_what_it_started(
    run: RunScript, assert_gone: AssertGone
) -> None:
    source = (
        "import subprocess, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "open('started', 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )

    finished = await run(source, timeout_s=1.0, grace_s=0.2)

    assert finished.timed_out
    workspace = finished.stdout.path.parent.parent / "workspace"
    assert (workspace / "started").exists()
    await assert_gone(workspace)


SLEEPS = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(60)"


async def test_cancelling_kills_the_script(
    run: RunScript, tmp_path: Path, text_of: TextOf, assert_gone: AssertGone
) -> None:
    workspace = tmp_path / "launches/0/workspace"
    running = asyncio.ensure_future(run(SLEEPS))
    await text_of(workspace / "pid")

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    await assert_gone(workspace)


async def test_fifty_sessions_of_a_heavy_script_take_seconds(run: RunScript) -> None:
    source = (
        "import langchain_core.messages\nprint(langchain_core.messages.AIMessage('hi').content)"
    )
    first = await run(source)
    started = time.monotonic()

    finished = await asyncio.gather(*(run(source) for _ in range(50)))

    assert [f.stdout.tail for f in (first, *finished)] == ["hi\n"] * 51
    assert time.monotonic() - started < 10


async def test_what_a_good_run_imports_late_is_imported_once(run: RunScript) -> None:
    """``xmlrpc.client`` is heavy enough to be seen, and nothing else imports it."""
    source = "import sys\nprint('xmlrpc.client' in sys.modules)\n__import__('xmlrpc.client')"

    assert (await run(source)).stdout.tail == "False\n"
    assert (await run(source)).stdout.tail == "True\n"


async def test_a_module_that_starts_a_thread_is_never_learned(
    run: RunScript, make_launch: MakeLaunch
) -> None:
    """A fork copies one thread only, so a warm process must not have any other."""
    source = (
        "import sys, threading\n"
        "print('antigravity_thread' in sys.modules, threading.active_count())\n"
        "print(len(__import__('os').listdir('/proc/self/task')))\n"
        "__import__('concurrent.futures.thread')\n"
        "ex = __import__('concurrent.futures', fromlist=['x']).ThreadPoolExecutor(2)\n"
        "print(ex.submit(pow, 2, 3).result())\n"
    )

    for _ in range(3):
        assert (await run(source)).stdout.tail == "False 1\n1\n8\n"


async def test_a_library_that_starts_threads_is_refused_with_the_way_out(
    make_launch: MakeLaunch, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "busy_library.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    script = tmp_path / "agent.py"
    script.write_text("print('never')")
    sandbox = ForkedProvider(["busy_library"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        with pytest.raises(NotLaunchable, match=r"1 threads.*process sandbox"):
            await make_launch(sys.executable, str(script)).run(sandbox)
    await sandbox.close()


async def test_a_console_script_is_forked_and_what_reads_its_environment_is_imported_anew(
    make_launch: MakeLaunch, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "slow_library.py").write_text("import os\nSEEN = os.environ.get('AHEAD')\n")
    (site / "the_agent.py").write_text(
        "import os, slow_library\nPLACE, AHEAD = os.environ['PLACE'], slow_library.SEEN\n"
    )
    script = tmp_path / "agent"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nfrom the_agent import AHEAD, PLACE\n"
        "print(AHEAD, PLACE, sys.argv[1:])\n"
    )
    sandbox = ForkedProvider(["slow_library"], fresh=["the_agent"], environment={"AHEAD": "yes"})
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        for place in ("first", "second"):
            environment = {"PLACE": place, "PYTHONPATH": str(site)}
            launch = make_launch(str(script), "go", environment=environment)
            said.append((await launch.run(sandbox)).stdout.tail)
    await sandbox.close()

    assert said == ["yes first ['go']\n", "yes second ['go']\n"]


async def test_a_module_that_cannot_be_imported_ahead_is_named(
    make_launch: MakeLaunch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "agent.py"
    script.write_text("print('fine')")
    sandbox = ForkedProvider(["no_such_library"])

    finished = await make_launch(sys.executable, str(script)).run(sandbox)
    await sandbox.close()

    assert finished.stdout.tail == "fine\n"
    assert "no_such_library" in caplog.text


async def test_a_lost_warm_process_fails_its_runs_and_the_next_run_starts_another(
    warm: ForkedProvider, run: RunScript, tmp_path: Path, text_of: TextOf, assert_gone: AssertGone
) -> None:
    workspace = tmp_path / "launches/0/workspace"
    running = asyncio.ensure_future(run(SLEEPS))
    await text_of(workspace / "pid")
    assert warm._zygote is not None
    assert warm._zygote._process is not None
    warm._zygote._process.kill()

    with pytest.raises(SandboxLost):
        await asyncio.wait_for(running, 10)
    await assert_gone(workspace)

    assert (await run("print('again')")).stdout.tail == "again\n"


@isolated
async def test_a_session_cannot_end_the_warm_process_nor_another_session(run: RunScript) -> None:
    other = asyncio.ensure_future(run("import time\ntime.sleep(2)\nprint('unharmed')"))
    source = (
        "import os, signal\n"
        "here = sorted(int(name) for name in os.listdir('/proc') if name.isdigit())\n"
        "print(here[0], len(here) <= 3)\n"
        "os.kill(os.getppid() or 1, signal.SIGKILL)\n"
        "try: os.kill(-1, signal.SIGKILL)\n"
        "except ProcessLookupError: pass\n"
        "print('alive')\n"
    )

    finished = await run(source)

    # Beside the script there are the first process and the child that it waits for.
    assert finished.stdout.tail == "1 True\nalive\n"
    assert (await other).stdout.tail == "unharmed\n"


@isolated
async def test_what_left_group_session_and_environment_ends_with_the_session(
    run: RunScript, assert_gone: AssertGone
) -> None:
    source = (
        "import os, subprocess\n"
        "subprocess.Popen(['sleep', '60'], start_new_session=True, env={})\n"
        "print('done')\n"
    )

    finished = await run(source)

    assert finished.stdout.tail == "done\n"
    await assert_gone(finished.stdout.path.parent.parent / "workspace")


ORPHANS = """
import contextlib, os, signal, time
with contextlib.suppress(ProcessLookupError):
    os.kill(-1, signal.SIGKILL)  # What holds the walls goes on.
for _ in range(20):
    if (child := os.fork()) == 0:
        if os.fork() == 0:
            time.sleep(0.2)
        os._exit(0)
    os.waitpid(child, 0)
end, others = time.monotonic() + 30, 20
while others > 3 and time.monotonic() < end:
    time.sleep(0.05)
    others = len([name for name in os.listdir("/proc") if name.isdigit()])
print(others <= 3)
"""


@isolated
async def test_orphans_inside_walls_do_not_stay_as_zombies(run: RunScript) -> None:
    finished = await run(ORPHANS)

    # The first process, the child that it waits for, and the script are left.
    assert (finished.exit_code, finished.stdout.tail) == (0, "True\n")


async def test_closing_kills_what_still_runs(
    warm: ForkedProvider, run: RunScript, tmp_path: Path, text_of: TextOf, assert_gone: AssertGone
) -> None:
    workspace = tmp_path / "launches/0/workspace"
    running = asyncio.ensure_future(run(SLEEPS))
    await text_of(workspace / "pid")

    await warm.close()

    with pytest.raises(SandboxLost):
        await running
    await assert_gone(workspace)


@pytest.mark.parametrize(
    "argv", [("sh", "-c", "true"), (sys.executable,), (sys.executable, "no.py")]
)
async def test_what_is_no_python_script_is_not_launchable(
    warm: ForkedProvider, make_launch: MakeLaunch, argv: tuple[str, ...]
) -> None:
    with pytest.raises(NotLaunchable):
        await make_launch(*argv).run(warm)
