"""``harbor``: its own verdict on what the tests of a task leave, and on the task's folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harbor.models.task.config import TaskOS
from harbor.models.task.task import Task
from harbor.models.trial.paths import TrialPaths
from harbor.verifier.verifier import RewardFileEmptyError, Verifier, VerifierOutputParseError

CASES = json.loads(Path(os.environ["BRIDLE_REFEREES_INPUTS"]).read_text())


class TestsHaveRun:
    """An environment in whose mounted folder the tests have left their files already."""

    os = TaskOS.LINUX

    async def exec(self, **_: Any) -> Any:
        return SimpleNamespace(return_code=0, stdout="", stderr="")

    async def upload_dir(self, **_: Any) -> None:
        pass

    def is_path_mounted(self, *_: Any) -> bool:
        return True


async def verdict(folder: Path) -> dict[str, float] | None:
    """Return the rewards, or ``None`` if Harbor has no verdict."""
    try:
        paths = TrialPaths(folder / "trial")
        found = await Verifier(Task(folder), paths, TestsHaveRun()).verify()  # type: ignore[arg-type]
        return {name: float(value) for name, value in (found.rewards or {}).items()}
    except (OSError, ValueError, RewardFileEmptyError, VerifierOutputParseError):
        return None


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
async def test_verdict(case: dict[str, Any]) -> None:
    theirs = await verdict(Path(case["folder"]))
    if theirs != case["verdict"]:
        pytest.fail(f"ours {case['verdict']}, theirs {theirs}", pytrace=False)
