"""A coding agent on the editing tasks, as a course for the demo's stages."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.install import pinned_version
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers.brought import TaskVerifier
from bridle.recipes.demo.course import Script
from bridle.recipes.demo.settings import DemoSettings, Lesson
from bridle.recipes.models.tiny import TinyShape
from bridle.recipes.reproduce import editing
from bridle.recipes.reproduce.folders import HarborFolders
from bridle.run.agents import agent
from bridle.run.rollouts import Rollouts

LONGEST_REPLY: Final = 96
"""Maximum tokens of a reply. A command takes a fraction of it, and a policy that babbles must come
to an end."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The way in which a policy is taught to use one harness, and the limits of its sessions."""

    package: str
    """The package whose pinned version is reported."""
    calls: int
    """Maximum calls of a session with one edit. It takes two or three, and one more for each
    further edit; an agent that is never satisfied must end, too."""
    settings: DemoSettings
    without: frozenset[str] = frozenset()
    """The kinds of tasks that the harness does not let a shell command do."""
    slips: float = 0.0
    """The share of demonstrations with a slip. It is for a harness that asks again after a reply
    without a tool call, so that its policy must know how to go on after a complaint."""


class Editing:
    """A harness on the editing tasks. Raises :class:`bridle.run.agents.UnknownAgent`."""

    def __init__(self, harness: str, folders: Path | None = None, edits: int = 1) -> None:
        """Prepare the course, whose tasks have ``edits`` edits each.

        If ``folders`` is given, the tasks are Harbor folders below it, and each session runs in a
        container of its own.
        """
        self._edits = edits
        self.harness = harness
        self._adapter, _ = agent(harness)
        self._recipe = _RECIPES[harness]
        self._folders = HarborFolders(folders) if folders is not None else None

    @property
    def harness_version(self) -> str | None:
        return pinned_version(self._recipe.package)

    def tasks(self, split: str, count: int | None = None, seed: int = 0) -> Sequence[Task]:
        found = editing.tasks(split, count, seed, self._recipe.without, self._edits)
        return found if self._folders is None else [self._folders.task(task) for task in found]

    def agent(self, temperature: float) -> Adapter:
        return self._adapter

    def session_settings(self, temperature: float) -> Mapping[str, Any]:
        """Return settings that pin the temperature in the proxy.

        They do so because the harness has no option for it.
        """
        return {
            "pin": {"temperature": temperature, "top_p": 1.0},
            "cap": {"max_tokens": LONGEST_REPLY},
            "budget": {"calls": self._recipe.calls + self._edits - 1},
        }

    def rollouts(self, proxy_url: str, key: str | None) -> Rollouts:
        _, sandbox = agent(self.harness, None if self._folders is None else "container")
        return Rollouts(proxy_url, LocalFleet(sandbox, TaskVerifier()), key=key)

    def first_corpus(self) -> Iterable[str]:
        return list(pydoc_data.topics.topics.values())

    def teacher(self, tasks: Sequence[Task], skill: float) -> Script:
        # A Harbor folder's task does not say which commands are right and wrong.
        taught = {task.id for task in tasks}
        everything = editing.all_tasks(self._recipe.without, self._edits)
        known = [task for task in everything if task.id in taught]
        return editing.teacher(known, skill=skill, slips=self._recipe.slips)


_COMMON: Final = DemoSettings(
    engine="vllm",
    shape=TinyShape(layers=3, hidden=128, intermediate=256, context=16384),
    vocab_size=4096,
    first_sessions=4,
    eval_tasks=100,
    minutes=150.0,
    timeout_s=120.0,
)
_TASK_LAST: Final = replace(
    _COMMON,
    teacher_sessions=2400,
    lessons=(
        Lesson(epochs=4, learning_rate=3e-3, context=48),
        Lesson(epochs=1, learning_rate=1e-3, context=512),
        Lesson(epochs=1, learning_rate=1e-3, batch_size=32, context=2048),
        Lesson(epochs=1, learning_rate=1e-3, batch_size=32),
    ),
    learning_rate=2e-4,
    max_steps=12,
    parallel=6,
)
"""The settings for a long prompt that is the same in every session and names the task at its end.
Almost all of an update's tokens are one prefix, so larger batches are cheaper."""
_LONG_PROMPT: Final = replace(
    _TASK_LAST, shape=replace(_COMMON.shape, context=32768, rope_theta=1e6)
)
_QWEN_CODE: Final = replace(
    _LONG_PROMPT,
    teacher_sessions=1200,
    groups=12,
    max_steps=14,
    update_threads=2,
    lessons=(
        Lesson(epochs=8, learning_rate=3e-3, final_fraction=1.0, shared=16, piece=256),
        Lesson(epochs=12, learning_rate=3e-3, shared=16, piece=2048),
        Lesson(epochs=3, learning_rate=1e-3, sessions=512),
    ),
)
"""The settings of Qwen Code. Its sessions take the longest, so there are half as many, and each is
shown more often where that is cheap."""
_RECIPES: Final[Mapping[str, Recipe]] = {
    "codex": Recipe("@openai/codex", 8, _TASK_LAST),
    "claude-code": Recipe(
        "@anthropic-ai/claude-code",
        8,
        replace(
            _LONG_PROMPT,
            teacher_sessions=1200,
            groups=12,
            max_steps=20,
            update_threads=2,
            lessons=(
                Lesson(epochs=8, learning_rate=3e-3, final_fraction=1.0, shared=16, piece=256),
                Lesson(epochs=12, learning_rate=3e-3, shared=16, piece=2048),
                Lesson(epochs=1, learning_rate=1e-3, sessions=512),
            ),
        ),
    ),
    "qwen-code": Recipe("@qwen-code/qwen-code", 8, _QWEN_CODE, without=frozenset({"replace"})),
    "pi": Recipe(
        "@earendil-works/pi-coding-agent",
        8,
        replace(
            _TASK_LAST,
            lessons=(
                Lesson(epochs=4, learning_rate=3e-3, context=48),
                Lesson(epochs=1, learning_rate=1e-3, context=512),
                Lesson(epochs=1, learning_rate=1e-3, batch_size=32),
            ),
        ),
    ),
    "mini-swe-agent": Recipe(
        "mini-swe-agent",
        5,
        replace(
            _COMMON,
            teacher_sessions=2400,
            lessons=(
                Lesson(epochs=8, learning_rate=3e-3, shared=16),
                Lesson(epochs=1, learning_rate=1e-3, shared=128),
                Lesson(epochs=2, learning_rate=1e-3, batch_size=32),
            ),
            learning_rate=2e-4,
            max_steps=10,
            parallel=8,
        ),
        slips=0.1,
    ),
}
"""The recipe of each harness. Claude Code and mini-swe-agent name the task before their prompts'
last 2,100 and 800 tokens, which lessons leave out at first. To teach copying over 800 tokens it is
enough to increase the distance with each lesson. Over 2,100 tokens it is not; there, pieces of the
omitted text come between from the beginning. mini-swe-agent leaves replies without a tool call out
of its history and asks again, and most of these come after four commands that failed. Qwen Code
takes ``sed -i`` for an edit of its own, and refuses it for a file that its tool has not read."""

HARNESSES: Final = tuple(_RECIPES)


def settings_for(harness: str) -> DemoSettings:
    """Return the sizes for two cores of one of :data:`HARNESSES`."""
    return _RECIPES[harness].settings
