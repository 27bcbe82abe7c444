"""Whole runs of the attempts: ``bridle rollout`` or ``bridle train`` as an operator starts them.

The engine and the proxy are processes too, started by the commands of ``docker-compose.yml``; with
the entry ``stack``, ``bridle train`` starts its own. Every session tries everything, next to others
that do the same; attempts that end their session have sessions of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from security.attempts import ATTEMPTS
from security.stage.world import HERE, World, canary

SOURCE = HERE.parents[2] / "src"
ORDINARY = 12345
USERS = "20001-20064"
FULL = 4
"""Number of sessions that try everything; training groups them by two."""
CAPABILITIES = "+setuid,+setgid,+chown,+kill"


@dataclass
class Cell:
    """A place in the matrix, and the processes of its run."""

    sandbox: str
    """``process``, ``forked``, ``users`` or ``container``."""
    entry: str
    """``rollout``, ``train``, or ``stack`` for a ``train`` that starts engine and proxy itself."""
    user: str
    """``root`` or ``ordinary``."""
    policy: Path
    """The model; its tokenizer is the scripted engine's, too."""
    engine: str = ""
    """The URL of a scripted engine, for ``rollout``."""
    world: World = field(default_factory=lambda: World(Path()))
    proxy: str = ""
    done: subprocess.CompletedProcess[str] | None = None

    @property
    def out(self) -> Path:
        return self.world.operator / "out"

    @property
    def alone(self) -> list[str]:
        meant = {name: one for name, one in ATTEMPTS.items() if one.meant_in(self.sandbox)}
        alone = (name for name, one in meant.items() if one.ends_itself_in(self.sandbox))
        return [name for name in alone if not ATTEMPTS[name].open_in(self.sandbox, self.user)]

    def prefix(self) -> list[str]:
        """Return the command that makes a process the user's."""
        if self.user == "root" or os.getuid() != 0:
            return []
        command = every_user()
        if self.sandbox == "container":
            address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
            command[-1] = f"--groups={os.stat(address.removeprefix('unix://')).st_gid}"
        if self.sandbox == "users":
            command += [f"--inh-caps=-all,{CAPABILITIES}", f"--ambient-caps=-all,{CAPABILITIES}"]
            command.append(f"--bounding-set=-all,{CAPABILITIES},+setpcap")
        return command

    def environment(self) -> dict[str, str]:
        found = self.world.environment() | {"BRIDLE_STORE": str(self.world.store)}
        if self.user == "ordinary" and os.getuid() == 0:
            packages = [path for path in sys.path if path.endswith("-packages")]
            found["PYTHONPATH"] = os.pathsep.join([str(SOURCE), *packages])
        if self.sandbox == "users":
            found["BRIDLE_SESSION_USERS"] = USERS
        return found

    def command(self, *arguments: object) -> list[str]:
        # Under the fixture `warm_start`, sys.executable forks a warm process.
        python = sys.executable if not self.prefix() else self.world.python
        return [*self.prefix(), python, "-m", "bridle", *map(str, arguments)]

    @contextlib.contextmanager
    def service(self, url: str, *arguments: object) -> Iterator[None]:
        """Run a command for as long, which serves at a URL."""
        port = url.rpartition(":")[2]
        with (self.world.folder / f"{arguments[0]}.log").open("w") as log:
            process = subprocess.Popen(
                self.command(*arguments, f"--port={port}"),
                env=self.environment(),
                cwd=self.world.operator,
                stdout=log,
                stderr=log,
            )
        try:
            until_served(url, process, Path(log.name))
            yield
        finally:
            process.terminate()
            process.wait()

    @contextlib.contextmanager
    def services(self) -> Iterator[list[str]]:
        """Start engine and proxy; yield the arguments that name them."""
        if self.entry == "stack":
            yield []
            return
        upstream, self.proxy = self.engine, f"http://127.0.0.1:{free_port()}"
        with contextlib.ExitStack() as stack:
            if self.entry == "train":
                upstream = f"http://127.0.0.1:{free_port()}"
                serving = ("embedded", f"--model={self.model}", "--served-model-name=policy")
                stack.enter_context(self.service(upstream, "engine", *serving))
            named = ("--upstream", upstream, "--tokenizer", self.model)
            stack.enter_context(self.service(self.proxy, "proxy", *named))
            self.add_a_neighbour()
            if self.entry == "rollout":
                yield [f"--proxy={self.proxy}"]
            else:
                stored = f"--set=services.store={self.world.store}"
                yield [f"--engine-url={upstream}", f"--proxy-url={self.proxy}", stored]

    @property
    def model(self) -> Path:
        return self.world.operator / "policy"

    def ask(self, method: str, path: str, key: str, **fields: Any) -> Any:
        reply = httpx.request(
            method,
            self.proxy + path,
            headers={"authorization": f"Bearer {key}"},
            trust_env=False,
            timeout=60,
            **fields,
        )
        reply.raise_for_status()
        return reply.json()

    def add_a_neighbour(self) -> None:
        """Open a session beside the run's, with a secret in its record."""
        made = self.ask("POST", "/bridle/v1/sessions", self.world.key, json={})
        message = {"role": "user", "content": canary()}
        body = {"model": "policy", "max_tokens": 2, "messages": [message]}
        self.ask("POST", f"/s/{made['id']}/v1/chat/completions", made["key"], json=body)
        self.world.neighbour = {"session": made["id"], "name": made["id"]}

    def tasks(self) -> list[dict[str, Any]]:
        full = FULL if self.entry == "rollout" else FULL // 2
        prompts = [f"Question {number}, {self.world.token}?" for number in range(full)]
        prompts += [f"{name} {self.world.token}" for name in self.alone]
        made = []
        for number, prompt in enumerate(prompts):
            task: dict[str, Any] = {"id": f"t{number}", "prompt": prompt}
            task["payload"] = {"answer": canary()}
            task["timeout_s"] = 60 if number < full else 15
            if self.sandbox == "container":
                parts = [self.world.agent / "attack.py", self.world.agent / "targets.json"]
                parts += (self.world.agent / "attempts").glob("*.py")
                names = {
                    str(part.relative_to(self.world.agent)): part.read_text() for part in parts
                }
                task |= {"files": names, "container": {"memory_mb": 300, "pids": 200}}
            made.append(task)
        return made

    def arguments(self) -> list[str]:
        operator = self.world.operator
        python = "python3" if self.sandbox == "container" else self.world.python
        script = "attack.py" if self.sandbox == "container" else self.world.agent / "attack.py"
        named = f"{python} {script} {{prompt}}"
        sandbox = "process" if self.sandbox == "users" else self.sandbox
        found = [
            *("--agent", str(script) if sandbox == "forked" else named),
            *("--tasks", str(operator / "tasks.jsonl")),
            *("--verifier", f"{operator / 'verifier.py'}:check"),
            f"--set=agent.sandbox={sandbox}",
            f"--set=agent.directory={self.world.sessions}",
            *("--set=agent.bounds.processes=200", "--set=agent.bounds.memory_mb=300"),
        ]
        if self.entry == "rollout":
            return ["rollout", *found, "--parallel=3", "--json"]
        groups = FULL // 2 + len(self.alone)
        return [
            *("train", "--policy", str(self.model), "--out", str(self.out), "--steps=1", *found),
            *(f"--set=groups.per_step={groups}", "--set=groups.size=2", "--set=agent.parallel=3"),
            "--set=training.filters.drop_zero_variance=false",
        ]

    @contextlib.contextmanager
    def played(self) -> Iterator[Cell]:
        """Run it; what it left is there while the context lasts."""
        folder = Path(tempfile.mkdtemp(prefix="bridle-attack-", dir="/var/tmp"))
        self.world.folder, self.world.prefix = folder, self.prefix()
        self.world.owner = ORDINARY if self.prefix() else os.getuid()
        self.world.python = python_for(every_user() if self.sandbox == "users" else self.prefix())
        self.world.store = folder / "operator/store/bridle.db"
        if self.entry == "stack":
            self.world.store = self.out / "bridle.db"
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, folder)
            stack.callback(self.world.tidy)
            stack.enter_context(self.world.lived_in())
            shutil.copytree(self.policy, self.model)
            self.world.own()
            services = stack.enter_context(self.services())
            targets = self.world.targets(self.sandbox)
            (self.world.agent / "targets.json").write_text(json.dumps(targets))
            tasks = self.tasks()
            lines = (json.dumps(task) + "\n" for task in tasks)
            (self.world.operator / "tasks.jsonl").write_text("".join(lines))
            self.world.own()
            self.before = self.world.state()
            self.done = subprocess.run(
                self.command(*self.arguments(), *services),
                env=self.environment(),
                cwd=self.world.operator,
                capture_output=True,
                text=True,
                check=False,
            )
            yield self


def until_served(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until anything answers at a URL."""
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(url + "/health", trust_env=False)
            return
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def every_user() -> list[str]:
    """Return the command of a user without any rights."""
    return ["setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups"]


def python_for(prefix: Sequence[str]) -> str:
    """Return an interpreter of this version that the user may start, or ``""``."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = str(Path(sys.prefix) / "bin/python")
    for program in (own, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        with contextlib.suppress(OSError):
            # setpriv itself still has root's rights when it starts a program.
            command = [*prefix, "sh", "-c", '"$0" -c ""', program]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return program
    return ""
