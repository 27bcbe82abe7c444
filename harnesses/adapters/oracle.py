"""An adapter that runs the solution of a Harbor task in place of an agent.

The task's tests must accept the solution.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from bridle.harnesses.adapters.base import Access, LaunchPlan, session_environment
from bridle.harnesses.install import NotLaunchable
from bridle.harnesses.sandboxes.base import Place, ProcessResult, Sandbox, SandboxProvider
from bridle.harnesses.sandboxes.process import ProcessProvider
from bridle.harnesses.tasks.harbor.config import read_config, resolved
from bridle.harnesses.tasks.task import Task


@dataclass(frozen=True)
class Oracle:
    """A harness that runs ``solution/solve.sh`` of the task, or of the step."""

    name: str = "oracle"

    def plan(self, task: Task, access: Access, place: Place) -> LaunchPlan:
        if "harbor" not in task.payload:
            raise NotLaunchable("the oracle runs Harbor tasks only: --tasks harbor:PATH")
        folder = Path(task.payload["harbor"])
        step = task.payload.get("step")
        own = folder / "steps" / step / "solution" if step else folder / "solution"
        solution = own if own.is_dir() else folder / "solution"
        if not (solution / "solve.sh").is_file() and not task.steps:
            raise NotLaunchable(f"{folder} has no solution/solve.sh")
        files: dict[PurePath, str | bytes] = {
            PurePosixPath("/solution") / path.relative_to(solution): path.read_bytes()
            for path in sorted(solution.rglob("*"))
            if path.is_file()
        }
        environment = session_environment(
            access, place, **resolved(read_config(folder).solution.env)
        )
        return LaunchPlan(("/bin/bash", "/solution/solve.sh"), environment, files)

    async def answer(self, finished: ProcessResult, sandbox: Sandbox) -> str:
        return ""

    def sandboxes(self) -> SandboxProvider:
        return ProcessProvider()
