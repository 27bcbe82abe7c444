"""Reads, copies, tidies and removes what a session left in its folders.

An agent may leave anything there: links to files of this machine, pipes that block their reader,
devices, terabytes, folders thousands deep, files that nobody may read. Everything of Bridle that
opens such a path goes through this module. It follows no link out of the session's folder, opens
regular files only, reads up to a limit, and never recurses.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import stat
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple

log = logging.getLogger(__name__)

READ_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes of a file that is read by default."""
RESULT_BYTES: Final = 1024 * 1024
"""Maximum bytes of a file with a verifier's result."""
COPY_BYTES: Final = 4 * 1024**3
"""Maximum bytes that one copy of a session's folder takes."""
DEPTH: Final = 64
"""Maximum depth of folders that are read; anything deeper is removed."""
_PATH_BYTES: Final = 3000
"""Maximum bytes of a path that is read: a name below it still fits into the system's 4096."""
_LINKS: Final = 40
_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | _FLAGS
_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | _FLAGS
_OF_THE_SYSTEM: Final = tuple(
    f"{folder}/"
    for folder in ("/usr", "/bin", "/sbin", "/lib", "/lib64", sys.prefix, sys.base_prefix)
)
"""Folders to which links may lead: a virtual environment has such links, and no answer of a task
lies here."""


def read_file(root: Path, path: Path, limit: int = READ_BYTES) -> bytes:
    """Return the content of a file of the session whose folder is ``root``.

    Raise :class:`FileNotFoundError` for a path that leads out of ``root``, and for anything but a
    regular file of at most ``limit`` bytes.
    """
    try:
        number = _open_below(root, path)
        with os.fdopen(number, "rb") as stream:
            state = os.fstat(number)
            data = stream.read(limit + 1) if stat.S_ISREG(state.st_mode) else None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _no_file(path) from error
    if data is None or len(data) > limit:
        raise _no_file(path)
    return data


def _open_below(root: Path, path: Path) -> int:
    """Return a descriptor of the file at ``path``.

    Each part is opened by itself, so that no link is followed unseen.
    """
    top = os.path.realpath(root)
    parts = deque(_relative(path, root, top).parts)
    opened = [os.open(top, _FOLDER)]
    links = 0
    try:
        while parts:
            if links > _LINKS or len(parts) > DEPTH or len(opened) > DEPTH + 1:
                raise _no_file(path)
            name = parts.popleft()
            if name == "..":
                if len(opened) == 1:
                    raise _no_file(path)
                os.close(opened.pop())
                continue
            target = _link(name, opened[-1])
            if target is not None:
                links += 1
                if os.path.isabs(target):
                    target = str(_relative(Path(target), root, top))
                    while len(opened) > 1:
                        os.close(opened.pop())
                parts.extendleft(reversed(Path(target).parts))
            elif parts:
                opened.append(os.open(name, _FOLDER, dir_fd=opened[-1]))
            else:
                return os.open(name, _FILE, dir_fd=opened[-1])
        raise _no_file(path)
    finally:
        for number in opened:
            os.close(number)


def _relative(path: Path, root: Path, top: str) -> Path:
    for folder in (root, Path(top)):
        with contextlib.suppress(ValueError):
            return path.relative_to(folder)
    raise _no_file(path)


def _link(name: str, folder: int) -> str | None:
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise


def _no_file(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "no regular file of the session that is read", str(path))


