"""The adapter of the harness ``parrot``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated

from msgspec import Meta

from bridle.harnesses.adapters.base import (
    Access,
    Configuration,
    LaunchPlan,
    last_line,
    session_environment,
)
from bridle.harnesses.sandboxes.base import Place, ProcessResult, Sandbox
from bridle.harnesses.tasks.task import Task


@dataclass(frozen=True)
class Parrot:
    """A harness that asks its model once."""

    name: str = "parrot"
    times: Annotated[int, Meta(ge=1)] = 1
    """Number of times that it prints the reply."""

    def plan(self, task: Task, access: Access, place: Place) -> LaunchPlan:
        script = Path(__file__).with_name("parrot.py")
        settings = self.configuration(access, place.home).environment
        return LaunchPlan(
            (sys.executable, str(script), task.prompt),
            session_environment(access, place, **settings),
        )

    def configuration(self, access: Access, home: PurePath) -> Configuration:
        return Configuration(
            {
                "PARROT_URL": access.openai,
                "PARROT_KEY": access.session.key,
                "PARROT_MODEL": access.model,
                "PARROT_TIMES": str(self.times),
            }
        )

    async def answer(self, finished: ProcessResult, sandbox: Sandbox) -> str:
        return last_line(finished.stdout.tail)
