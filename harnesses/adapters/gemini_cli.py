"""The adapter of Google's Gemini CLI (generateContent API)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePath

from bridle.harnesses.adapters.base import Access, Configuration, ConfiguredHarness
from bridle.harnesses.sandboxes.base import Place
from bridle.harnesses.tasks.task import Task

_SETTINGS = {
    "security": {"auth": {"selectedType": "gemini-api-key"}},
    "privacy": {"usageStatisticsEnabled": False},
    "general": {"disableAutoUpdate": True},
}


@dataclass(frozen=True)
class GeminiCli(ConfiguredHarness):
    """``gemini -p`` without confirmations.

    The CLI knows its models by name and chooses features by that name, so it requests ``model`` and
    not the rollout's model name; the proxy serves the policy under that name.
    """

    name: str = "gemini-cli"
    model: str = "gemini-2.5-pro"

    def argv(self, task: Task, access: Access, place: Place) -> tuple[str, ...]:
        return (place.programs.node("gemini"), "-m", self.model, "-y", "-p", task.prompt)

    def configuration(self, access: Access, home: PurePath) -> Configuration:
        # Without a model of its own it asks one which model to ask.
        settings = {**_SETTINGS, "model": {"name": self.model}}
        return Configuration(
            {
                "GOOGLE_GEMINI_BASE_URL": access.google,
                "GEMINI_API_KEY": access.session.key,
                "GEMINI_CLI_HOME": str(home),
                "GEMINI_CLI_TRUST_WORKSPACE": "true",
            },
            {home / ".gemini/settings.json": json.dumps(settings, indent=2)},
        )
