"""A process per session on this machine, inside walls (``walls.py``).

Inside, only the session's processes exist: a harness cannot read another process's environment,
command line or memory, and the kernel ends all that it started when it ends. It sees the system,
the programs and files that its command names, and its own folders. With ``confined`` the network
inside is a loopback on which there is the session's URL and nothing else.

Without walls, which the user must permit, a session is this process's user, or a user of its own
(``users.py``), and leftovers are found by a mark in the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from bridle.harnesses.install import NotLaunchable
from bridle.harnesses.permissions import shown_paths
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
from bridle.harnesses.sandboxes.bounds import Bounds, Watch
from bridle.harnesses.sandboxes.entrance import (
    INNER_PORT,
    Entrance,
    Report,
    environment_file,
    threshold,
)
from bridle.harnesses.sandboxes.folder import Folder, place_in
from bridle.harnesses.sandboxes.leftovers import remove_folder
from bridle.harnesses.sandboxes.programs import named_by
from bridle.harnesses.sandboxes.relay import Relay
from bridle.harnesses.sandboxes.supervise import environment_of, new_mark, supervise
from bridle.harnesses.sandboxes.users import SessionUsers, as_user, one_of
from bridle.harnesses.sandboxes.walls import Walls, walled

_NO_COMMAND: Final = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOEXEC}
)


@dataclass(frozen=True, slots=True)
class Enclosure:
    """The separation of a session's processes from the machine."""

    temporary: Path
    """The session's folder for temporary files. With walls it is ``/tmp`` inside."""
    walled: bool = False
    """True if processes run inside walls."""
    hidden: tuple[Path, ...] = ()
    """Files and folders of this machine that are not visible inside."""
    user: int | None = None
    """The user that processes run as; ``None`` means this process's own."""
    relay: Relay | None = None
    """The way to the session's URLs from a network of its own; ``None`` means the machine's."""

    bounds: Bounds = field(default_factory=Bounds)
    """The bounds of the session's processes."""

    async def begin(self, report: Report, watch: Watch) -> None:
        """Serve the session's URLs in the network of a process that starts, and measure it."""
        if report.started:
            watch.begin(report.process)
        if report.listener is not None and self.relay is not None:
            await self.relay.listen(report.listener)


class ProcessSandbox(Folder):
    """Starts each launch as the leader of its own session and process group."""

    def __init__(
        self, directory: Path, enclosure: Enclosure | None = None, seen_as: Path | None = None
    ) -> None:
        """Create the sandbox. Without an ``enclosure``, processes run without isolation.

        Only walls can show the folder under another path, ``seen_as``.
        """
        enclosure = enclosure or Enclosure(directory / "tmp")
        super().__init__(directory, enclosure.user, seen_as if enclosure.walled else None)
        self._enclosure = enclosure
        temporary = "/tmp" if enclosure.walled else str(enclosure.temporary)  # noqa: S108
        inside = {**self._place.environment, "TMPDIR": temporary}
        self._place = replace(self._place, environment=inside)

    def url(self, url: str) -> str:
        if self._enclosure.relay is None:
            return url
        return urlsplit(url)._replace(scheme="http", netloc=f"127.0.0.1:{INNER_PORT}").geturl()

    def _roots(self) -> tuple[Path, ...]:
        return (*super()._roots(), self._enclosure.temporary)

    def _stripped(self) -> tuple[Path, ...]:
        # The next launch's walls are built in the temporary folder: no link may lead them out.
        return (*super()._stripped(), self._enclosure.temporary)

    async def exec(self, launch: Launch) -> ProcessResult:
        directory = Path(launch.directory or self.place.workspace)
        if not self.here(directory).is_dir():
            raise DirectoryGone(f"there is no directory {directory} to start in")
        with self.lent():
            finished = await self._exec(launch, directory)
        if launch.role == "agent":
            await asyncio.to_thread(self.tidy)
        return finished

    @contextlib.contextmanager
    def watched(self) -> Iterator[Watch]:
        """Return the measurement of a launch, which ends with the block."""
        watch = Watch(self._enclosure.bounds, (*self._roots(), self._outputs))
        try:
            yield watch
        finally:
            watch.end()

    def _walls(self, launch: Launch, *further: str) -> Walls:
        """Return the walls of a launch, whose files are ``further`` ones too."""
        program = (launch.argv[0], *launch.shown, *further)
        inside = self._place.workspace, self._place.home, self._place.logs
        own = tuple((str(self.here(path)), str(path)) for path in inside)
        # The agent may have written these files by the time a verifier runs.
        untrusted = [path for pair in own for path in pair] if launch.role == "verifier" else ()
        return Walls(
            own=own,
            tmp=str(self._enclosure.temporary),
            shown=(*named_by(program, launch.environment, untrusted), *shown_paths()),
            hidden=tuple(str(path.absolute()) for path in self._enclosure.hidden),
            network=self._enclosure.relay is not None,
            user=self._user,
        )

    async def _exec(self, launch: Launch, directory: Path) -> ProcessResult:
        if self._enclosure.walled:
            return await self._exec_walled(launch, directory)
        mark = new_mark()
        stdout, stderr = self.outputs(launch.role)
        started_at = time.monotonic()
        argv = launch.argv if self._user is None else as_user(self._user, launch.argv)
        variables = environment_of(launch, directory, mark)
        process = await _spawn(launch, argv, directory, variables, (stdout, stderr))
        with self.watched() as watch:
            if self._user is not None:
                watch.begin_user(self._user)
            code = await supervise(_Process(process), mark, launch.timeout_s, launch.grace_s)
        seconds = time.monotonic() - started_at
        outputs = Captured.of(stdout), Captured.of(stderr)
        return ProcessResult(code, seconds, *outputs, watch.exceeded)

    async def _exec_walled(self, launch: Launch, directory: Path) -> ProcessResult:
        stdout, stderr = self.outputs(launch.role)
        walls = self._walls(launch)
        started_at = time.monotonic()
        try:
            variables = environment_file(environment_of(launch, directory, None))
        except ValueError as error:
            raise _not_started(launch, error) from error
        argv = launch.argv if self._user is None else as_user(self._user, launch.argv)
        reading, writing = os.pipe()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with (
            os.fdopen(reading, "rb") as status,
            contextlib.closing(Entrance(ours)) as entrance,
            self.watched() as watch,
        ):
            options = ("--chdir", str(directory), "--json-status-fd", str(writing))
            before = threshold(theirs, variables, walls.network)
            command = (*walls.command(*options), *before, *argv)
            passed = (writing, variables, theirs.fileno())
            try:
                process = await _spawn(launch, command, None, {}, (stdout, stderr), passed)
            finally:
                os.close(writing)
                os.close(variables)
                theirs.close()
            child = _Walled(process)
            entering = asyncio.create_task(self._entering(child, entrance, status.fileno(), watch))
            try:
                code = await supervise(child, None, launch.timeout_s, launch.grace_s)
                entered = await entering
            finally:
                entering.cancel()
            if (failure := entrance.failure()) is not None:
                raise _not_started(launch, failure) from failure
        seconds = time.monotonic() - started_at
        outputs = Captured.of(stdout), Captured.of(stderr)
        result = ProcessResult(code, seconds, *outputs, watch.exceeded)
        if not entered and code is not None:
            raise SandboxLost(f"cannot wall off a session: {result.stderr.tail.strip()[-300:]}")
        return result

    async def _entering(
        self, child: _Walled, entrance: Entrance, status: int, watch: Watch
    ) -> bool:
        """Serve the session's URLs inside as soon as its command starts; return whether it does."""
        report = await entrance.report()
        if report.started:
            child.group = report.process
            child.first = msgspec.json.decode(os.read(status, 4096).splitlines()[0])["child-pid"]
        await self._enclosure.begin(report, watch)
        return report.started


