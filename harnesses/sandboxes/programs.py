"""The files and folders of this machine that a command needs, read-only, to run inside walls."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import Final

from bridle.harnesses.sandboxes.covers import below

SEARCH_PATHS: Final = ("PATH", "PYTHONPATH", "PYTHONUSERBASE", "LD_LIBRARY_PATH", "NODE_PATH")
"""Variables whose value is a list of folders from which programs are loaded."""
_RUNNING: Final = ("/run/current-system", "/run/opengl-driver", "/run/booted-system")
"""Folders of ``/run`` in which programs and libraries of some systems lie."""


@functools.cache
def programs_of(python: str) -> tuple[str, ...]:
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
            found += [
                place
                for name in (*_spellings(path), os.path.realpath(path))
                for place in _house(name)
            ]
    for name in SEARCH_PATHS:
        for folder in environment.get(name, "").split(os.pathsep):
            if os.path.isabs(folder) and os.path.isdir(folder):
                file = os.path.join(folder, "any")
                for one in _spellings(file):
                    found += _house(one) if name == "PATH" else [os.path.dirname(one)]
    return tuple(dict.fromkeys(path for path in found if not _is_home(path)))


def _spellings(path: str) -> tuple[str, str]:
    """Return the path of a file, as it is and without links in its folder.

    Inside walls, a link in the folder leads nowhere unless the folder itself is shown.
    """
    folder, name = os.path.split(path)
    return path, os.path.join(os.path.realpath(folder), name)


def _house(path: str) -> list[str]:
    """Return the folder that the file at ``path`` needs around it.

    It is the folder of all packages of Node, the prefix above a ``bin``, or the file's own folder.
    """
    before, packages, _ = f"{path}/".partition("/node_modules/")
    if packages:
        return [f"{before}/node_modules"]
    if os.path.isdir(path):
        return [path]
    folder = os.path.dirname(path)
    prefix, name = os.path.split(folder)
    above, last = os.path.split(prefix)
    private = above == os.path.expanduser("~") and last.startswith(".")
    if name == "bin" and not private and not _is_home(prefix):
        return [prefix]
    return [path, folder]


@functools.cache
def _is_home(path: str) -> bool:
    return below(os.path.realpath(os.path.expanduser("~")), os.path.realpath(path))
