"""Archives of files that go into a container or come out of it."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

from bridle.harnesses.sandboxes.leftovers import COPY_BYTES, DEPTH

_NAME_LENGTH: Final = 3000


def opened(archive: Any) -> tarfile.TarFile:
    """Return an open archive. Raise :class:`FileNotFoundError` if it is none."""
    try:
        return tarfile.open(fileobj=archive, mode="r:")
    except tarfile.TarError as error:
        raise FileNotFoundError(f"the container's archive cannot be read: {error}") from error


def owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def extract(tar: tarfile.TarFile, target: Path) -> None:
    """Extract an archive of an agent's files.

    Leave out entries that would lie, or lead, outside of the folder, that are no files or folders,
    or that are too deep or too large. Pythons before 3.11.4 cannot detect where a link leads, so
    with them all links are left out.
    """
    members = _bounded(tar)
    if hasattr(tarfile, "data_filter"):
        tar.extractall(target, members=members, filter=_harmless)  # noqa: S202 - filtered
    else:
        tar.extractall(target, members=filter(_is_plain, members))  # noqa: S202 - filtered


def _bounded(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    remaining = COPY_BYTES
    for entry in tar:
        parts = PurePosixPath(entry.name).parts
        named = max((len(os.fsencode(part)) for part in parts), default=0) < 256
        if len(parts) > DEPTH or len(entry.name) > _NAME_LENGTH or not named:
            continue
        if entry.size <= remaining:
            remaining -= entry.size
            yield entry


def _harmless(entry: tarfile.TarInfo, target: str) -> tarfile.TarInfo | None:
    try:
        return tarfile.data_filter(entry, target)
    except tarfile.FilterError:
        return None


def _is_plain(entry: tarfile.TarInfo) -> bool:
    """Return whether it is a file or a folder below the one that it is written to."""
    path = PurePosixPath(entry.name)
    below = not path.is_absolute() and ".." not in path.parts
    entry.mode &= 0o755
    return below and (entry.isreg() or entry.isdir())
