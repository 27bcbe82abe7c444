"""Test that the calls of installed harnesses get the kinds that the script meant.

The kinds are the work, sub-agents at once, titles, and summaries of a conversation that had become
too long.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bridle.bench.shell_policy import SHELLS, train_bench_tokenizer
from bridle.engine.scripted import ScriptedCall, ScriptedEngine, ScriptedReply, ScriptedRequest
from bridle.harnesses.adapters.base import Access, Adapter, LaunchPlan
from bridle.harnesses.adapters.claude_code import ClaudeCode
from bridle.harnesses.adapters.codex import Codex
from bridle.harnesses.adapters.opencode import OpenCode
from bridle.harnesses.adapters.qwen_code import QwenCode
from bridle.harnesses.client import Client
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.rollout import Job, Rollout, RolloutSettings
from bridle.harnesses.sandboxes import ProcessProvider
from bridle.harnesses.sandboxes.base import Place, ProcessResult, Sandbox
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import RegexAnswer
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.reconstruct.audit import audit_session
from bridle.reconstruct.kinds.kinds import with_kinds
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import CallKind

pytestmark = pytest.mark.harness

TASKS = ("Count the words of the first list.", "Count the words of the second list.")
SUMMARY = (
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
class Case:
    adapter: Adapter
    tool: str
    """Starts a sub-agent."""
    arguments: Callable[[str], dict[str, str]]
    summary: str = SUMMARY
    titles: bool = False


def described(kind: str) -> Callable[[str], dict[str, str]]:
    return lambda task: {"description": "Counts words", "prompt": task, "subagent_type": kind}


CASES: Mapping[str, Case] = {
    "codex": Case(
        Codex(context_window=26_000), "multi_agent_v1__spawn_agent", lambda task: {"message": task}
    ),
    "claude-code": Case(
        Narrow(
            ClaudeCode(),
            environment={
                "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "40000",
                "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "60",
            },
        ),
        "Agent",
        described("general-purpose"),
        f"<analysis>I look back.</analysis>\n<summary>\n{SUMMARY}\n</summary>",
    ),
    "qwen-code": Case(
        Narrow(
            QwenCode(),
            files={
                ".qwen/settings.json": json.dumps(
                    {"model": {"generationConfig": {"contextWindowSize": 60_000}}}
                )
            },
        ),
        "agent",
        described("general-purpose"),
        f"<analysis>I look back.</analysis>\n<state_snapshot>\n{SUMMARY}\n</state_snapshot>",
    ),
    "opencode": Case(OpenCode(context_window=40_000), "task", described("general"), titles=True),
}


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content)


def script(case: Case) -> Callable[[ScriptedRequest], ScriptedReply]:
    """Hands both tasks on, then prints long lists until it is asked for a summary."""

    def reply(request: ScriptedRequest) -> ScriptedReply:
        names = {described["function"]["name"] for described in request.tools}
        shell = next((name for name in SHELLS if name in names), "")
        said = [text_of(m) for m in request.messages if m["role"] == "user"]
        told = [text_of(m) for m in request.messages if m["role"] in ("system", "developer")]
        outputs = [text_of(m) for m in request.messages if m["role"] == "tool"]
        if not shell and "title" in told[0][:200]:
            return ScriptedReply("A title")
        if shell and any("SUMMARY:" in text_of(message) for message in request.messages):
            return ScriptedReply("All is well.", reasoning="I remember.")
        if asks_for_a_summary(said[-1]) or (not shell and asks_for_a_summary(told[0])):
            return ScriptedReply(case.summary)
        if not shell:
            return ScriptedReply("A title")
        if any(task in text for task in TASKS for text in said):
            if outputs:
                return ScriptedReply("There are 3 words.", reasoning="I counted.")
            call = ScriptedCall(shell, SHELLS[shell]("echo 3"))
            return ScriptedReply(reasoning="I count.", tool_calls=(call,))
        return main_reply(case, shell, outputs)

    return reply


def main_reply(case: Case, shell: str, outputs: list[str]) -> ScriptedReply:
    """The main agent's next turn after the ``outputs`` of its tools."""
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


def asks_for_a_summary(text: str) -> bool:
    lowered = text.lower()
    return "summary:" not in lowered and any(
        word in lowered
        for word in ("summariz", "summary", "state_snapshot", "checkpoint compaction")
    )


def content_of(call: CallRow) -> str:
    return str(call.replies[0].content) if call.replies else ""


def intended(call: CallRow) -> CallKind:
    """Return the kind that the script meant the call to be, by its answer."""
    content, reasoning = content_of(call), call.replies[0].reasoning or "" if call.replies else ""
    if "SUMMARY:" in content:
        return CallKind.COMPACTION
    if "A title" in content:
        return CallKind.SIDE
    if ("count." in reasoning and "Others" not in reasoning) or "I counted." in reasoning:
        return CallKind.SUBAGENT
    return CallKind.MAIN


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[[Case], tuple[str, Reader]]]:
    with ExitStack() as stack:

        def start(case: Case) -> tuple[str, Reader]:
            train_bench_tokenizer(tmp_path / "model")
            engine = stack.enter_context(
                ScriptedEngine(tmp_path / "model", script(case), max_model_len=1_000_000)
            )
            store = str(tmp_path / "bridle.db")
            settings = ProxySettings(engine.base_url, store, tokenizer_dir=tmp_path / "model")
            server = stack.enter_context(ProxyServer(settings))
            return server.base_url, stack.enter_context(Reader(store))

        yield start


@pytest.mark.parametrize("name", sorted(CASES))
async def test_work_sub_agents_titles_and_summaries_are_told_apart_as_they_were_meant(
    stage: Callable[[Case], tuple[str, Reader]], tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    url, reader = stage(case)
    task = Task("lists", "lists", "Have both lists counted, print more, then say how it went.")
    async with Client(url) as client:
        settings = RolloutSettings(tmp_path / "sessions", timeout_s=240, retries=0)
        rollout = Rollout(
            client, case.adapter, LocalFleet(ProcessProvider(), RegexAnswer("well")), settings
        )
        (result,) = await rollout.collect([Job(task)])

    assert result.session_id is not None, result
    calls = with_kinds(reader.calls(result.session_id))
    told = [(call.kind, content_of(call)[:40]) for call in calls]
    assert [call.kind for call in calls] == [intended(call) for call in calls], told
    kinds = {call.kind for call in calls}
    assert {CallKind.MAIN, CallKind.SUBAGENT, CallKind.COMPACTION} <= kinds
    assert (CallKind.SIDE in kinds) is case.titles
    assert result.scores == {"reward": 1.0}, result
    assert audit_session(reader, result.session_id, bodies=True).clean
