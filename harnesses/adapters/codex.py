"""The adapter of OpenAI's Codex CLI (Responses API)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePath

from bridle.harnesses.adapters.base import Access, Configuration, ConfiguredHarness, text_of
from bridle.harnesses.sandboxes.base import Place, ProcessResult, Sandbox
from bridle.harnesses.tasks.task import Task

_KEY_VARIABLE = "BRIDLE_SESSION_KEY"


@dataclass(frozen=True)
class Codex(ConfiguredHarness):
    """``codex exec`` with a configuration directory of its own.

    The built-in provider does not let its transport be chosen, so the session gets a provider
    entry. Codex's own sandbox is off, because Bridle provides one.
    """

    name: str = "codex"
    context_window: int = 131_072

    def argv(self, task: Task, access: Access, place: Place) -> tuple[str, ...]:
        return (
            place.programs.node("codex"),
            "exec",
            "--dangerously-bypass-approvals-and-sandbox",
            "--skip-git-repo-check",
            "--output-last-message",
            str(place.logs / "answer.txt"),
            task.prompt,
        )

    def configuration(self, access: Access, home: PurePath) -> Configuration:
        codex_home = home / ".codex"
        return Configuration(
            {"CODEX_HOME": str(codex_home), _KEY_VARIABLE: access.session.key},
            {codex_home / "config.toml": self._config(access)},
        )

    async def answer(self, finished: ProcessResult, sandbox: Sandbox) -> str:
        return (await text_of(sandbox, sandbox.place.logs / "answer.txt")).strip()

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