def read_tail(path: Path, limit: int) -> tuple[int, bytes]:
    """Return the size and the last ``limit`` bytes of a regular file.

    Return 0 and nothing for anything else.
    """
    try:
        with os.fdopen(os.open(path, _FILE), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                return 0, b""
            size = stream.seek(0, 2)
            stream.seek(max(0, size - limit))
            return size, stream.read(limit)
    except OSError:
        return 0, b""


def new_file(path: Path) -> IO[bytes]:
    """Open a new file for writing in place of whatever is at ``path``."""
    remove_folder(path)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
    return os.fdopen(number, "wb")


def copy_folder(source: Path, target: Path, *, trusted: bool = False) -> None:
    """Copy the content of a folder into another, which is made.

    From a folder that a session left, copy regular files and folders down to :data:`DEPTH`, at most
    :data:`COPY_BYTES`, and links that stay inside; the rest is left out with a warning. ``trusted``
    copies every link and any number of bytes. A link in ``target`` is replaced, never written
    through. Raise :class:`FileNotFoundError` when ``source`` is no folder.
    """
    if (source.is_symlink() and not trusted) or not source.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such directory", str(source))
    _make_folder(target)
    for one in left_in(source, sys.maxsize if trusted else COPY_BYTES, trusted=trusted):
        to = os.path.join(target, one.name)
        if one.link is not None:
            _make_way(to)
            os.symlink(one.link, to)
        elif one.size is None:
            _make_folder(Path(to))
        elif not _copy_file(one.path, to, one.size):
            _report("not copied", [one.path])


class Left(NamedTuple):
    """A folder, a link or a regular file that a session left, and that is copied."""

    path: str
    name: str
    """Its path below the folder that is copied."""
    link: str | None
    """The target of a link, else ``None``."""
    size: int | None
    """The bytes of a regular file, else ``None``. Holes in it count."""


def left_in(source: Path, most: int, *, trusted: bool = False) -> Iterator[Left]:
    """Yield what :func:`copy_folder` copies, of at most ``most`` bytes, folders before their files.

    Warn of everything else. A caller opens files by :func:`opened_file`, as they may have changed.
    """
    top = os.path.realpath(source)
    left_out: list[str] = []
    remaining = most
    pending = [(str(source), "", 0)]
    while pending:
        folder, name, depth = pending.pop()
        for entry in _entries(folder):
            below = os.path.join(name, entry.name)
            link, size = None, None
            if entry.is_symlink():
                link = _target(entry.path, top, trusted)
                left = link is None
            elif entry.is_dir(follow_symlinks=False):
                left = not trusted and _too_deep(entry.path, depth + 1)
                if not left:
                    pending.append((entry.path, below, depth + 1))
            else:
                size = _size(entry, remaining)
                left = size is None
                remaining -= size or 0
            if left:
                left_out.append(entry.path)
            else:
                yield Left(entry.path, below, link, size)
    _report("not copied", left_out)


def _target(link: str, top: str, trusted: bool) -> str | None:
    """Return the target of a link that is copied, else ``None``."""
    with contextlib.suppress(OSError):
        if trusted or not _leads_out(link, top):
            return os.readlink(link)
    return None


def _size(entry: os.DirEntry[str], most: int) -> int | None:
    """Return the size of a regular file, or ``None`` if it is larger than ``most``, or is none."""
    with contextlib.suppress(OSError):
        state = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(state.st_mode) and state.st_size <= most:
            return state.st_size
    return None


@contextlib.contextmanager
def opened_file(path: str, most: int) -> Iterator[tuple[IO[bytes], os.stat_result] | None]:
    """Yield a regular file of at most ``most`` bytes and its state, or ``None`` if it is none."""
    try:
        number = os.open(path, _FILE)
    except OSError:
        yield None
        return
    with os.fdopen(number, "rb") as data:
        state = os.fstat(number)
        yield (data, state) if stat.S_ISREG(state.st_mode) and state.st_size <= most else None


def _make_folder(path: Path) -> None:
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)


