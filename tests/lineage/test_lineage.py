"""Every rule by which a request finds the call that it continues."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from proxy.canonical import Message, Minted, ToolCall
from proxy.lineage import Conversations, Sampled, Turn
from store.records import BreakReason, CallStatus, new_id

SYSTEM = Message("system", "You are careful.")
USER = Message("user", "How many cafés are there?")
NEXT = Message("user", "And bars?")
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {}}},)
LONG = "All the cafés of the town were counted, street by street, and there are twelve of them."


def results(turn: Turn, *texts: str) -> list[Message]:
    calls = turn.choices[0].message.tool_calls
    return [
        Message("tool", text, tool_call_id=call.id) for call, text in zip(calls, texts, strict=True)
    ]


def said(turn: Turn, **changes) -> Message:
    return msgspec.structs.replace(turn.choices[0].message, **changes)


# — finding the parent —


def test_a_first_request_has_no_parent_and_no_break(session) -> None:
    link = session.ask(SYSTEM, USER)
    assert (link.parent, link.base, link.break_reason) == (None, None, None)
    assert link.tail == (SYSTEM, USER)


def test_an_echoed_tool_call_id_names_the_parent(session) -> None:
    first = session.answer(session.ask(SYSTEM, USER), "Hm.", ("f", '{"a": 1}'))
    link = session.ask(SYSTEM, USER, said(first), *results(first, "12"))
    assert (link.parent, link.rule, link.confidence) == (first, "minted_id", 1.0)
    assert link.differs == ()
    assert link.tail == tuple(results(first, "12"))


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
    history = [USER, said(first), *results(first, "12")]
    second = session.answer(session.ask(*history), "Twelve.")
    assert session.ask(*history, said(second), NEXT).parent is second


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
    link = session.ask(SYSTEM, USER, said(first, **changes), *results(first, "12"))
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
    call = said(first).tool_calls[0]
    literal = [
        {"id": call.id, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]
    echo = Message("assistant", f"Hm.\nCalling tools:\n{literal}")
    link = session.ask(USER, echo, Message("user", "Observation:\n12"))
    assert (link.parent, link.rule) == (first, "minted_id")
    assert "folded" in link.differs


def test_parallel_results_in_another_order_stay_the_same_history(session) -> None:
    first = session.answer(session.ask(USER), None, ("f", "{}"), ("g", "{}"))
    one, two = results(first, "1", "2")
    second = session.answer(session.ask(USER, said(first), one, two), "Three.")
    link = session.ask(USER, said(first), two, one, said(second), NEXT)
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
    link = session.ask(head("b"), marked, said(first), NEXT)
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
        found = session.ask(USER, said(turn), NEXT, previous_response_id=previous)
        assert found.parent is turn


def test_each_of_several_choices_can_be_continued(session) -> None:
    link = session.ask(USER)
    choices = [
        Sampled(Message("assistant", word), np.array([n], np.uint32), "stop")
        for n, word in enumerate(("One.", "Two."))
    ]
    turn = Turn.of(
        new_id("call"), link, status=CallStatus.COMPLETE, choices=choices, prompt_token_ids=[7]
    )
    session.conversations.add(turn)
    found = session.ask(USER, Message("assistant", "Two."), NEXT)
    assert (found.parent, found.choice) == (turn, 1)
    assert turn.path_ids(1).tolist() == [7, 1]


# — breaks —


def test_a_changed_system_prompt_is_a_break_from_the_start(session) -> None:
    first = session.answer(session.ask(SYSTEM, USER), "Twelve.")
    link = session.ask(Message("system", "Be bold."), USER, said(first), NEXT)
    assert (link.parent, link.base) == (first, None)
    assert link.break_reason is BreakReason.SYSTEM_CHANGED
    assert link.tail[1:] == (USER, said(first), NEXT)


def test_changed_tools_are_a_break_from_the_start(session) -> None:
    first = session.answer(session.ask(SYSTEM, USER, tools=TOOLS), None, ("f", "{}"))
    link = session.ask(SYSTEM, USER, said(first), *results(first, "12"))
    assert (link.parent, link.base) == (first, None)
    assert link.break_reason is BreakReason.TOOLS_CHANGED


def test_an_edited_history_breaks_at_its_depth(session) -> None:
    first = session.answer(session.ask(USER), None, ("f", "{}"))
    history = [USER, said(first), *results(first, "12")]
    second = session.answer(session.ask(*history), None, ("f", '{"a": 2}'))
    cleared = [USER, said(first), *results(first, "[cleared]")]
    link = session.ask(*cleared, said(second), *results(second, "13"))
    assert (link.parent, link.base) == (second, first)
    assert link.break_reason is BreakReason.EDITED
    assert link.tail == (*results(first, "[cleared]"), said(second), *results(second, "13"))


def test_an_edit_in_a_conversation_of_text_only_is_seen(session) -> None:
    first = session.answer(session.ask(USER), "Twelve.")
    second = session.answer(session.ask(USER, said(first), NEXT), "Three.")
    edited = Message("user", "And pubs?")
    link = session.ask(USER, said(first), edited, said(second), NEXT)
    assert (link.parent, link.base, link.break_reason) == (second, first, BreakReason.EDITED)


def test_calls_below_an_edit_are_followed_to_the_last_one(session) -> None:
    first = session.answer(session.ask(SYSTEM, USER), None, ("f", "{}"))
    history = [said(first), *results(first, "12")]
    second = session.answer(session.ask(SYSTEM, USER, *history), "Twelve.")
    history += [said(second), NEXT]
    third = session.answer(session.ask(SYSTEM, USER, *history), "Three.")
    edited = Message("user", "How many pubs are there?")
    link = session.ask(SYSTEM, edited, *history, said(third), NEXT)
    assert (link.parent, link.base, link.break_reason) == (third, None, BreakReason.EDITED)


def test_rewinding_to_an_earlier_turn_is_a_branch_and_no_break(session) -> None:
    first = session.answer(session.ask(USER), "Twelve.")
    session.answer(session.ask(USER, said(first), NEXT), "Three.")
    link = session.ask(USER, said(first), Message("user", "And pubs?"))
    assert (link.parent, link.break_reason, link.retry_of) == (first, None, None)


def test_an_edited_reply_is_a_break_at_the_call_above_it(session) -> None:
    first = session.answer(session.ask(USER), "Twelve.")
    second = session.answer(session.ask(USER, said(first), NEXT), "Hm.", ("f", '{"a": 1}'))
    call = msgspec.structs.replace(said(second).tool_calls[0], arguments='{"a": 99}')
    echo = said(second, tool_calls=(call,))
    link = session.ask(USER, said(first), NEXT, echo, *results(second, "13"))
    assert (link.parent, link.base, link.break_reason) == (second, first, BreakReason.EDITED)


def test_a_kept_end_under_a_dropped_middle_is_a_compaction(session) -> None:
    history = [USER]
    for n in range(6):
        turn = session.answer(session.ask(SYSTEM, *history), None, ("f", f'{{"a": {n}}}'))
        history += [said(turn), *results(turn, str(n))]
    link = session.ask(SYSTEM, USER, Message("user", "Summary: all is well."), *history[-2:])
    assert (link.parent, link.base) == (turn, None)
    assert link.break_reason is BreakReason.COMPACTED


@pytest.mark.parametrize("first_user_kept", [True, False])
def test_a_conversation_begun_from_a_summary_is_a_compaction(session, first_user_kept) -> None:
    history = [USER]
    for n in range(3):
        turn = session.answer(session.ask(SYSTEM, *history, tools=TOOLS), None, ("f", f"[{n}]"))
        history += [said(turn), *results(turn, str(n))]
    summary = session.answer(session.ask(SYSTEM, *history, Message("user", "Sum up.")), LONG)
    start = [USER] if first_user_kept else []
    begun = Message("user", f"This session is being continued. Summary:\n\n{LONG}\n\nGo on.")
    link = session.ask(SYSTEM, *start, begun, tools=TOOLS)
    assert (link.parent, link.base) == (summary, None)
    assert link.break_reason is BreakReason.COMPACTED
    assert link.confidence < 0.7


def test_a_summary_put_in_as_an_assistant_turn_is_a_compaction(session) -> None:
    history = [USER]
    for n in range(3):
        turn = session.answer(session.ask(SYSTEM, *history), None, ("f", f"[{n}]"))
        history += [said(turn), *results(turn, str(n))]
    other = Message("system", "Summarise.")
    summary = session.answer(session.ask(other, *history, Message("user", "Sum up.")), LONG)
    what = Message("user", "What did we do so far?")
    link = session.ask(SYSTEM, what, Message("assistant", LONG), Message("user", "Go on."))
    assert (link.parent, link.base) == (summary, None)
    assert link.break_reason is BreakReason.COMPACTED


def test_a_cut_reply_that_the_harness_used_whole_is_continued(session) -> None:
    link = session.ask(USER)
    cut = session.answer(link, "Twelve, and", status=CallStatus.PARTIAL)
    found = session.ask(USER, said(cut), NEXT)
    assert (found.parent, found.base, found.break_reason) == (cut, cut, None)


def test_a_reply_used_in_part_is_truncated(session) -> None:
    first = session.answer(session.ask(USER), "Hello.")
    link = session.ask(USER, said(first), NEXT)
    cut = session.answer(link, "Twelve, and then some", status=CallStatus.PARTIAL)
    echo = Message("assistant", "Twelve, and")
    found = session.ask(USER, said(first), NEXT, echo, USER)
    assert (found.parent, found.base) == (cut, first)
    assert found.break_reason is BreakReason.TRUNCATED
    after = session.answer(found, "So.")
    assert session.ask(USER, said(first), NEXT, echo, USER, said(after), NEXT).base is after


def test_a_dropped_unfinished_call_is_truncated(session) -> None:
    cut = session.answer(
        session.ask(USER), "Hm.", ("f", "{}"), ("g", '{"a": '), status=CallStatus.PARTIAL
    )
    echo = said(cut, tool_calls=said(cut).tool_calls[:1])
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


# — agents that share a session —


def test_concurrent_agents_never_adopt_each_other(session) -> None:
    heads = [Message("system", f"You are agent {n}.") for n in range(3)]
    first = [session.answer(session.ask(head, USER), "Hm.") for head in heads]
    second = [
        session.answer(session.ask(head, USER, said(turn), NEXT), "Hm.")
        for head, turn in zip(heads, first, strict=True)
    ]
    for head, one, two in zip(heads, first, second, strict=True):
        assert session.ask(head, USER, said(one), NEXT, said(two), NEXT).parent is two
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
    history = [USER, said(first)]
    task, turn = Message("user", "You are a sub-agent: count."), NEXT
    sub = session.answer(session.ask(*history, task), "OK.")
    main = session.answer(session.ask(*history, turn), "OK.")
    assert sub.parent_call_id == main.parent_call_id == first.call_id
    assert session.ask(*history, task, said(sub), USER).parent is sub
    assert session.ask(*history, turn, said(main), USER).parent is main


# — retries and samples —


@pytest.mark.parametrize("status", [CallStatus.FAILED, CallStatus.INTERRUPTED])
def test_asking_again_after_a_failure_is_a_retry(session, status) -> None:
    failed = session.fail(session.ask(SYSTEM, USER), status)
    assert session.ask(SYSTEM, USER).retry_of == failed.call_id


def test_asking_again_after_a_reply_that_nobody_used_is_a_retry(session) -> None:
    unused = session.answer(session.ask(USER), "Twelve.")
    assert session.ask(USER).retry_of == unused.call_id


def test_asking_again_after_the_reply_was_used_is_no_retry(session) -> None:
    used = session.answer(session.ask(USER), "Twelve.")
    session.answer(session.ask(USER, said(used), NEXT), "Three.")
    assert session.ask(USER).retry_of is None


def test_another_response_format_is_another_question(session) -> None:
    session.answer(session.ask(USER), "Twelve.")
    assert session.ask(USER, response_format={"type": "json_object"}).retry_of is None


def test_parallel_samples_are_siblings(session) -> None:
    links = [session.ask(SYSTEM, USER) for _ in range(3)]
    assert [link.retry_of for link in links] == [None] * 3
    turns = [session.answer(link, f"Sample {n}.") for n, link in enumerate(links)]
    assert {turn.parent_call_id for turn in turns} == {None}
    for turn in turns:
        assert session.ask(SYSTEM, USER, said(turn), NEXT).parent is turn


def test_a_retry_goes_below_the_same_parent_as_the_failed_call(session) -> None:
    twins = [session.answer(session.ask(USER), "Twelve.") for _ in range(2)]
    failed = session.fail(session.ask(USER, Message("assistant", "Twelve."), NEXT))
    again = session.ask(USER, Message("assistant", "Twelve."), NEXT)
    assert again.parent.call_id == failed.parent_call_id
    assert again.parent in twins
    assert again.confidence == 0.5
    assert again.retry_of == failed.call_id


# — tokens —


def test_a_prompt_of_ids_is_placed_below_the_longest_path_it_begins_with(session) -> None:
    first = Turn.of(
        new_id("call"),
        session.ask(),
        status=CallStatus.COMPLETE,
        choices=[Sampled(Message("assistant", "x"), np.array([4, 5], np.uint32))],
        prompt_token_ids=[1, 2, 3],
    )
    session.conversations.add(first)
    link = session.ask(prompt=(1, 2, 3, 4, 5, 6))
    found = session.conversations.find_tokens(link, [1, 2, 3, 4, 5, 6])
    assert (found.parent, found.base, found.rule) == (first, first, "token_prefix")
    assert session.conversations.find_tokens(link, [1, 2, 3, 4, 9]).parent is None


def test_a_path_is_stored_once_and_read_back_whole(session) -> None:
    history, prompt, rng = [USER], [1, 2, 3], np.random.default_rng(0)
    for n in range(20):
        sampled = rng.integers(0, 1000, 10).astype(np.uint32)
        link = session.ask(*history)
        call_id = new_id("call")
        message = Message("assistant", f"Reply {n}.")
        turn = Turn.of(
            call_id, link, status=CallStatus.COMPLETE,
            choices=[Sampled(message, sampled)], prompt_token_ids=prompt,
        )  # fmt: skip
        session.conversations.add(turn)
        assert turn.prompt_token_ids.tolist() == prompt
        assert turn.path_ids().tolist() == [*prompt, *sampled.tolist()]
        prompt = [*prompt, *sampled.tolist(), 7, 8]
        history += [message, NEXT]
    assert session.conversations.held_tokens == len(prompt) - 2


def test_a_prompt_that_left_its_parents_ids_shares_what_it_can(session) -> None:
    first = session.answer(session.ask(USER), "Twelve.", prompt_token_ids=[1, 2, 3])
    second = session.answer(
        session.ask(USER, said(first), NEXT), "Three.", prompt_token_ids=[1, 2, 9, 9, 9]
    )
    assert second.shared == 2
    assert second.prompt_token_ids.tolist() == [1, 2, 9, 9, 9]


# — state and bounds —


def restored(turn: Turn, turns: Conversations) -> Turn:
    """``turn`` as a restarted proxy rebuilds it from the store."""
    state = msgspec.json.decode(msgspec.json.encode(turn.to_state()))
    return Turn.from_state(
        state,
        call_id=turn.call_id,
        parent_call_id=turn.parent_call_id,
        status=turn.status,
        base=turns.get(state["base"]) if state["base"] else None,
        choices=turn.choices,
        prompt_token_ids=turn.prompt_token_ids,
    )


def test_a_restarted_proxy_continues_exactly(session) -> None:
    first = session.answer(session.ask(SYSTEM, USER, agent="a"), "Hm.", ("f", "{}"))
    history = [SYSTEM, USER, said(first, content=None), *results(first, "12")]
    second = session.answer(session.ask(*history, agent="a"), "Twelve.")
    again = Conversations()
    for turn in (first, second):
        again.add(restored(turn, again))
    before = session.ask(*history, said(second), NEXT)
    session.conversations = again
    after = session.ask(*history, said(second), NEXT)
    assert after.parent.call_id == before.parent.call_id
    assert after.parent.path_ids().tolist() == before.parent.path_ids().tolist()
    assert (after.seen, after.differs) == (before.seen, before.differs)
    assert again.get(first.call_id).to_state() == first.to_state()


def test_a_state_without_its_base_or_of_another_version_is_refused(session) -> None:
    first = session.answer(session.ask(USER), "Hm.")
    second = session.answer(session.ask(USER, said(first), NEXT), "Hm.")
    with pytest.raises(ValueError, match=f"needs call {first.call_id} first"):
        restored(second, Conversations())
    with pytest.raises(ValueError, match="unknown lineage state"):
        Turn.from_state(
            {"version": 99}, call_id="call_x", parent_call_id=None,
            status=CallStatus.COMPLETE, base=None,
        )  # fmt: skip


def test_a_call_can_be_recorded_again_with_more_known(session) -> None:
    link = session.ask(USER)
    turn = session.answer(link, "Twel", status=CallStatus.PARTIAL)
    whole = Turn.of(
        turn.call_id, link, status=CallStatus.COMPLETE,
        choices=[Sampled(Message("assistant", "Twelve."), np.array([1], np.uint32))],
        prompt_token_ids=[1],
    )  # fmt: skip
    session.conversations.add(whole)
    assert len(session.conversations) == 1
    assert session.ask(USER, Message("assistant", "Twelve."), NEXT).parent is whole


def test_what_is_longest_out_of_use_is_forgotten_first(session) -> None:
    session.conversations.max_turns = 10
    main, history = None, [SYSTEM, USER]
    for n in range(8):
        main = session.answer(session.ask(*history), f"Reply {n}.")
        history += [said(main), NEXT]
        for side in range(5):
            session.answer(session.ask(Message("user", f"Title {n} {side}?")), "A title")
    assert len(session.conversations) <= 10
    assert session.conversations.forgotten == 8 * 6 - len(session.conversations)
    assert session.ask(*history).parent is main


def test_one_line_longer_than_the_bound_is_kept_whole(session) -> None:
    session.conversations.max_tokens = 50
    history = [USER]
    for n in range(10):
        turn = session.answer(session.ask(*history), f"Reply {n}.")
        history += [said(turn), NEXT]
    assert session.conversations.forgotten == 0
    assert session.ask(*history).parent is turn
