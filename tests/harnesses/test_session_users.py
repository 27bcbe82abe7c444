"""Sessions as users of their own: what a hostile agent reaches of Bridle and of other sessions."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from bridle.errors import UsageError
from bridle.harnesses.sandboxes import Launch, ProcessProvider, SandboxRequest
from bridle.harnesses.sandboxes.users import SessionUsers, as_user
from bridle.harnesses.sandboxes.walls import missing

AS_THE_TRAINER = (
    *("setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"),
    "--inh-caps=-all,+setuid,+setgid,+chown,+kill",
    "--ambient-caps=-all,+setuid,+setgid,+chown,+kill",
    "--bounding-set=-all,+setuid,+setgid,+chown,+kill,+setpcap",
)
SOURCE = Path(__file__).parents[2] / "src"
ROOT = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="changes users, as root"
)

AGENT = """
import json, os, subprocess, sys, time
bridle, secret, other = sys.argv[1:]
def attempt(action):
    try:
        return str(action())
    except OSError as error:
        return error.strerror
found = {
    "user": os.getuid(), "groups": os.getgroups(),
    "secret": attempt(lambda: open(secret).read()),
    "environment": attempt(lambda: open(f"/proc/{bridle}/environ").read()),
    "kill": attempt(lambda: os.kill(int(bridle), 0)),
    "root": attempt(lambda: os.setuid(0)),
    "bridle": attempt(lambda: os.setuid(12345)),
    "other": attempt(lambda: os.listdir(other)),
}
os.symlink(secret, "answer")
open("mine", "w").write("mine")
os.makedirs("closed/deep"); open("closed/deep/file", "w"); os.chmod("closed", 0)
left = subprocess.Popen(["sleep", "300"], start_new_session=True, env={})
print(json.dumps(found | {"left": left.pid}))
"""

BRIDLE = """
import asyncio, json, os, sys
from pathlib import Path
from bridle.harnesses.sandboxes import ForkedProvider, Launch, ProcessProvider, SandboxRequest
from bridle.harnesses.sandboxes.users import _owner

async def main():
    base, agent, secret = map(Path, sys.argv[1:])
    told = {}
    for provider in (ProcessProvider(), ForkedProvider()):
        name = type(provider).__name__
        async with (
            provider.open(SandboxRequest(base / name / "one")) as one,
            provider.open(SandboxRequest(base / name / "two")) as two,
        ):
            (Path(two.place.workspace) / "note").write_text("of the other")
            with two.lent():
                words = (os.getpid(), secret, two.place.workspace)
                argv = (sys.executable, str(agent), *map(str, words))
                ended = await one.exec(Launch(argv, {"PATH": os.environ["PATH"]}, 60))
            found = json.loads(ended.stdout.tail) if ended.stdout.tail else ended.stderr.tail
            assert isinstance(found, dict), found
            workspace = Path(one.place.workspace)
            try:
                read = (await one.read(workspace / "answer")).decode()
            except FileNotFoundError:
                read = "nothing"
            told[name] = {
                "found": found, "answer": read,
                "mine": (await one.read(workspace / "mine")).decode(),
                "closed": os.listdir(workspace / "closed"),
                "running": _owner(found["left"]) is not None,
            }
        await provider.close()
    print(json.dumps(told))

