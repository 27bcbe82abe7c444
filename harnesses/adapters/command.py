"""An adapter that runs any command line as a harness."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bridle.harnesses.adapters.base import Access, LaunchPlan, last_line, session_environment
from bridle.harnesses.install import NotLaunchable
from bridle.harnesses.sandboxes.base import Place, ProcessResult, Sandbox
from bridle.harnesses.tasks.task import Task


@dataclass(frozen=True)
class Command:
    """A harness that runs ``argv`` with its placeholders filled in.

    The placeholders are ``{prompt}``, ``{task_id}``, ``{workspace}``, ``{home}``, ``{model}``,
    ``{key}``, and the base URLs ``{openai}``, ``{anthropic}``, ``{google}``; ``{{`` and ``}}`` are
    literal braces. The base URLs and the key are in the environment as well. The answer is the last
    line printed.
    """

    argv: Sequence[str]
    name: str = "command"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables, in which placeholders work too."""

    def plan(self, task: Task, access: Access, place: Place) -> LaunchPlan:
        values = {
            "prompt": task.prompt,
            "task_id": task.id,
            "workspace": str(place.workspace),
            "home": str(place.home),
            "model": access.model,
            "key": access.session.key,
            **{name: access.session.base_urls.get(name, "") for name in _URLS},
        }
        extra = {name: _fill(text, values) for name, text in self.environment.items()}
        return LaunchPlan(
            argv=tuple(_fill(part, values) for part in self.argv),
            environment=session_environment(access, place, **extra),
            shown=tuple(part for part in self.argv[1:] if "{" not in part),
        )

    async def answer(self, finished: ProcessResult, sandbox: Sandbox) -> str:
        return last_line(finished.stdout.tail)


_URLS = ("openai", "anthropic", "google")


def _fill(text: str, values: Mapping[str, str]) -> str:
    try:
        return string.Formatter().vformat(text, (), values)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        known = ", ".join(f"{{{name}}}" for name in values)
        raise NotLaunchable(f"{text!r}: unknown placeholder {error}; known are {known}") from error
