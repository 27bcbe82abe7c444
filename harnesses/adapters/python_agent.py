"""An adapter of Python agent scripts, such as a LangChain app, in the local or the warm sandbox."""

from __future__ import annotations

import site
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bridle.harnesses.adapters.base import Access, LaunchPlan, last_line, session_environment
from bridle.harnesses.sandboxes.base import Place, ProcessResult, Sandbox
from bridle.harnesses.tasks.task import Task


@dataclass(frozen=True)
class PythonAgent:
    """A harness that runs ``python script *arguments prompt``.

    The answer is the last line that it prints.
    """

    script: Path
    arguments: Sequence[str] = ()
    """Arguments before the prompt."""
    name: str = "python"
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    without_tls: bool = False
    """True if the agent opens no TLS connection, because the proxy is at a plain ``http`` URL and
    its tools stay local. This saves each session the loading of the machine's certificate
    authorities (40 ms)."""

    def plan(self, task: Task, access: Access, place: Place) -> LaunchPlan:
        extra = {"OPENAI_MODEL": access.model, **self.environment}
        if self.without_tls:
            # A directory of authorities is read when one is needed, a file at once.
            extra |= {"SSL_CERT_FILE": "", "SSL_CERT_DIR": str(place.home)}
        if site.ENABLE_USER_SITE:
            # Packages installed per user are found through the home, which is the session's now.
            extra.setdefault("PYTHONUSERBASE", site.getuserbase())
        return LaunchPlan(
            argv=(self.python, str(self.script.absolute()), *self.arguments, task.prompt),
            environment=session_environment(access, place, **extra),
            shown=(str(self.script.absolute()), *self.arguments),
        )

    async def answer(self, finished: ProcessResult, sandbox: Sandbox) -> str:
        return last_line(finished.stdout.tail)
