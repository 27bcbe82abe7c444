"""Python agent scripts, forked from a process that has imported their libraries once.

Starting an interpreter and importing an agent framework costs seconds of CPU; forking a process
that has done so costs milliseconds. The script runs unmodified, as ``__main__``, with its own
arguments, environment, directory and output files (see ``zygote.py`` for how, and its limits).
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import msgspec

from bridle.harnesses.environment import allowed
from bridle.harnesses.install import NotLaunchable
from bridle.harnesses.sandboxes.base import (
    Captured,
    Launch,
    Place,
    ProcessResult,
    SandboxLost,
    SandboxRequest,
    refuse_container,
)
from bridle.harnesses.sandboxes.bounds import Watch
from bridle.harnesses.sandboxes.entrance import INNER_PORT, Entrance
from bridle.harnesses.sandboxes.folder import place_in
from bridle.harnesses.sandboxes.process import (
    Enclosure,
    ProcessSandbox,
    enclosed,
)
from bridle.harnesses.sandboxes.supervise import environment_of, new_mark, supervise
from bridle.harnesses.sandboxes.users import SessionUsers
from bridle.harnesses.sandboxes.walls import Walls, walled

log = logging.getLogger(__name__)

_NO_WALLS: Final = 127
"""The exit code of a child that could not enter walls."""
_ZYGOTE = Path(__file__).with_name("zygote.py")


class ForkedProvider:
    """A provider of sandboxes that run agents in forks of one warm process.

    The agents have the form ``(python, script, *arguments)``, or ``(script, *arguments)`` where the
    script's first line names that Python.

    The libraries to import ahead are those of the first script's own import statements and, after
    its first successful run, those that it imported late; ``preload`` names further ones. ``fresh``
    names packages that every run imports for itself, because they read its environment while they
    are imported. ``environment`` is for packages that do so and are imported ahead. When the warm
    process is lost, the runs in it raise :class:`SandboxLost` and the next run starts another.
    """

    def __init__(
        self,
        preload: Sequence[str] = (),
        *,
        python: str = sys.executable,
        fresh: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        start_timeout_s: float = 120.0,
        hidden: Sequence[Path] = (),
        confined: bool = False,
    ) -> None:
        """Take ``hidden`` and ``confined`` as ``ProcessProvider`` of ``process.py`` does."""
        self.python = python
        self._preload = tuple(preload)
        self._fresh = tuple(fresh)
        self._environment = dict(environment)
        self._start_timeout_s = start_timeout_s
        self._hidden = tuple(hidden)
        self._users = SessionUsers.of_environment()
        self._walled = walled(self._users)
        self._confined = confined
        self._zygote: Zygote | None = None
        self._starting = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def open(self, request: SandboxRequest) -> AsyncIterator[ForkedSandbox]:
        refuse_container(request, "forked")
        async with enclosed(
            request, self._hidden, self._users, walled=self._walled, confined=self._confined
        ) as enclosure:
            yield ForkedSandbox(request.directory, self, enclosure, request.seen_as).make()

    def expected_place(self, request: SandboxRequest) -> Place:
        refuse_container(request, "forked")
        return place_in(request.directory)

    async def close(self) -> None:
        """End the warm process and whatever still runs in it."""
        if self._zygote is not None:
            await self._zygote.close()
            self._zygote = None

    async def warm(self, script: Path) -> Zygote:
        """Return the warm process, with the modules that ``script`` imports."""
        async with self._starting:
            if self._zygote is None or self._zygote.lost:
                found = [
                    module
                    for module in imports_of(script)
                    if module.partition(".")[0] not in self._fresh
                ]
                modules = dict.fromkeys((*self._preload, *found))
                starting = Zygote.start(
                    self.python,
                    tuple(modules),
                    self._fresh,
                    self._environment,
                )
                try:
                    self._zygote = await asyncio.wait_for(starting, self._start_timeout_s)
                except TimeoutError as error:
                    raise SandboxLost(
                        f"importing {', '.join(modules)} took over {self._start_timeout_s:g} s"
                    ) from error
            return self._zygote


class ForkedSandbox(ProcessSandbox):
    """A session whose agent is forked from its provider's warm process.

    Everything else in it runs as a process of its own.
    """

    def __init__(
        self,
        directory: Path,
        provider: ForkedProvider,
        enclosure: Enclosure,
        seen_as: Path | None = None,
    ) -> None:
        super().__init__(directory, enclosure, seen_as)
        self._provider = provider

    async def exec(self, launch: Launch) -> ProcessResult:
        if launch.role != "agent":
            return await super().exec(launch)
        argv, python = launch.argv, self._provider.python
        if argv and interpreter_of(Path(argv[0])) == python:
            argv = (python, *argv)
        if len(argv) < 2 or argv[0] != python:
            raise NotLaunchable(
                f"a forked sandbox runs Python scripts of {python}, not {launch.argv[:2]}"
            )
        script = Path(argv[1])
        if not script.is_file():  # noqa: ASYNC240 - one stat of a local file
            raise NotLaunchable(f"no such script: {script}")
        zygote = await self._provider.warm(script)
        with self.lent():
            finished = await self._forked(zygote, argv, launch)
        await asyncio.to_thread(self.tidy)
        return finished

    async def _forked(self, zygote: Zygote, argv: Sequence[str], launch: Launch) -> ProcessResult:
        stdout, stderr = self.outputs(launch.role)
        directory = Path(launch.directory or self.place.workspace)
        mark = None if self._enclosure.walled else new_mark()
        asked = {
            "argv": list(argv[1:]),
            "cwd": str(directory),
            "env": environment_of(launch, directory, mark),
            "stdout": str(stdout.absolute()),
            "stderr": str(stderr.absolute()),
            **({} if self._user is None else {"uid": self._user}),
        }
        started_at = time.monotonic()
        with self.watched() as watch:
            if self._enclosure.walled:
                walls = self._walls(launch, *argv[:2], *zygote.search_path)
                code = await self._inside(zygote, asked, launch, walls, watch)
            else:
                child = zygote.fork(asked)
                if self._user is not None:
                    watch.begin_user(self._user)
                code = await supervise(child, mark, launch.timeout_s, launch.grace_s)
        seconds = time.monotonic() - started_at
        outputs = Captured.of(stdout), Captured.of(stderr)
        return ProcessResult(code, seconds, *outputs, watch.exceeded)

    async def _inside(
        self,
        zygote: Zygote,
        asked: Mapping[str, Any],
        launch: Launch,
        walls: Walls,
        watch: Watch,
    ) -> int | None:
        """Run the script inside walls, and return its exit code, or ``None`` at the time limit."""
        with _Door(self._enclosure.temporary.parent / "door") as door:
            port = INNER_PORT if walls.network else 0
            walled = {"command": walls.held(), "door": door.path, "port": port}
            child = zygote.fork({**asked, "walls": walled})
            entering = asyncio.create_task(door.opened(self._enclosure, watch))
            try:
                code = await supervise(child, None, launch.timeout_s, launch.grace_s)
                if code == _NO_WALLS and (why := await entering):
                    raise SandboxLost(f"cannot wall off a session: {why}")
            finally:
                entering.cancel()
        return code


class _Door:
    """The Unix socket at which a forked session reports its start."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(self.path)
        self._socket.listen(1)
        self._socket.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    async def opened(self, enclosure: Enclosure, watch: Watch) -> str:
        """Serve the session's URLs inside, or return the reason why there are no walls."""
        connection, _ = await asyncio.get_running_loop().sock_accept(self._socket)
        with contextlib.closing(Entrance(connection)) as entrance:
            report = await entrance.report()
        await enclosure.begin(report, watch)
        return "" if report.started else report.text


