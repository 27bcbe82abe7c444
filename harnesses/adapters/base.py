"""The adapter protocol: everything that is particular to one harness, and no process handling.

An adapter returns what to start and which files to write, in paths of the sandbox, and reads the
answer from what the finished process left there. Running, limits and clean-up are the sandbox's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Protocol

from bridle.harnesses.client import Session
from bridle.harnesses.environment import home_at
from bridle.harnesses.sandboxes.base import Place, ProcessResult, Sandbox
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
class LaunchPlan:
    """The process that an adapter asks for."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """All of it; nothing else is inherited."""
    files: Mapping[PurePath, str | bytes] = field(default_factory=dict)
    """Configuration to write first, absolute path -> content."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What points a harness at a session, whatever it is asked to do there."""

    environment: Mapping[str, str]
    files: Mapping[PurePath, str] = field(default_factory=dict)
    """Absolute path -> content, all below the home that the configuration was made for."""


class Configurable(Protocol):
    """A harness that a person starts with arguments of their own."""

    @property
    def name(self) -> str: ...

    def configuration(self, access: Access, home: PurePath) -> Configuration:
        """Its settings, kept in ``home`` and not in the person's own."""


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

    async def answer(self, finished: ProcessResult, sandbox: Sandbox) -> str:
        """The final answer of a run that exited with 0, ``""`` when it gave none."""


def session_environment(access: Access, place: Place, **extra: str) -> dict[str, str]:
    """The sandbox's environment with the session's, in a home of its own."""
    return {
        **place.environment,
        **home_at(place.home),
        **access.session.environment,
        **extra,
    }


async def text_of(sandbox: Sandbox, path: PurePath) -> str:
    """The text of a file in the sandbox, ``""`` when there is none."""
    try:
        return (await sandbox.read(path)).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def last_line(text: str) -> str:
    """The last line of ``text`` that is not blank, or ``""``."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
