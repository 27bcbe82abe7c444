"""Calls that continue no other: the session that they belong to, and their kind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
from tests.support.text_turns import ask

from bridle.engine.scripted import Refuse, ScriptedCall, ScriptedReply, Stall
from bridle.reconstruct.audit import audit_session
from bridle.store.records import BreakReason, CallKind, CallStatus

DIALECTS = ("chat", "messages")
QUESTION = [("user", "How much is one and two?")]
LONG = "I looked at the first file and at the second one, and found that both of them are wrong"
LEAD = "You lead."
TASK = "Please add the numbers one and two with care, check the sum twice, and report it to me."


def kinds(bench: Any) -> list[CallKind]:
    return [call.kind for call in bench.judged()]


def sessions(bench: Any) -> int:
    return len({call.session_id for call in bench.calls()})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_first_call_that_fails_and_its_retries_are_one_session_without_a_key(
    bench: Any, stage: Any, dialect: str, stream: bool
) -> None:
    stage.play = lambda _: Refuse(500)
    for _ in range(2):
        ask(bench.url, dialect, QUESTION, stream=stream)
    stage.play = lambda _: "three"
    for _ in range(2):
        assert ask(bench.url, dialect, QUESTION, stream=stream) == 200
    first, second, third, other = bench.judged()
    assert first.session_id == second.session_id == third.session_id
    assert [first.kind, second.kind, third.kind] == [*[CallKind.RETRY] * 2, CallKind.MAIN]
    assert audit_session(bench.reader, first.session_id).clean
    assert other.session_id != first.session_id  # it asks what was answered


async def test_clients_that_fail_at_once_and_ask_again_at_once_are_kept_apart(
    bench: Any, stage: Any, until: Any
) -> None:
    over = threading.Event()
    stage.play = lambda _: ScriptedReply("three", fault=Stall(60, over=over))
    body = {"model": "m", "messages": [{"role": "user", "content": "How much?"}]}

    async def until_open(number: int) -> None:
        def are_open() -> bool:
            return [call.status for call in bench.calls()].count(CallStatus.OPEN) == number

        await asyncio.to_thread(until, are_open)

    async with httpx.AsyncClient(base_url=bench.url, timeout=60) as client:

        async def three_calls() -> list[asyncio.Task[httpx.Response]]:
            asked = (client.post("/v1/chat/completions", json=body) for _ in range(3))
            tasks = [asyncio.create_task(one) for one in asked]
            await until_open(3)
            return tasks

        for task in await three_calls():
            task.cancel()
        await until_open(0)
        asked_again = await three_calls()
        over.set()
        assert [reply.status_code for reply in await asyncio.gather(*asked_again)] == [200] * 3
    answered = [call for call in bench.calls() if call.status is CallStatus.COMPLETE]
    assert sessions(bench) == len({call.session_id for call in answered}) == 3


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_transcript_that_is_summarised_without_a_key_is_a_compaction_of_its_session(
    bench: Any, stage: Any, dialect: str, kept: bool
) -> None:
    turns, said = [*QUESTION], []
    for number in range(3):
        said.append(f"{LONG} ({number}).")
        stage.play = lambda _: said[-1]
        assert ask(bench.url, dialect, turns) == 200
        turns += [("assistant", said[-1]), ("user", f"Go on with number {number}.")]
    summary = f"Three files were looked at, one after the other. {LONG}, all of them."
    stage.play = lambda _: summary
    transcript = "\n\n".join(f"{role}: {text}" for role, text in turns)
    ask(bench.url, dialect, [("user", f"Summarise:\n{transcript}")], system="You summarise.")
    stage.play = lambda _: "I go on."
    begun = [("user", f"The session goes on. Summary:\n{summary}\nNow go on.")]
    ask(bench.url, dialect, [*begun, *turns[-2:]] if kept else begun)
    assert sessions(bench) == 1
    assert kinds(bench) == [*[CallKind.MAIN] * 3, CallKind.COMPACTION, CallKind.MAIN]
    assert bench.calls()[-1].break_reason is BreakReason.COMPACTED
    assert audit_session(bench.reader, bench.calls()[0].session_id).clean


def test_one_reply_pasted_into_a_new_conversation_without_a_key_begins_a_session(
    bench: Any, stage: Any
) -> None:
    stage.play = lambda _: f"{LONG}."
    ask(bench.url, "chat", QUESTION)
    ask(bench.url, "chat", [("user", f"Is this true?\n{LONG}. I doubt it, and so do others.")])
    assert sessions(bench) == 2


def lead(url: str, dialect: str, answered: Any = None) -> Any:
    """Ask an agent that delegates, with the answer to its call; return its next call, if any."""
    tool = {"name": "task", "description": "delegates"}
    schema = {"type": "object", "properties": {}}
    messages: list[Any] = [{"role": "user", "content": "Get it done."}]
    if dialect == "chat":
        if answered:
            done = {"role": "tool", "tool_call_id": answered["id"], "content": "3"}
            messages += [{"role": "assistant", "tool_calls": [answered]}, done]
        body: dict[str, Any] = {"messages": [{"role": "system", "content": LEAD}, *messages]}
        body["tools"] = [{"type": "function", "function": {**tool, "parameters": schema}}]
        reply = httpx.post(f"{url}/v1/chat/completions", json={"model": "m", **body}, timeout=30)
        calls = reply.json()["choices"][0]["message"].get("tool_calls") or ()
    else:
        if answered:
            done = {"type": "tool_result", "tool_use_id": answered["id"], "content": "3"}
            messages.append({"role": "assistant", "content": [answered]})
            messages.append({"role": "user", "content": [done]})
        body = {"system": LEAD, "messages": messages, "max_tokens": 300}
        body["tools"] = [{**tool, "input_schema": schema}]
        reply = httpx.post(f"{url}/v1/messages", json={"model": "m", **body}, timeout=30)
        calls = [part for part in reply.json()["content"] if part["type"] == "tool_use"]
    return next(iter(calls), None)


@pytest.mark.parametrize("awaited", [True, False])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_agent_whose_prompt_has_a_delegated_task_in_it_is_a_sub_agent(
    bench: Any, stage: Any, dialect: str, awaited: bool
) -> None:
    """Its work is awaited, or it runs in the background and ends after its caller."""
    url = f"{bench.url}/s/lamp"
    prompt = [("user", f"You're a helper named adder.\nTask:\n{TASK}\n---\nBe brief.")]

    def play(request: Any) -> ScriptedReply:
        if LEAD in str(request.messages[0]) and request.messages[-1]["role"] != "tool":
            return ScriptedReply(tool_calls=(ScriptedCall("task", {"tasks": [{"prompt": TASK}]}),))
        return ScriptedReply(f"The sum is {len(request.messages)}.")

    def work() -> None:
        ask(url, dialect, prompt, system="You add.")
        said = [*prompt, ("assistant", "The sum is 2."), ("user", "Check it.")]
        ask(url, dialect, said, system="You add.")

    stage.play = play
    call = lead(url, dialect)
    if awaited:
        work()
    lead(url, dialect, call)
    if not awaited:
        work()
    found = [(call.kind, call.role) for call in bench.judged()]
    main, sub = (CallKind.MAIN, None), (CallKind.SUBAGENT, "task")
    assert found == ([main, sub, sub, main] if awaited else [main, main, sub, sub])
    assert audit_session(bench.reader, bench.calls()[0].session_id).unlinked_roots == 0


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_agent_that_another_ones_code_waits_for_is_a_sub_agent(
    bench: Any, stage: Any, dialect: str
) -> None:
    url = f"{bench.url}/s/lamp"
    stage.play = lambda request: f"Reply {len(request.messages)} in code."
    task = [("user", "Get it done.")]
    ask(url, dialect, task, system="You write code.")
    sub = [("user", "Add one and two.")]
    ask(url, dialect, sub, system="You add.")
    ask(url, dialect, [*sub, ("assistant", "Reply 2 in code."), ("user", "3")], system="You add.")
    said = [*task, ("assistant", "Reply 2 in code.\nCalling tools: run()"), ("user", "3")]
    ask(url, dialect, said, system="You write code.")
    assert kinds(bench) == [CallKind.MAIN, *[CallKind.SUBAGENT] * 2, CallKind.MAIN]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_reply_that_was_thrown_away_and_asked_again_is_not_trained(
    bench: Any, stage: Any, dialect: str, stream: bool
) -> None:
    url, replies = f"{bench.url}/s/lamp", iter(["one", "two", "three", "four"])
    stage.play = lambda _: next(replies)
    for _ in range(3):
        ask(url, dialect, QUESTION, stream=stream)
    ask(url, dialect, [*QUESTION, ("assistant", "three"), ("user", "and then?")], stream=stream)
    assert kinds(bench) == [*[CallKind.RETRY] * 2, *[CallKind.MAIN] * 2]
    first, _, *used = bench.calls()
    audited = audit_session(bench.reader, first.session_id)
    assert audited.clean
    assert audited.conservation.trained == sum(call.sampled_tokens or 0 for call in used)
    assert audited.unlinked_roots == 0
