"""Sessions as users of their own: what a hostile agent reaches of Bridle and of other sessions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridle.errors import UsageError
from bridle.harnesses.sandboxes.users import SessionUsers, as_user

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
            except FileNotFoundError as error:
                read = error.strerror
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
    assert session["answer"] == "no file of the session"
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
    """What two sessions of each kind of sandbox came to, under a process that is not root."""
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
