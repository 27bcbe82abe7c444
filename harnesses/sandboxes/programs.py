"""The files and folders of this machine that a command needs, read-only, to run inside walls."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from bridle.harnesses.sandboxes.covers import below

SEARCH_PATHS: Final = ("PATH", "PYTHONPATH", "PYTHONUSERBASE", "LD_LIBRARY_PATH", "NODE_PATH")
"""Variables whose value is a list of folders from which programs are loaded."""
_RUNNING: Final = ("/run/current-system", "/run/opengl-driver", "/run/booted-system")
"""Folders of ``/run`` in which programs and libraries of some systems lie."""
_FIRST_LINE: Final = 256
"""Bytes of a script's first line that Linux reads."""


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


def named_by(
    argv: Iterable[str], environment: Mapping[str, str], untrusted: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the files and folders that a command needs: its program's and its search paths'.

    ``argv`` has the program, and further files that are given with the folders in which they lie.
    A person's home and the folders above it are never among them, nor what a file in one of the
    ``untrusted`` folders names.
    """
    found: list[str] = []
    search = environment.get("PATH", os.defpath)
    for number, part in enumerate(argv):
        path = part if number else shutil.which(part, path=search) or part
        if os.path.isabs(path) and os.path.exists(path):
            needed = _needed_by(path, search, untrusted)
            found += [place for name in needed for place in _house(name)]
    for name in SEARCH_PATHS:
        for folder in environment.get(name, "").split(os.pathsep):
            if os.path.isabs(folder) and os.path.isdir(folder):
                for one in _links(os.path.join(folder, "any")):
                    found += _house(one) if name == "PATH" else [os.path.dirname(one)]
    return tuple(dict.fromkeys(path for path in found if not _is_home(path)))


def _needed_by(path: str, search: str, untrusted: Sequence[str]) -> Iterator[str]:
    """Yield every path that the kernel opens to start the file at ``path``.

    They are ``path``, those that it links to, and, if the file is a script, the same for the
    interpreter that its first line names. ``search`` is the ``PATH`` that ``env`` searches. Links
    and scripts in an ``untrusted`` folder lead no further.
    """
    seen: set[str] = set()
    while path and path not in seen and os.path.exists(path):
        for name in _links(path):
            seen.add(name)
            yield name
            if any(below(name, folder) for folder in untrusted):
                return
        path = _interpreter(name, search)


def _links(path: str) -> Iterator[str]:
    """Yield ``path``, and what becomes of it as one link after the other is followed.

    The outermost link comes first, as for the kernel. Inside walls, each of these paths has to
    exist, because the folder of a link may be shown without the folder that it leads to.
    """
    seen: set[str] = set()
    while path not in seen:
        seen.add(path)
        yield path
        whole = Path(path)
        for place in (*reversed(whole.parents), whole):
            if place.is_symlink():
                target = place.parent / place.readlink() / whole.relative_to(place)
                path = os.path.normpath(target)
                break


def _interpreter(script: str, search: str) -> str:
    """Return the path of the program that a script's first line names, or ``""``."""
    try:
        with open(script, "rb") as file:
            line = file.readline(_FIRST_LINE)
    except OSError:
        return ""
    if not line.startswith(b"#!"):
        return ""
    program, *arguments = os.fsdecode(line[2:]).split() or [""]
    named = [word for word in arguments if not word.startswith("-")]
    if os.path.basename(program) == "env" and named:
        return shutil.which(named[0], path=search) or ""
    return program


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
