"""Harbor tasks at the corners of the format, with our verdicts, for Harbor to judge again."""

from __future__ import annotations

import json
from pathlib import Path

from bridle.harnesses.tasks.harbor.loader import harbor_task
from bridle.harnesses.tasks.task import TaskError
from bridle.harnesses.verifiers.delivery import NoVerdict
from bridle.harnesses.verifiers.harbor import rewards_in

TASK = {
    "task.toml": 'schema_version = "1.4"\n[environment]\ndocker_image = "debian:12"\n',
    "instruction.md": "Say yes.\n",
    "environment/Dockerfile": "FROM debian:12\n",
    "tests/test.sh": "exit 0\n",
}
TEXT, TABLE = "trial/verifier/reward.txt", "trial/verifier/reward.json"
CORNERS: dict[str, dict[str, str | None]] = {
    "text": {TEXT: "1.0\n"},
    "text-in-blanks": {TEXT: "  0.5 \n"},
    "text-negative": {TEXT: "-2"},
    "text-nan": {TEXT: "nan"},
    "text-infinite": {TEXT: "inf"},
    "text-empty": {TEXT: ""},
    "text-blank": {TEXT: "\n"},
    "text-two-numbers": {TEXT: "1 2"},
    "text-underscore": {TEXT: "1_0"},
    "text-words": {TEXT: "passed"},
    "text-other-digits": {TEXT: "١"},
    "table": {TABLE: '{"reward": 1, "style": 0.5}'},
    "table-before-text": {TABLE: '{"reward": 0.25}', TEXT: "7"},
    "table-empty-before-text": {TABLE: "", TEXT: "1"},
    "table-without-rewards": {TABLE: "{}"},
    "table-truth": {TABLE: '{"reward": true}'},
    "table-bare-number": {TABLE: "1.0"},
    "table-list": {TABLE: "[1.0]"},
    "table-nan": {TABLE: '{"reward": NaN}'},
    "table-overflow": {TABLE: '{"reward": 1e309}'},
    "table-string": {TABLE: '{"reward": "1"}'},
    "table-null": {TABLE: '{"reward": null}'},
    "table-nested": {TABLE: '{"reward": {"style": 1}}'},
    "table-twice": {TABLE: '{"reward": 0, "reward": 1}'},
    "table-cut": {TABLE: '{"reward": 1'},
    "nothing-left": {},
    "no-instruction": {"instruction.md": None, TEXT: "1"},
    "no-config": {"task.toml": None, TEXT: "1"},
    "config-cut": {"task.toml": "[environment", TEXT: "1"},
    "config-of-later": {"task.toml": TASK["task.toml"] + "[later]\nx = 1\n", TEXT: "1"},
}
"""The files by which each task differs from ``TASK``; ``None`` leaves one out."""


def verdict(folder: Path) -> dict[str, float] | None:
    """Return our rewards of a task whose tests have run, or ``None`` if there is no verdict."""
    try:
        harbor_task(folder, "corners")
        return dict(rewards_in(folder / "trial" / "verifier"))
    except (TaskError, NoVerdict):
        return None


def write(file: Path) -> None:
    """Write the tasks beside ``file``, and there their folders and our verdicts as JSON."""
    cases = []
    for name, files in CORNERS.items():
        folder = file.with_name("corners") / name
        (folder / "trial" / "verifier").mkdir(parents=True)
        for path, text in (TASK | files).items():
            if text is not None:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text, encoding="utf-8")
        cases.append({"name": name, "folder": str(folder), "verdict": verdict(folder)})
    file.write_text(json.dumps(cases))
