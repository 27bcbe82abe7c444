"""The adapter protocol: everything that is particular to one harness, and no process handling.

An adapter is pure: it returns what to start and which files to write, and reads the answer from
what the finished process left. Running, limits and clean-up are the sandbox's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bridle.harnesses.client import Session
from bridle.harnesses.environment import home_at, scrubbed
from bridle.harnesses.sandboxes.base import ProcessResult
from bridle.harnesses.tasks.task import Task

DEFAULT_MODEL = "policy"
"""The default model name in a harness's requests; the proxy serves the policy under it."""


@dataclass(frozen=True, slots=True)
class Access:
    """How a harness reaches the model: a session of the proxy, and the model name to ask for."""

    session: Session
    model: str = DEFAULT_MODEL

    @property
    def openai(self) -> str:
        """Base URL for OpenAI clients, ending in ``/v1``."""
        return self.session.base_urls["openai"]

    @property
    def anthropic(self) -> str:
        """Base URL for Anthropic clients, without ``/v1``."""
        return self.session.base_urls["anthropic"]

    @property
    def google(self) -> str:
        """Base URL for Gemini clients, without ``/v1beta``."""
        return self.session.base_urls["google"]


@dataclass(frozen=True, slots=True)
class Place:
    """The directories of one session while it runs; no other uses them at the same time."""

    root: Path

    @property
    def workspace(self) -> Path:
        return self.root / "workspace"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def logs(self) -> Path:
        return self.root / "logs"


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The process that an adapter asks for."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """All of it; nothing else is inherited."""
    files: Mapping[Path, str] = field(default_factory=dict)
    """Configuration to write first, absolute path -> text."""


class Adapter(Protocol):
    """Launches one harness."""

    @property
    def name(self) -> str:
        """The harness, as it is recorded with the session."""

    def plan(self, task: Task, access: Access, place: Place) -> LaunchPlan:
        """What to start for ``task``. Raises ``NotLaunchable`` when it is not installed.

        Asked twice: before the session is opened, with one whose id, key and URLs are empty, only
        for what it raises; then with the session, for what to start.
        """

    def answer(self, finished: ProcessResult, place: Place) -> str:
        """The final answer of a run that exited with 0, ``""`` when it gave none."""


def session_environment(access: Access, place: Place, **extra: str) -> dict[str, str]:
    """The caller's environment without its secrets, with the session's, in a home of its own."""
    return {
        **scrubbed(os.environ),
        **home_at(place.home),
        **access.session.environment,
        **extra,
    }


def last_line(text: str) -> str:
    """The last line of ``text`` that is not blank, or ``""``."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
