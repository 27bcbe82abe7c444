"""The pinned Node harnesses."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from bridle.harnesses.install import NODE, search_path

LOCKS = [NODE / "package-lock.json", NODE / "more/package-lock.json"]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.parent.name)
def test_a_lock_file_pins_every_package_by_its_hash_and_names_no_registry(lock: Path) -> None:
    packages = json.loads(lock.read_text())["packages"]
    root = packages.pop("")

    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in root["dependencies"].values())
    assert all("integrity" in package for package in packages.values())
    assert not any("resolved" in package for package in packages.values())


def test_the_pinned_binaries_come_before_the_systems() -> None:
    assert search_path("/usr/bin").startswith(str(NODE / "node_modules/.bin"))
    assert search_path("/usr/bin").endswith(":/usr/bin")


def test_the_installer_refuses_what_it_does_not_know() -> None:
    ended = subprocess.run([NODE / "install", "--everything"], capture_output=True, text=True)

    assert (ended.returncode, ended.stderr) == (2, "usage: harnesses/node/install [--all]\n")
