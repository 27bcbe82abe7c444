"""Anthropic's Claude Code (Messages API)."""

from __future__ import annotations

from dataclasses import dataclass

from bridle.harnesses.adapters.base import Access, LaunchPlan, session_environment
from bridle.harnesses.sandboxes.base import Place, ProcessResult, Sandbox
from bridle.harnesses.tasks.task import Task


@dataclass(frozen=True)
class ClaudeCode:
    """``claude -p`` with a configuration directory of its own and nothing but model traffic."""

    name: str = "claude-code"

    def plan(self, task: Task, access: Access, place: Place) -> LaunchPlan:
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
                ANTHROPIC_BASE_URL=access.anthropic,
                ANTHROPIC_AUTH_TOKEN=access.session.key,
                ANTHROPIC_MODEL=access.model,
                ANTHROPIC_SMALL_FAST_MODEL=access.model,
                ANTHROPIC_DEFAULT_HAIKU_MODEL=access.model,
                CLAUDE_CONFIG_DIR=str(place.home / ".claude"),
                CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
                IS_SANDBOX="1",
            ),
        )

    async def answer(self, finished: ProcessResult, sandbox: Sandbox) -> str:
        return finished.stdout.tail.strip()