asyncio.run(main())
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """pytest's own folders are closed to other users."""
    with tempfile.TemporaryDirectory(prefix="bridle-users-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        yield folder


@ROOT
@pytest.mark.parametrize("provider", ["ProcessProvider", "ForkedProvider"])
def test_a_session_reaches_nothing_of_bridle_nor_of_another(
    told: dict[str, Any], provider: str
) -> None:
    session = told[provider]
    found = session["found"]
    assert 20001 <= found["user"] <= 20008
    assert found["groups"] == []
    assert found["secret"] == found["environment"] == found["other"] == "Permission denied"
    assert found["kill"] == found["root"] == found["bridle"] == "Operation not permitted"
    assert session["answer"] == "nothing"
    assert session["mine"] == "mine"
    assert session["closed"] == ["deep"]
    assert not session["running"], "what it left was ended"


def python_for_all() -> str:
    """An interpreter of this version that every user may start; root's own lies in its home."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for program in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        command = [*AS_THE_TRAINER, *as_user(20001, [program, "-c", ""])]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return program
    pytest.skip(f"no {version} that every user may start")


@pytest.fixture
def told(open_folder: Path) -> dict[str, Any]:
    """The results of two sessions in each kind of sandbox, under a process that is not root."""
    python = python_for_all()
    agent, program, secret = (open_folder / name for name in ("agent.py", "program.py", "secret"))
    agent.write_text(AGENT)
    program.write_text(BRIDLE)
    secret.write_text("sesame")
    base = open_folder / "sessions"
    base.mkdir()
    for path in (secret, base):
        shutil.chown(path, 12345, 12345)
    secret.chmod(0o600)
    done = subprocess.run(
        [*AS_THE_TRAINER, python, program, base, agent, secret],
        env={
            **os.environ,
            "BRIDLE_SESSION_USERS": "20001-20008",
            "HOME": str(base),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(SOURCE), *sys.path])),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


ALONE = """
id -u; cat "$4"; cat "$1" || echo closed; ls -d /proc/[0-9]* | wc -l
for port in "$2" "$3"; do
  if exec 3<>/dev/tcp/127.0.0.1/"$port"; then
    printf 'GET /s/mine/v1/models HTTP/1.1\\r\\nhost: h\\r\\nconnection: close\\r\\n\\r\\n' >&3
    head -n 1 <&3
  else echo unreachable; fi
done 2>/dev/null
"""


@ROOT
@pytest.mark.skipif(missing() is not None, reason=f"no network: {missing()}")
async def test_under_root_a_session_has_a_user_and_namespaces_of_its_own(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIDLE_SESSION_USERS", "20001-20008")
    secret = open_folder / "secret"
    secret.write_text("sesame")
    secret.chmod(0o600)
    shown = open_folder / "agent/shown"
    shown.parent.mkdir()
    shown.write_text("hello\n")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    request = SandboxRequest(
        open_folder / "session", {"openai": f"http://127.0.0.1:{port}/s/mine/v1"}
    )
    async with ProcessProvider(confined=True).open(request) as sandbox:
        own = str(urlsplit(sandbox.url(request.urls["openai"])).port)
        asked = ("bash", "-c", ALONE, "-", str(secret), own, str(port), str(shown))
        launch = Launch(asked, {"PATH": os.environ["PATH"]}, 30.0, shown=(str(shown),))
        done = await sandbox.exec(launch)
    server.close()
    user, read, closed, processes, answered, outside = done.stdout.tail.splitlines()
    assert read == "hello", "folders above one that is shown can be entered"
    assert 20001 <= int(user) <= 20008
    assert (closed, answered.strip(), outside) == ("closed", "HTTP/1.1 200 OK", "unreachable")
    assert int(processes) < 8


CLEANUP = """
import os, subprocess, sys
from pathlib import Path
from bridle.harnesses.sandboxes.leftovers import remove_folder
from bridle.harnesses.sandboxes.users import _owner, _processes, as_user, give, kill_all_of
python, folder = sys.argv[1], Path(sys.argv[2])
forks = "import os, time; os.setsid()\\nwhile not os.fork(): time.sleep(0.002)"
subprocess.run(as_user(20001, [python, "-c", forks]), check=True)
seen = lambda: sum(_owner(pid) == 20001 for _ in range(20) for pid in _processes())
assert seen()
kill_all_of(20001)
print(seen())
(folder / "/".join("d" * 100)).mkdir(parents=True)
give(folder, 20001)
os.chown(folder, os.getuid(), os.getgid())
remove_folder(folder)
print(folder.exists())
"""


@ROOT
def test_neither_a_process_that_forks_away_nor_a_deep_folder_of_a_session_user_stays(
    open_folder: Path,
) -> None:
    """A process that is not root cleans up."""
    python = python_for_all()
    sessions = open_folder / "sessions"
    sessions.mkdir()
    shutil.chown(sessions, 12345, 12345)
    done = subprocess.run(
        [*AS_THE_TRAINER, python, "-c", CLEANUP, python, sessions / "one"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["0", "False"], done.stderr


@pytest.mark.parametrize("named", ["some", "7", "0-5", "9-3", f"{os.getuid()}-{os.getuid() + 9}"])
def test_what_is_no_range_of_other_users_is_refused(
    monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("BRIDLE_SESSION_USERS", named)
    with pytest.raises(UsageError, match="no range of users"):
        SessionUsers.of_environment()


def test_without_the_capabilities_it_says_which_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BRIDLE_SESSION_USERS", "20001-20008")
    monkeypatch.setattr("bridle.harnesses.sandboxes.users._effective", lambda: 1 << 6 | 1 << 7)
    with pytest.raises(UsageError, match="chown, kill"):
        SessionUsers.of_environment()


def test_more_sessions_than_users_are_refused() -> None:
    users = SessionUsers(range(20001, 20002))
    with users.one(), pytest.raises(UsageError, match="fewer than sessions"), users.one():
        pass
