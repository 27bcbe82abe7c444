"""A turn's tokens, its state in the store, and the bounds of memory."""

from __future__ import annotations

import numpy as np

from bridle.proxy.session.memory import SessionMemory
from bridle.proxy.wire.canonical import Message
from bridle.store.records import CallStatus, SessionRecord, new_id

SYSTEM = Message("system", "You are careful.")
USER = Message("user", "How many cafés are there?")
NEXT = Message("user", "And bars?")


def test_a_prompt_of_ids_is_placed_below_the_longest_path_it_begins_with(session, talk) -> None:
    said = [(Message("assistant", "x"), [4, 5])]
    first = talk.ended(
        session.held, new_id("call"), session.ask(), said, prompt_token_ids=[1, 2, 3]
    )
    found = session.ask(prompt=(1, 2, 3, 4, 5, 6))
    assert (found.parent, found.base, found.rule) == (first, first, "token_prefix")
    assert session.ask(prompt=(1, 2, 3, 4, 9)).parent is None


def test_a_path_is_stored_once_and_read_back_whole(session, talk) -> None:
    history, prompt, rng = [USER], [1, 2, 3], np.random.default_rng(0)
    for n in range(20):
        sampled = rng.integers(0, 1000, 10).astype(np.uint32)
        message = Message("assistant", f"Reply {n}.")
        turn = talk.ended(
            session.held,
            new_id("call"),
            session.ask(*history),
            [(message, sampled)],
            prompt_token_ids=prompt,
        )
        assert turn.prompt_length == len(prompt)
        assert turn.path_ids().tolist() == [*prompt, *sampled.tolist()]
        prompt = [*prompt, *sampled.tolist(), 7, 8]
        history += [message, NEXT]
    assert session.held.tree.tokens == len(prompt) - 2


def test_a_prompt_that_left_its_parents_ids_shares_what_it_can(session) -> None:
    first = session.answer(session.ask(USER), "Twelve.", prompt_token_ids=[1, 2, 3])
    second = session.answer(
        session.ask(USER, session.said(first), NEXT), "Three.", prompt_token_ids=[1, 2, 9, 9, 9]
    )
    node = session.held.tree.nodes.get(f"{second.call_id}.o")
    assert node.start == 2
    assert second.path_ids()[:5].tolist() == [1, 2, 9, 9, 9]


def test_a_restarted_proxy_continues_exactly(session, talk) -> None:
    asked = session.ask(SYSTEM, USER, agent="a", template_kwargs={"enable_thinking": False})
    first = session.answer(asked, "Hm.", ("f", "{}"))
    history = [SYSTEM, USER, session.said(first, content=None), *session.results(first, "12")]
    second = session.answer(session.ask(*history, agent="a"), "Twelve.")
    before = session.ask(*history, session.said(second), NEXT)
    again = session.held = talk.restarted(session.held, [first, second])
    after = session.ask(*history, session.said(second), NEXT)
    assert after.parent.call_id == before.parent.call_id
    assert after.parent.path_ids().tolist() == before.parent.path_ids().tolist()
    assert (after.seen, after.differs) == (before.seen, before.differs)
    assert again.turns.turns[first.call_id].seen == first.seen


def test_a_call_whose_base_is_missing_is_looked_at_and_left_out(session, talk, caplog) -> None:
    first = session.answer(session.ask(USER), "Hm.")
    second = session.answer(session.ask(USER, session.said(first), NEXT), "Hm.")
    again = talk.restarted(session.held, [second])
    assert again.calls == {second.call_id}
    assert not again.turns.turns
    assert f"needs call {first.call_id} first" in caplog.records[-1].error


def test_a_call_can_be_recorded_again_with_more_known(session, talk) -> None:
    link = session.ask(USER)
    turn = session.answer(link, "Twel", status=CallStatus.PARTIAL)
    session.held.tree.drop(turn.call_id)
    said = [(Message("assistant", "Twelve."), [1])]
    whole = talk.ended(session.held, turn.call_id, link, said, prompt_token_ids=[1])
    assert len(session.held.turns.turns) == 1
    assert session.ask(USER, Message("assistant", "Twelve."), NEXT).parent is whole


def test_idle_turns_make_room_and_one_line_is_kept_whole(session) -> None:
    main, history = None, [SYSTEM, USER]
    for n in range(8):
        main = session.answer(session.ask(*history), f"Reply {n}.")
        history += [session.said(main), NEXT]
        for side in range(5):
            session.answer(session.ask(Message("user", f"Title {n} {side}?")), "A title")
    tokens = session.held.tree.tokens
    while session.held.trim():
        pass
    assert set(session.held.turns.turns) == {
        turn.call_id for turn in lineage(session.ask(*history).parent)
    }
    assert session.ask(*history).parent is main
    assert session.held.tree.tokens < tokens


def lineage(turn):
    while turn is not None:
        yield turn
        turn = turn.base


def test_sessions_longest_out_of_use_make_room_and_running_ones_stay() -> None:
    record = [SessionRecord(f"ses_{n}", 0.0, name=f"n{n}") for n in range(4)]
    memory = SessionMemory(None, 1)
    first = memory.add(record[0], new=True)
    memory.begin(first, "call_1")
    second = memory.add(record[1], new=True)
    assert memory.named("n0") is first
    assert memory.named("n1") is second
    memory.add(record[2], new=True)
    assert memory.named("n1") is None
    assert memory.get("ses_0") is first
    memory.end(first, "call_1")
    memory.add(record[3], new=True)
    assert list(memory._sessions) == ["ses_3"]
