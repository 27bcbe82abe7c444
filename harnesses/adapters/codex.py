"""OpenAI's Codex CLI (Responses API)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from bridle.harnesses.adapters.base import Access, LaunchPlan, Place, session_environment
from bridle.harnesses.install import find_harness, search_path
from bridle.harnesses.sandboxes.base import ProcessResult
from bridle.harnesses.tasks.task import Task

_KEY_VARIABLE = "BRIDLE_SESSION_KEY"


@dataclass(frozen=True)
class Codex:
    """``codex exec`` with a configuration directory of its own.

    The built-in provider would not let its transport be chosen, so the session gets a provider
    entry. Codex's own sandbox is off: Bridle provides one.
    """

    name: str = "codex"
    context_window: int = 131_072

    def plan(self, task: Task, access: Access, place: Place) -> LaunchPlan:
        codex_home = place.home / ".codex"
        return LaunchPlan(
            argv=(
                find_harness("codex"),
                "exec",
                "--dangerously-bypass-approvals-and-sandbox",
                "--skip-git-repo-check",
                "--output-last-message",
                str(place.logs / "answer.txt"),
                task.prompt,
            ),
            environment=session_environment(
                access,
                place,
                PATH=search_path(os.environ.get("PATH", os.defpath)),
                CODEX_HOME=str(codex_home),
                **{_KEY_VARIABLE: access.session.key},
            ),
            files={codex_home / "config.toml": self._config(access)},
        )

    def answer(self, finished: ProcessResult, place: Place) -> str:
        path = place.logs / "answer.txt"
        return path.read_text(encoding="utf-8").strip() if path.exists() else ""

    def _config(self, access: Access) -> str:
        return "\n".join(
            [
                f"model = {json.dumps(access.model)}",
                'model_provider = "bridle"',
                f"model_context_window = {self.context_window}",
                "check_for_update_on_startup = false",
                "[analytics]",
                "enabled = false",
                "[model_providers.bridle]",
                'name = "bridle"',
                f"base_url = {json.dumps(access.openai)}",
                f'env_key = "{_KEY_VARIABLE}"',
                'wire_api = "responses"',
                "",
            ]
        )
