"""The protocol of sandboxes.

It covers a session's place, what can be done in it, and the provider that opens it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Literal, Protocol

from bridle.errors import BridleError
from bridle.harnesses.install import NotLaunchable
from bridle.harnesses.sandboxes.bounds import Bounds
from bridle.harnesses.sandboxes.leftovers import read_tail
from bridle.harnesses.sandboxes.spec import ContainerSpec

TAIL_BYTES = 64 * 1024
"""Maximum bytes of an output that a result holds; the output's file has all of them."""

Role = Literal["agent", "verifier", "setup"]
"""The part of a session that a process is for. Its output files have this name."""


class SandboxLost(BridleError):
    """The sandbox itself failed, so nothing is known about the agent."""

    retryable = True


class LaunchRefused(BridleError):
    """This launch cannot be started, while others may.

    Its prompt is too long for an argument or contains a NUL, or its files cannot be written.
    """


class DirectoryGone(BridleError):
    """The directory to start in does not exist: the agent has removed it."""


class Programs(Protocol):
    """The places of the pinned harnesses in a sandbox.

    ``node`` and ``python`` raise :class:`NotLaunchable` with the command that installs a missing
    one.
    """

    def node(self, command: str) -> str:
        """Return the absolute path of the Node harness ``command``."""

    def python(self, harness: str, command: str) -> str:
        """Return the absolute path of ``command`` of the Python harness ``harness``."""

    def search_path(self, path: str) -> str:
        """Return ``path`` with the directories of Node and the Node harnesses before the others."""


@dataclass(frozen=True, slots=True)
class Place:
    """The directories of a session, as paths of its sandbox; no other session writes to them."""

    workspace: PurePath
    """Working directory of the agent."""
    home: PurePath
    logs: PurePath
    """Directory for files that a harness writes about its run."""
    environment: Mapping[str, str]
    """The environment that every process in the sandbox starts from. It holds no secret of the
    caller's."""
    programs: Programs

    @property
    def search_path(self) -> str:
        """The value of ``PATH`` for a Node harness."""
        return self.programs.search_path(self.environment.get("PATH", "/usr/bin:/bin"))


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start, and its time limit."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """The whole environment; nothing is inherited. ``PWD`` is set because some harnesses trust
    it."""
    timeout_s: float
    role: Role = "agent"
    directory: PurePath | None = None
    """The directory to start in; ``None`` means the workspace."""
    user: str | None = None
    """The user in a container. ``None`` means the task's for the agent, and the image's for
    everything else."""
    shown: tuple[str, ...] = ()
    """Files of this machine that the command reads beside its program, such as its script. A
    sandbox with walls shows each with the folder in which it lies."""
    grace_s: float = 2.0
    """Seconds between the polite and the forced end when the time is up."""


@dataclass(frozen=True, slots=True)
class Captured:
    """One output stream of a finished process."""

    path: Path
    """The file of the stream on this machine."""
    size: int
    """Bytes in the file."""
    tail: str
    """The last ``TAIL_BYTES`` as text; a cut character reads as U+FFFD."""

    @classmethod
    def of(cls, path: Path, limit: int = TAIL_BYTES) -> Captured:
        """Return the output in the file, or no output if the process has removed the file."""
        size, tail = read_tail(path, limit)
        return cls(path, size, tail.decode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """The result of a launch."""

    exit_code: int | None
    """The process's own exit code, 128 + n if signal n ended it, or ``None`` if its time was up."""
    seconds: float
    stdout: Captured
    stderr: Captured
    exceeded: str | None = None
    """The bound for which everything inside was ended, in words; ``None`` if there was none."""

    @property
    def timed_out(self) -> bool:
        return self.exit_code is None


class Sandbox(Protocol):
    """The place where a session's harness and verifier run. Paths are the sandbox's own.

    Every method raises :class:`SandboxLost` when the sandbox is gone.
    """

    @property
    def place(self) -> Place: ...

    @property
    def directory(self) -> Path:
        """A folder of this machine for this session alone, with the outputs of its processes."""

    def url(self, url: str) -> str:
        """Return the URL by which a process inside reaches a base URL of its session."""

    async def exec(self, launch: Launch) -> ProcessResult:
        """Run a process, and stream its output to files of :attr:`directory`.

        When the time is up, or when this is cancelled, everything that runs inside is ended. Raise
        :class:`LaunchRefused`, :class:`NotLaunchable` or :class:`DirectoryGone`.
        """

    async def read(self, path: PurePath) -> bytes:
        """Return the content of a file of the session.

        Raise :class:`FileNotFoundError` also for anything but a plain file of at most
        ``READ_BYTES``, and for a link that leads out of the session.
        """

    async def write(self, files: Mapping[PurePath, str | bytes]) -> None:
        """Write files and the directories above them. Raise :class:`LaunchRefused`."""

    async def upload(self, source: Path, target: PurePath) -> None:
        """Copy the content of a folder of this machine into a directory, which is made."""

    async def download(self, source: PurePath, target: Path) -> None:
        """Copy the content of a directory into a folder of this machine, which is made.

        Raise :class:`FileNotFoundError` when there is no such directory.
        """


@dataclass(frozen=True, slots=True)
class SandboxRequest:
    """The requirements of a session for its sandbox."""

    directory: Path
    """A folder of this machine, made for this session."""
    urls: Mapping[str, str] = field(default_factory=dict)
    """The session's base URLs, by provider."""
    container: ContainerSpec | None = None
    """The container that the task needs. Sandboxes that are not containers refuse it."""
    hidden: tuple[Path, ...] = ()
    """Files and folders of this machine that nothing in the sandbox may see (``walls.py``)."""
    bounds: Bounds = field(default_factory=Bounds)
    """The bounds of its processes, where the sandbox is no container."""
    seen_as: Path | None = None
    """The path under which the session sees ``directory``, where it has walls; ``None`` stands for
    the folder's own path."""


class SandboxProvider(Protocol):
    """Opens sandboxes, any number at a time."""

    def open(self, request: SandboxRequest) -> AbstractAsyncContextManager[Sandbox]:
        """Open a sandbox, which ends with all that runs in it when the context is left.

        Raise :class:`SandboxLost`, :class:`LaunchRefused` or :class:`NotLaunchable`.
        """

    def expected_place(self, request: SandboxRequest) -> Place:
        """Return the place that :meth:`open` would give, without making anything."""

    async def close(self) -> None: ...


def refuse_container(request: SandboxRequest, kind: str) -> None:
    """Raise :class:`NotLaunchable` for a task that needs a container."""
    if request.container is not None:
        raise NotLaunchable(
            f"this task needs a container, and the {kind} sandbox is none: use "
            "--set agent.sandbox=container"
        )
