"""A turn's tokens, its state in the store, and the bounds of memory."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from bridle.proxy.lineage.lineage import Conversations, Sampled, Turn
from bridle.proxy.wire.canonical import Message
from bridle.store.records import CallStatus, new_id

SYSTEM = Message("system", "You are careful.")
USER = Message("user", "How many cafés are there?")
NEXT = Message("user", "And bars?")


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
        session.ask(USER, session.said(first), NEXT), "Three.", prompt_token_ids=[1, 2, 9, 9, 9]
    )
    assert second.shared == 2
    assert second.prompt_token_ids.tolist() == [1, 2, 9, 9, 9]


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
    asked = session.ask(SYSTEM, USER, agent="a", template_kwargs={"enable_thinking": False})
    first = session.answer(asked, "Hm.", ("f", "{}"))
    history = [SYSTEM, USER, session.said(first, content=None), *session.results(first, "12")]
    second = session.answer(session.ask(*history, agent="a"), "Twelve.")
    again = Conversations()
    for turn in (first, second):
        again.add(restored(turn, again))
    before = session.ask(*history, session.said(second), NEXT)
    session.conversations = again
    after = session.ask(*history, session.said(second), NEXT)
    assert after.parent.call_id == before.parent.call_id
    assert after.parent.path_ids().tolist() == before.parent.path_ids().tolist()
    assert (after.seen, after.differs) == (before.seen, before.differs)
    assert again.get(first.call_id).to_state() == first.to_state()
    assert again.get(first.call_id).seen == first.seen


def test_a_state_without_its_base_or_of_another_version_is_refused(session) -> None:
    first = session.answer(session.ask(USER), "Hm.")
    second = session.answer(session.ask(USER, session.said(first), NEXT), "Hm.")
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
        history += [session.said(main), NEXT]
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
        history += [session.said(turn), NEXT]
    assert session.conversations.forgotten == 0
    assert session.ask(*history).parent is turn
