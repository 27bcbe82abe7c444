"""The adapter of Anthropic's Claude Code (Messages API)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePath

from bridle.harnesses.adapters.base import Access, Configuration, LaunchPlan, session_environment
from bridle.harnesses.sandboxes.base import Place, ProcessResult, Sandbox
from bridle.harnesses.tasks.task import Task


@dataclass(frozen=True)
class ClaudeCode:
    """``claude -p`` with a configuration directory of its own and nothing but model traffic."""

    name: str = "claude-code"

    def plan(self, task: Task, access: Access, place: Place) -> LaunchPlan:
        config = self.configuration(access, place.home)
        return LaunchPlan(
            argv=(
                place.programs.node("claude"),
                "-p",
                task.prompt,
                "--dangerously-skip-permissions",
            ),
            environment=session_environment(
                access,
                place,
                PATH=place.search_path,
                **config.environment,
                IS_SANDBOX="1",
                # A session's home is new: there is nothing to remember, and its path would stand
                # before nine tenths of the prompt.
                CLAUDE_CODE_DISABLE_AUTO_MEMORY="1",
            ),
            files=config.files,
        )

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

    async def answer(self, finished: ProcessResult, sandbox: Sandbox) -> str:
        return finished.stdout.tail.strip()
