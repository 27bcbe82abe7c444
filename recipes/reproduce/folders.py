"""The editing tasks as Harbor folders (schema 1.4), for sessions in containers."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from bridle.harnesses.sandboxes.container.images import DEFAULT_IMAGE
from bridle.harnesses.tasks.harbor.loader import harbor_task
from bridle.harnesses.tasks.task import Task

STEP: Final = "edit"
_CONFIG: Final = f"""schema_version = "1.4"

[environment]
docker_image = "{DEFAULT_IMAGE}"
network_mode = "no-network"
workdir = "/workspace"

[[steps]]
name = "{STEP}"
"""
_TEST: Final = """#!/bin/sh
if {check}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


class HarborFolders:
    """The Harbor folders below ``root``, each written when its task is first asked for.

    The task's only step puts the file to edit into the workspace, so that all tasks share one
    image.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def task(self, task: Task) -> Task:
        """Return the same task, as a Harbor folder describes it."""
        folder = self._root / task.id
        if not folder.is_dir():
            self._write(task, folder)
        return replace(harbor_task(folder, task.suite), split=task.split)

    def _write(self, task: Task, folder: Path) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._root) as made:
            files = {
                "task.toml": _CONFIG,
                f"steps/{STEP}/instruction.md": f"{task.prompt}\n",
                f"steps/{STEP}/tests/test.sh": _TEST.format(check=task.payload["verify"]),
                f"steps/{STEP}/solution/solve.sh": "\n".join(
                    ["#!/bin/sh", *task.payload["right"], ""]
                ),
                **{f"steps/{STEP}/workdir/{name}": text for name, text in task.files.items()},
            }
            for name, text in files.items():
                path = Path(made) / "task" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            os.replace(Path(made) / "task", folder)
