"""The command line of docker or podman."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from bridle.harnesses.install import NotLaunchable
from bridle.harnesses.sandboxes.base import SandboxLost

_CHUNK: Final = 1 << 20
VARIABLE: Final = "BRIDLE_CONTAINERS"
OWNER: Final = "bridle.owner"
"""Label of everything that one process makes and removes, ``HOST:PID:START``."""


@dataclass(frozen=True, slots=True)
class Finished:
    """An ended command of the engine."""

    code: int
    out: bytes
    err: bytes

    @property
    def error(self) -> str:
        return self.err.decode("utf-8", "replace").strip()[-600:]


@dataclass(frozen=True, slots=True)
class Engine:
    """The program of the container engine: docker or podman."""

    program: str

    @classmethod
    def find(cls) -> Engine:
        """Find ``$BRIDLE_CONTAINERS``, else docker, else podman. Raise :class:`NotLaunchable`."""
        named = os.environ.get(VARIABLE)
        for program in (named,) if named else ("docker", "podman"):
            if shutil.which(program):
                return cls(program)
        raise NotLaunchable(
            f"there is no {named or 'docker or podman'}: install one of them, or name it in "
            f"{VARIABLE}"
        )

    @property
    def copy_in(self) -> tuple[str, ...]:
        """The command that unpacks an archive with the owners that it states."""
        return ("cp", *(("--archive=false",) if "podman" in self.program else ()), "-")

    async def run(
        self,
        *arguments: str,
        data: bytes | IO[bytes] | None = None,
        out: int | None = None,
        limit_s: float = 120.0,
    ) -> Finished:
        """Run a command to its end. Raise :class:`SandboxLost` after ``limit_s`` seconds.

        ``out`` is the descriptor of its standard output, if that is not to be returned.
        """
        given = asyncio.subprocess.PIPE if isinstance(data, bytes) else data
        process = await self.start(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL if given is None else given,
            stdout=asyncio.subprocess.PIPE if out is None else out,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            stdout, stderr = await asyncio.wait_for(
                process.communicate(data if isinstance(data, bytes) else None), limit_s
            )
        except TimeoutError as error:
            raise SandboxLost(
                f"{self.program} {arguments[0]} took more than {limit_s:g} s"
            ) from error
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        return Finished(process.returncode or 0, stdout or b"", stderr)

    async def save(
        self, *arguments: str, out: IO[bytes], most: int, limit_s: float = 120.0
    ) -> Finished:
        """Run a command as :meth:`run` does, and write its output to a file.

        Raise :class:`OSError` when it writes more than ``most`` bytes, which then ends it.
        """
        reading, writing = os.pipe()
        copying = asyncio.create_task(asyncio.to_thread(_copy, reading, out, most))
        try:
            finished = await self.run(*arguments, out=writing, limit_s=limit_s)
        finally:
            os.close(writing)
            fits = await copying
        if not fits:
            raise OSError(errno.EFBIG, f"more than {most} bytes")
        return finished

    async def start(self, *arguments: str, **streams: Any) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                self.program, *arguments, start_new_session=True, **streams
            )
        except OSError as error:
            raise SandboxLost(f"cannot start {self.program}: {error}") from error

    async def check(self, *arguments: str, **options: Any) -> bytes:
        """Return the output of a command that must succeed. Raise :class:`SandboxLost`."""
        finished = await self.run(*arguments, **options)
        if finished.code:
            raise SandboxLost(f"{self.program} {arguments[0]} failed: {finished.error}")
        return finished.out

    async def sweep(self) -> list[str]:
        """Remove containers and volumes whose owner on this machine has died.

        Return the ids of the containers.
        """
        form = '{{.ID}} {{.Label "' + OWNER + '"}}'
        listed = await self.check("ps", "-a", "--filter", f"label={OWNER}", "--format", form)
        dead = [
            identifier
            for identifier, _, owner in (
                line.partition(" ") for line in listed.decode().split("\n")
            )
            if identifier and is_dead(owner)
        ]
        if dead:
            await self.run("rm", "-f", "-v", *dead)
        form = '{{.Name}} {{.Label "' + OWNER + '"}}'
        kept = await self.check("volume", "ls", "--filter", f"label={OWNER}", "--format", form)
        pairs = (line.partition(" ") for line in kept.decode().split("\n"))
        if volumes := [name for name, _, owner in pairs if name and is_dead(owner)]:
            await self.run("volume", "rm", "-f", *volumes)
        return dead


def _copy(source: int, target: IO[bytes], most: int) -> bool:
    """Copy what comes from a descriptor and close it; return whether it is ``most`` bytes or less.

    More is not read.
    """
    with os.fdopen(source, "rb", buffering=0) as stream:
        while data := stream.read(_CHUNK):
            most -= len(data)
            if most < 0:
                return False
            target.write(data)
    return True


def owner_label() -> str:
    """Return the label of this process, which no later process with the same number has."""
    pid = os.getpid()
    return f"{socket.gethostname()}:{pid}:{_start_of(pid)}"


def is_dead(owner: str) -> bool:
    """Return whether a process of this machine that has this label has ended."""
    host, _, rest = owner.partition(":")
    pid, _, start = rest.partition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    return _start_of(int(pid)) != start


def _start_of(pid: int) -> str:
    """Return the time at which a process started, in ticks, or ``""`` if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def require_words(words: Sequence[str]) -> None:
    """Raise :class:`NotLaunchable` for an argument that an engine would take for an option."""
    for word in words:
        if word.startswith("-"):
            raise NotLaunchable(f"{word!r} is no name of an image")
