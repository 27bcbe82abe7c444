"""A request that is read from where an earlier one ended is the request that it would be, read
whole."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.proxy.dialects.chat.dialect import ChatDialect
from bridle.proxy.dialects.chat.history import spans
from bridle.proxy.dialects.chat.known_histories import KnownHistories
from bridle.proxy.lineage.digests import Digester, system_digest
from bridle.proxy.lineage.index import TurnIndex
from bridle.proxy.lineage.search import find
from bridle.proxy.wire.canonical import ApiError, Request

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are careful."},
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": 'Quote: "messages":[{"role":"user"}], é ☕ \\ end'},
    {"role": "user", "content": [{"type": "text", "text": "a ] } , b"}]},
    {"role": "assistant", "content": "Yes."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "12"},
    {"role": "tool", "tool_call_id": "c2", "content": ""},
]
ODD: list[Any] = [{"role": "nobody"}, 7, {"content": "no role"}, {"role": "tool", "content": 1}]
FIELDS = st.dictionaries(
    st.sampled_from(["metadata", "temperature", "tools", "seed", "unheard_of"]),
    st.sampled_from([None, 1, {"messages": MESSAGES[:2]}, [], "x"]),
    max_size=2,
)


def whole(body: bytes) -> Request | tuple[Any, ...]:
    try:
        return ChatDialect().parse(body, {}, {})
    except ApiError as error:
        return (error.kind, error.message, error.param, error.status)


def read_on(histories: KnownHistories, body: bytes) -> Request | tuple[Any, ...]:
    try:
        request = histories.parse(body, "someone")
    except ApiError as error:
        return (error.kind, error.message, error.param, error.status)
    _, _, leading = system_digest(request.messages)
    known = request.history.units
    units = Digester().units(request.messages, leading, known)
    assert units == Digester().units(request.messages, leading)
    request.history.units = units
    return msgspec.structs.replace(request, history=None)


def written(messages: list[Any], before: dict[str, Any], after: dict[str, Any], rng: Random) -> str:
    """A body in one of the ways that clients write JSON."""
    style: dict[str, Any] = rng.choice(
        [{}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}]
    )
    fields = {"model": "m", **before, "messages": messages}
    text = json.dumps(fields | {k: v for k, v in after.items() if k not in fields}, **style)
    if rng.random() < 0.05:
        # The last of equal names counts.
        text = text[:-1] + ', "messages": ' + json.dumps(messages[:2]) + "}"
    return text


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """Bodies of a session: mostly the history grows, now and then something else happens."""
    rng = Random(draw(st.integers(0, 2**20)))
    before, after = draw(FIELDS), draw(FIELDS)
    style = Random(rng.random())
    messages: list[Any] = [rng.choice(MESSAGES)]
    bodies = []
    for happens in draw(st.lists(st.sampled_from("ggggggesrdft"), min_size=2, max_size=12)):
        if happens == "g":
            messages = [*messages, *rng.choices(MESSAGES, k=rng.randrange(1, 4))]
        elif happens == "e":
            messages[rng.randrange(len(messages))] = rng.choice(MESSAGES + ODD)
        elif happens == "s":
            style = Random(rng.random())
        elif happens == "d":
            messages = messages[: rng.randrange(len(messages)) + 1]
        elif happens == "f":
            before = {**before, "seed": rng.randrange(9)}
        # "r": the same again
        how = Random()
        how.setstate(style.getstate())
        body = written(messages, before, after, how).encode()
        bodies.append(body)
        if happens == "t":
            place = rng.choice([rng.randrange(len(body)), body.rfind(b"}", 0, -2) + 1])
            bodies[-1] = body[:place] + rng.choice([b"", b" ", b"]", b"]}", b"\xff"])
    return bodies


@settings(max_examples=300, deadline=None)
@given(conversations())
def test_reading_on_is_reading_the_whole(bodies: list[bytes]) -> None:
    histories = KnownHistories(shortest=0)
    for body in bodies:
        assert read_on(histories, body) == whole(body)


def test_only_what_is_new_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    decode = ChatDialect.parse_on.__globals__["openai"].decode

    def counted(decoder: Any, body: bytes) -> Any:
        read.append(len(body))
        return decode(decoder, body)

    monkeypatch.setattr("bridle.proxy.dialects.chat.openai.decode", counted)
    histories, messages = KnownHistories(), [{"role": "user", "content": "x" * 100_000}]
    for _ in range(3):
        messages = [*messages, {"role": "user", "content": "y" * 1000}]
        histories.parse(json.dumps({"model": "m", "messages": messages}).encode(), "someone")
    assert read[0] > 100_000
    assert max(read[1:]) < 2000


def test_each_message_is_found_in_the_bytes() -> None:
    body = b'{"model":"m","messages":[ {"role":"user"} ,\n{"role":"tool","content":"a]"}],"n":1}'
    found = spans(body)
    assert found is not None
    assert [body[start:end] for start, end in found] == [
        b'{"role":"user"}',
        b'{"role":"tool","content":"a]"}',
    ]


def test_histories_are_held_within_a_bound() -> None:
    histories = KnownHistories(capacity=400_000)
    for number in range(50):
        for turn in range(3):
            messages = [{"role": "user", "content": f"{number} " + "x" * 20_000}] * (turn + 1)
            body = json.dumps({"model": "m", "messages": messages}).encode()
            assert histories.parse(body, f"session {number}").messages
            assert histories.held <= 400_000
    assert histories.held > 0


def test_lineage_of_a_request_that_was_read_on_is_the_same() -> None:
    """Also with what an earlier search left behind, and when the instructions change in length."""
    histories, conversations = KnownHistories(shortest=0), TurnIndex()
    for messages in ([0, 2, 4], [0, 2, 4, 2], [0, 1, 2, 4, 2], [0, 2, 4, 2, 5, 7, 8], [0, 2, 4]):
        chosen = [MESSAGES[n] for n in messages]
        body = json.dumps({"model": "m", "messages": chosen}).encode()
        link = find(conversations, histories.parse(body, "someone"))
        assert link == find(conversations, ChatDialect().parse(body, {}, {}))