class ProcessProvider:
    """Opens process sandboxes.

    ``hidden`` files and folders of this machine, and those that a request names, are not visible
    inside. ``confined`` sandboxes reach their session's URL alone.
    """

    def __init__(self, hidden: Sequence[Path] = (), *, confined: bool = False) -> None:
        """Raise :class:`bridle.harnesses.sandboxes.walls.NoWalls` where there can be no walls."""
        self._hidden = tuple(hidden)
        self._confined = confined
        self._users = SessionUsers.of_environment()
        self._walled = walled(self._users)

    @contextlib.asynccontextmanager
    async def open(self, request: SandboxRequest) -> AsyncIterator[ProcessSandbox]:
        refuse_container(request, "process")
        async with enclosed(
            request, self._hidden, self._users, walled=self._walled, confined=self._confined
        ) as enclosure:
            yield ProcessSandbox(request.directory, enclosure, request.seen_as).make()

    def expected_place(self, request: SandboxRequest) -> Place:
        refuse_container(request, "process")
        return place_in(request.directory)

    async def close(self) -> None:
        """Do nothing: nothing outlives a launch."""


@contextlib.asynccontextmanager
async def enclosed(
    request: SandboxRequest,
    hidden: Sequence[Path],
    users: SessionUsers | None,
    *,
    walled: bool,
    confined: bool,
) -> AsyncIterator[Enclosure]:
    """Yield the enclosure of one session. Its folder for temporary files is removed at the end."""
    relay = Relay(request.urls.values(), ()) if walled and confined else None
    folder = Path(tempfile.mkdtemp(prefix="bridle-session-"))
    try:
        with one_of(users) as user:
            os.chmod(folder, 0o711 if user else 0o700)
            hides = (*hidden, *request.hidden)
            yield Enclosure(folder / "tmp", walled, hides, user, relay, request.bounds)
    finally:
        if relay is not None:
            await relay.close()
        await asyncio.to_thread(remove_folder, folder)


async def _spawn(
    launch: Launch,
    argv: Sequence[str],
    directory: Path | None,
    environment: Mapping[str, str],
    outputs: tuple[Path, Path],
    passed: Sequence[int] = (),
) -> asyncio.subprocess.Process:
    stdout, stderr = outputs
    with stdout.open("wb") as out, stderr.open("wb") as err:
        try:
            return await asyncio.create_subprocess_exec(
                *argv,
                cwd=directory,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                pass_fds=passed,
            )
        except (OSError, ValueError) as error:
            raise _not_started(launch, error) from error


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


class _Walled(_Process):
    """A command inside walls. Its numbers are unknown until it has reported its start."""

    first: int | None = None
    """The first process of the walls; all that is in them ends with it."""
    group: int | None = None
    """The process group of the command."""

    def signal_group(self, number: int) -> None:
        if self._process.returncode is not None:
            return  # All has ended, and its numbers may be others'.
        with contextlib.suppress(ProcessLookupError):
            if self.first is None or self.group is None:
                self._process.kill()
            elif number == signal.SIGKILL:
                os.kill(self.first, number)
            else:
                os.killpg(self.group, number)
