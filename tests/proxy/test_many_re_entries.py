"""Many recorded sessions, each re-entered at a turn drawn at random: ``make test-replay``."""

from __future__ import annotations

import os
import random
import re
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedCall, ScriptedReply
from bridle.reconstruct.audit import audit_session

pytestmark = pytest.mark.replay

SESSIONS = int(os.environ.get("BRIDLE_REPLAY_SESSIONS", "20"))
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
HTTP = httpx.Client(trust_env=False)
DATE, VERSION = "Fri Nov 27 2026", "pytest 8.2"
PLANTED = {
    "a date": ({DATE: "Mon Mar 1 2027"}, "replay_noise", "date"),
    "a changed file": ({"line 7": "line 8"}, "replay_diverged", "diverged: tool result"),
    "another version": ({VERSION: "pytest 8.3"}, "replay_diverged", "diverged: tool result"),
    "another outcome": (
        {"process running": "process stopped"},
        "replay_diverged",
        "diverged: tool result",
    ),
    "a handle": ({"session ID 8002": "session ID 77"}, "replay_handle", "session ID"),
    "a handle in another folder": (
        {"session ID 8002": "session ID 77", "/old/work": "/new/work"},
        "replay_diverged",
        "place: tool result",
    ),
    "a handle for two": (
        {"session ID 8002": "session ID 8001"},
        "replay_diverged",
        "handle: tool result",
    ),
    "swapped handles": (
        {"ID 8001": "ID x", "ID 8002": "ID 8001", "ID x": "ID 8002"},
        "replay_diverged",
        "handle: tool result",
    ),
    "another folder": ({"/old/work": "/new/work"}, "replay_diverged", "place: tool result"),
}
"""A change of the second turn's results, the note that it gets, and a part of its detail.

Each turn has a process with a handle of its own, and the first turn's still runs.
"""


class Steps:
    """A policy that takes ``turns`` turns, two tool calls in every third of them."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def __call__(self, request: Any) -> ScriptedReply:
        number = sum(m["role"] == "assistant" for m in request.messages) + 1
        if number >= self.turns:
            return ScriptedReply("All steps are taken.")
        names = ("a", "b") if number % 3 == 0 else ("a",)
        calls = tuple(ScriptedCall("run", {"step": f"{number}{name}"}) for name in names)
        return ScriptedReply(f"Step {number}.", tool_calls=calls)


def result(arguments: str) -> str:
    (number,) = re.findall(r"\d+", arguments)
    return (
        f"{arguments} in /old/work on {DATE} by {VERSION}: line 7, process running "
        f"with session ID {8000 + int(number)}, beside session ID 8001"
    )


def plays(url: str, changed: dict[str, str], turn: int = 0) -> int:
    """Run a harness and return its last status. Its tool results differ at ``turn``."""
    messages: list[Any] = [{"role": "user", "content": "work"}]
    number = 0
    while True:
        body = {"model": "m", "messages": messages, "tools": TOOLS}
        reply = HTTP.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        if reply.status_code != 200:
            return reply.status_code
        number += 1
        message = reply.json()["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return 200
        for call in message["tool_calls"]:
            text = result(call["function"]["arguments"])
            if number == turn:
                for was, now in changed.items():
                    text = text.replace(was, now)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


def begun(url: str, **fields: Any) -> str:
    made = HTTP.post(f"{url}/bridle/v1/sessions", json=fields, timeout=120)
    made.raise_for_status()
    return str(made.json()["id"])


def test_sessions_are_re_entered_at_any_turn(stage: Any, bench: Any) -> None:
    drawn, equal, replayed, asked, conserved = random.Random(11), 0, 0, 0, 0
    for _ in range(SESSIONS):
        turns = drawn.randint(5, 30)
        stage.play = Steps(turns)
        session = begun(bench.url)
        assert plays(f"{bench.url}/s/{session}", {}) == 200
        calls = bench.reader.calls(session)
        place = drawn.randrange(turns)
        before = len(stage.requests)
        again = begun(bench.url, origin={"session": session, "call": calls[place].id})
        noise = {DATE: "Sat Nov 28 2026"}
        assert plays(f"{bench.url}/s/{again}", noise, drawn.randint(1, turns)) == 200
        own = bench.reader.calls(again)
        assert [one.replayed_call_id for one in own[:place]] == [one.id for one in calls[:place]]
        prompts = [bench.reader.prompt_token_ids(one.id) for one in (calls[place], own[place])]
        equal += prompts[0].tolist() == prompts[1].tolist()
        replayed += place
        asked += len(stage.requests) - before - (len(own) - place)
        audited = audit_session(bench.reader, again, bodies=True)
        live = sum(one.sampled_tokens or 0 for one in own[place:])
        conserved += audited.clean and audited.conservation.captured == live
    print(
        f"\n{SESSIONS} sessions re-entered at random turns; first live prompts bit-equal: {equal}; "
        f"{replayed} replayed turns, engine calls for them: {asked}; tokens conserved: {conserved}"
    )
    assert (equal, asked, conserved) == (SESSIONS, 0, SESSIONS)


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_divergences_are_named(stage: Any, bench: Any, planted: str) -> None:
    changed, note, detail = PLANTED[planted]
    stage.play = Steps(6)
    start = {"folder": "/old/work"}
    session = begun(bench.url, start=start)
    assert plays(f"{bench.url}/s/{session}", {}) == 200
    calls = bench.reader.calls(session)
    before = len(stage.requests)
    origin = {"session": session, "call": calls[4].id}
    again = begun(bench.url, origin=origin, start={"folder": "/new/work"})
    status = plays(f"{bench.url}/s/{again}", changed, 2)
    assert status == (400 if note == "replay_diverged" else 200)
    own = bench.reader.calls(again)
    assert {one.name for one in own[2].notes} == {note}
    assert detail in own[2].notes[0].detail
    live = [one for one in own if one.replayed_call_id is None and one.status == "complete"]
    assert len(stage.requests) - before == len(live)
