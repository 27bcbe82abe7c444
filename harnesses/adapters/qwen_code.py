"""Qwen Code (Chat completions)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePath

from bridle.harnesses.adapters.base import Access, Configuration, LaunchPlan, session_environment
from bridle.harnesses.sandboxes.base import Place, ProcessResult, Sandbox
from bridle.harnesses.tasks.task import Task

_SETTINGS = {"security": {"auth": {"selectedType": "openai"}}}


@dataclass(frozen=True)
class QwenCode:
    """``qwen -p`` without confirmations."""

    name: str = "qwen-code"

    def plan(self, task: Task, access: Access, place: Place) -> LaunchPlan:
        config = self.configuration(access, place.home)
        return LaunchPlan(
            argv=(place.programs.node("qwen"), "--auth-type", "openai", "-y", "-p", task.prompt),
            environment=session_environment(
                access,
                place,
                PATH=place.search_path,
                **config.environment,
            ),
            files=config.files,
        )

    def configuration(self, access: Access, home: PurePath) -> Configuration:
        directory = home / ".qwen"
        return Configuration(
            {
                "OPENAI_BASE_URL": access.openai,
                "OPENAI_API_KEY": access.session.key,
                "OPENAI_MODEL": access.model,
                "QWEN_HOME": str(directory),
            },
            {directory / "settings.json": json.dumps(_SETTINGS, indent=2)},
        )

    async def answer(self, finished: ProcessResult, sandbox: Sandbox) -> str:
        return finished.stdout.tail.strip()
