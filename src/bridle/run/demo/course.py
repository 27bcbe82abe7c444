"""What a demo run trains on: an agent, its tasks, and a scripted teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any, Protocol

from bridle.engine.scripted import ScriptedReply, ScriptedRequest
from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.adapters.python_agent import PythonAgent
from bridle.harnesses.sandboxes.forked import ForkedProvider
from bridle.harnesses.tasks.task import Task
from bridle.run.demo.corpus import first_corpus
from bridle.run.demo.teacher import teacher
from bridle.run.examples import load_example
from bridle.run.rollouts import Rollouts

Script = Callable[[ScriptedRequest], ScriptedReply]


class Course(Protocol):
    """One agent and what it learns."""

    harness: str

    @property
    def harness_version(self) -> str | None:
        """``None`` when it is not one that comes with Bridle."""

    def tasks(self, split: str, count: int | None = None, seed: int = 0) -> Sequence[Task]:
        """Tasks of ``train`` or ``held_out``, which share none; ``seed`` decides their order."""

    def agent(self, temperature: float) -> Adapter: ...

    def session_settings(self, temperature: float) -> Mapping[str, Any]:
        """What the proxy pins or caps for its sessions."""

    def rollouts(self, proxy_url: str, key: str | None) -> Rollouts: ...

    def first_corpus(self) -> Iterable[str]:
        """Text for the tokenizer that serves the first recording."""

    def teacher(self, tasks: Sequence[Task], skill: float) -> Script:
        """Works as a policy should in the share ``skill`` of ``tasks``, else makes one mistake."""


class Shop:
    """The example agent, its questions and its verifier, as any user's would be."""

    harness = "langchain"

    def __init__(self) -> None:
        self.directory, self.module = load_example("shop_agent")
        self.script = self.directory / "agent.py"

    @property
    def harness_version(self) -> str:
        return version(self.harness)

    def tasks(self, split: str, count: int | None = None, seed: int = 0) -> list[Task]:
        found: list[Task] = self.module.tasks(split, count, seed)
        return found

    def agent(self, temperature: float) -> PythonAgent:
        return PythonAgent(
            self.script,
            name=self.harness,
            without_tls=True,
            environment={"SHOP_TEMPERATURE": str(temperature)},
        )

    def session_settings(self, temperature: float) -> Mapping[str, Any]:
        """None: the agent asks for its temperature itself."""
        return {}

    def rollouts(self, proxy_url: str, key: str | None) -> Rollouts:
        module: ModuleType = self.module
        return Rollouts(proxy_url, ForkedProvider(), module.verifier, key=key)

    def first_corpus(self) -> Iterator[str]:
        return first_corpus(self.script.read_text())

    def teacher(self, tasks: Sequence[Task], skill: float) -> Script:
        return teacher(tasks, skill=skill)
