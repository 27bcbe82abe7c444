"""The courses of demo runs: an agent, its tasks, and a scripted teacher for the tiny policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any, Protocol

from bridle.engine.scripted import ScriptedReply, ScriptedRequest
from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.adapters.python_agent import PythonAgent
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.sandboxes.forked import ForkedProvider
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import FunctionVerifier
from bridle.recipes.demo.corpus import first_corpus
from bridle.recipes.demo.teacher import teacher
from bridle.run.examples import load_example
from bridle.run.rollouts import Rollouts

Script = Callable[[ScriptedRequest], ScriptedReply]


class Course(Protocol):
    """An agent, and the tasks on which it is trained."""

    harness: str

    @property
    def harness_version(self) -> str | None:
        """The version of the harness; ``None`` if it does not come with Bridle."""

    def tasks(self, split: str, count: int | None = None, seed: int = 0) -> Sequence[Task]:
        """Return tasks of ``train`` or ``held_out``, in an order that ``seed`` decides.

        The two have no task in common.
        """

    def agent(self, temperature: float) -> Adapter: ...

    def session_settings(self, temperature: float) -> Mapping[str, Any]:
        """Return the sampling parameters that the proxy pins or caps for the course's sessions."""

    def rollouts(self, proxy_url: str, key: str | None) -> Rollouts: ...


class TaughtCourse(Course, Protocol):
    """A course for a policy that starts from random weights."""

    def first_corpus(self) -> Iterable[str]:
        """Return text for the tokenizer of the first recording."""

    def teacher(self, tasks: Sequence[Task], skill: float) -> Script:
        """Return a script that works as a policy should in the share ``skill`` of ``tasks``.

        It makes one mistake in each of the others.
        """


class LangChainExample:
    """An example agent with its tasks and verifier, which runs as any user's would."""

    harness = "langchain"

    def __init__(self, name: str, temperature_variable: str) -> None:
        directory, self.module = load_example(name)
        self.script = directory / "agent.py"
        self._temperature_variable = temperature_variable

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
            environment={self._temperature_variable: str(temperature)},
        )

    def session_settings(self, temperature: float) -> Mapping[str, Any]:
        """Return no settings: the agent asks for its temperature itself."""
        return {}

    def rollouts(self, proxy_url: str, key: str | None) -> Rollouts:
        module: ModuleType = self.module
        check = FunctionVerifier(module.verifier)
        return Rollouts(proxy_url, LocalFleet(ForkedProvider(confined=True), check), key=key)


class StaffList(LangChainExample):
    """The example with two questions in one conversation."""

    def __init__(self) -> None:
        super().__init__("staff_list", "STAFF_TEMPERATURE")


class Shop(LangChainExample):
    """The example of an agent with tools."""

    def __init__(self) -> None:
        super().__init__("shop_agent", "SHOP_TEMPERATURE")

    def first_corpus(self) -> Iterator[str]:
        return first_corpus(self.script.read_text())

    def teacher(self, tasks: Sequence[Task], skill: float) -> Script:
        return teacher(tasks, skill=skill)
