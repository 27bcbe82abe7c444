"""The adapter of mini-swe-agent (Chat completions, without streaming)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePath

from bridle.harnesses.adapters.base import (
    Access,
    Configuration,
    LaunchPlan,
    session_environment,
    text_of,
)
from bridle.harnesses.install import NotLaunchable, find_python_harness
from bridle.harnesses.sandboxes.base import Place, ProcessResult, Sandbox, SandboxProvider
from bridle.harnesses.sandboxes.container import WarmContainerProvider
from bridle.harnesses.sandboxes.forked import ForkedProvider, interpreter_of
from bridle.harnesses.sandboxes.process import ProcessProvider
from bridle.harnesses.tasks.task import Task

_LITELLM_ENVIRONMENT = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""The environment that keeps LiteLLM from fetching its price list from the network when it is
imported."""


_ATTEMPTS = "3"
"""Number of attempts at a call, seconds apart. With its default of ten, mini-swe-agent retries for
minutes after a permanent error such as a spent budget."""


@dataclass(frozen=True)
class MiniSweAgent:
    """The program ``mini`` with a task and without confirmations.

    It is the pinned one, or ``command`` on ``PATH``.
    """

    name: str = "mini-swe-agent"
    command: str = "mini"

    def plan(self, task: Task, access: Access, place: Place) -> LaunchPlan:
        found = place.programs.python("mini-swe-agent", self.command)
        return LaunchPlan(
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
                MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT=_ATTEMPTS,
                **self.configuration(access, place.home).environment,
            ),
        )

    def configuration(self, access: Access, home: PurePath) -> Configuration:
        return Configuration(
            {
                "OPENAI_API_BASE": access.openai,
                "OPENAI_API_KEY": access.session.key,
                "MSWEA_CONFIGURED": "true",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_MODEL_NAME": f"openai/{access.model}",
                "MSWEA_GLOBAL_CONFIG_DIR": str(home / ".config/mini-swe-agent"),
                **_LITELLM_ENVIRONMENT,
            }
        )

    async def answer(self, finished: ProcessResult, sandbox: Sandbox) -> str:
        try:
            trajectory = json.loads(await text_of(sandbox, sandbox.place.logs / "trajectory.json"))
        except json.JSONDecodeError:
            return ""
        return str(trajectory.get("info", {}).get("submission") or "").strip()

    def sandboxes(self) -> SandboxProvider:
        """Return sandboxes whose sessions are forked from a process that has imported LiteLLM.

        The import takes seconds. If the harness's Python is not known, sessions are plain
        processes.

        mini-swe-agent itself is not imported there: at its import it reads the location of its
        configuration, which differs between sessions.
        """
        try:
            python = interpreter_of(Path(find_python_harness("mini-swe-agent", self.command)))
        except NotLaunchable:
            python = None
        if python is None or not Path(python).name.startswith("python"):
            return ProcessProvider(confined=True)
        return ForkedProvider(
            ["litellm"],
            python=python,
            fresh=["minisweagent"],
            environment=_LITELLM_ENVIRONMENT,
            confined=True,
        )

    def warm_containers(self) -> SandboxProvider:
        """Return the same as :meth:`sandboxes`, in one container for all sessions."""
        return WarmContainerProvider(
            self.name, ["litellm"], fresh=["minisweagent"], environment=_LITELLM_ENVIRONMENT
        )
