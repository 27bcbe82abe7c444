"""Count the files of Bridle's that a change needs: ``python benchmarks/touch.py``.

A part of another distribution needs none: each distribution of ``tests/distributions`` is installed
and run from end to end by ``tests/bridle/test_distributions.py``, and no product file names it.
"""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
ROOMS: Final = ("src", "store", "engine", "proxy", "reconstruct", "trainer", "harnesses")
DISTRIBUTIONS: Final = {
    "export": "bridle-markdown",
    "adapter": "bridle-parrot",
    "sandbox": "bridle-remote",
}
"""The distribution that stands for each kind of part."""


def touched() -> dict[str, list[str]]:
    """Return the product files that each change needs, by the name of the change."""
    return {kind: naming(name) for kind, name in DISTRIBUTIONS.items()}


def naming(distribution: str) -> list[str]:
    """Return the product files that contain the name of a distribution, of a module of it, or of a
    part that it brings, in quotation marks."""
    file = ROOT / "tests" / "distributions" / distribution / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    groups: Mapping[str, Mapping[str, str]] = project["entry-points"]
    words = {distribution}
    for parts in groups.values():
        for name, place in parts.items():
            words |= {f'"{name}"', place.partition(":")[0]}
    patterns = [argument for word in sorted(words) for argument in ("-e", word)]
    found = subprocess.run(
        ["git", "grep", "-lF", *patterns, "--", *ROOMS],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return found.stdout.split()


if __name__ == "__main__":
    print(json.dumps({kind: len(files) for kind, files in touched().items()}))
