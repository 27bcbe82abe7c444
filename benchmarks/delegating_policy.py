"""A scripted policy that starts sub-agents, and prints until its harness asks for a summary.

It plays the sessions whose calls are not all of one conversation: two sub-agents at once, titles on
the side, and summaries of a conversation that had become too long.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from bridle.bench.shell_policy import SHELLS
from bridle.engine.scripted import ScriptedCall, ScriptedReply, ScriptedRequest
from bridle.harnesses.adapters.base import Access, Adapter, LaunchPlan
from bridle.harnesses.adapters.claude_code import ClaudeCode
from bridle.harnesses.adapters.codex import Codex
from bridle.harnesses.adapters.opencode import OpenCode
from bridle.harnesses.adapters.qwen_code import QwenCode
from bridle.harnesses.sandboxes.base import Place, ProcessResult, Sandbox
from bridle.harnesses.tasks.task import Task
from bridle.recipes.reproduce.editing import text_of, tool_names

TASKS: Final = ("Count the words of the first list.", "Count the words of the second list.")
SUMMARY: Final = (
    "SUMMARY: both lists were counted by others and have three words each; long lists of numbers "
    "were printed one after the other. What is left is to say that all is well."
)


@dataclass(frozen=True)
class Narrow:
    """A harness that believes its model's context to be small."""

    inner: Adapter
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.inner.name

    def plan(self, task: Task, access: Access, place: Place) -> LaunchPlan:
        plan = self.inner.plan(task, access, place)
        more = {place.home / path: text for path, text in self.files.items()}
        return replace(
            plan,
            environment={**plan.environment, **self.environment},
            files={**plan.files, **more},
        )

    async def answer(self, finished: ProcessResult, sandbox: Sandbox) -> str:
        return await self.inner.answer(finished, sandbox)


@dataclass(frozen=True)
class Delegation:
    """A harness with a small context, and the way in which it starts a sub-agent."""

    adapter: Adapter
    tool: str
    """The tool that starts a sub-agent."""
    arguments: Callable[[str], dict[str, str]]
    """A function from a sub-agent's task to the arguments of the tool."""
    summary: str = SUMMARY
    """The reply to a request for a summary."""
    titles: bool = False
    """True if the harness asks for a title on the side."""


def _described(kind: str) -> Callable[[str], dict[str, str]]:
    return lambda task: {"description": "Counts words", "prompt": task, "subagent_type": kind}


DELEGATIONS: Final[Mapping[str, Delegation]] = {
    "codex": Delegation(
        Codex(context_window=26_000), "multi_agent_v1__spawn_agent", lambda task: {"message": task}
    ),
    "claude-code": Delegation(
        Narrow(
            ClaudeCode(),
            environment={
                "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "40000",
                "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "60",
            },
        ),
        "Agent",
        _described("general-purpose"),
        f"<analysis>I look back.</analysis>\n<summary>\n{SUMMARY}\n</summary>",
    ),
    "qwen-code": Delegation(
        Narrow(
            QwenCode(),
            files={
                ".qwen/settings.json": json.dumps(
                    {"model": {"generationConfig": {"contextWindowSize": 68_000}}}
                )
            },
        ),
        "agent",
        _described("general-purpose"),
        f"<analysis>I look back.</analysis>\n<state_snapshot>\n{SUMMARY}\n</state_snapshot>",
    ),
    "opencode": Delegation(
        OpenCode(context_window=40_000), "task", _described("general"), titles=True
    ),
}


TASK: Final = "Have both lists counted, print more, then say how it went."
"""The prompt of the task; the answer says that all is well."""


def script(case: Delegation) -> Callable[[ScriptedRequest], ScriptedReply]:
    """Return a policy that hands both tasks on, then prints long lists until a summary is asked."""

    def reply(request: ScriptedRequest) -> ScriptedReply:
        names = tool_names(request)
        shell = next((name for name in SHELLS if name in names), "")
        said = [text_of(m) for m in request.messages if m["role"] == "user"]
        told = [text_of(m) for m in request.messages if m["role"] in ("system", "developer")]
        outputs = [text_of(m) for m in request.messages if m["role"] == "tool"]
        if not shell and "title" in told[0][:200]:
            return ScriptedReply("A title")
        if shell and any("SUMMARY:" in text_of(message) for message in request.messages):
            return ScriptedReply("All is well.", reasoning="I remember.")
        if _asks_for_a_summary(said[-1]) or (not shell and _asks_for_a_summary(told[0])):
            return ScriptedReply(case.summary)
        if not shell:
            return ScriptedReply("A title")
        if any(task in text for task in TASKS for text in said):
            if outputs:
                return ScriptedReply("There are 3 words.", reasoning="I counted.")
            call = ScriptedCall(shell, SHELLS[shell]("echo 3"))
            return ScriptedReply(reasoning="I count.", tool_calls=(call,))
        return _main_reply(case, shell, outputs)

    return reply


def _main_reply(case: Delegation, shell: str, outputs: list[str]) -> ScriptedReply:
    """Return the main agent's next turn after the ``outputs`` of its tools."""
    if not outputs:
        calls = tuple(ScriptedCall(case.tool, case.arguments(task)) for task in TASKS)
        return ScriptedReply(reasoning="Others count.", tool_calls=calls)
    if case.adapter.name == "codex" and len(outputs) < 2 * len(TASKS):
        # It does not wait for its sub-agents by itself.
        agent = json.loads(outputs[len(outputs) - len(TASKS)])["agent_id"]
        wait = ScriptedCall("multi_agent_v1__wait_agent", {"targets": [agent]})
        return ScriptedReply(reasoning="I wait.", tool_calls=(wait,))
    if len(outputs) > 25:
        return ScriptedReply("It was never too long.")
    numbers = f"seq {len(outputs)}000 {len(outputs)}900"
    call = ScriptedCall(shell, SHELLS[shell](numbers))
    return ScriptedReply(reasoning="I print more.", tool_calls=(call,))


def _asks_for_a_summary(text: str) -> bool:
    lowered = text.lower()
    return "summary:" not in lowered and any(
        word in lowered
        for word in ("summariz", "summary", "state_snapshot", "checkpoint compaction")
    )
