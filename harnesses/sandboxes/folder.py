"""Sandboxes whose files are a folder of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Final, Self

from bridle.harnesses.environment import scrubbed
from bridle.harnesses.install import HostPrograms
from bridle.harnesses.sandboxes.base import READ_BYTES, LaunchRefused, Place, Role, SandboxLost
from bridle.harnesses.sandboxes.users import give, kill_all_of, take_back

_NO_FILE: Final = frozenset(
    {errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EINVAL, errno.EILSEQ}
)
"""Errors that a file's name causes, alone or with the names beside it."""


def place_in(directory: Path) -> Place:
    """The place of a session whose files lie in ``directory``."""
    return Place(
        directory / "workspace",
        directory / "home",
        directory / "logs",
        scrubbed(os.environ),
        HostPrograms(),
    )


class Folder:
    """The file operations of a sandbox in a folder: paths inside are paths of this machine."""

    def __init__(self, directory: Path, user: int | None = None) -> None:
        """``user``: whom all that runs here runs as; ``None``: as this process."""
        self._directory = directory
        self._place = place_in(directory)
        self._user = user

    def make(self) -> Self:
        """Makes the directories of the place."""
        for path in self._roots():
            path.mkdir(parents=True, exist_ok=True)
        if self._user is not None:
            self._directory.chmod(0o711)
        return self

    def _roots(self) -> tuple[Path, ...]:
        return Path(self._place.workspace), Path(self._place.home), Path(self._place.logs)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """While a launch runs, the directories are its user's; nothing of it runs afterwards."""
        if self._user is None:
            yield
            return
        for path in self._roots():
            give(path, self._user)
        try:
            yield
        finally:
            kill_all_of(self._user)
            for path in self._roots():
                take_back(path)

    @property
    def place(self) -> Place:
        return self._place

    @property
    def directory(self) -> Path:
        return self._directory

    def url(self, url: str) -> str:
        return url

    def outputs(self, role: Role) -> tuple[Path, Path]:
        """Files for the two output streams of a process; their directory is made."""
        logs = self._directory / ("logs" if self._user is None else "outputs")
        logs.mkdir(parents=True, exist_ok=True)
        return logs / f"{role}.stdout", logs / f"{role}.stderr"

    async def read(self, path: PurePath) -> bytes:
        if self._user is not None:
            self._require_inside(Path(path))
        return await asyncio.to_thread(_read, Path(path))

    def _require_inside(self, path: Path) -> None:
        """Refuses a link that its user has laid to a file which only we may read."""
        if not path.resolve().is_relative_to(self._directory.resolve()):
            raise FileNotFoundError(errno.ENOENT, "no file of the session", str(path))

    async def write(self, files: Mapping[PurePath, str | bytes]) -> None:
        await asyncio.to_thread(_write, files)

    async def upload(self, source: Path, target: PurePath) -> None:
        await asyncio.to_thread(_copy, source, Path(target))

    async def download(self, source: PurePath, target: Path) -> None:
        await asyncio.to_thread(_copy, Path(source), target)


def _read(path: Path) -> bytes:
    if not path.is_file() or path.stat().st_size > READ_BYTES:
        raise FileNotFoundError(errno.ENOENT, "no file of a size that is read", str(path))
    return path.read_bytes()


def _write(files: Mapping[PurePath, str | bytes]) -> None:
    for path, content in files.items():
        try:
            data = content.encode() if isinstance(content, str) else content
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(data)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            problem = f"cannot write the file {str(path)!r}: {why}"
            if isinstance(error, ValueError) or error.errno in _NO_FILE:
                raise LaunchRefused(problem) from error
            raise SandboxLost(problem) from error


def _copy(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such directory", str(source))
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
