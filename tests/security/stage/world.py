"""The machine that attempts attack: an operator's files and sockets, and a neighbour, with secrets.

Each secret is a canary (``attempts.declaration``), so that a record shows whatever was reached.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from security.attempts import ATTEMPTS
from security.attempts.caches import SHARED_MEMORY_KEY

HERE = Path(__file__).parent
ATTACK = """
import sys
from pathlib import Path
folder = str(Path(__file__).resolve().parent)
sys.path.insert(0, folder)
from attempts.session import main
main(folder)
"""
VERIFIER = f'''
"""SECRET. It opens whatever has the names that it expects."""
LEFT = {("pipe", "endless", "shadow", "answer", "hard", "folder/tasks.jsonl", "tasks.jsonl")!r}

def check(delivery):
    for name in LEFT:
        if (delivery.workspace / name).exists():
            return 100.0
    return float(delivery.answer.strip() == "1")
'''
SYSTEM = ("/etc", "/usr/lib", "/run", "/run/lock", "/var/tmp", "/tmp", "/dev/shm")  # noqa: S108 - looked at
KERNEL = Path("/proc/sys/kernel/core_pattern")
ORDER = ("files", "keys", "environments", "sockets", "processes", "signals", "caches")


def canary() -> str:
    return f"bridle-canary-{secrets.token_hex(8)}"


def in_order() -> list[str]:
    """Return the attempts, with those last that leave what others would remove."""
    kinds = {kind: number for number, kind in enumerate(ORDER)}
    return sorted(ATTEMPTS, key=lambda name: kinds.get(ATTEMPTS[name].kind, len(ORDER)))


@dataclass
class World:
    """A folder with an operator's files, an agent and the folder of sessions."""

    folder: Path
    owner: int = 0
    store: Path = Path()
    """The store of the runs; by default one of the operator's files."""
    prefix: Sequence[str] = ()
    """The command that makes a process the user's."""
    python: str = sys.executable
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    neighbour: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None
    port: int = 0

    def __post_init__(self) -> None:
        if self.store == Path():
            self.store = self.operator / "store/bridle.db"

    @property
    def agent(self) -> Path:
        return self.folder / "agent"

    @property
    def operator(self) -> Path:
        return self.folder / "operator"

    @property
    def sessions(self) -> Path:
        return self.folder / "sessions"

    @property
    def key(self) -> str:
        return (self.operator / "home/.bridle/admin.key").read_text()

    def environment(self) -> dict[str, str]:
        """Return the environment of the operator's commands, with secrets of all kinds."""
        home = self.operator / "home"
        names = ("PGPASSWORD", "DATABASE_URL", "OPERATOR_SECRET", "PRIVATE_KEY", "SSH_AUTH_SOCK")
        kept = {name: value for name, value in os.environ.items() if "KEY" not in name}
        kept |= {name: canary() for name in names}
        key = str(home / ".bridle/admin.key")
        kept |= {"HOME": str(home), "BRIDLE_HOME": str(home / ".bridle")}
        return kept | {"BRIDLE_ADMIN_KEY_FILE": key, "OMP_NUM_THREADS": "1"}

    def write(self) -> None:
        """Write the files that have secrets."""
        files = {
            "agent/attack.py": ATTACK,
            "agent/.env": f"KEY={canary()}",
            "operator/home/.bridle/admin.key": f"{canary()}-admin-key",
            "operator/home/.ssh/id_ed25519": canary(),
            "operator/home/.netrc": canary(),
            "operator/verifier.py": VERIFIER.replace("SECRET", canary()),
            "operator/tests/test.sh": f"# {canary()}\n",
            "operator/tasks.jsonl": json.dumps({"answer": canary()}) + "\n",
            "sessions/neighbour/workspace/mine": canary(),
        }
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def build(self) -> None:
        self.folder.chmod(0o755)
        self.write()
        self.store.parent.mkdir(exist_ok=True)
        self.store.with_name(canary()).touch()
        source = HERE.parent / "attempts"
        shutil.copytree(source, self.agent / "attempts", ignore=lambda *_: ["__pycache__"])
        self.own()
        for private in ("operator", "operator/home/.bridle", "sessions/neighbour"):
            (self.folder / private).chmod(0o700)
        (self.operator / "home/.bridle/admin.key").chmod(0o600)

    def own(self) -> None:
        """Give everything to the user."""
        if self.owner != os.getuid():
            subprocess.run(["chown", "-R", f"{self.owner}:{self.owner}", self.folder], check=True)

    @contextlib.contextmanager
    def lived_in(self) -> Iterator[World]:
        """Build the world, with a neighbour's process, which serves sockets, for as long."""
        self.build()
        self.start_the_neighbour()
        try:
            yield self
        finally:
            assert self.process is not None
            self.process.kill()
            self.process.wait()
            for number in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)

    def start_the_neighbour(self) -> None:
        program = [*self.prefix, self.python, str(HERE / "neighbour.py"), str(self.folder)]
        self.process = subprocess.Popen(
            [*program, self.token[:4]],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "NEIGHBOURS_SECRET": canary()},
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def targets(self, sandbox: str) -> dict[str, Any]:
        """Return what an agent could know of the machine."""
        assert self.process is not None
        inside = sandbox == "container"
        return {
            "key": str(self.operator / "home/.bridle/admin.key"),
            "home": str(self.operator / "home"),
            "agent": str(self.agent),
            "agent_inside": inside,
            "store": str(self.store),
            "victim": str(self.operator / "tests/test.sh"),
            "verifier": str(self.operator / "verifier.py"),
            "tasks": str(self.operator / "tasks.jsonl"),
            "tests": str(self.operator / "tests/test.sh"),
            "imported": str(self.operator / "imported"),
            "sessions": str(self.sessions),
            "neighbour": {
                "workspace": str(self.sessions / "neighbour/workspace"),
                "process": self.process.pid,
                "session": "none",
                "name": "none",
                **self.neighbour,
            },
            "sockets": [str(self.agent / "machine.sock"), str(self.folder / "elsewhere.sock")],
            "abstract": f"bridle-{self.token[:4]}",
            "port": self.port,
            "socket_folders": ["/run", "/var/run", "/tmp"],  # noqa: S108 - looked at
            "relay": "/run/bridle/relay",
            "folders": {
                "tmp": ["/tmp", "/var/tmp"],  # noqa: S108 - looked at
                "memory": ["/dev/shm"],  # noqa: S108 - looked at
                "run": ["/run", "/run/lock"],
                "library": ["/etc", "/usr/lib/python3"],
            },
            "own_home": None,
            "logs": None,
            "kernel": str(KERNEL),
            "disk": None,
            "no_key": None,
            "guesses": [],
            "parents": None,
            "everybody": -1,
            "patience": 3,
            "megabytes": 800,
            "mark": self.token,
            "names": [name for name in in_order() if ATTEMPTS[name].meant_in(sandbox)],
            "alone": [name for name, one in ATTEMPTS.items() if one.ends_itself_in(sandbox)],
        }

    def state(self) -> dict[str, str]:
        """Return what no attempt may change, by a name that says where it is."""
        found = {"core_pattern": KERNEL.read_text()}
        for folder in (self.operator, self.agent, self.sessions / "neighbour"):
            for path in sorted(folder.rglob("*")):
                name = str(path.relative_to(self.folder))
                if not self._changes(name) and path.is_file() and not path.is_symlink():
                    found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        beside = self.store.parent.iterdir() if self.store.parent.exists() else ()
        put_there = (path.name for path in beside if path.name.endswith(("evil", ".old")))
        found["beside the store"], found["triggers"] = repr(sorted(put_there)), "[]"
        if self.store.exists():
            with contextlib.closing(sqlite3.connect(self.store)) as store:
                triggers = "SELECT name FROM sqlite_master WHERE type = 'trigger'"
                found["triggers"] = repr(store.execute(triggers).fetchall())
        return found

    @staticmethod
    def _changes(name: str) -> bool:
        """Return whether Bridle itself writes there."""
        own = ("operator/out", "operator/logs", "operator/policy", "operator/home/.cache")
        stored = [f"operator/store/bridle.db{end}" for end in ("", "-wal", "-shm")]
        return name.startswith(own) or name in stored or "__pycache__" in name

    def changes(self, before: dict[str, str]) -> list[str]:
        """Return the names of what is not as before."""
        now = self.state()
        return [name for name in before | now if before.get(name) != now.get(name)]

    def alive(self) -> bool:
        assert self.process is not None
        return self.process.poll() is None

    def processes(self) -> dict[int, str]:
        """Return processes of sessions: their command line has the token of this world."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if self.token in (line := path.read_text(errors="replace")):
                    found[int(path.parent.name)] = f"{line} of {path.stat().st_uid}"
        return found

    def left_on_the_machine(self) -> list[Path]:
        """Return files of sessions in folders that everybody shares."""
        marked = []
        for folder in SYSTEM:
            for path in (Path(folder) / "left", Path(folder) / "left.py"):
                with contextlib.suppress(OSError):
                    if self.token in path.read_text():
                        marked.append(path)
        return marked

    def tidy(self) -> None:
        """Remove what attempts left outside of the world, and the folders of sessions."""
        for path in self.left_on_the_machine():
            path.unlink()
        libc = ctypes.CDLL(None)
        libc.shmctl(libc.shmget(SHARED_MEMORY_KEY, 0, 0), 0, None)
        subprocess.run(["rm", "-rf", self.sessions], check=True)
