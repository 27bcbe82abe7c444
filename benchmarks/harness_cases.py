"""The harnesses that ``bridle bench harnesses`` runs, each under the name in the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from typing import Final

from bridle.harnesses.adapters import ADAPTERS, PROGRAMS, Command, PythonAgent
from bridle.harnesses.adapters.base import Access, Adapter, LaunchPlan
from bridle.harnesses.adapters.claude_code import ClaudeCode
from bridle.harnesses.install import (
    find_harness,
    find_node_script,
    find_python_harness,
    pinned_version,
)
from bridle.harnesses.sandboxes.base import Place
from bridle.harnesses.tasks.task import Task
from bridle.run.examples import example_directory

_PACKAGES: Final = {
    "codex": "@openai/codex",
    "claude-code": "@anthropic-ai/claude-code",
    "qwen-code": "@qwen-code/qwen-code",
    "pi": "@earendil-works/pi-coding-agent",
    "opencode": "opencode-ai",
    "gemini-cli": "@google/gemini-cli",
}
_DIALECTS: Final = {"codex": "responses", "claude-code": "messages", "gemini-cli": "google"}


@dataclass(frozen=True, slots=True)
class HarnessCase:
    """One harness with one dialect."""

    name: str
    dialect: str
    adapter: Callable[[], Adapter]
    """A function that makes the adapter. It may raise ``NotLaunchable`` if the harness is not
    installed."""
    streams: bool = True
    package: str = ""
    """The package that contains the harness."""

    @property
    def version(self) -> str:
        """The pinned version, else that of the installed package, or ``""`` if neither is known."""
        pinned = pinned_version(self.package)
        if pinned is not None:
            return pinned
        try:
            return metadata.version(self.package) if self.package else ""
        except metadata.PackageNotFoundError:
            return ""


def _langchain(api: str) -> Adapter:
    script = example_directory("langchain") / "agent.py"
    return PythonAgent(script, ("--api", api, "--stream"), name="langchain")


def _agents_sdk(api: str) -> Adapter:
    script = example_directory("agents_sdk") / "agent.py"
    python = find_python_harness("openai-agents", "python")
    return PythonAgent(script, ("--api", api, "--stream"), name="openai-agents", python=python)


def _ai_sdk(api: str) -> Adapter:
    argv = (find_harness("node"), find_node_script("ai_agent.mjs"), api, "{prompt}")
    return Command(argv, "ai", {"OPENAI_MODEL": "{model}"})


@dataclass(frozen=True)
class _ClaudeAgentSdk(ClaudeCode):
    """An agent on the Claude Agent SDK, which runs Claude Code as its child."""

    name: str = "claude-agent-sdk"

    def plan(self, task: Task, access: Access, place: Place) -> LaunchPlan:
        plan = super().plan(task, access, place)
        script = find_node_script("claude_agent.mjs")
        argv = (find_harness("node"), script, plan.argv[0], task.prompt)
        return replace(plan, argv=argv, shown=(script,))


def _coding(name: str) -> HarnessCase:
    dialect = _DIALECTS.get(name, "chat")
    adapter, streams = ADAPTERS.get(name), name != "mini-swe-agent"
    return HarnessCase(name, dialect, adapter, streams, _PACKAGES.get(name, name))


def _sdk(name: str, make: Callable[[str], Adapter], api: str) -> HarnessCase:
    return HarnessCase(f"{name}-{api}", api, partial(make, api), package=name)


CASES: Final[Mapping[str, HarnessCase]] = {
    case.name: case
    for case in (
        *(_coding(name) for name in PROGRAMS.values()),
        _sdk("langchain", _langchain, "chat"),
        _sdk("langchain", _langchain, "responses"),
        _sdk("openai-agents", _agents_sdk, "chat"),
        _sdk("openai-agents", _agents_sdk, "responses"),
        HarnessCase(
            "claude-agent-sdk",
            "messages",
            _ClaudeAgentSdk,
            package="@anthropic-ai/claude-agent-sdk",
        ),
        *(_sdk("ai", _ai_sdk, api) for api in ("chat", "responses", "messages")),
    )
}
