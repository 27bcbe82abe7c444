"""The adapter of Qwen Code (Chat completions)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from bridle.harnesses.adapters.base import Access, Configuration, ConfiguredHarness
from bridle.harnesses.sandboxes.base import Place
from bridle.harnesses.tasks.task import Task

_SETTINGS = {"security": {"auth": {"selectedType": "openai"}}}
_NO_MEMORY = {"memory": {"enableManagedAutoMemory": False}}
"""The settings for a session, whose home is new. It has nothing to remember, and the memory's path
would come before most of the prompt."""


@dataclass(frozen=True)
class QwenCode(ConfiguredHarness):
    """``qwen -p`` without confirmations."""

    name: str = "qwen-code"

    def argv(self, task: Task, access: Access, place: Place) -> tuple[str, ...]:
        program = place.programs.node("qwen")
        return (program, "--auth-type", "openai", "-y", "-p", task.prompt)

    def unattended(self, access: Access, home: PurePath) -> Configuration:
        # Else it starts itself again for a larger heap: a quarter of a short session.
        more = {"QWEN_CODE_NO_RELAUNCH": "true"}
        environment = {**more, **self.configuration(access, home).environment}
        return Configuration(environment, _settings_file(home, **_NO_MEMORY))

    def configuration(self, access: Access, home: PurePath) -> Configuration:
        return Configuration(
            {
                "OPENAI_BASE_URL": access.openai,
                "OPENAI_API_KEY": access.session.key,
                "OPENAI_MODEL": access.model,
                "QWEN_HOME": str(home / ".qwen"),
            },
            _settings_file(home),
        )


def _settings_file(home: PurePath, **more: Any) -> dict[PurePath, str]:
    return {home / ".qwen" / "settings.json": json.dumps(_SETTINGS | more, indent=2)}
