"""Agents that share a session are kept apart; who asks again is told from who samples."""

from __future__ import annotations

import pytest

from bridle.proxy.wire.canonical import Message
from bridle.store.records import CallStatus

SYSTEM = Message("system", "You are careful.")
USER = Message("user", "How many cafés are there?")
NEXT = Message("user", "And bars?")
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {}}},)


def test_concurrent_agents_never_adopt_each_other(session) -> None:
    heads = [Message("system", f"You are agent {n}.") for n in range(3)]
    first = [session.answer(session.ask(head, USER), "Hm.") for head in heads]
    second = [
        session.answer(session.ask(head, USER, session.said(turn), NEXT), "Hm.")
        for head, turn in zip(heads, first, strict=True)
    ]
    for head, one, two in zip(heads, first, second, strict=True):
        assert (
            session.ask(head, USER, session.said(one), NEXT, session.said(two), NEXT).parent is two
        )
        assert two.parent_call_id == one.call_id


def test_agents_of_one_kind_are_kept_apart_by_name(session) -> None:
    turns = {
        name: session.answer(session.ask(SYSTEM, USER, agent=name), "Hm.") for name in ("a", "b")
    }
    for name, turn in turns.items():
        link = session.ask(SYSTEM, USER, Message("assistant", "Hm."), NEXT, agent=name)
        assert link.parent is turn


def test_another_system_prompt_and_other_tools_are_another_agent(session) -> None:
    session.answer(session.ask(SYSTEM, USER, tools=TOOLS), "OK")
    other = Message("system", "You name things.")
    link = session.ask(other, USER, Message("assistant", "OK"), NEXT)
    assert link.parent is None


def test_a_subagent_seeded_with_the_history_is_told_apart_once_either_goes_on(session) -> None:
    first = session.answer(session.ask(USER), "Hm.")
    history = [USER, session.said(first)]
    task, turn = Message("user", "You are a sub-agent: count."), NEXT
    sub = session.answer(session.ask(*history, task), "OK.")
    main = session.answer(session.ask(*history, turn), "OK.")
    assert sub.parent_call_id == main.parent_call_id == first.call_id
    assert session.ask(*history, task, session.said(sub), USER).parent is sub
    assert session.ask(*history, turn, session.said(main), USER).parent is main


@pytest.mark.parametrize("status", [CallStatus.FAILED, CallStatus.INTERRUPTED])
def test_asking_again_after_a_failure_is_a_retry(session, status) -> None:
    failed = session.fail(session.ask(SYSTEM, USER), status)
    assert session.retry_of(session.ask(SYSTEM, USER)) == failed.call_id


def test_asking_again_after_a_reply_that_nobody_used_is_a_retry(session) -> None:
    unused = session.answer(session.ask(USER), "Twelve.")
    assert session.retry_of(session.ask(USER)) == unused.call_id


def test_asking_again_after_the_reply_was_used_is_no_retry(session) -> None:
    used = session.answer(session.ask(USER), "Twelve.")
    session.answer(session.ask(USER, session.said(used), NEXT), "Three.")
    assert session.retry_of(session.ask(USER)) is None


def test_another_response_format_is_another_question(session) -> None:
    session.answer(session.ask(USER), "Twelve.")
    link = session.ask(USER, response_format={"type": "json_object"})
    assert session.retry_of(link) is None


def test_parallel_samples_are_siblings(session) -> None:
    links = [session.ask(SYSTEM, USER) for _ in range(3)]
    assert [session.retry_of(link) for link in links] == [None] * 3
    turns = [session.answer(link, f"Sample {n}.") for n, link in enumerate(links)]
    assert {turn.parent_call_id for turn in turns} == {None}
    for turn in turns:
        assert session.ask(SYSTEM, USER, session.said(turn), NEXT).parent is turn


def test_a_retry_goes_below_the_same_parent_as_the_failed_call(session) -> None:
    twins = [session.answer(session.ask(USER), "Twelve.") for _ in range(2)]
    failed = session.fail(session.ask(USER, Message("assistant", "Twelve."), NEXT))
    again = session.ask(USER, Message("assistant", "Twelve."), NEXT)
    assert again.parent.call_id == failed.parent_call_id
    assert again.parent in twins
    assert again.confidence == 0.5
    assert session.retry_of(again) == failed.call_id


def test_of_equal_samples_the_one_that_was_gone_on_from_stays_the_parent(session) -> None:
    """Also when the request goes on under other tools, fails, and is asked again."""
    asked = session.ask(USER)
    turns = [session.answer(asked, "Twelve.") for _ in range(3)]
    history = (USER, session.said(turns[0]), NEXT)
    first = session.ask(*history, tools=TOOLS)
    assert first.parent in turns
    session.fail(first)
    assert session.ask(*history, tools=TOOLS).parent is first.parent


def test_of_equal_samples_the_one_with_the_later_replies_is_the_base_of_an_edit(session) -> None:
    asked = session.ask(USER)
    one, other = (session.answer(asked, "Twelve.") for _ in range(2))
    link = session.ask(USER, session.said(one), NEXT)
    second = session.answer(link, "Three bars.")
    edited = Message("user", "[cleared]")
    found = session.ask(USER, session.said(other), edited, session.said(second), NEXT)
    assert (found.parent, found.base) == (second, second.base)


def test_a_reply_that_the_harness_leaves_out_is_told_of_once(session) -> None:
    """The harness behaves like mini-swe-agent with replies that call no tool."""
    hint = Message("user", "Call a tool.")
    first = session.answer(session.ask(SYSTEM, USER), "Well.")
    link = session.ask(SYSTEM, USER, hint)
    assert (link.parent, session.left_out(link)) == (None, first.call_id)
    second = session.answer(link, "Well!")
    assert session.left_out(session.ask(SYSTEM, USER, hint, hint)) == second.call_id


def test_a_reply_is_left_out_below_the_reply_before_it(session) -> None:
    first = session.answer(session.ask(SYSTEM, USER), "Three.")
    history = (SYSTEM, USER, session.said(first))
    second = session.answer(session.ask(*history, NEXT), "Hm.")
    link = session.ask(*history, NEXT, USER)
    assert (link.parent, session.left_out(link)) == (first, second.call_id)


@pytest.mark.parametrize("used", ["A", "B"])
def test_a_sample_that_was_not_used_is_no_dropped_reply(session, used) -> None:
    for text in ("A", "B"):
        session.answer(session.ask(SYSTEM, USER), text)
    link = session.ask(SYSTEM, USER, Message("assistant", used), NEXT)
    assert link.parent is not None
    assert session.left_out(link) is None


def test_a_call_without_a_reply_has_none_to_drop(session) -> None:
    session.fail(session.ask(SYSTEM, USER), CallStatus.FAILED)
    assert session.left_out(session.ask(SYSTEM, USER, NEXT)) is None


def test_a_question_of_another_agent_is_no_dropped_reply(session) -> None:
    session.answer(session.ask(SYSTEM, USER, agent="explore"), "Hm.")
    session.answer(session.ask(SYSTEM, USER, tools=TOOLS), "Hm.")
    assert session.left_out(session.ask(SYSTEM, USER, NEXT)) is None
