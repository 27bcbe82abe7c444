"""A process per session on this machine, in namespaces of its own where the machine permits it.

Inside, only the session's processes exist: a harness cannot read another process's environment,
command line or memory, and the kernel ends all that it started when it ends. Where that is not
permitted (``isolation.missing``), a mark in the environment is what finds leftovers. Temporary
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
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from bridle.harnesses.sandboxes.base import (
    Captured,
    DirectoryGone,
    Launch,
    LaunchRefused,
    NotLaunchable,
    Place,
    ProcessResult,
    SandboxLost,
    SandboxRequest,
    refuse_container,
)
from bridle.harnesses.sandboxes.container.relay import Relay
from bridle.harnesses.sandboxes.folder import Folder, place_in
from bridle.harnesses.sandboxes.isolation import (
    INNER_PORT,
    StartFailure,
    missing,
    namespaced,
    network_missing,
    started,
)
from bridle.harnesses.sandboxes.supervise import environment_of, new_mark, supervise
from bridle.harnesses.sandboxes.users import SessionUsers, as_user, one_of

_NO_COMMAND: Final = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOEXEC}
)


class ProcessSandbox(Folder):
    """Starts each launch as the leader of its own session and process group."""

    def __init__(
        self,
        directory: Path,
        hidden: Sequence[Path] = (),
        user: int | None = None,
        *,
        temporary: Path | None = None,
        way_out: Path | None = None,
    ) -> None:
        """``hidden``: files of this machine that read as empty inside. ``temporary``: for temporary
        files; ``None``: the machine's. ``way_out``: the Unix socket of the session's relay;
        ``None``: the machine's network."""
        super().__init__(directory, user)
        if temporary is not None:
            inside = {**self._place.environment, "TMPDIR": str(temporary)}
            self._place = replace(self._place, environment=inside)
        self._hidden = tuple(hidden)
        self._temporary = temporary
        self._way_out = way_out

    def url(self, url: str) -> str:
        if self._way_out is None:
            return url
        return urlsplit(url)._replace(scheme="http", netloc=f"127.0.0.1:{INNER_PORT}").geturl()

    def _roots(self) -> tuple[Path, ...]:
        return (*super()._roots(), *([] if self._temporary is None else [self._temporary]))

    async def exec(self, launch: Launch) -> ProcessResult:
        directory = Path(launch.directory or self.place.workspace)
        if not directory.is_dir():  # noqa: ASYNC240 - one stat of a local file
            raise DirectoryGone(f"there is no directory {directory} to start in")
        with self.lent():
            return await self._exec(launch, directory)

    async def _exec(self, launch: Launch, directory: Path) -> ProcessResult:
        mark = new_mark()
        stdout, stderr = self.outputs(launch.role)
        apart = _may_isolate(self._user) and await asyncio.to_thread(missing) is None
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
            if apart:
                argv = namespaced(argv, writing, self._hidden, self._way_out)
            try:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    cwd=directory,
                    env=environment_of(launch, directory, mark),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    pass_fds=(writing,) if apart else (),
                )
            except (OSError, ValueError) as error:
                raise _not_started(launch, error) from error
            finally:
                os.close(writing)
            code = await supervise(_Process(process), mark, launch.timeout_s, launch.grace_s)
            try:
                started(said.read() if apart else b"")
            except StartFailure as failure:
                raise _not_started(launch, failure.error) from failure
        seconds = time.monotonic() - started_at
        return ProcessResult(code, seconds, Captured.of(stdout), Captured.of(stderr))


class ProcessProvider:
    """Opens process sandboxes; ``hidden`` files of this machine read as empty inside, and
    ``confined`` ones reach their session's URL alone, where the machine permits it."""

    def __init__(self, hidden: Sequence[Path] = (), *, confined: bool = False) -> None:
        self._hidden = tuple(hidden)
        self._confined = confined
        self._users = SessionUsers.of_environment()

    @contextlib.asynccontextmanager
    async def open(self, request: SandboxRequest) -> AsyncIterator[ProcessSandbox]:
        refuse_container(request, "process")
        own = tempfile.TemporaryDirectory(prefix="bridle-session-", ignore_cleanup_errors=True)
        # Not in the session's folder: a socket's path has at most 107 characters.
        with own as folder, one_of(self._users) as user:
            os.chmod(folder, 0o711 if user else 0o700)
            async with self._way_out(request, Path(folder) / "session") as way_out:
                yield ProcessSandbox(
                    request.directory,
                    self._hidden,
                    user,
                    temporary=Path(folder) / "tmp",
                    way_out=way_out,
                ).make()

    @contextlib.asynccontextmanager
    async def _way_out(self, request: SandboxRequest, socket: Path) -> AsyncIterator[Path | None]:
        """The socket of the session's relay; ``None`` where it gets no network of its own."""
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
        """Nothing outlives a launch."""


def _may_isolate(user: object | None) -> bool:
    """Whether namespaces are tried: a user namespace knows one user, so that only root gives a
    session both a user and namespaces of its own."""
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
