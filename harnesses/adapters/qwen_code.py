"""Qwen Code (Chat completions)."""

from __future__ import annotations

import os
from dataclasses import dataclass

from bridle.harnesses.adapters.base import Access, LaunchPlan, Place, session_environment
from bridle.harnesses.install import find_harness, search_path
from bridle.harnesses.sandboxes.base import ProcessResult
from bridle.harnesses.tasks.task import Task


@dataclass(frozen=True)
class QwenCode:
    """``qwen -p`` without confirmations."""

    name: str = "qwen-code"

    def plan(self, task: Task, access: Access, place: Place) -> LaunchPlan:
        return LaunchPlan(
            argv=(find_harness("qwen"), "--auth-type", "openai", "-y", "-p", task.prompt),
            environment=session_environment(
                access,
                place,
                PATH=search_path(os.environ.get("PATH", os.defpath)),
                OPENAI_BASE_URL=access.openai,
                OPENAI_API_KEY=access.session.key,
                OPENAI_MODEL=access.model,
            ),
        )

    def answer(self, finished: ProcessResult, place: Place) -> str:
        return finished.stdout.tail.strip()
