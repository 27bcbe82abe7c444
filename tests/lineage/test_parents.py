"""Every rule by which a request finds the call that it continues."""

from __future__ import annotations

import numpy as np
import pytest

from bridle.proxy.wire.canonical import Message, Minted, ToolCall
from bridle.store.records import new_id

SYSTEM = Message("system", "You are careful.")
USER = Message("user", "How many cafés are there?")
NEXT = Message("user", "And bars?")


def test_a_first_request_has_no_parent_and_no_break(session) -> None:
    link = session.ask(SYSTEM, USER)
    assert (link.parent, link.base, link.break_reason) == (None, None, None)
    assert link.tail == (SYSTEM, USER)


def test_an_echoed_tool_call_id_names_the_parent(session) -> None:
    first = session.answer(session.ask(SYSTEM, USER), "Hm.", ("f", '{"a": 1}'))
    link = session.ask(SYSTEM, USER, session.said(first), *session.results(first, "12"))
    assert (link.parent, link.rule, link.confidence) == (first, "minted_id", 1.0)
    assert link.differs == ()
    assert link.tail == tuple(session.results(first, "12"))


def test_a_text_reply_is_found_by_what_it_says(session) -> None:
    first = session.answer(session.ask(SYSTEM, USER), "Twelve.")
    link = session.ask(SYSTEM, USER, Message("assistant", "Twelve. "), NEXT)
    assert (link.parent, link.rule, link.differs) == (first, "content", ("whitespace",))
    assert link.tail == (NEXT,)


@pytest.mark.parametrize(
    "anchor", ["item", "signature", "joined"], ids=["item id", "signature", "joined ids"]
)
def test_an_anchor_tells_which_of_two_equal_replies_is_echoed(session, anchor: str) -> None:
    link = session.ask(SYSTEM, USER)
    turns = [session.answer(link, "Twelve.") for _ in range(3)]
    for turn in turns:
        minted = Minted(call_id=turn.call_id, created=0, response_id="", model="m")
        value = {
            "item": minted.item_id("msg", 0),
            "signature": minted.signature(0),
            "joined": f"{minted.tool_call_id(0)}|{minted.item_id('fc', 0)}",
        }[anchor]
        echo = Message("assistant", "Twelve.", anchors=(value,))
        found = session.ask(SYSTEM, USER, echo, NEXT)
        assert (found.parent, found.rule) == (turn, "minted_id")


def test_text_after_a_minted_turn_is_followed_to_the_deepest_call(session) -> None:
    first = session.answer(session.ask(USER), None, ("f", "{}"))
    history = [USER, session.said(first), *session.results(first, "12")]
    second = session.answer(session.ask(*history), "Twelve.")
    assert session.ask(*history, session.said(second), NEXT).parent is second


REWRITES = {
    "reasoning dropped": ({"reasoning"}, {"reasoning": None}),
    "reasoning end-stripped": ({"whitespace"}, {"reasoning": "Let me think."}),
    "text as blocks": ({"blocks"}, {"content": [{"type": "text", "text": "Hm."}]}),
    "text beside calls dropped": ({"text"}, {"content": None}),
    "white space": ({"whitespace"}, {"content": "Hm.\n"}),
}


@pytest.mark.parametrize("case", REWRITES)
def test_a_tolerated_rewrite_of_the_reply_is_named_and_breaks_nothing(session, case: str) -> None:
    differs, changes = REWRITES[case]
    first = session.answer(
        session.ask(SYSTEM, USER), "Hm.", ("f", '{"a": 1}'), reasoning="Let me think.\n"
    )
    link = session.ask(SYSTEM, USER, session.said(first, **changes), *session.results(first, "12"))
    assert link.parent is first
    assert link.break_reason is None
    assert set(link.differs) == differs


def test_arguments_written_anew_and_ids_replaced_are_tolerated(session) -> None:
    first = session.answer(session.ask(USER), None, ("f", '{"a": 1, "b": "é"}'))
    call = ToolCall("theirs", "f", '{"b":"\\u00e9","a":1}')
    echo = Message("assistant", "", tool_calls=(call,))
    link = session.ask(USER, echo, Message("tool", "12", tool_call_id="theirs"))
    assert (link.parent, link.rule, link.break_reason) == (first, "content", None)
    assert set(link.differs) == {"arguments", "ids"}


def test_tool_calls_folded_into_text_are_tolerated(session) -> None:
    first = session.answer(session.ask(USER), "Hm.", ("f", '{"a": 1}'))
    call = session.said(first).tool_calls[0]
    literal = [
        {"id": call.id, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]
    echo = Message("assistant", f"Hm.\nCalling tools:\n{literal}")
    link = session.ask(USER, echo, Message("user", "Observation:\n12"))
    assert (link.parent, link.rule) == (first, "minted_id")
    assert "folded" in link.differs


def test_parallel_results_in_another_order_stay_the_same_history(session) -> None:
    first = session.answer(session.ask(USER), None, ("f", "{}"), ("g", "{}"))
    one, two = session.results(first, "1", "2")
    second = session.answer(session.ask(USER, session.said(first), one, two), "Three.")
    link = session.ask(USER, session.said(first), two, one, session.said(second), NEXT)
    assert link.parent is second
    assert link.differs == ("tool_form",)


def test_moved_cache_marks_and_the_billing_block_do_not_matter(session) -> None:
    def head(mark: str) -> Message:
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={mark};"}
        return Message("system", [billing, {"type": "text", "text": "You are careful."}])

    first = session.answer(session.ask(head("a"), USER), "Twelve.")
    marked = Message(
        "user", [{"type": "text", "text": USER.content, "cache_control": {"type": "ephemeral"}}]
    )
    link = session.ask(head("b"), marked, session.said(first), NEXT)
    assert (link.parent, link.break_reason) == (first, None)
    assert set(link.differs) == {"system_form", "user_form"}


def test_of_equal_replies_the_one_that_nobody_used_yet_is_taken(session) -> None:
    link = session.ask(USER)
    turns = [session.answer(link, "Twelve.") for _ in range(2)]
    used = []
    for word in ("One more.", "Another."):
        found = session.ask(USER, Message("assistant", "Twelve."), Message("user", word))
        assert found.confidence == 0.5
        session.answer(found, "So.")
        used.append(found.parent)
    assert set(used) == set(turns)


def test_a_previous_response_id_decides_between_equal_replies(session) -> None:
    link = session.ask(USER)
    turns = [session.answer(link, "Twelve.") for _ in range(2)]
    for turn in turns:
        previous = "resp_" + turn.call_id.removeprefix("call_")
        found = session.ask(USER, session.said(turn), NEXT, previous_response_id=previous)
        assert found.parent is turn


def test_each_of_several_choices_can_be_continued(session, talk) -> None:
    link = session.ask(USER)
    choices = [
        (Message("assistant", word), np.array([n], np.uint32))
        for n, word in enumerate(("One.", "Two."))
    ]
    turn = talk.ended(session.held, new_id("call"), link, choices, prompt_token_ids=[7])
    found = session.ask(USER, Message("assistant", "Two."), NEXT)
    assert (found.parent, found.choice) == (turn, 1)
    assert turn.path_ids(1).tolist() == [7, 1]
