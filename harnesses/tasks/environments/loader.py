"""The loader of the tasks of a verifiers environment.

The Python that has the environment installed lists them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from bridle.harnesses.tasks.task import Task, TaskError

PLAYER: Final = Path(__file__).with_name("player.py")
PLAYED: Final = "played.json"
"""The name of the file that the player leaves beside the logs of a session."""
PYTHON_VARIABLE: Final = "BRIDLE_VERIFIERS_PYTHON"


def environment_python() -> str:
    """Return the interpreter that has verifiers and the environments.

    It is the one in ``BRIDLE_VERIFIERS_PYTHON``, or else this one.
    """
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


def environment_tasks(name: str) -> Iterator[Task]:
    """Yield the tasks of the environment ``name``, or of a TOML file with its ``[env]`` block.

    An environment without an end is listed as far as its tasks are read. Raise :class:`TaskError`.
    """
    if name.endswith(".toml"):
        name = str(Path(name).expanduser().absolute())
    with tempfile.TemporaryFile("w+", encoding="utf-8") as problems:
        listing = _listing(name, problems)
        with listing:
            try:
                for index, line in enumerate(listing.stdout or ()):
                    yield _task(name, index, json.loads(line))
            finally:
                if listing.poll() is None:  # it is still listing, and nobody reads on
                    listing.kill()
        problems.seek(0)
        said = problems.read().strip().splitlines()
    if listing.returncode:
        why = said[-1] if said else f"exit code {listing.returncode}"
        raise TaskError(
            f"the verifiers environment {name} cannot be listed: {why}. Install verifiers and the "
            f"environment for one Python, and name it in {PYTHON_VARIABLE}"
        )


def _listing(name: str, problems: IO[str]) -> subprocess.Popen[str]:
    command = [environment_python(), str(PLAYER), "tasks", name]
    try:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=problems, text=True, encoding="utf-8"
        )
    except OSError as error:
        raise TaskError(f"{PYTHON_VARIABLE} names no Python: {error}") from error


def _task(name: str, index: int, found: dict[str, str]) -> Task:
    payload = {"verifiers": name, "index": index}
    return Task(f"{index}-{found['id']}", found["prompt"], Path(name).stem, payload=payload)
