"""The example agent, as a process, and its tasks."""

from __future__ import annotations

import ast
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.harnesses.adapters import PythonAgent
from bridle.harnesses.client import Client
from bridle.harnesses.episode import Outcome
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.rollout import Job, Rollout, RolloutSettings
from bridle.harnesses.sandboxes import (
    ForkedProvider,
    ProcessProvider,
    ProcessResult,
    ProcessSandbox,
    SandboxProvider,
)
from bridle.harnesses.verifiers import Delivery

pytestmark = pytest.mark.asyncio(loop_scope="module")

Ask = Callable[..., Awaitable[ProcessResult]]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def warm() -> AsyncIterator[ForkedProvider]:
    """One warm process for all: importing LangChain takes seconds."""
    sandbox = ForkedProvider()
    yield sandbox
    await sandbox.close()


@pytest.fixture
def ask(stand_in: Any, shop: Any, warm: ForkedProvider, make_launch: Callable[..., Any]) -> Ask:
    """Runs the agent on a question."""

    async def run(question: str, *arguments: str, sandbox: SandboxProvider = warm) -> ProcessResult:
        environment = {
            "PATH": os.environ["PATH"],
            "OPENAI_BASE_URL": f"{stand_in.url}/s/x/v1",
            "OPENAI_API_KEY": "key",
        }
        argv = (sys.executable, str(shop.script), *arguments, question)
        return await make_launch(*argv, environment=environment).run(sandbox)

    return run


