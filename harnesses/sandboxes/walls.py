"""The walls around a session: the files, processes and network that it has, made by bubblewrap.

Inside are the system's directories, the Python that runs Bridle and the folders that a launch
names, all read-only; the session's own folders; and a ``/tmp``, ``/run``, ``/dev`` and ``/proc`` of
its own. Nothing else of the machine is there: no home, no key, no store, no other session, no
socket. The network is a loopback with one port, whose listening socket Bridle holds.

:class:`Walls` has the one list of mounts. :func:`held` keeps walls open for a process that
``zygote.py`` forks into them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bridle.errors import BridleError, UsageError
from bridle.harnesses.permissions import permits_unsafe_sandbox

log = logging.getLogger(__name__)

INNER_PORT: Final = 8484
"""Port of the loopback inside at which a session's URL is."""
SYSTEM: Final = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt"),
    *("/nix", "/gnu"),
)
"""The system's directories, which every session sees."""
SEARCH_PATHS: Final = ("PATH", "PYTHONPATH", "PYTHONUSERBASE", "LD_LIBRARY_PATH", "NODE_PATH")
"""Variables whose value is a list of folders from which programs are loaded."""
_RUNNING: Final = ("/run/current-system", "/run/opengl-driver", "/run/booted-system")
"""Folders of ``/run`` in which programs and libraries of some systems lie."""
_DEVICES: Final = ("nvidiactl", "nvidia-uvm", "kfd", "dri", *(f"nvidia{n}" for n in range(16)))
_SECRETS: Final = (".env", ".netrc", ".npmrc", ".pypirc", ".git-credentials")
"""Files with secrets that are hidden in each folder that a launch names."""
_SHARED_MEMORY: Final = str(1 << 30)
_RUN: Final = str(64 << 20)
"""Bytes of the file systems in memory that a session may fill."""
_MOST_ENTRIES: Final = 1000
"""Maximum entries of a folder that is rebuilt around a hidden file of it."""
_THRESHOLD: Final = Path(__file__).with_name("threshold.py").read_text()
_HOLD: Final = "trap '' CHLD; echo >&2; read _"
"""The first process of walls that are held: it lets orphans go, and ends with its input."""


class NoWalls(UsageError):
    """This machine gives sessions no walls, and the user did not say that they may run without."""


class WallsFailed(BridleError):
    """Bubblewrap did not build the walls of a session; the message has its error."""


