"""A request that goes on from an earlier one is found as if it were read whole.

Every search in this folder is compared with one that remembers nothing (``conftest.py``). Here
random harnesses rewrite, branch and repeat long conversations, while other calls end.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from bridle.proxy.session.session import Session
from bridle.proxy.wire.canonical import Message, Minted, Request, ToolCall
from bridle.store.records import CallStatus, SessionRecord, new_id

STEPS = ("on", "again", "branch", "edit", "split", "results", "late", "forget")


class Harness:
    """A client whose conversations grow, branch and are rewritten, in one session."""

    def __init__(self) -> None:
        self.session = Session(SessionRecord(id=new_id("ses"), created_at=0.0))
        self.talks: list[list[Message]] = [[Message("system", "Be brief."), Message("user", "go")]]
        self.waiting: list[tuple[str, Any, Message]] = []

    def ask(self, messages: list[Message], number: int, *, late: bool = False) -> list[Message]:
        """Make one call, and return the conversation with its reply and a result."""
        session = self.session
        link = session.find(Request(dialect="chat", model="m", messages=tuple(messages)))
        call_id = new_id("call")
        minted = Minted(call_id, 0, call_id, "m").tool_call_id(0)
        calls = (ToolCall(minted, "f", "{}"),) if number % 2 else ()
        reply = Message("assistant", f"r{number % 3}", tool_calls=calls)
        if late:
            self.waiting.append((call_id, link, reply))
        else:
            self.end(call_id, link, reply)
        after = (
            Message("tool", f"t{number}", tool_call_id=minted) if calls else Message("user", "u")
        )
        return [*messages, reply, after]

    def end(self, call_id: str, link: Any, reply: Message) -> None:
        self.session.add(self.session.turn(call_id, link, CallStatus.COMPLETE, [reply]))

    def do(self, step: str, number: int) -> None:
        at = number % len(self.talks)
        talk = self.talks[at]
        if step == "branch":
            self.talks.append(self.ask(talk[: 2 + len(talk) // 2], number))
        elif step == "again":
            self.ask(talk, number)
        elif step == "edit":
            cut = len(talk) * number // 6
            changed = Message(talk[cut].role, f"other {number}", tool_calls=talk[cut].tool_calls)
            self.talks[at] = [*talk[:cut], changed, *talk[cut + 1 :]]
        elif step == "split":
            self.talks[at] = [*talk, Message("assistant", f"r{number}"), Message("user", "x")]
        elif step == "results":
            self.talks[at] = [*talk, Message("tool", f"t{number}", tool_call_id="c")]
        elif step == "forget":
            self.session.trim()
        else:
            for waiting in self.waiting:
                self.end(*waiting)
            self.waiting.clear()
            self.talks[at] = self.ask(talk, number, late=step == "late")


@pytest.mark.parametrize("seed", range(3))
def test_a_search_that_goes_on_finds_what_a_whole_one_finds(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(200):
        harness = Harness()
        for _ in range(chance.randrange(24)):
            harness.do(chance.choice(STEPS), chance.randrange(6))
