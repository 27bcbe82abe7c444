"""The adapter protocol: everything that is particular to one harness, without process handling.

An adapter returns the command to start and the files to write, in paths of the sandbox, and reads
the answer from what the finished process left there. Running, limits and clean-up are the
sandbox's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Protocol, runtime_checkable

from bridle.harnesses.client import Session
from bridle.harnesses.environment import home_at
from bridle.harnesses.sandboxes.base import Place, ProcessResult, Sandbox, SandboxProvider
from bridle.harnesses.tasks.task import Task

DEFAULT_MODEL = "policy"
"""The default model name in a harness's requests; the proxy serves the policy under it."""


@dataclass(frozen=True, slots=True)
class Access:
    """The access of a harness to the model.

    It is a session of the proxy, and the model name to request.
    """

    session: Session
    model: str = DEFAULT_MODEL

    @property
    def openai(self) -> str:
        """The base URL for OpenAI clients, ending in ``/v1``."""
        return self.session.base_urls["openai"]

    @property
    def anthropic(self) -> str:
        """The base URL for Anthropic clients, without ``/v1``."""
        return self.session.base_urls["anthropic"]

    @property
    def google(self) -> str:
        """The base URL for Gemini clients, without ``/v1beta``."""
        return self.session.base_urls["google"]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The process that an adapter asks for."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """The whole environment; nothing else is inherited."""
    files: Mapping[PurePath, str | bytes] = field(default_factory=dict)
    """Configuration files to write first. Each absolute path maps to the content."""
    shown: tuple[str, ...] = ()
    """Files of this machine that the process reads beside its program
    (:attr:`bridle.harnesses.sandboxes.base.Launch.shown`)."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings that connect a harness to a session, whatever its task is."""

    environment: Mapping[str, str]
    files: Mapping[PurePath, str] = field(default_factory=dict)
    """Configuration files, all below the home for which the configuration was made. Each absolute
    path maps to the content."""


@runtime_checkable
class Configurable(Protocol):
    """A harness that a person starts with arguments of their own."""

    @property
    def name(self) -> str: ...

    def configuration(self, access: Access, home: PurePath) -> Configuration:
        """Return the settings, to be kept in ``home`` and not in the person's own home."""


class Adapter(Protocol):
    """The launcher of one harness."""

    @property
    def name(self) -> str:
        """The name of the harness, as it is recorded with the session."""

    def plan(self, task: Task, access: Access, place: Place) -> LaunchPlan:
        """Return the process to start for ``task``.

        Raise ``NotLaunchable`` if the harness is not installed.

        It is called twice. The first call comes before the session is opened, with a session whose
        id, key and URLs are empty, only for the error that it may raise. The second call has the
        session, and its result is started.
        """

    async def answer(self, finished: ProcessResult, sandbox: Sandbox) -> str:
        """Return the final answer of a run that exited with 0, or ``""`` if it gave none."""


@runtime_checkable
class Housed(Protocol):
    """An adapter that knows the sandboxes that suit its harness best."""

    def sandboxes(self) -> SandboxProvider:
        """Return the sandboxes for sessions whose user names none."""


def session_environment(access: Access, place: Place, **extra: str) -> dict[str, str]:
    """Return the sandbox's environment with the session's variables and a home of its own."""
    return {
        **place.environment,
        **home_at(place.home),
        **access.session.environment,
        **extra,
    }


class ConfiguredHarness(ABC):
    """An adapter of a program that its :class:`Configuration` connects to a session.

    The answer is what the program prints.
    """

    @abstractmethod
    def argv(self, task: Task, access: Access, place: Place) -> tuple[str, ...]:
        """Return the command line for ``task``."""

    @abstractmethod
    def configuration(self, access: Access, home: PurePath) -> Configuration:
        """Return the settings, as :class:`Configurable` describes them."""

    def unattended(self, access: Access, home: PurePath) -> Configuration:
        """Return the settings of a session that no person watches, whose home is new."""
        return self.configuration(access, home)

    def plan(self, task: Task, access: Access, place: Place) -> LaunchPlan:
        argv, config = self.argv(task, access, place), self.unattended(access, place.home)
        variables = {"PATH": place.search_path, **config.environment}
        return LaunchPlan(argv, session_environment(access, place, **variables), config.files)

    async def answer(self, finished: ProcessResult, sandbox: Sandbox) -> str:
        return finished.stdout.tail.strip()


async def text_of(sandbox: Sandbox, path: PurePath) -> str:
    """Return the text of a file in the sandbox, or ``""`` if there is none."""
    try:
        return (await sandbox.read(path)).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def last_line(text: str) -> str:
    """Return the last line of ``text`` that is not blank, or ``""``."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
