"""Agents that write calls and results as text of their own are one conversation, with breaks."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.support.text_turns import DIALECTS, Turns, ask

from bridle.diagnosis.findings import findings_of_session
from bridle.engine.scripted import ScriptedReply
from bridle.reconstruct.audit import audit_session
from bridle.store.records import BreakReason, CallKind

TASK = "How much is one and two and four?"


def code(number: int) -> str:
    """The model's reply to the request with this number."""
    return f"Step {number}: I call the tool.\n<code>\nadd({number}, 2)\n</code>"


def replies(request: Any) -> ScriptedReply:
    return ScriptedReply(code(sum("result" in str(m["content"]) for m in request.messages)))


def called(reply: str, number: int) -> Turns:
    """The reply with its call as a literal behind it."""
    call = {"function": {"name": "python_interpreter", "arguments": "add(1, 2)"}, "id": "call_1"}
    return [("assistant", f"{reply}\nCalling tools:\n[{call}]"), ("user", f"result {number}")]


def observed(reply: str, number: int) -> Turns:
    """The reply with the result behind it."""
    return [("assistant", f"{reply}\nObservation: result {number}"), ("user", "Go on.")]


def narrated(reply: str, number: int) -> Turns:
    """Reply and result as the user's text."""
    return [("user", f"You said: {reply}\nresult {number}")]


def renamed(_: str, number: int) -> Turns:
    """A call in other words, and its result."""
    return [("assistant", "The sum is looked up."), ("user", f"result {number}")]


def run(bench: Any, stage: Any, session: str, dialect: str, rewrite: Any, stream: bool) -> None:
    """Run an agent of four calls that writes its history down in this way."""
    stage.play = replies
    turns: Turns = [("user", TASK)]
    url = bench.url if not session else f"{bench.url}/s/{session}"
    for number in range(4):
        assert ask(url, dialect, turns, stream=stream) == 200
        turns += rewrite(code(number), number)


def check_one_line(bench: Any) -> None:
    """Each call continues the one before it, with its reason, and all tokens are trained."""
    calls = bench.judged()
    assert len(calls) == 4
    assert len({call.session_id for call in calls}) == 1
    assert [call.parent_call_id for call in calls] == [None, *[call.id for call in calls[:-1]]]
    assert [call.break_reason for call in calls] == [None, *[BreakReason.REWORDED] * 3]
    assert {call.lineage_rule for call in calls[1:]} == {"position"}
    assert {call.kind for call in calls} == {CallKind.MAIN}
    audited = audit_session(bench.reader, calls[0].session_id)
    assert audited.clean
    assert audited.unlinked_roots == 0
    assert audited.conservation.trained == sum(call.sampled_tokens or 0 for call in calls) > 0
    names = [finding.name for finding in findings_of_session(bench.reader, calls[0].session_id)]
    assert names == ["reworded"]


@pytest.mark.parametrize("session", ["lamp", ""])
@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_a_scratchpad_in_one_message_is_one_session_and_one_line(
    bench: Any, stage: Any, dialect: str, session: str
) -> None:
    text = f"Answer with Thought, Action and Observation.\nQuestion: {TASK}\nThought:"
    url = bench.url if not session else f"{bench.url}/s/{session}"
    for number in range(4):
        reply = f" I call the tool.\nAction: add\nAction Input: {number}"
        stage.play = lambda _, reply=reply: reply
        assert ask(url, dialect, [("user", text)]) == 200
        text += f"{reply}\nObservation: {number}\nThought:"
    check_one_line(bench)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("session", ["lamp", ""])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_calls_written_as_text_are_one_session_and_one_line(
    bench: Any, stage: Any, dialect: str, session: str, stream: bool
) -> None:
    run(bench, stage, session, dialect, called, stream)
    check_one_line(bench)


@pytest.mark.parametrize("session", ["lamp", ""])
@pytest.mark.parametrize("rewrite", [observed, narrated])
def test_results_written_beside_the_reply_are_one_session_and_one_line(
    bench: Any, stage: Any, rewrite: Any, session: str
) -> None:
    run(bench, stage, session, "chat", rewrite, False)
    check_one_line(bench)


def test_in_a_session_a_reply_in_quite_other_words_is_found_by_its_place(
    bench: Any, stage: Any
) -> None:
    run(bench, stage, "lamp", "messages", renamed, False)
    check_one_line(bench)


def test_without_a_key_a_reply_in_quite_other_words_is_another_conversation(
    bench: Any, stage: Any
) -> None:
    run(bench, stage, "", "chat", renamed, False)
    assert len({call.session_id for call in bench.calls()}) == 4


def test_agents_without_keys_that_ask_the_same_are_kept_apart(bench: Any, stage: Any) -> None:
    talks: list[Turns] = [[("user", TASK)] for _ in range(3)]
    for number in range(3):
        for one, turns in enumerate(talks):
            reply = f"Agent {'abc'[one]} adds {'xyz'[one]}{number} by tool."
            stage.play = lambda _, reply=reply: ScriptedReply(reply)
            assert ask(bench.url, "chat", turns) == 200
            turns += called(reply, number)
    sessions: dict[str, set[str]] = {}
    for call in bench.calls():
        sessions.setdefault(call.session_id, set()).add(call.replies[0].content[:7])
    assert sorted(map(sorted, sessions.values())) == [["Agent a"], ["Agent b"], ["Agent c"]]


def test_a_restarted_proxy_goes_on_with_a_reworded_conversation(
    stage: Any, start_proxy: Any
) -> None:
    turns: Turns = [("user", TASK)]
    stage.play = replies
    for number in range(4):
        bench = start_proxy(stage.engine.base_url)
        assert ask(bench.url, "chat", turns) == 200
        turns += called(code(number), number)
        bench.server.stop()
    check_one_line(bench)


def test_a_history_that_shows_no_earlier_reply_is_a_finding_and_counted(
    bench: Any, stage: Any
) -> None:
    stage.play = replies
    for number in range(4):
        ask(f"{bench.url}/s/lamp", "chat", [("user", f"State {number} of the board. Your move?")])
    session = bench.calls()[0].session_id
    assert audit_session(bench.reader, session).unlinked_roots == 3
    (finding,) = findings_of_session(bench.reader, session)
    assert (finding.name, finding.calls) == (
        "unlinked_roots",
        tuple(call.id for call in bench.calls()[1:]),
    )
    url = f"{bench.url}/bridle/v1/sessions/{session}/seal"
    assert httpx.post(url, json={"outcome": "completed"}, timeout=30).is_success
    (sealed,) = findings_of_session(bench.reader, session)
    assert sealed == finding