@dataclass(frozen=True, slots=True)
class Walls:
    """The settings of a session's walls."""

    own: tuple[str, ...]
    """Folders that can be written, at their own paths."""
    tmp: str
    """The folder that is ``/tmp`` inside."""
    shown: tuple[str, ...] = ()
    """Further files and folders that are visible, read-only."""
    hidden: tuple[str, ...] = ()
    """Files and folders that are not visible, wherever they lie. A file is hidden with its
    siblings, the files of its folder whose names begin with its name."""
    network: bool = True
    """Whether the network is the session's own."""
    user: int | None = None
    """The user that the command becomes; ``None`` means this process's own."""

    def command(self, *options: str) -> list[str]:
        """Return the command of bubblewrap up to the program that it starts."""
        capabilities = ("CAP_SETUID", "CAP_SETGID") if self.user is not None else ()
        return [
            *("bwrap", "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts"),
            *(("--unshare-net",) if self.network else ()),
            *("--cap-drop", "ALL"),
            *(part for name in capabilities for part in ("--cap-add", name)),
            *self._mounts(),
            *options,
            "--",
        ]

    def held(self) -> list[str]:
        """Return the command of walls that stand without a program, for ``zygote.py`` to enter."""
        options = ("--json-status-fd", "1", "--as-pid-1")
        return [*self.command(*options), "/bin/sh", "-c", _HOLD]

    def _mounts(self) -> Iterator[str]:
        yield from _system()
        yield from ("--proc", "/proc", *_settings_of_the_kernel())
        yield from ("--dev", "/dev", "--perms", "1777", "--size", _SHARED_MEMORY)
        yield from ("--tmpfs", "/dev/shm")  # noqa: S108 - its own
        for name in _DEVICES:
            if os.path.exists(f"/dev/{name}"):
                yield from ("--dev-bind", f"/dev/{name}", f"/dev/{name}")
        yield from ("--size", _RUN, "--tmpfs", "/run")
        yield from ("--bind", self.tmp, "/tmp")  # noqa: S108 - its own
        secrets = (os.path.join(path, name) for path in self.shown for name in _SECRETS)
        covers = _covers((*self.hidden, *filter(os.path.isfile, secrets)))
        shown = _outermost(
            path
            for path in (*_programs(sys.executable), *self.shown)
            if not _is_covered(path, covers)
        )
        yield from _parents((*shown, *self.own), self.user)
        for path in shown:
            yield from ("--ro-bind", path, path)
        visible = (*shown, *SYSTEM)
        for path in _sockets():
            if any(_below(path, folder) for folder in visible) and not _is_covered(path, covers):
                yield from ("--ro-bind", "/dev/null", path)
        rebuilt: list[str] = []
        for folder, names in covers.items():
            outside = not any(_below(folder, path) for path in visible)
            if outside or any(_is_covered(folder, {one: covers[one]}) for one in rebuilt):
                continue
            yield from _cover(folder, names)
            rebuilt.append(folder)
        for path in self.own:
            yield from ("--bind", path, path)
        for path in (*rebuilt, "/dev", "/"):
            yield from ("--remount-ro", path)


@functools.cache
def _system() -> tuple[str, ...]:
    """Return the mounts of the system's directories. Files that root alone reads are covered."""
    found: list[str] = []
    for path in SYSTEM:
        if os.path.islink(path):
            found += ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            found += ("--ro-bind", path, path)
    for folder, folders, files in os.walk("/etc") if os.getuid() == 0 else ():
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISDIR(mode) and not mode & stat.S_IROTH:
                folders.remove(name)
                found += ("--tmpfs", path)
            elif stat.S_ISREG(mode) and not mode & stat.S_IROTH:
                found += ("--ro-bind", "/dev/null", path)
    return tuple(found)


@functools.cache
def _settings_of_the_kernel() -> tuple[str, ...]:
    """Return mounts that keep root from writing the machine's settings in ``/proc``."""
    paths = ("/proc/sys", "/proc/sysrq-trigger", "/proc/fs", "/proc/acpi", "/proc/scsi")
    found = [path for path in paths if os.path.exists(path)] if os.getuid() == 0 else []
    return tuple(part for path in found for part in ("--ro-bind", path, path))


@functools.cache
def _programs(python: str) -> tuple[str, ...]:
    """Return ``python``, which runs Bridle, and its folders.

    ``python -m`` puts the folder in which it was started before its search path. That folder is the
    user's, not Python's.
    """
    started_in = sys.path[:1] == [os.getcwd()]
    named = (python, sys.prefix, sys.base_prefix, *sys.path[started_in:])
    own = tuple(path for path in named if not _is_home(path))
    return tuple(path for path in (*own, *_RUNNING, *_resolver()) if _is_file_or_folder(path))


def _is_file_or_folder(path: str) -> bool:
    return os.path.isabs(path) and os.path.exists(path)


def _resolver() -> tuple[str, ...]:
    path = os.path.realpath("/etc/resolv.conf")
    return (path,) if path.startswith("/run/") else ()


