"""The protocol of sandboxes: what a launch is, and what it results in."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from bridle.errors import BridleError

MARK = "BRIDLE_PROCESS_MARK"
"""Environment variable that marks every process a launch started."""

TAIL_BYTES = 64 * 1024
"""Bytes of an output that a result holds; its file has all of them."""

_NO_FILE: Final = frozenset(
    {errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EINVAL, errno.EILSEQ}
)
"""Errors that a file's name causes, alone or with the names beside it."""


class SandboxLost(BridleError):
    """The sandbox itself failed, so nothing is known about the agent."""

    retryable = True


class NotLaunchable(BridleError):
    """The command cannot be started: it is not installed or not executable."""


class LaunchRefused(BridleError):
    """This launch cannot be started, while others may: its prompt is too long for an argument or
    contains a NUL, or its files cannot be written."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One harness process: what to start, where, and for how long."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """All of it; nothing is inherited. ``PWD`` is set to the workspace, some harnesses trust it."""
    workspace: Path
    """The working directory; the harness may write there."""
    logs: Path
    """Directory for ``stdout.log`` and ``stderr.log``."""
    timeout_s: float
    files: Mapping[Path, str] = field(default_factory=dict)
    """Absolute path -> text, written before the start (configuration, task files)."""
    grace_s: float = 2.0
    """Between the polite and the forced end when the time is up."""


@dataclass(frozen=True, slots=True)
class Captured:
    """One output stream of a finished process."""

    path: Path
    size: int
    """Bytes in the file."""
    tail: str
    """The last ``TAIL_BYTES`` as text; a cut character reads as U+FFFD."""

    @classmethod
    def of(cls, path: Path, limit: int = TAIL_BYTES) -> Captured:
        """What is in the file; nothing when the process has removed it."""
        try:
            with path.open("rb") as stream:
                size = stream.seek(0, 2)
                stream.seek(max(0, size - limit))
                return cls(path, size, stream.read(limit).decode("utf-8", "replace"))
        except FileNotFoundError:
            return cls(path, 0, "")


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """How a launch ended."""

    exit_code: int | None
    """The process's own; 128 + n when signal n ended it; ``None`` when its time was up."""
    seconds: float
    stdout: Captured
    stderr: Captured

    @property
    def timed_out(self) -> bool:
        return self.exit_code is None


class Sandbox(Protocol):
    """Runs launches, any number at a time.

    ``run`` leaves no process behind, also when it is cancelled. Raises :class:`SandboxLost`,
    :class:`LaunchRefused` or :class:`NotLaunchable`.
    """

    async def run(self, launch: Launch) -> ProcessResult: ...

    async def close(self) -> None: ...


def prepare(launch: Launch) -> None:
    """Makes the directories and files of a launch.

    Raises :class:`LaunchRefused` for a file that cannot be, by its name or its text, and
    :class:`SandboxLost` when the machine takes none now.
    """
    launch.workspace.mkdir(parents=True, exist_ok=True)
    launch.logs.mkdir(parents=True, exist_ok=True)
    for path, text in launch.files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            problem = f"cannot write the file {str(path)!r}: {why}"
            if isinstance(error, ValueError) or error.errno in _NO_FILE:
                raise LaunchRefused(problem) from error
            raise SandboxLost(problem) from error


def environment_of(launch: Launch, mark: str) -> dict[str, str]:
    """The environment to start ``launch`` with."""
    return {**launch.environment, "PWD": str(launch.workspace), MARK: mark}
