"""The list of mounts of a session, in the words of bubblewrap."""

from __future__ import annotations

import functools
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from bridle.harnesses.sandboxes.covers import below, cover, covers_of, is_covered, sockets
from bridle.harnesses.sandboxes.programs import programs_of

SYSTEM: Final = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt"),
    *("/nix", "/gnu"),
)
"""The system's directories, which every session sees."""
_DEVICES: Final = ("nvidiactl", "nvidia-uvm", "kfd", "dri", *(f"nvidia{n}" for n in range(16)))
_SECRETS: Final = (".env", ".netrc", ".npmrc", ".pypirc", ".git-credentials")
"""Files with secrets that are hidden in each folder that a launch names."""
_SHARED_MEMORY: Final = str(1 << 30)
_RUN: Final = str(64 << 20)
"""Bytes of the file systems in memory that a session may fill."""


def mounts(
    own: Sequence[tuple[str, str]], tmp: str, shown: Sequence[str], hidden: Sequence[str]
) -> Iterator[str]:
    """Yield the mounts of a session, whose arguments are those of ``Walls`` in ``walls.py``."""
    yield from _system()
    yield from ("--proc", "/proc", *_settings_of_the_kernel())
    yield from _devices()
    yield from ("--size", _RUN, "--tmpfs", "/run")
    yield from ("--bind", tmp, "/tmp")  # noqa: S108 - its own
    secrets = (os.path.join(path, name) for path in shown for name in _SECRETS)
    covers = covers_of((*hidden, *filter(os.path.isfile, secrets)))
    named = (*programs_of(sys.executable), *shown)
    visible = _outermost(path for path in named if not is_covered(path, covers))
    yield from _folders_above((*visible, *(inside for _, inside in own)))
    for path in visible:
        yield from ("--ro-bind", path, path)
    rebuilt: list[str] = []
    yield from _covered((*visible, *SYSTEM), covers, rebuilt)
    # A path that is not the folder's own may lie in a visible folder, which cannot be written.
    above = dict.fromkeys(str(Path(inside).parents[1]) for path, inside in own if path != inside)
    for path in above:
        yield from ("--tmpfs", path)
    for path, inside in own:
        yield from ("--bind", path, inside)
    for path in (*rebuilt, *above, "/dev", "/"):
        yield from ("--remount-ro", path)


def _folders_above(paths: Iterable[str]) -> Iterator[str]:
    """Yield the folders above ``paths``, so that a session's user can enter them.

    Started by root, bubblewrap would make them for root alone.
    """
    above = {str(parent) for path in paths for parent in Path(path).parents}
    for path in sorted(above - {"/"}) if os.getuid() == 0 else ():
        if not any(below(path, folder) for folder in SYSTEM):
            yield from ("--perms", "0755", "--dir", path)


def _covered(
    visible: Sequence[str], covers: Mapping[str, tuple[str, ...]], rebuilt: list[str]
) -> Iterator[str]:
    """Yield the covers over visible folders, and add the covered folders to ``rebuilt``."""
    for path in sockets():
        if any(below(path, folder) for folder in visible) and not is_covered(path, covers):
            yield from ("--ro-bind", "/dev/null", path)
    for folder, names in covers.items():
        outside = not any(below(folder, path) for path in visible)
        if outside or any(is_covered(folder, {one: covers[one]}) for one in rebuilt):
            continue
        yield from cover(folder, names)
        rebuilt.append(folder)


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
def _devices() -> tuple[str, ...]:
    found = ["--dev", "/dev", "--perms", "1777", "--size", _SHARED_MEMORY]
    found += ("--tmpfs", "/dev/shm")  # noqa: S108 - its own
    for name in _DEVICES:
        if os.path.exists(f"/dev/{name}"):
            found += ("--dev-bind", f"/dev/{name}", f"/dev/{name}")
    return tuple(found)


def _outermost(paths: Iterable[str]) -> list[str]:
    """Return the paths that lie below no other and in no directory of the system, in order."""
    found: list[str] = []
    inside = tuple(f"{folder}/" for folder in SYSTEM)
    for path in sorted({os.path.normpath(path) for path in paths}):
        if not f"{path}/".startswith(inside):
            found.append(path)
            inside = (*inside, f"{path.rstrip('/')}/")
    return found
