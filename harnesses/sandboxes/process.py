"""A process per session on this machine, in namespaces of its own where the machine permits it.

Inside, only the session's processes exist: a harness cannot read another process's environment,
command line or memory, and the kernel ends all that it started when it ends. All files but the
session's own are read-only, and the private ones do not exist there (``walls.py``). Where that is
not permitted (``isolation.missing``), leftovers are found by a mark in the environment. Temporary
files go to a folder of the session's own. With ``confined`` the network inside is a loopback on
which there is the session's URL and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from bridle.harnesses.install import NotLaunchable
from bridle.harnesses.sandboxes.base import (
    Captured,
    DirectoryGone,
    Launch,
    LaunchRefused,
    Place,
    ProcessResult,
    SandboxLost,
    SandboxRequest,
    refuse_container,
)
from bridle.harnesses.sandboxes.folder import Folder, place_in
from bridle.harnesses.sandboxes.isolation import (
    INNER_PORT,
    StartFailure,
    Walls,
    below_tmp,
    missing,
    namespaced,
    network_missing,
    started,
)
from bridle.harnesses.sandboxes.leftovers import remove_folder
from bridle.harnesses.sandboxes.relay import Relay
from bridle.harnesses.sandboxes.supervise import environment_of, new_mark, supervise
from bridle.harnesses.sandboxes.users import SessionUsers, as_user, one_of

_NO_COMMAND: Final = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOEXEC}
)


@dataclass(frozen=True, slots=True)
class Enclosure:
    """The separation of a session's processes from the machine."""

    temporary: Path
    """The session's folder for temporary files. With walls it is ``/tmp`` inside."""
    walled: bool = False
    """Whether processes get namespaces of their own, and see the files of ``walls.py``."""
    hidden: tuple[Path, ...] = ()
    """Files and folders of this machine that are not visible inside."""
    user: int | None = None
    """The user that processes run as; ``None`` means this process's own."""
    way_out: Path | None = None
    """The Unix socket of the session's relay; ``None`` means the machine's network."""


class ProcessSandbox(Folder):
    """Starts each launch as the leader of its own session and process group."""

    def __init__(self, directory: Path, enclosure: Enclosure | None = None) -> None:
        """Create the provider. Without an ``enclosure``, processes run without isolation."""
        enclosure = enclosure or Enclosure(directory / "tmp")
        super().__init__(directory, enclosure.user)
        self._enclosure = enclosure
        temporary = "/tmp" if enclosure.walled else str(enclosure.temporary)  # noqa: S108
        inside = {**self._place.environment, "TMPDIR": temporary}
        self._place = replace(self._place, environment=inside)

    def url(self, url: str) -> str:
        if self._enclosure.way_out is None:
            return url
        return urlsplit(url)._replace(scheme="http", netloc=f"127.0.0.1:{INNER_PORT}").geturl()

    def _roots(self) -> tuple[Path, ...]:
        return (*super()._roots(), self._enclosure.temporary)

    async def exec(self, launch: Launch) -> ProcessResult:
        directory = Path(launch.directory or self.place.workspace)
        if not directory.is_dir():  # noqa: ASYNC240 - one stat of a local file
            raise DirectoryGone(f"there is no directory {directory} to start in")
        with self.lent():
            finished = await self._exec(launch, directory)
        if launch.role == "agent":
            await asyncio.to_thread(self.tidy)
        return finished

    def _walls(self, launch: Launch, further: Iterable[str] = ()) -> Walls | None:
        """Return the files that a launch sees.

        Return ``None`` if this machine has no namespaces for it.
        """
        enclosure = self._enclosure
        if not enclosure.walled:
            return None
        named = (*launch.argv, *launch.environment.values(), *further)
        way_out = [] if enclosure.way_out is None else [str(enclosure.way_out)]
        roots = super()._roots()
        return Walls(
            own=tuple(str(path) for path in roots),
            tmp=str(enclosure.temporary),
            shown=(*below_tmp(named), *way_out),
            hidden=tuple(str(path.absolute()) for path in enclosure.hidden),
        )

    async def _exec(self, launch: Launch, directory: Path) -> ProcessResult:
        mark = new_mark()
        stdout, stderr = self.outputs(launch.role)
        walls = self._walls(launch)
        started_at = time.monotonic()
        reading, writing = os.pipe()
        with (
            os.fdopen(reading, "rb") as said,
            stdout.open("wb") as out,
            stderr.open("wb") as err,
        ):
            argv = launch.argv
            if self._user is not None:
                argv = as_user(self._user, argv)
            if walls is not None:
                way_out = self._enclosure.way_out
                argv = namespaced(argv, writing, walls, str(directory), way_out)
            try:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    cwd=directory,
                    env=environment_of(launch, directory, mark),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    pass_fds=() if walls is None else (writing,),
                )
            except (OSError, ValueError) as error:
                raise _not_started(launch, error) from error
            finally:
                os.close(writing)
            code = await supervise(_Process(process), mark, launch.timeout_s, launch.grace_s)
            try:
                started(b"" if walls is None else said.read())
            except StartFailure as failure:
                raise _not_started(launch, failure.error) from failure
        seconds = time.monotonic() - started_at
        return ProcessResult(code, seconds, Captured.of(stdout), Captured.of(stderr))


