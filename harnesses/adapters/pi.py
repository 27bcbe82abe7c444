"""The adapter of Pi (Chat completions)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePath

from bridle.harnesses.adapters.base import Access, Configuration, ConfiguredHarness
from bridle.harnesses.sandboxes.base import Place
from bridle.harnesses.tasks.task import Task


@dataclass(frozen=True)
class Pi(ConfiguredHarness):
    """``pi -p`` with one provider and one model in its model list."""

    name: str = "pi"
    reasoning: bool = True
    context_window: int = 131_072
    max_tokens: int = 8_192

    def argv(self, task: Task, access: Access, place: Place) -> tuple[str, ...]:
        program = place.programs.node("pi")
        return (program, "--provider", "bridle", "--model", access.model, "-p", task.prompt)

    def configuration(self, access: Access, home: PurePath) -> Configuration:
        directory = home / ".pi/agent"
        settings = {"defaultProvider": "bridle", "defaultModel": access.model}
        return Configuration(
            {"PI_CODING_AGENT_DIR": str(directory)},
            {
                directory / "models.json": self._models(access),
                directory / "settings.json": json.dumps(settings),
            },
        )

    def _models(self, access: Access) -> str:
        model = {
            "id": access.model,
            "name": access.model,
            "reasoning": self.reasoning,
            "input": ["text"],
            "contextWindow": self.context_window,
            "maxTokens": self.max_tokens,
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        }
        provider = {
            "baseUrl": access.openai,
            "apiKey": access.session.key,
            "api": "openai-completions",
            "models": [model],
        }
        return json.dumps({"providers": {"bridle": provider}}, indent=2)