def called(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


async def test_the_agent_imports_nothing_of_ours(shop: Any) -> None:
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(shop.script.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }

    ours = {"bridle", "harnesses", "trainer", "reconstruct", "proxy", "engine", "store"}
    assert not imported & ours


@pytest.mark.parametrize(("arguments", "cold"), [((), True), ((), False), (("--stream",), False)])
async def test_a_right_run_ends_with_the_answer_on_the_last_line(
    ask: Ask,
    warm: ForkedProvider,
    stand_in: Any,
    shop: Any,
    shop_teacher: Any,
    arguments: tuple[str, ...],
    cold: bool,
) -> None:
    (task,) = shop.tasks("train", 1)
    stand_in.reply = shop_teacher([task])

    ended = await ask(task.prompt, *arguments, sandbox=ProcessProvider() if cold else warm)

    assert (ended.exit_code, ended.stderr.tail) == (0, "")
    assert ended.stdout.tail.splitlines()[-1] == str(task.payload["answer"])
    assert [len(body["messages"]) for _, body, _ in stand_in.chats] == [2, 4, 6]
    tools = [message["content"] for message in stand_in.chats[-1][1]["messages"][3::2]]
    assert tools == [step["result"] for step in task.payload["steps"]]


@pytest.mark.parametrize(
    ("reply", "calls", "why"),
    [
        (called("look_up", '{"item": "lamp", "field": "price"}'), 6, "within 6 model calls"),
        (called("fly", "{}"), 6, "within 6 model calls"),
        (called("calculate", '{"a": "x"}'), 6, "within 6 model calls"),
        (called("look_up", '{"item": '), 1, "without an answer"),
        ({"role": "assistant", "content": " "}, 1, "without an answer"),
        (web.json_response({"error": {"message": "too long"}}, status=400), 1, "too long"),
    ],
)
async def test_odd_replies_end_with_an_error_and_not_in_a_loop(
    ask: Ask, stand_in: Any, reply: Any, calls: int, why: str
) -> None:
    stand_in.reply = lambda messages: reply

    ended = await ask("What do 7 lamps cost?")

    assert ended.exit_code == 1
    assert ended.stdout.tail == ""
    assert why in ended.stderr.tail
    assert "Traceback" not in ended.stderr.tail
    assert len(stand_in.chats) == calls


async def test_a_missing_item_field_or_operation_is_told_to_the_model(
    ask: Ask, stand_in: Any
) -> None:
    steps = [
        ("look_up", {"item": "unicorn", "field": "price"}),
        ("look_up", {"item": "lamp", "field": "colour"}),
        ("calculate", {"a": 1, "operation": "root", "b": 2}),
    ]

    def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
        done = sum(message["role"] == "tool" for message in messages)
        if done == len(steps):
            return {"role": "assistant", "content": "unknown"}
        name, arguments = steps[done]
        return called(name, json.dumps(arguments))

    stand_in.reply = reply

    assert (await ask("What?")).stdout.tail == "unknown\n"
    results = [m["content"] for m in stand_in.chats[-1][1]["messages"] if m["role"] == "tool"]
    assert results == ["no such item", "no such field", "no such operation"]


async def test_the_prompt_is_short_for_a_tokenizer_that_knows_it(
    ask: Ask, stand_in: Any, shop: Any, tmp_path: Path
) -> None:
    from bridle.recipes.models.tiny_tokenizer import train_tokenizer

    await ask("What do 7 lamps cost?")
    _, body, _ = stand_in.chats[0]
    train_tokenizer(tmp_path, [""], vocab_size=300)
    prompt = Tokenizer(tmp_path).render(body["messages"], body["tools"])

    train_tokenizer(tmp_path, [prompt] * 10, vocab_size=1024)

    assert len(Tokenizer(tmp_path).encode(prompt)) <= 230


async def test_the_splits_share_no_question_and_hold_enough(shop: Any) -> None:
    train, held_out = shop.tasks("train"), shop.tasks("held_out")

    assert not {task.prompt for task in train} & {task.prompt for task in held_out}
    assert len({task.id for task in (*train, *held_out)}) == len(train) + len(held_out)
    assert len(train) > 5000
    assert len(held_out) > 1000
    assert {task.split for task in train} == {"train"}


async def test_the_same_seed_draws_the_same_tasks(shop: Any) -> None:
    assert shop.tasks("train", 50, seed=3) == shop.tasks("train", 50, seed=3)
    assert shop.tasks("train", 50, seed=3) != shop.tasks("train", 50, seed=4)


async def test_every_payload_tells_a_run_that_earns_the_answer(shop: Any) -> None:
    """The steps, played with the shop's own numbers, end in the answer, which is never below 0."""
    compute = {
        "multiply": lambda a, b: a * b,
        "add": lambda a, b: a + b,
        "subtract": lambda a, b: a - b,
    }
    for task in itertools.starmap(shop.module.make_task, shop.module.all_questions()):
        look_up, calculate = task.payload["steps"]
        arguments = calculate["arguments"]
        item = look_up["arguments"]["item"]
        entry = shop.module.SHOP.get(item) or shop.module.SHOP[item.removesuffix("s")]
        value = entry[look_up["arguments"]["field"]]
        assert look_up["result"] == str(value) == str(arguments["a"])
        result = compute[arguments["operation"]](arguments["a"], arguments["b"])
        assert result == task.payload["answer"]
        assert task.payload["answer"] >= 0
        assert str(arguments["b"]) in task.prompt
        assert item in task.prompt


async def test_the_verifier_reads_the_final_answer_only(shop: Any, tmp_path: Path) -> None:
    (task,) = shop.tasks("held_out", 1)
    right, wrong = task.payload["answer"], task.payload["answer"] + 1

    for answer, score in ((f"It is {right}.", 1.0), (str(wrong), 0.0), (f"{wrong} {right}", 0.0)):
        delivery = Delivery(task, answer, tmp_path, 0, ProcessSandbox(tmp_path))
        assert await shop.module.verifier(delivery) == {"reward": score}


async def test_warm_sessions_of_the_agent_are_cheap_and_each_uses_its_own_key(
    stand_in: Any, shop: Any, shop_teacher: Any, warm: ForkedProvider, tmp_path: Path
) -> None:
    tasks = shop.tasks("train", 20)
    stand_in.reply = shop_teacher(tasks)
    async with Client(stand_in.url) as client:
        rollout = Rollout(
            client,
            PythonAgent(shop.script, without_tls=True),
            LocalFleet(warm, shop.module.verifier),
            RolloutSettings(tmp_path, parallel=2),
        )
        results = await rollout.collect(Job(task) for task in tasks)

    assert all(result.outcome is Outcome.COMPLETED for result in results)
    assert all(result.scores == {"reward": 1.0} for result in results)
    assert {(session, header) for session, _, header in stand_in.chats} == {
        (session, f"Bearer key-{session.removeprefix('ses_')}") for session in stand_in.sessions
    }
    # A cold start imports for seconds.
    assert sum(result.seconds for result in results) / len(results) < 1.0
