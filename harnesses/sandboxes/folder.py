"""Sandboxes whose files are a folder of this machine."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Final, Self

from bridle.harnesses.environment import scrubbed
from bridle.harnesses.install import HostPrograms
from bridle.harnesses.sandboxes.base import READ_BYTES, LaunchRefused, Place, Role, SandboxLost

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

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._place = place_in(directory)

    def make(self) -> Self:
        """Makes the directories of the place."""
        for path in (self._place.workspace, self._place.home, self._place.logs):
            Path(path).mkdir(parents=True, exist_ok=True)
        return self

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
        logs = self._directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return logs / f"{role}.stdout", logs / f"{role}.stderr"

    async def read(self, path: PurePath) -> bytes:
        return await asyncio.to_thread(_read, Path(path))

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
