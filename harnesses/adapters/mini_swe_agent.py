"""mini-swe-agent (Chat completions, without streaming)."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass

from harnesses.adapters.base import Access, Place, Plan, session_environment
from harnesses.runtimes.base import Finished, NotLaunchable
from harnesses.tasks import Task


@dataclass(frozen=True)
class MiniSweAgent:
    """``mini`` with a task, without confirmations; install it with ``pip install mini-swe-agent``.

    ``command`` is its executable, when it lives in an environment of its own.
    """

    name: str = "mini-swe-agent"
    command: str = "mini"

    def plan(self, task: Task, access: Access, place: Place) -> Plan:
        found = shutil.which(self.command)
        if found is None:
            raise NotLaunchable(f"{self.command} is not installed; pip install mini-swe-agent mcp")
        return Plan(
            argv=(
                found,
                "-m",
                f"openai/{access.model}",
                "-t",
                task.prompt,
                "-y",
                "--exit-immediately",
                "-o",
                str(place.logs / "trajectory.json"),
            ),
            environment=session_environment(
                access,
                place,
                OPENAI_API_BASE=access.openai,
                OPENAI_API_KEY=access.session.key,
                MSWEA_CONFIGURED="true",
                MSWEA_COST_TRACKING="ignore_errors",
                LITELLM_LOCAL_MODEL_COST_MAP="True",
                MSWEA_GLOBAL_CONFIG_DIR=str(place.home / ".config/mini-swe-agent"),
            ),
        )

    def answer(self, finished: Finished, place: Place) -> str:
        try:
            trajectory = json.loads((place.logs / "trajectory.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return ""
        return str(trajectory.get("info", {}).get("submission") or "").strip()
