"""A history that was changed: which call it still goes on from, and why it is a break."""

from __future__ import annotations

import msgspec
import pytest

from bridle.proxy.wire.canonical import Message, ToolCall
from bridle.store.records import BreakReason, CallStatus, new_id

SYSTEM = Message("system", "You are careful.")
USER = Message("user", "How many cafés are there?")
NEXT = Message("user", "And bars?")
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {}}},)
LONG = "All the cafés of the town were counted, street by street, and there are twelve of them."


def test_a_changed_system_prompt_is_a_break_from_the_start(session) -> None:
    first = session.answer(session.ask(SYSTEM, USER), "Twelve.")
    link = session.ask(Message("system", "Be bold."), USER, session.said(first), NEXT)
    assert (link.parent, link.base) == (first, None)
    assert link.break_reason is BreakReason.SYSTEM_CHANGED
    assert link.tail[1:] == (USER, session.said(first), NEXT)


def test_changed_tools_are_a_break_from_the_start(session) -> None:
    first = session.answer(session.ask(SYSTEM, USER, tools=TOOLS), None, ("f", "{}"))
    link = session.ask(SYSTEM, USER, session.said(first), *session.results(first, "12"))
    assert (link.parent, link.base) == (first, None)
    assert link.break_reason is BreakReason.TOOLS_CHANGED


def test_an_edited_history_breaks_at_its_depth(session) -> None:
    first = session.answer(session.ask(USER), None, ("f", "{}"))
    history = [USER, session.said(first), *session.results(first, "12")]
    second = session.answer(session.ask(*history), None, ("f", '{"a": 2}'))
    cleared = [USER, session.said(first), *session.results(first, "[cleared]")]
    link = session.ask(*cleared, session.said(second), *session.results(second, "13"))
    assert (link.parent, link.base) == (second, first)
    assert link.break_reason is BreakReason.EDITED
    assert link.tail == (
        *session.results(first, "[cleared]"),
        session.said(second),
        *session.results(second, "13"),
    )


def test_an_edit_in_a_conversation_of_text_only_is_seen(session) -> None:
    first = session.answer(session.ask(USER), "Twelve.")
    second = session.answer(session.ask(USER, session.said(first), NEXT), "Three.")
    edited = Message("user", "And pubs?")
    link = session.ask(USER, session.said(first), edited, session.said(second), NEXT)
    assert (link.parent, link.base, link.break_reason) == (second, first, BreakReason.EDITED)


def test_calls_below_an_edit_are_followed_to_the_last_one(session) -> None:
    first = session.answer(session.ask(SYSTEM, USER), None, ("f", "{}"))
    history = [session.said(first), *session.results(first, "12")]
    second = session.answer(session.ask(SYSTEM, USER, *history), "Twelve.")
    history += [session.said(second), NEXT]
    third = session.answer(session.ask(SYSTEM, USER, *history), "Three.")
    edited = Message("user", "How many pubs are there?")
    link = session.ask(SYSTEM, edited, *history, session.said(third), NEXT)
    assert (link.parent, link.base, link.break_reason) == (third, None, BreakReason.EDITED)


def test_rewinding_to_an_earlier_turn_is_a_branch_and_no_break(session) -> None:
    first = session.answer(session.ask(USER), "Twelve.")
    session.answer(session.ask(USER, session.said(first), NEXT), "Three.")
    link = session.ask(USER, session.said(first), Message("user", "And pubs?"))
    assert (link.parent, link.break_reason) == (first, None)
    assert session.retry_of(link) is None


def test_an_edited_reply_is_a_break_at_the_call_above_it(session) -> None:
    first = session.answer(session.ask(USER), "Twelve.")
    second = session.answer(session.ask(USER, session.said(first), NEXT), "Hm.", ("f", '{"a": 1}'))
    call = msgspec.structs.replace(session.said(second).tool_calls[0], arguments='{"a": 99}')
    echo = session.said(second, tool_calls=(call,))
    link = session.ask(USER, session.said(first), NEXT, echo, *session.results(second, "13"))
    assert (link.parent, link.base, link.break_reason) == (second, first, BreakReason.EDITED)


