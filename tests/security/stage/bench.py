"""A bench for single attempts: a world, a proxy, and a process that nothing keeps from anything."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from security.attempts.caches import SHARED_MEMORY_KEY
from security.conftest import ADMIN, ASK, CHAT, Lab, opened
from security.stage.world import HERE, World, canary

FOLDERS = ("tmp", "memory", "run", "library", "home", "logs")


@dataclass
class Bench:
    """Runs attempts one by one, with the admin key as their session's key."""

    world: World
    lab: Lab
    runner: subprocess.Popen[str]
    pipe: int
    """The reading end of a pipe that the attempts inherit."""
    inherited: int
    """Its writing end."""
    relay: socket.socket
    session: dict[str, Any] = field(default_factory=dict)
    workspace: Path = Path()
    standin: subprocess.Popen[bytes] | None = None
    """A process in the place of those that attempts kill."""

    @property
    def away(self) -> Path:
        return self.world.operator / "away"

    def renew(self, name: str) -> None:
        """Make what an attempt may have spoilt new: sessions, files, processes."""
        self.session, other = self.lab.session(), self.lab.session()
        body = {**ASK, "messages": [{"role": "user", "content": canary()}]}
        at = f"/s/{other['id']}{CHAT}"
        self.lab.ask("POST", at, other["key"], json=body).raise_for_status()
        self.world.neighbour = {"session": other["id"], "name": other["id"]}
        self.restore_the_store()
        self.world.write()
        if not self.world.alive():
            self.world.start_the_neighbour()
        for number in self.left():
            os.kill(number, signal.SIGKILL)
        beside = [self.world.agent / name for name in ("queue.py", "attempts/left.py")]
        sessions = [one for one in self.world.sessions.iterdir() if one.name != "neighbour"]
        subprocess.run(["rm", "-rf", self.away, *beside, *sessions], check=True)
        os.write(self.inherited, canary().encode())
        for folder in FOLDERS:
            (self.away / folder).mkdir(parents=True)
        (self.away / "kernel").write_text("core")
        self.workspace = self.world.sessions / name / "workspace"
        self.workspace.mkdir(parents=True)
        if self.standin is None or self.standin.poll() is not None:
            self.standin = subprocess.Popen(["sleep", "300"], start_new_session=True)
        libc = ctypes.CDLL(None)
        libc.shmctl(libc.shmget(SHARED_MEMORY_KEY, 0, 0), 0, None)

    def restore_the_store(self) -> None:
        store = self.world.store
        if (moved := store.with_name(f"{store.name}.old")).exists():
            moved.rename(store)
        with contextlib.closing(sqlite3.connect(store)) as connection:
            connection.execute("DROP TRIGGER IF EXISTS evil")
        for path in store.parent.glob("*evil"):
            path.unlink()

    def left(self) -> set[int]:
        """Return the processes of attempts."""
        return {*self.world.processes()} - {self.runner.pid}

    def targets(self) -> dict[str, Any]:
        """Return the world's targets; what would harm this machine is replaced."""
        assert self.standin is not None
        return self.world.targets("process") | {
            "no_key": ADMIN,
            "guesses": [self.session["verifier_key"]],
            "disk": [stat.S_IFCHR, os.makedev(1, 5)],
            "kernel": str(self.away / "kernel"),
            "parents": [self.standin.pid],
            "everybody": -self.standin.pid,
            "socket_folders": [str(self.world.folder)],
            "relay": self.relay.getsockname(),
            "folders": {name: [str(self.away / name)] for name in FOLDERS[:4]},
            "own_home": str(self.away / "home"),
            "logs": str(self.away / "logs"),
            "patience": 0.2,
            "megabytes": 30,
        }

    def ask(self, *names: str, look: bool = False, wait: bool = True) -> dict[str, Any]:
        """Return what the attempts got, by name, and ``inherited`` with ``look``."""
        own = {
            "OPENAI_BASE_URL": f"{self.lab.url}/s/{self.session['id']}/v1",
            "OPENAI_API_KEY": ADMIN,
        }
        asked = {"folder": str(self.workspace), "names": names, "targets": self.targets()}
        asked |= {"environment": own, "look": look, "wait": wait}
        assert self.runner.stdin is not None
        assert self.runner.stdout is not None
        self.runner.stdin.write(json.dumps(asked) + "\n")
        self.runner.stdin.flush()
        answer: dict[str, Any] = json.loads(self.runner.stdout.readline())
        assert "error" not in answer, answer
        return answer


@contextlib.contextmanager
def prepared(model_dir: Path, store: Path) -> Iterator[Bench]:
    """Yield a bench with a store at a path."""
    folder = Path(tempfile.mkdtemp(prefix="bridle-control-"))
    world = World(folder, os.getuid(), store)
    reading, writing = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        stack.callback(world.tidy)
        lab = stack.enter_context(opened(model_dir, store))
        stack.enter_context(world.lived_in())
        relay = stack.enter_context(socket.socket(socket.AF_UNIX))
        relay.bind(str(store.with_name("relay")))
        relay.listen()
        runner = subprocess.Popen(
            [sys.executable, str(HERE / "controls.py"), str(world.agent), world.token],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(reading, writing),
            env=world.environment(),
        )
        bench = Bench(world, lab, runner, reading, writing, relay)
        yield bench
        for process in filter(None, (runner, bench.standin)):
            process.kill()
            process.wait()
    for number in (reading, writing):
        os.close(number)
