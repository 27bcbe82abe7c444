"""Collects this machine's Python into one folder that runs in any image.

``pack.py FOLDER``. Python gets a loader and libraries of its own, below ``FOLDER``, so that it
needs nothing of the image that it is mounted into but ``/bin/sh``, not even a C library.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

START = """#!/bin/sh
exec {lib}/{loader} --library-path {lib} --argv0 {bin}/python3 {lib}/{program} "$@"
"""


def main() -> None:
    folder = Path(sys.argv[1])
    programs, libraries = folder / "bin", folder / "lib"
    programs.mkdir(parents=True)
    libraries.mkdir()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    skipped = ("test", "idlelib", "tkinter", "turtledemo", "ensurepip", "site-packages")
    shutil.copytree(
        sysconfig.get_path("stdlib"),
        libraries / version,
        ignore=shutil.ignore_patterns(*skipped, "dist-packages", "config-*", "*.a"),
    )
    (libraries / version / "site-packages").mkdir()
    program = libraries / "python-program"
    shutil.copy(os.path.realpath(sys.executable), program)
    loader = ""
    for path in (program, *(libraries / version).rglob("*.so")):
        for name, found in needed(path):
            if "ld-linux" in name:
                loader = name
            if not (libraries / name).exists():
                shutil.copy(os.path.realpath(found), libraries / name)
    start = programs / "python3"
    start.write_text(START.format(lib=libraries, bin=programs, loader=loader, program=program.name))
    start.chmod(0o755)
    (programs / version).symlink_to("python3")
    subprocess.run([start, "-m", "compileall", "-q", libraries / version], check=False)


def needed(path: Path) -> list[tuple[str, str]]:
    """Name and file of each library that ``path`` loads, and of the loader."""
    listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
    loaders = re.findall(r"^\s+(/\S+)", listed, re.MULTILINE)
    found: list[tuple[str, str]] = re.findall(r"(\S+) => (/\S+)", listed)
    return [*found, *((os.path.basename(loader), loader) for loader in loaders)]


if __name__ == "__main__":
    main()
