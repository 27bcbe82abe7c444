"""Sandboxes whose files are a folder of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Final, Self

from bridle.harnesses.environment import allowed
from bridle.harnesses.install import HostPrograms
from bridle.harnesses.sandboxes.base import LaunchRefused, Place, Role, SandboxLost
from bridle.harnesses.sandboxes.leftovers import copy_folder, new_file, read_file, tidy
from bridle.harnesses.sandboxes.users import give, kill_all_of

_NO_FILE: Final = frozenset(
    {errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EINVAL, errno.EILSEQ}
)
"""Errors that a file's name causes, alone or with the names beside it."""


def place_in(directory: Path) -> Place:
    """Return the place of a session whose files lie in ``directory``."""
    return Place(
        directory / "workspace",
        directory / "home",
        directory / "logs",
        allowed(os.environ),
        HostPrograms(),
    )


class Folder:
    """The file operations of a sandbox in a folder."""

    def __init__(
        self, directory: Path, user: int | None = None, seen_as: Path | None = None
    ) -> None:
        """``user`` is the user that everything here runs as; ``None`` means this process's own.

        ``seen_as`` is the path of the folder inside, its own if it is ``None``.
        """
        self._directory = directory.absolute()
        self._seen_as = seen_as or self._directory
        self._place = place_in(self._seen_as)
        self._user = user

    def make(self) -> Self:
        for path in (*self._roots(), self._seen_as.parent):
            path.mkdir(parents=True, exist_ok=True)
        if self._user is not None:
            self._directory.chmod(0o711)
        return self

    def _roots(self) -> tuple[Path, ...]:
        place = self._place
        return self.here(place.workspace), self.here(place.home), self.here(place.logs)

    def here(self, path: PurePath) -> Path:
        """Return the path on this machine of a path inside."""
        if self._seen_as != self._directory and path.is_relative_to(self._seen_as):
            return self._directory / path.relative_to(self._seen_as)
        return Path(path)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Give the directories to the session's user while a launch runs.

        Afterwards nothing of that user runs.
        """
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
                tidy(path, strip=False)
                path.chmod(0o700)

    def tidy(self) -> None:
        """Make everything that the agent left safe to read. None of its processes may still run."""
        for path in self._roots():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                tidy(path, strip=path in self._stripped())

    def _stripped(self) -> tuple[Path, ...]:
        """Return the folders that keep no link out of them, and no pipe, socket or device."""
        return (self.here(self._place.workspace),)

    @property
    def place(self) -> Place:
        return self._place

    @property
    def directory(self) -> Path:
        return self._directory

    def url(self, url: str) -> str:
        return url

    @property
    def _outputs(self) -> Path:
        """The folder of the output streams of its processes."""
        return self._directory / "outputs"

    def outputs(self, role: Role) -> tuple[Path, Path]:
        """Make two new files for the output streams of a process.

        No process of the session is given their folder.
        """
        folder = self._outputs
        folder.mkdir(parents=True, exist_ok=True)
        paths = folder / f"{role}.stdout", folder / f"{role}.stderr"
        for path in paths:
            new_file(path).close()
        return paths

    async def read(self, path: PurePath) -> bytes:
        return await asyncio.to_thread(read_file, self._directory, self.here(path))

    async def write(self, files: Mapping[PurePath, str | bytes]) -> None:
        await asyncio.to_thread(self._write, files)

    def _write(self, files: Mapping[PurePath, str | bytes]) -> None:
        for inside, content in files.items():
            path = self.here(inside)
            try:
                data = content.encode() if isinstance(content, str) else content
                path.parent.mkdir(parents=True, exist_ok=True)
                self._make_way(path)
                path.write_bytes(data)
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                problem = f"cannot write the file {str(path)!r}: {why}"
                if isinstance(error, ValueError) or error.errno in _NO_FILE:
                    raise LaunchRefused(problem) from error
                raise SandboxLost(problem) from error

    def _make_way(self, path: Path) -> None:
        """Remove a link or a pipe at ``path``, and refuse a folder that leads elsewhere.

        An earlier step of the session may have left either.
        """
        if not path.is_relative_to(self._directory):
            return
        if not path.parent.resolve().is_relative_to(self._directory.resolve()):
            raise NotADirectoryError(errno.ENOTDIR, "its folder is a link that leads elsewhere")
        if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
            path.unlink()

    async def upload(self, source: Path, target: PurePath) -> None:
        await asyncio.to_thread(copy_folder, source, self.here(target), trusted=True)

    async def download(self, source: PurePath, target: Path) -> None:
        await asyncio.to_thread(copy_folder, self.here(source), target)
