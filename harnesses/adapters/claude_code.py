"""The adapter of Anthropic's Claude Code (Messages API)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import PurePath

from bridle.harnesses.adapters.base import Access, Configuration, ConfiguredHarness
from bridle.harnesses.sandboxes.base import Place
from bridle.harnesses.tasks.task import Task


@dataclass(frozen=True)
class ClaudeCode(ConfiguredHarness):
    """``claude -p`` with a configuration directory of its own and nothing but model traffic."""

    name: str = "claude-code"

    def argv(self, task: Task, access: Access, place: Place) -> tuple[str, ...]:
        program = place.programs.node("claude")
        return (program, "-p", task.prompt, "--dangerously-skip-permissions")

    def unattended(self, access: Access, home: PurePath) -> Configuration:
        config = self.configuration(access, home)
        # A session's home is new: there is nothing to remember, and its path would stand before
        # nine tenths of the prompt.
        more = {"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1"}
        return replace(config, environment={**config.environment, **more})

    def configuration(self, access: Access, home: PurePath) -> Configuration:
        directory = home / ".claude"
        return Configuration(
            {
                "ANTHROPIC_BASE_URL": access.anthropic,
                "ANTHROPIC_AUTH_TOKEN": access.session.key,
                "ANTHROPIC_MODEL": access.model,
                "ANTHROPIC_SMALL_FAST_MODEL": access.model,
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": access.model,
                "CLAUDE_CONFIG_DIR": str(directory),
                # A hash that differs between sessions would begin the prompt, so that nothing
                # of the rest could be computed for all of them at once.
                "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            },
            {directory / ".claude.json": json.dumps({"hasCompletedOnboarding": True})},
        )
