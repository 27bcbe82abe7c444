"""Where the Node harnesses are: what ``harnesses/node/install`` put there, or the system's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from harnesses.runtimes.base import NotLaunchable

NODE = Path(__file__).with_name("node")
BIN_DIRECTORIES = (NODE / "node_modules/.bin", NODE / "more/node_modules/.bin")


def find_harness(command: str) -> str:
    """Absolute path of ``command``, the pinned one before any other on ``PATH``.

    Raises :class:`NotLaunchable` with what to install.
    """
    found = shutil.which(command, path=search_path(os.environ.get("PATH", os.defpath)))
    if found is None:
        raise NotLaunchable(f"{command} is not installed; run harnesses/node/install --all")
    return found


def search_path(path: str) -> str:
    """``path`` with the pinned binaries first, Node among them: harnesses are Node scripts."""
    return os.pathsep.join([*(str(directory) for directory in BIN_DIRECTORIES), path])
