"""Qwen Code (Chat completions)."""

from __future__ import annotations

from dataclasses import dataclass

from bridle.harnesses.adapters.base import Access, LaunchPlan, session_environment
from bridle.harnesses.sandboxes.base import Place, ProcessResult, Sandbox
from bridle.harnesses.tasks.task import Task


@dataclass(frozen=True)
class QwenCode:
    """``qwen -p`` without confirmations."""

    name: str = "qwen-code"

    def plan(self, task: Task, access: Access, place: Place) -> LaunchPlan:
        return LaunchPlan(
            argv=(place.programs.node("qwen"), "--auth-type", "openai", "-y", "-p", task.prompt),
            environment=session_environment(
                access,
                place,
                PATH=place.search_path,
                OPENAI_BASE_URL=access.openai,
                OPENAI_API_KEY=access.session.key,
                OPENAI_MODEL=access.model,
            ),
        )

    async def answer(self, finished: ProcessResult, sandbox: Sandbox) -> str:
        return finished.stdout.tail.strip()
