"""The protocol of sandboxes: one session's place, what it can do, and what opens it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Literal, Protocol

from bridle.errors import BridleError
from bridle.harnesses.sandboxes.leftovers import read_tail
from bridle.harnesses.sandboxes.spec import ContainerSpec

TAIL_BYTES = 64 * 1024
"""Bytes of an output that a result holds; its file has all of them."""

Role = Literal["agent", "verifier", "setup"]
"""Which part of a session a process is; its output files have this name."""


class SandboxLost(BridleError):
    """The sandbox itself failed, so nothing is known about the agent."""

    retryable = True


class NotLaunchable(BridleError):
    """The command cannot be started: it is not installed or not executable."""


class LaunchRefused(BridleError):
    """This launch cannot be started, while others may: its prompt is too long for an argument or
    contains a NUL, or its files cannot be written."""


class DirectoryGone(BridleError):
    """The directory to start in does not exist: the agent has removed it."""


class Programs(Protocol):
    """Where the pinned harnesses are in a sandbox.

    Both methods raise :class:`NotLaunchable` with the command that installs what is missing.
    """

    def node(self, command: str) -> str:
        """Absolute path of the Node harness ``command``."""

    def python(self, harness: str, command: str) -> str:
        """Absolute path of ``command`` of the Python harness ``harness``."""

    def search_path(self, path: str) -> str:
        """``path`` with the directories first in which Node and the Node harnesses are."""


@dataclass(frozen=True, slots=True)
class Place:
    """The directories of a session, as paths of its sandbox; no other session writes to them."""

    workspace: PurePath
    """Working directory of the agent."""
    home: PurePath
    logs: PurePath
    """For files that a harness writes about its run."""
    environment: Mapping[str, str]
    """What every process in the sandbox starts from; it holds no secret of the caller's."""
    programs: Programs

    @property
    def search_path(self) -> str:
        """``PATH`` for a Node harness."""
        return self.programs.search_path(self.environment.get("PATH", "/usr/bin:/bin"))


@dataclass(frozen=True, slots=True)
class Launch:
    """One process: what to start, and for how long."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """All of it; nothing is inherited. ``PWD`` is set, some harnesses trust it."""
    timeout_s: float
    role: Role = "agent"
    directory: PurePath | None = None
    """Where it starts; ``None``: the workspace."""
    user: str | None = None
    """In a container; ``None``: the task's for the agent, the image's for everything else."""
    grace_s: float = 2.0
    """Between the polite and the forced end when the time is up."""


@dataclass(frozen=True, slots=True)
class Captured:
    """One output stream of a finished process."""

    path: Path
    """On this machine."""
    size: int
    """Bytes in the file."""
    tail: str
    """The last ``TAIL_BYTES`` as text; a cut character reads as U+FFFD."""

    @classmethod
    def of(cls, path: Path, limit: int = TAIL_BYTES) -> Captured:
        """The output in the file; nothing when the process has removed it."""
        size, tail = read_tail(path, limit)
        return cls(path, size, tail.decode("utf-8", "replace"))


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
    """Where one session's harness and verifier run. Paths are the sandbox's own.

    Every method raises :class:`SandboxLost` when the sandbox is gone.
    """

    @property
    def place(self) -> Place: ...

    @property
    def directory(self) -> Path:
        """A folder of this machine for this session alone; outputs of processes lie in it."""

    def url(self, url: str) -> str:
        """By which URL a process inside reaches a base URL of its session."""

    async def exec(self, launch: Launch) -> ProcessResult:
        """Runs a process, its output streamed to files of :attr:`directory`.

        When the time is up, or when this is cancelled, everything that runs inside is ended.
        Raises :class:`LaunchRefused`, :class:`NotLaunchable` or :class:`DirectoryGone`.
        """

    async def read(self, path: PurePath) -> bytes:
        """The content of a file of the session. Raises :class:`FileNotFoundError` also for what is
        no plain file of at most ``READ_BYTES``, and for a link that leads out of the session."""

    async def write(self, files: Mapping[PurePath, str | bytes]) -> None:
        """Writes files and the directories above them. Raises :class:`LaunchRefused`."""

    async def upload(self, source: Path, target: PurePath) -> None:
        """Copies the content of a folder of this machine into a directory, which is made."""

    async def download(self, source: PurePath, target: Path) -> None:
        """Copies the content of a directory into a folder of this machine, which is made.

        Raises :class:`FileNotFoundError` when there is no such directory.
        """


@dataclass(frozen=True, slots=True)
class SandboxRequest:
    """What a session needs of its sandbox."""

    directory: Path
    """A folder of this machine, made for this session."""
    urls: Mapping[str, str] = field(default_factory=dict)
    """The session's base URLs, by provider."""
    container: ContainerSpec | None = None
    """The task's; sandboxes that are no containers refuse it."""
    hidden: tuple[Path, ...] = ()
    """Files and folders of this machine that nothing in the sandbox may see: see ``walls.py``."""


class SandboxProvider(Protocol):
    """Opens sandboxes, any number at a time."""

    def open(self, request: SandboxRequest) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox that is gone, with all that runs in it, when the context is left.

        Raises :class:`SandboxLost`, :class:`LaunchRefused` or :class:`NotLaunchable`.
        """

    def expected_place(self, request: SandboxRequest) -> Place:
        """The place that :meth:`open` would give; nothing is made."""

    async def close(self) -> None: ...


def refuse_container(request: SandboxRequest, kind: str) -> None:
    """Raises :class:`NotLaunchable` for a task that needs a container."""
    if request.container is not None:
        raise NotLaunchable(
            f"this task needs a container, and the {kind} sandbox is none: use --sandbox container"
        )