def _make_way(path: str) -> None:
    """Remove the file or link at ``path``."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _copy_file(source: str, target: str, most: int) -> bool:
    """Return whether the file was copied. It is not if it is larger, or cannot be read."""
    with opened_file(source, most) as opened:
        if opened is None:
            return False
        data, state = opened
        _make_way(target)
        made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        with os.fdopen(made, "wb") as copy:
            shutil.copyfileobj(data, copy, 1 << 20)
            os.fchmod(made, stat.S_IMODE(state.st_mode) & 0o777 | 0o600)
    os.utime(target, ns=(state.st_atime_ns, state.st_mtime_ns))
    return True


def tidy(root: Path, *, strip: bool) -> None:
    """Make a session's folder safe to read.

    All of it becomes this process's own and readable, and nothing is deeper than :data:`DEPTH`.
    ``strip`` also removes links that lead out of it, pipes, sockets and devices, so that a program
    that opens a name in it neither blocks nor reads a foreign file.

    No process of the session may still run.
    """
    top = os.path.realpath(root)
    removed: list[str] = []
    _take(str(root), os.lstat(root))
    pending = [(str(root), 0)]
    while pending:
        folder, depth = pending.pop()
        for entry in _entries(folder):
            state = entry.stat(follow_symlinks=False)
            kind = state.st_mode
            if stat.S_ISLNK(kind):
                _take(entry.path, state)
                unwanted = strip and _leads_out(entry.path, top)
            elif stat.S_ISDIR(kind) and _too_deep(entry.path, depth + 1):
                removed.append(entry.path)
                remove_folder(Path(entry.path))
                continue
            elif stat.S_ISDIR(kind):
                _take(entry.path, state)
                pending.append((entry.path, depth + 1))
                continue
            else:
                unwanted = strip and not stat.S_ISREG(kind)
                if not unwanted:
                    _take(entry.path, state)
            if unwanted:
                removed.append(entry.path)
                os.unlink(entry.path)
    _report("removed", removed)


def _take(path: str, state: os.stat_result) -> None:
    """Make a file or folder this process's own, and readable and writable by it."""
    user, group = os.getuid(), os.getgid()
    if state.st_uid != user:
        os.chown(path, user, group, follow_symlinks=False)
    if stat.S_ISLNK(state.st_mode):
        return
    needed = 0o700 if stat.S_ISDIR(state.st_mode) else 0o600
    mode = stat.S_IMODE(state.st_mode)
    if mode & needed != needed or mode & 0o6000:
        os.chmod(path, mode & 0o1777 | needed)


def remove_folder(path: Path) -> None:
    """Remove a folder and all that is in it, however deep. Anything that cannot be removed stays.

    A folder in it is moved to the top before it is emptied, so that no path grows long.
    """
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return
        os.chmod(path, 0o700)
        top = os.open(path, _FOLDER)
    except OSError:
        return
    prefix = f".removed-{secrets.token_hex(8)}-"
    pending: list[str] = []
    moved = 0
    try:
        for name, is_folder in _names(top):
            if is_folder:
                pending.append(name)
            else:
                _unlink(name, top)
        while pending:
            folder = pending.pop()
            with contextlib.suppress(OSError), _opened(folder, top) as number:
                for name, is_folder in _names(number):
                    if not is_folder:
                        _unlink(name, number)
                        continue
                    moved += 1
                    with contextlib.suppress(OSError):
                        _take_in(name, number)
                        os.rename(name, f"{prefix}{moved}", src_dir_fd=number, dst_dir_fd=top)
                        pending.append(f"{prefix}{moved}")
            with contextlib.suppress(OSError):
                os.rmdir(folder, dir_fd=top)
    finally:
        os.close(top)
    with contextlib.suppress(OSError):
        os.rmdir(path)


@contextlib.contextmanager
def _opened(name: str, folder: int) -> Iterator[int]:
    _take_in(name, folder)
    number = os.open(name, _FOLDER, dir_fd=folder)
    try:
        yield number
    finally:
        os.close(number)


def _take_in(name: str, folder: int) -> None:
    """Open a folder to this process's user, which may be a session user's with all below it."""
    user = os.geteuid()
    if os.stat(name, dir_fd=folder, follow_symlinks=False).st_uid != user:
        os.chown(name, user, os.getegid(), dir_fd=folder, follow_symlinks=False)
    os.chmod(name, 0o700, dir_fd=folder)


def _names(folder: int) -> list[tuple[str, bool]]:
    """Return the names in a folder, and whether each is a folder."""
    with os.scandir(folder) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _unlink(name: str, folder: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _too_deep(path: str, depth: int) -> bool:
    return depth > DEPTH or len(os.fsencode(path)) > _PATH_BYTES


def _leads_out(link: str, top: str) -> bool:
    """Return whether a link leads to a place outside of ``top`` that is not the system's."""
    real = os.path.realpath(link)
    return not (real == top or real.startswith((f"{top}/", *_OF_THE_SYSTEM)))


def _report(what: str, paths: list[str]) -> None:
    if paths:
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        shown = ", ".join(path[-200:] for path in paths[:3])
        log.warning("left by the agent and %s: %s%s", what, ascii(shown), more)