def test_a_kept_end_under_a_dropped_middle_is_a_compaction(session) -> None:
    history = [USER]
    for n in range(6):
        turn = session.answer(session.ask(SYSTEM, *history), None, ("f", f'{{"a": {n}}}'))
        history += [session.said(turn), *session.results(turn, str(n))]
    link = session.ask(SYSTEM, USER, Message("user", "Summary: all is well."), *history[-2:])
    assert (link.parent, link.base) == (turn, None)
    assert link.break_reason is BreakReason.COMPACTED


def test_a_history_that_keeps_every_reply_in_fewer_steps_is_edited_and_not_compacted(
    session,
) -> None:
    history, joined = [SYSTEM, USER], [SYSTEM, USER]
    for n in range(6):
        turn = session.answer(session.ask(*history), f"Turn {n}.", ("f", f'{{"a": {n}}}'))
        history += [session.said(turn), *session.results(turn, str(n)), NEXT, USER]
        joined += [session.said(turn), *session.results(turn, str(n))]
    link = session.ask(*joined)
    assert link.parent is turn
    assert link.break_reason is BreakReason.EDITED


@pytest.mark.parametrize("first_user_kept", [True, False])
def test_a_conversation_begun_from_a_summary_is_a_compaction(session, first_user_kept) -> None:
    history = [USER]
    for n in range(3):
        turn = session.answer(session.ask(SYSTEM, *history, tools=TOOLS), None, ("f", f"[{n}]"))
        history += [session.said(turn), *session.results(turn, str(n))]
    summary = session.answer(session.ask(SYSTEM, *history, Message("user", "Sum up.")), LONG)
    start = [USER] if first_user_kept else []
    begun = Message("user", f"This session is being continued. Summary:\n\n{LONG}\n\nGo on.")
    link = session.ask(SYSTEM, *start, begun, tools=TOOLS)
    assert (link.parent, link.base) == (summary, None)
    assert link.break_reason is BreakReason.COMPACTED
    assert link.confidence < 0.7


def test_a_conversation_begun_from_a_summary_inside_a_tag_is_a_compaction(session) -> None:
    first = session.answer(session.ask(SYSTEM, USER, tools=TOOLS), None, ("f", "{}"))
    history = [USER, session.said(first), *session.results(first, "12")]
    asked = session.ask(SYSTEM, *history, Message("user", "Sum up."), tools=TOOLS)
    told = f"<analysis>\nI look back.\n</analysis>\n\n<summary>\n{LONG}\n</summary>\n"
    summary = session.answer(asked, told)
    begun = Message("user", f"This session is being continued.\n\nSummary:\n{LONG}\n\nGo on.")
    link = session.ask(SYSTEM, begun, tools=TOOLS)
    assert (link.parent, link.base) == (summary, None)
    assert link.break_reason is BreakReason.COMPACTED


def test_a_question_that_a_reply_restates_begins_no_compaction(session) -> None:
    told = f"<question>{LONG} Why?</question> Because of the weather."
    first = session.answer(session.ask(SYSTEM, USER), told)
    session.answer(session.ask(SYSTEM, USER, session.said(first), NEXT), "Three.")
    link = session.ask(SYSTEM, Message("user", f"Now it is noon. {LONG} Why?"))
    assert (link.parent, link.break_reason) == (None, None)


def test_a_question_that_a_reply_repeated_begins_no_compaction_when_it_is_asked_again(
    session,
) -> None:
    asked = Message("user", f"Correct this: {LONG}")
    first = session.answer(session.ask(SYSTEM, asked), LONG)
    session.answer(session.ask(SYSTEM, asked, session.said(first), NEXT), "Three.")
    link = session.ask(SYSTEM, asked)
    assert (link.parent, link.break_reason) == (None, None)


def test_a_summary_put_in_as_an_assistant_turn_is_a_compaction(session) -> None:
    history = [USER]
    for n in range(3):
        turn = session.answer(session.ask(SYSTEM, *history), None, ("f", f"[{n}]"))
        history += [session.said(turn), *session.results(turn, str(n))]
    other = Message("system", "Summarise.")
    summary = session.answer(session.ask(other, *history, Message("user", "Sum up.")), LONG)
    what = Message("user", "What did we do so far?")
    link = session.ask(SYSTEM, what, Message("assistant", LONG), Message("user", "Go on."))
    assert (link.parent, link.base) == (summary, None)
    assert link.break_reason is BreakReason.COMPACTED


