"""mini-swe-agent (Chat completions, without streaming)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from harnesses.adapters.base import Access, Place, Plan, session_environment
from harnesses.install import find_python_harness
from harnesses.runtimes.base import Finished
from harnesses.tasks import Task


@dataclass(frozen=True)
class MiniSweAgent:
    """``mini`` with a task, without confirmations: the pinned one, or ``command`` on ``PATH``."""

    name: str = "mini-swe-agent"
    command: str = "mini"

    def plan(self, task: Task, access: Access, place: Place) -> Plan:
        found = find_python_harness("mini-swe-agent", self.command)
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