class ProcessProvider:
    """Opens process sandboxes.

    ``hidden`` files and folders of this machine, and those that a request names, are not visible
    inside. ``confined`` sandboxes reach their session's URL alone, where the machine permits it.
    """

    def __init__(self, hidden: Sequence[Path] = (), *, confined: bool = False) -> None:
        self._hidden = tuple(hidden)
        self._confined = confined
        self._users = SessionUsers.of_environment()

    @contextlib.asynccontextmanager
    async def open(self, request: SandboxRequest) -> AsyncIterator[ProcessSandbox]:
        refuse_container(request, "process")
        async with enclosed(request, self._hidden, self._users) as enclosure:
            # Not in the session's folder: a socket's path has at most 107 characters.
            socket = enclosure.temporary.parent / "session"
            async with self._way_out(request, socket) as way_out:
                yield ProcessSandbox(request.directory, replace(enclosure, way_out=way_out)).make()

    @contextlib.asynccontextmanager
    async def _way_out(self, request: SandboxRequest, socket: Path) -> AsyncIterator[Path | None]:
        """Yield the socket of the session's relay, or ``None`` if it gets no network of its own."""
        confined = self._confined and _may_isolate(self._users)
        if not confined or await asyncio.to_thread(network_missing) is not None:
            yield None
            return
        relay = Relay(request.urls.values(), ())
        await relay.start(socket)
        try:
            yield socket
        finally:
            await relay.close()

    def expected_place(self, request: SandboxRequest) -> Place:
        refuse_container(request, "process")
        return place_in(request.directory)

    async def close(self) -> None:
        """Do nothing: nothing outlives a launch."""


@contextlib.asynccontextmanager
async def enclosed(
    request: SandboxRequest, hidden: Sequence[Path], users: SessionUsers | None
) -> AsyncIterator[Enclosure]:
    """Yield the enclosure of one session. Its folder for temporary files is removed at the end."""
    walled = await apart(users)
    folder = Path(tempfile.mkdtemp(prefix="bridle-session-"))
    try:
        with one_of(users) as user:
            os.chmod(folder, 0o711 if user else 0o700)
            yield Enclosure(folder / "tmp", walled, (*hidden, *request.hidden), user)
    finally:
        await asyncio.to_thread(remove_folder, folder)


async def apart(users: SessionUsers | None) -> bool:
    """Return whether sessions get namespaces of their own here."""
    return _may_isolate(users) and await asyncio.to_thread(missing) is None


def _may_isolate(user: object | None) -> bool:
    """Return whether namespaces are tried.

    A user namespace knows one user, so that only root gives a session both a user and namespaces of
    its own.
    """
    return user is None or os.getuid() == 0


def _not_started(launch: Launch, error: OSError | ValueError) -> Exception:
    problem = f"cannot start {launch.argv[0]}: {error}"
    if isinstance(error, ValueError) or error.errno == errno.E2BIG:
        return LaunchRefused(problem)
    return NotLaunchable(problem) if error.errno in _NO_COMMAND else SandboxLost(problem)


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def wait(self) -> int:
        return await self._process.wait()

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