def test_a_cut_reply_that_the_harness_used_whole_is_continued(session) -> None:
    link = session.ask(USER)
    cut = session.answer(link, "Twelve, and", status=CallStatus.PARTIAL)
    found = session.ask(USER, session.said(cut), NEXT)
    assert (found.parent, found.base, found.break_reason) == (cut, cut, None)


def test_a_reply_used_in_part_is_truncated(session) -> None:
    first = session.answer(session.ask(USER), "Hello.")
    link = session.ask(USER, session.said(first), NEXT)
    cut = session.answer(link, "Twelve, and then some", status=CallStatus.PARTIAL)
    echo = Message("assistant", "Twelve, and")
    found = session.ask(USER, session.said(first), NEXT, echo, USER)
    assert (found.parent, found.base) == (cut, first)
    assert found.break_reason is BreakReason.TRUNCATED
    after = session.answer(found, "So.")
    assert (
        session.ask(USER, session.said(first), NEXT, echo, USER, session.said(after), NEXT).base
        is after
    )


def test_a_dropped_unfinished_call_is_truncated(session) -> None:
    cut = session.answer(
        session.ask(USER), "Hm.", ("f", "{}"), ("g", '{"a": '), status=CallStatus.PARTIAL
    )
    echo = session.said(cut, tool_calls=session.said(cut).tool_calls[:1])
    done = Message("tool", "1", tool_call_id=echo.tool_calls[0].id)
    found = session.ask(USER, echo, done)
    assert (found.parent, found.base) == (cut, None)
    assert found.break_reason is BreakReason.TRUNCATED


def test_an_echo_of_a_call_that_left_no_reply_is_a_parent_without_ids(session) -> None:
    lost = session.fail(session.ask(USER), CallStatus.INTERRUPTED)
    call = ToolCall(f"call_{lost.call_id[5:]}00", "f", "{}")
    echo = Message("assistant", None, tool_calls=(call,))
    link = session.ask(USER, echo, Message("tool", "1", tool_call_id=call.id))
    assert link.parent is lost
    assert link.break_reason is BreakReason.PARENT_WITHOUT_IDS


def test_an_echoed_id_that_is_not_known_here_is_reported(session) -> None:
    call_id = new_id("call")
    call = ToolCall(f"call_{call_id[5:]}00", "f", "{}")
    link = session.ask(USER, Message("assistant", None, tool_calls=(call,)))
    assert link.unknown == (call_id,)


def test_below_changed_tools_a_break_is_named_by_its_own_reason(session) -> None:
    first = session.answer(session.ask(USER), "Twelve.")
    changed = session.ask(USER, session.said(first), NEXT, tools=TOOLS)
    assert changed.break_reason is BreakReason.TOOLS_CHANGED
    second = session.answer(changed, "Three,\nmore or less.", status=CallStatus.PARTIAL)
    history = (USER, session.said(first), NEXT, Message("assistant", "Three,"), USER)
    link = session.ask(*history, tools=TOOLS)
    assert (link.parent, link.break_reason) == (second, BreakReason.TRUNCATED)


def test_an_edit_is_followed_where_the_harness_drops_text_and_makes_ids_of_its_own(session) -> None:
    first = session.answer(session.ask(USER), "Hm.", ("f", '{"a": 1}'))
    history = [USER, session.said(first), *session.results(first, "12")]
    second = session.answer(session.ask(*history), "So.", ("f", '{"b": 2}'))

    def echoed(turn, own_id: str, result: str) -> list[Message]:
        (call,) = turn.choices[0].message.tool_calls
        own = msgspec.structs.replace(call, id=own_id)
        reply = session.said(turn, content=None, tool_calls=(own,))
        return [reply, Message("tool", result, tool_call_id=own_id)]

    link = session.ask(USER, *echoed(first, "x0", "[cleared]"), *echoed(second, "x1", "13"))
    assert (link.parent, link.base) == (second, first)
    assert link.break_reason is BreakReason.EDITED
