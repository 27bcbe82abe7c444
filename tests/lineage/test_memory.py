"""The memory of an idle session: its ids once, and a bounded amount for each turn.

Nothing of the texts that were sent with every call is kept.
"""

from __future__ import annotations

import gc
import tracemalloc
from types import SimpleNamespace

import numpy as np

from bridle.proxy.session.session import Session
from bridle.proxy.wire.canonical import Message, Minted, Request, ToolCall
from bridle.store.records import new_id

TURNS, OBSERVED, SAMPLED = 200, 600, 60
BYTES_PER_TURN = 4500
"""The bound on a turn's bytes beside four for each token.

A turn takes its own object, its digests, the sampled message, and its places in the indexes.
"""


def played(talk: SimpleNamespace) -> Session:
    """A session of one agent that reads a file in every turn."""
    session = talk.new_session()
    messages = [Message("system", "You are careful."), Message("user", "Read all files.")]
    prompt = np.arange(OBSERVED, dtype=np.uint32)
    for number in range(TURNS):
        request = Request(dialect="chat", model="m", messages=tuple(messages))
        link, call_id = session.find(request), new_id("call")
        minted = Minted(call_id, 0, call_id, "m").tool_call_id(0)
        reply = Message(
            "assistant",
            f"Step {number}: let me read on.",
            reasoning="What was read so far does not say it; the next part may. " * 3,
            tool_calls=(ToolCall(minted, "read", f'{{"path":"lib.py","offset":{number}}}'),),
        )
        ids = np.full(SAMPLED, number, dtype=np.uint32)
        talk.ended(session, call_id, link, [(reply, ids)], prompt_token_ids=prompt)
        result = Message("tool", f"{number} " + "x" * 4 * OBSERVED, tool_call_id=minted)
        messages += [reply, result]
        prompt = np.concatenate([prompt, ids, np.full(OBSERVED, 7, dtype=np.uint32)])
    return session


def test_an_idle_session_costs_its_ids_and_a_bounded_amount_for_each_turn(
    talk: SimpleNamespace,
) -> None:
    played(talk)  # what is made once stays out of the account
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    session = played(talk)
    session.measure()
    gc.collect()
    remembering, _ = tracemalloc.get_traced_memory()
    session.trails.clear()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    tokens = TURNS * OBSERVED + TURNS * SAMPLED
    assert session.tree.tokens == tokens
    beside = (after - before - 4 * tokens) / TURNS
    print(f"{beside:.0f} bytes for each turn beside its {4 * tokens // TURNS} bytes of ids")
    latest, counted = remembering - after, -session.measure()
    print(f"{latest} bytes of its latest request, {counted} by its own measure")
    assert latest < 1.5 * counted
    print(f"{session.size} bytes by its own measure, {after - before} measured")
    assert beside < BYTES_PER_TURN
    assert after - before < 6 * 4 * tokens
