"""The editing tasks can be checked, told apart, done and got wrong."""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from bridle.engine.scripted import ScriptedReply, ScriptedRequest
from bridle.harnesses.sandboxes import ProcessSandbox
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import CommandVerifier, Delivery
from bridle.recipes.reproduce import editing
from bridle.recipes.reproduce.course import HARNESSES, Editing

pytestmark = pytest.mark.loop

CODEX = {"type": "function", "function": {"name": "exec_command", "parameters": {}}}
MINI = {"type": "function", "function": {"name": "bash", "parameters": {}}}
CLAUDE = {"type": "function", "function": {"name": "Bash", "parameters": {}}}


def some(kind: str, count: int = 5) -> list[Task]:
    return [task for task in editing.tasks("train") if task.id.startswith(f"{kind}-")][:count]


@pytest.mark.parametrize("kind", [kind.name for kind in editing.KINDS])
def test_the_right_command_passes_the_check_and_the_mistake_and_doing_nothing_do_not(
    tmp_path: Path, kind: str
) -> None:
    async def reward(task: Task, command: str, *, slip_first: bool = False) -> float:
        workspace = tmp_path / task.id / f"{command} {slip_first}".replace("/", "_")
        workspace.mkdir(parents=True)
        for name, text in task.files.items():
            (workspace / name).write_text(text)
        if slip_first:
            slip = await asyncio.create_subprocess_shell(
                task.payload["slip"][0], cwd=workspace, stderr=asyncio.subprocess.PIPE
            )
            _, complaint = await slip.communicate()
            assert slip.returncode != 0
            assert complaint
        process = await asyncio.create_subprocess_shell(command, cwd=workspace)
        assert await process.wait() == 0, "a mistake is no error"
        return (
            await CommandVerifier()(Delivery(task, "", workspace, 0, ProcessSandbox(workspace)))
        )["reward"]

    async def check() -> None:
        for task in some(kind, 8):
            assert await reward(task, task.payload["right"][0]) == 1.0
            assert await reward(task, task.payload["wrong"][0]) == 0.0
            assert await reward(task, "true") == 0.0
            assert await reward(task, task.payload["right"][0], slip_first=True) == 1.0
            assert await reward(task, "true", slip_first=True) == 0.0

    asyncio.run(check())


def test_tasks_are_thousands_each_said_once_and_their_split_is_their_own() -> None:
    everything = list(editing.all_tasks())
    assert len(everything) > 2000
    assert len({task.prompt for task in everything}) == len(everything)
    train, held_out = editing.tasks("train"), editing.tasks("held_out")
    assert not {task.prompt for task in train} & {task.prompt for task in held_out}
    assert 0.15 < len(held_out) / len(everything) < 0.25
    again = editing.tasks("train", seed=1)
    assert again != train
    assert {task.id for task in again} == {task.id for task in train}


def asked(script: Any, messages: list[Any], tool: dict[str, Any]) -> ScriptedReply:
    nothing: Any = None
    request = ScriptedRequest(messages, [tool], (), sampling=nothing, tokenizer=nothing)
    reply: ScriptedReply = script(request)
    return reply


def test_the_teacher_runs_one_command_in_the_harness_own_shell_and_ends_its_way() -> None:
    (task,) = some("move", 1)
    script = editing.teacher([task], skill=1.0)
    messages: list[Any] = [
        {"role": "user", "content": "<environment>words of the harness</environment>"},
        {"role": "user", "content": task.prompt},
    ]
    for tool, argument in ((CODEX, "cmd"), (MINI, "command"), (CLAUDE, "command")):
        (call,) = asked(script, messages, tool).tool_calls
        assert call.arguments == {argument: task.payload["right"][0]}
    ran = [*messages, {"role": "tool", "content": ""}]
    assert asked(script, ran, CODEX).content == "Done."
    told = [{"role": "system", "content": f"To end, echo {editing.SUBMIT}"}, *ran]
    (call,) = asked(script, told, MINI).tool_calls
    assert call.arguments == {"command": f"echo {editing.SUBMIT}"}
    assert asked(script, [{"role": "user", "content": "Name this chat."}], CODEX).tool_calls == ()