def named_by(argv: Iterable[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the files and folders that a command needs: its program's and its search paths'.

    ``argv`` has the program, and further files that are given with the folders in which they lie.
    A person's home and the folders above it are never among them.
    """
    found: list[str] = []
    for number, part in enumerate(argv):
        path = part
        if number == 0:
            path = shutil.which(part, path=environment.get("PATH", os.defpath)) or part
        if os.path.isabs(path) and os.path.exists(path):
            found += [place for name in (path, os.path.realpath(path)) for place in _house(name)]
    for name in SEARCH_PATHS:
        for folder in environment.get(name, "").split(os.pathsep):
            if os.path.isabs(folder) and os.path.isdir(folder):
                found += _house(os.path.join(folder, "any")) if name == "PATH" else [folder]
    return tuple(dict.fromkeys(path for path in found if not _is_home(path)))


def _house(path: str) -> list[str]:
    """Return the folder that the file at ``path`` needs around it.

    It is the folder of all packages of Node, the prefix above a ``bin``, or the file's own folder.
    """
    found = Path(path)
    if "node_modules" in found.parts:
        index = found.parts.index("node_modules")
        return [str(Path(*found.parts[: index + 1]))]
    if found.is_dir():
        return [path]
    prefix = found.parent.parent
    private = prefix.parent == Path.home() and prefix.name.startswith(".")
    if found.parent.name == "bin" and not private and not _is_home(str(prefix)):
        return [str(prefix)]
    return [path, str(found.parent)]


@functools.cache
def _is_home(path: str) -> bool:
    return _below(os.path.realpath(Path.home()), os.path.realpath(path))


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _outermost(paths: Iterable[str]) -> list[str]:
    """Return the paths that lie below no other and in no directory of the system, in order."""
    found: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths}):
        if not any(_below(path, folder) for folder in (*SYSTEM, *found)):
            found.append(path)
    return found


def _parents(paths: Iterable[str], user: int | None) -> Iterator[str]:
    """Yield mounts for the folders above ``paths``, so that a session's ``user`` can enter them.

    Bubblewrap would make them for the user who starts it alone.
    """
    if user is None:
        return
    above = {str(parent) for path in paths for parent in Path(path).parents}
    for path in sorted(above - {"/"}):
        if not any(_below(path, folder) for folder in SYSTEM):
            yield from ("--perms", "0755", "--dir", path)


def _covers(hidden: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the folders to cover, outer ones first.

    Each comes with the beginnings of the names that it is covered for. A folder that is covered
    whole has none.
    """
    found: dict[str, tuple[str, ...]] = {}
    for path in hidden:
        real = os.path.realpath(path)
        if os.path.isdir(real):
            found[real] = ()
            continue
        folder, name = os.path.split(real)
        if name and os.path.isdir(folder) and found.get(folder, (name,)):
            found[folder] = (*found.get(folder, ()), name)
    return dict(sorted(found.items()))


def _is_covered(path: str, covers: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether a cover takes ``path`` away."""
    for folder, names in covers.items():
        if _below(path, folder) and not names:
            return True
        inside = path.removeprefix(folder.rstrip("/") + "/")
        if inside != path and inside.startswith(names):
            return True
    return False


def _sockets() -> list[str]:
    """Return the Unix sockets of this machine's network that have a path."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()
        found = {line.split(maxsplit=7)[7] for line in lines if " /" in line}
        return sorted(path for path in found if os.path.exists(path))
    return []


def _cover(folder: str, names: tuple[str, ...]) -> Iterator[str]:
    """Cover ``folder`` by an empty one, with everything that is in it but ``names``."""
    yield from ("--perms", "0755", "--tmpfs", folder)
    if not names:
        return
    with os.scandir(folder) as entries:
        kept = [entry for entry in entries if not entry.name.startswith(names)]
    if len(kept) > _MOST_ENTRIES:
        raise WallsFailed(
            f"{folder} has a private file of Bridle's among {len(kept)} others: keep keys and "
            "stores in a folder of their own"
        )
    for entry in kept:
        if entry.is_symlink():
            yield from ("--symlink", os.readlink(entry.path), entry.path)
        elif entry.is_dir() or entry.is_file():
            yield from ("--ro-bind", entry.path, entry.path)


@functools.cache
def missing() -> str | None:
    """Return the reason why sessions cannot have walls here, or ``None`` if they can."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    with tempfile.TemporaryDirectory(prefix="bridle-") as folder:
        command = [*Walls((), folder).command(), "true"]
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else tried.stderr.strip() or f"exit {tried.returncode}"


def walled(users: object | None) -> bool:
    """Return whether sessions get walls here.

    A user namespace knows one user, so that only root gives a session both a user of ``users`` and
    walls; users alone keep sessions apart, too. Raise :class:`NoWalls` if there are neither, unless
    the user permits that.
    """
    if users is not None and os.getuid() != 0:
        return False
    why = missing()
    if why is None:
        return True
    if users is None and not permits_unsafe_sandbox():
        raise NoWalls(
            f"agents cannot be kept apart from this machine's files: {why}. Install bubblewrap "
            "(apt-get install bubblewrap), run sessions in containers "
            "(--set agent.sandbox=container), or run them as this user, with this user's files "
            "and network (--unsafe-sandbox)"
        )
    _warn(why)
    return False


@functools.cache
def _warn(why: str) -> None:
    log.warning(
        "sandbox_not_isolated: sessions see this machine's files, processes and network, the admin "
        "key and the store among them (%s)",
        why,
    )


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a process inside walls on its start."""

    text: str
    """``"\\n"`` from a process that starts its command; otherwise the reason why it does not."""
    process: int
    """Its process number on this machine."""
    listener: socket.socket | None
    """The socket that listens in the session's own network, if it has one."""

    @property
    def started(self) -> bool:
        return self.text == "\n"


class Entrance:
    """Bridle's end of the socket over which a process inside walls reports its start."""

    def __init__(self, connection: socket.socket) -> None:
        self._ours = connection
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._ours.setblocking(False)

    async def report(self) -> Report:
        """Wait until the command is about to start, or will not."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()
        number = self._ours.fileno()

        def note() -> None:
            if not arrived.done():
                arrived.set_result(None)

        loop.add_reader(number, note)
        try:
            await arrived
        finally:
            loop.remove_reader(number)
        said, extra, _, _ = self._ours.recvmsg(1024, socket.CMSG_SPACE(4) + socket.CMSG_SPACE(12))
        process, listener = 0, None
        for _, kind, data in extra:
            if kind == socket.SCM_RIGHTS:
                listener = socket.socket(fileno=struct.unpack("i", data[:4])[0])
            elif kind == socket.SCM_CREDENTIALS:
                process = struct.unpack("3i", data[:12])[0]
        return Report(said.decode("utf-8", "replace"), process, listener)

    def failure(self) -> OSError | None:
        """Return the error with which the command was not started, once it has ended."""
        try:
            said = self._ours.recv(64)
        except BlockingIOError:
            return None
        return OSError(int(said), os.strerror(int(said))) if said.isdigit() else None

    def close(self) -> None:
        self._ours.close()


def threshold(theirs: socket.socket, environment: int, network: bool) -> tuple[str, ...]:
    """Return the program that comes before a command inside, and reports its start.

    ``environment`` is a descriptor of :func:`environment_file`.
    """
    numbers = (theirs.fileno(), environment, INNER_PORT if network else 0)
    return (sys.executable, "-I", "-S", "-c", _THRESHOLD, *map(str, numbers))


def environment_file(environment: Mapping[str, str]) -> int:
    """Return a descriptor of a file in memory with an environment.

    Raise :class:`ValueError` for one that no process can have.
    """
    entries = [os.fsencode(f"{name}={value}") for name, value in environment.items()]
    if any(b"\0" in entry for entry in entries):
        raise ValueError("embedded null byte in the environment")
    number = os.memfd_create("environment")
    os.write(number, b"\0".join(entries))
    os.lseek(number, 0, os.SEEK_SET)
    return number
