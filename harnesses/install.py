"""The locations of the harnesses, the pinned ones or the system's.

The two ``install`` scripts install the pinned ones.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from bridle.errors import BridleError

NODE = Path(__file__).with_name("node")
PYTHON = Path(__file__).with_name("python")
SDK = NODE / "sdk"
BIN_DIRECTORIES = (NODE / "node_modules/.bin", NODE / "more/node_modules/.bin")


class NotLaunchable(BridleError):
    """The command cannot be started: it is not installed or not executable."""


def find_harness(command: str) -> str:
    """Return the absolute path of the Node harness ``command``.

    The pinned one comes before any other on ``PATH``.

    Raise :class:`NotLaunchable` with the command that installs it.
    """
    found = shutil.which(command, path=search_path(os.environ.get("PATH", os.defpath)))
    if found is None:
        raise NotLaunchable(f"{command} is not installed; run harnesses/node/install --all")
    return found


def find_python_harness(environment: str, command: str) -> str:
    """Return the absolute path of ``command`` in the pinned ``environment``, or else on ``PATH``.

    ``python`` is looked up in the environment only, because any other lacks the harness. Raise
    :class:`NotLaunchable` with the command that installs it.
    """
    pinned = PYTHON / f".venv-{environment}/bin"
    places = [str(pinned)]
    if command != "python":
        places.append(os.environ.get("PATH", os.defpath))
    found = shutil.which(command, path=os.pathsep.join(places))
    if found is None:
        raise NotLaunchable(f"{environment} is not installed; run harnesses/python/install")
    return found


def find_node_script(name: str) -> str:
    """Return the absolute path of an agent script whose packages are installed beside it.

    Raise :class:`NotLaunchable` with the command that installs them.
    """
    if not (SDK / "node_modules").is_dir():
        raise NotLaunchable(f"{name} lacks its packages; run harnesses/node/install --all")
    return str(SDK / name)


class HostPrograms:
    """The harnesses that the install scripts put on this machine, or that are on ``PATH``."""

    def node(self, command: str) -> str:
        return find_harness(command)

    def python(self, harness: str, command: str) -> str:
        return find_python_harness(harness, command)

    def search_path(self, path: str) -> str:
        return search_path(path)


def pinned_version(package: str) -> str | None:
    """Return the version of ``package`` that the install scripts put here.

    Return ``None`` if they do not install it.
    """
    for folder in (NODE, NODE / "more", SDK):
        manifest = (folder / "package.json").read_text(encoding="utf-8")
        pins = json.loads(manifest)["dependencies"]
        if package in pins:
            return str(pins[package])
    pins_file = PYTHON / f"{package}.txt"
    if "/" in package or not pins_file.is_file():
        return None
    lines = pins_file.read_text(encoding="utf-8").splitlines()
    return next((line.split("==")[1] for line in lines if line.startswith(f"{package}==")), None)


def search_path(path: str) -> str:
    """Return ``path`` with the folders of the pinned programs in front.

    Node is among those programs, because harnesses are Node scripts.
    """
    return os.pathsep.join([*(str(directory) for directory in BIN_DIRECTORIES), path])
