"""The adapter of the agent that a verifiers environment brings; the environment itself plays it."""

from __future__ import annotations

from dataclasses import dataclass

from bridle.harnesses.adapters.base import Access, LaunchPlan, session_environment
from bridle.harnesses.install import NotLaunchable
from bridle.harnesses.sandboxes.base import Place, ProcessResult, Sandbox
from bridle.harnesses.tasks.environments.loader import PLAYED, PLAYER, environment_python
from bridle.harnesses.tasks.task import Task


@dataclass(frozen=True)
class EnvironmentPlayer:
    """A harness that plays a task of ``verifiers:NAME`` in the Python that has the environment."""

    name: str = "verifiers"

    def plan(self, task: Task, access: Access, place: Place) -> LaunchPlan:
        if "verifiers" not in task.payload:
            raise NotLaunchable("this agent plays environments: --tasks verifiers:NAME")
        named, index = task.payload["verifiers"], task.payload["index"]
        argv = (environment_python(), str(PLAYER), "play", named, str(index))
        environment = session_environment(access, place, OPENAI_MODEL=access.model)
        return LaunchPlan((*argv, str(place.logs / PLAYED)), environment, shown=(str(PLAYER),))

    async def answer(self, finished: ProcessResult, sandbox: Sandbox) -> str:
        return ""