def interpreter_of(script: Path) -> str | None:
    """Return the program that the first line of ``script`` names, without arguments of its own."""
    try:
        with script.open("rb") as file:
            line = file.readline(4096)
    except OSError:
        return None
    return os.fsdecode(line[2:].strip()) if line.startswith(b"#!") else None


def imports_of(script: Path) -> list[str]:
    """Return the modules that ``script`` imports anywhere and that do not lie beside it, in order.

    A script that does not parse imports nothing; running it reports the error.
    """
    try:
        tree = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError):
        return []
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(dict.fromkeys(alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found[node.module] = None
    beside = script.resolve().parent

    def is_beside(module: str) -> bool:
        top = module.partition(".")[0]
        return (beside / f"{top}.py").exists() or (beside / top).is_dir()

    return [module for module in found if module != "__future__" and not is_beside(module)]


class Zygote:
    """This process's end of the socket to a warm process."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        process: asyncio.subprocess.Process | None = None,
    ) -> None:
        """``process`` is the warm process, if it is one of this machine's."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._pids: dict[int, int] = {}
        self._next_id = 0
        self.search_path: tuple[str, ...] = ()
        """The folders that its sessions import from."""
        self._listening: asyncio.Task[None] | None = None
        self.lost = False

    @classmethod
    async def start(
        cls,
        python: str,
        modules: Sequence[str],
        fresh: Sequence[str],
        environment: Mapping[str, str],
    ) -> Zygote:
        environment = {**allowed(os.environ), **environment}
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(python, str(_ZYGOTE), str(theirs.fileno()), ",".join(fresh), *modules),
                    env=environment,
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise NotLaunchable(f"cannot start {python}: {error}") from error
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 24)
        zygote = cls(reader, writer, process)
        zygote.search_path = tuple(environment.get("PYTHONPATH", "").split(os.pathsep))
        try:
            await zygote.greet()
        except BaseException:
            await zygote.close()
            raise
        return zygote

    async def greet(self) -> None:
        """Wait until its libraries are imported. Raise ``SandboxLost`` and ``NotLaunchable``."""
        line = await self._reader.readline()
        if not line:
            raise SandboxLost("the warm process ended while importing; see its stderr")
        greeting = msgspec.json.decode(line)
        for failure in greeting["failed"]:
            log.warning("could not import ahead: %s", failure)
        if greeting["threads"] > 1:
            raise NotLaunchable(
                f"importing the agent's libraries started {greeting['threads'] - 1} threads, "
                "which a forked copy would lack; use the process sandbox for this agent"
            )
        self._listening = asyncio.create_task(self._listen())

    def fork(self, request: dict[str, Any]) -> _Child:
        self._next_id += 1
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ends[self._next_id] = ended
        self.send({"op": "run", "id": self._next_id, **request})
        return _Child(self, self._next_id, ended)

    def send(self, message: dict[str, Any]) -> None:
        if self.lost:
            raise SandboxLost("the warm process is gone")
        self._writer.write(msgspec.json.encode(message) + b"\n")

    async def _listen(self) -> None:
        while line := await self._reader.readline():
            message = msgspec.json.decode(line)
            if "pid" in message:
                self._pids[message["id"]] = message["pid"]
            elif "code" in message:
                del self._pids[message["id"]]
                self._ends.pop(message["id"]).set_result(message["code"])
        self.lost = True
        for pid in self._pids.values() if self._process is not None else ():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for ended in self._ends.values():
            ended.set_exception(SandboxLost("the warm process ended while the agent ran"))
        self._ends.clear()

    async def close(self) -> None:
        self._writer.close()
        if self._process is not None:
            await self._process.wait()
        if self._listening is not None:
            await self._listening


class _Child:
    def __init__(self, zygote: Zygote, identifier: int, ended: asyncio.Future[int]) -> None:
        self._zygote = zygote
        self._id = identifier
        self._ended = ended

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def signal_group(self, number: int) -> None:
        if not self._zygote.lost and not self._ended.done():
            self._zygote.send({"op": "signal", "id": self._id, "number": number})
