"""The adapter of OpenCode (Chat completions)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import PurePath

from bridle.harnesses.adapters.base import Access, Configuration, ConfiguredHarness
from bridle.harnesses.sandboxes.base import Place
from bridle.harnesses.tasks.task import Task


@dataclass(frozen=True)
class OpenCode(ConfiguredHarness):
    """``opencode run`` with one provider. Its configuration is in the session's home."""

    name: str = "opencode"
    context_window: int = 131_072
    max_tokens: int = 8_192

    def argv(self, task: Task, access: Access, place: Place) -> tuple[str, ...]:
        return (place.programs.node("opencode"), "run", task.prompt)

    def unattended(self, access: Access, home: PurePath) -> Configuration:
        config = self.configuration(access, home)
        permitted = {"OPENCODE_PERMISSION": json.dumps({"*": "allow"})}
        return replace(config, environment={**permitted, **config.environment})

    def configuration(self, access: Access, home: PurePath) -> Configuration:
        file = home / ".config/opencode/opencode.json"
        return Configuration(
            {"OPENCODE_CONFIG": str(file), "OPENCODE_DISABLE_AUTOUPDATE": "1"},
            {file: self._config(access)},
        )

    def _config(self, access: Access) -> str:
        limits = {"context": self.context_window, "output": self.max_tokens}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": access.openai, "apiKey": access.session.key},
            "models": {access.model: {"name": access.model, "limit": limits}},
        }
        return json.dumps(
            {
                "$schema": "https://opencode.ai/config.json",
                "model": f"bridle/{access.model}",
                "provider": {"bridle": provider},
                "autoupdate": False,
                "share": "disabled",
            },
            indent=2,
        )