def test_a_task_of_two_edits_is_done_if_both_are(tmp_path: Path) -> None:
    def passes(task: Task, *done: str) -> bool:
        workspace = tmp_path / f"{task.id}-{'-'.join(done)}"
        workspace.mkdir()
        for name, text in task.files.items():
            (workspace / name).write_text(text)
        for number, which in enumerate(done):
            command = ["sh", "-c", task.payload[which][number]]
            subprocess.run(command, cwd=workspace, check=True)
        check = ["sh", "-c", task.payload["verify"]]
        return subprocess.run(check, cwd=workspace, check=False).returncode == 0

    tasks = editing.tasks("train", edits=2)
    assert len({task.prompt for task in tasks}) == len(tasks) > 2000
    for task in tasks[:12]:
        assert len(task.files) == 2
        assert passes(task, "right", "right")
        assert not passes(task, "right", "wrong")
        assert not passes(task, "wrong", "right")
        assert not passes(task, "right")


def test_the_teacher_makes_the_edits_of_a_task_one_after_another() -> None:
    tasks = editing.tasks("train", 400, edits=2)
    script = editing.teacher(tasks, skill=0.5)
    outcomes = Counter[tuple[bool, ...]]()
    for task in tasks:
        messages: list[Any] = [{"role": "user", "content": task.prompt}]
        right = []
        for edit in range(2):
            (call,) = asked(script, messages, CODEX).tool_calls
            assert call.arguments["cmd"] in (
                task.payload["right"][edit],
                task.payload["wrong"][edit],
            )
            right.append(call.arguments["cmd"] == task.payload["right"][edit])
            messages.append({"role": "tool", "content": ""})
        outcomes[tuple(right)] += 1
        assert asked(script, messages, CODEX).content == "Done."
    assert len(outcomes) == 4, "each edit is drawn by itself"
    assert min(outcomes.values()) > 60


def test_the_teachers_share_of_mistakes_is_its_skill() -> None:
    tasks = editing.tasks("train", 500)
    script = editing.teacher(tasks, skill=0.45)
    right = 0
    for task in tasks:
        (call,) = asked(script, [{"role": "user", "content": task.prompt}], CODEX).tool_calls
        right += call.arguments == {"cmd": task.payload["right"][0]}
    assert 0.38 < right / len(tasks) < 0.52


def test_the_teacher_goes_on_after_a_slip_with_the_command_that_it_would_have_run() -> None:
    tasks = editing.tasks("train", 500)
    plain = editing.teacher(tasks, skill=0.45)
    slipping = editing.teacher(tasks, skill=0.45, slips=0.1)
    slipped = 0
    for task in tasks:
        messages: list[Any] = [{"role": "user", "content": task.prompt}]
        (first,) = asked(slipping, messages, CODEX).tool_calls
        if first.arguments == {"cmd": task.payload["slip"][0]}:
            slipped += 1
            messages.append({"role": "tool", "content": "a complaint"})
            (first,) = asked(slipping, messages, CODEX).tool_calls
        (expected,) = asked(plain, messages[:1], CODEX).tool_calls
        assert first.arguments == expected.arguments
        messages.append({"role": "tool", "content": ""})
        assert asked(slipping, messages, CODEX).content == "Done."
    assert 0.06 < slipped / len(tasks) < 0.14


def test_a_harness_that_is_not_known_is_said(bridle: Callable[..., Result]) -> None:
    result = bridle("reproduce", "aider")
    assert result.exit_code == 2
    assert "codex, claude-code, qwen-code, pi, mini-swe-agent" in " ".join(result.output.split())


@pytest.mark.parametrize("harness", HARNESSES)
def test_a_course_knows_the_pinned_version_of_its_harness(harness: str) -> None:
    version = Editing(harness).harness_version
    assert version is not None
    assert version[0].isdigit()


def test_a_harness_is_not_asked_what_its_shell_refuses() -> None:
    kinds = {
        harness: {task.id.partition("-")[0] for task in Editing(harness).tasks("train")}
        for harness in ("pi", "qwen-code")
    }
    assert kinds == {
        "pi": {"write", "append", "replace", "move"},
        "qwen-code": {"write", "append", "move"},
    }
