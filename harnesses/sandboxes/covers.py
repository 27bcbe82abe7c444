"""Covers over the files of a visible folder that a session must not see.

A mount hides a folder whole. A file is hidden by an empty folder over its own, in which everything
else of that folder is made visible again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from bridle.errors import BridleError

_MOST_ENTRIES: Final = 1000
"""Maximum entries of a folder that is rebuilt around a hidden file of it."""


class WallsFailed(BridleError):
    """Bubblewrap did not build the walls of a session; the message has its error."""


def below(path: str, folder: str) -> bool:
    """Return whether ``path`` is the folder or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def covers_of(hidden: Iterable[str]) -> dict[str, tuple[str, ...]]:
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


def is_covered(path: str, covers: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether a cover takes ``path`` away."""
    for folder, names in covers.items():
        if below(path, folder) and not names:
            return True
        inside = path.removeprefix(folder.rstrip("/") + "/")
        if inside != path and inside.startswith(names):
            return True
    return False


def sockets() -> list[str]:
    """Return the Unix sockets of this machine's network that have a path."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()
        found = {line.split(maxsplit=7)[7] for line in lines if " /" in line}
        return sorted(path for path in found if os.path.exists(path))
    return []


def cover(folder: str, names: tuple[str, ...]) -> Iterator[str]:
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
