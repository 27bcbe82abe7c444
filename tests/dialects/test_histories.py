"""A body that goes on from an earlier one is read as if it were read whole."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from msgspec import structs

from bridle.proxy.dialects import body as bodies
from bridle.proxy.dialects.registry import DIALECTS
from bridle.proxy.wire import histories
from bridle.proxy.wire.canonical import ApiError, Request
from bridle.proxy.wire.histories import Arriving, History, Known, Repeats
from bridle.store.records import new_id


class Talk(NamedTuple):
    """A dialect's messages, the key of their array, and the fields that a request needs."""

    key: str
    messages: list[dict[str, Any]]
    frame: dict[str, Any]


def made(prefix: str) -> list[str]:
    """Ids of three calls, each with two tool calls."""
    calls = [new_id("call") for _ in range(3)]
    return [f"{prefix}_{one.removeprefix('call_')}{at:02d}" for one in calls for at in range(2)]


CHAT: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": 'It says "messages":[1] and \\"input\\":[2], é ☕ \U0001f600'},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "x": {}}]},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}]},
    {"role": "tool", "tool_call_id": "c", "content": "r"},
    {"role": "assistant", "content": "b", "reasoning_details": [{}]},
]  # fmt: skip
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'It says "messages":[1], é ☕'},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "unheard", "x": {}}]},
    {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
    *({"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": one},
        {"type": "tool_use", "id": one, "name": "f", "input": {"a": [1]}}]}
        for one in made("toolu")),
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t", "content": "r", "is_error": True},
        {"type": "text", "text": "and"}]},
]  # fmt: skip
ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": 'It says "input":[1], é ☕'},
    {"type": "unheard", "x": {}},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
    {"type": "item_reference", "id": "msg_1"},
    {"type": "additional_tools", "tools": [{"type": "function", "name": "late"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    *({"type": "function_call", "call_id": one, "name": "f", "arguments": "{}"}
        for one in made("call")),
    {"type": "function_call_output", "call_id": "c", "output": "r"},
]  # fmt: skip
CONTENTS: list[dict[str, Any]] = [
    {"role": "system", "parts": [{"text": "Be brief."}]},
    {"role": "user", "parts": [{"text": 'It says "contents":[1], é ☕'}]},
    {"role": "user", "parts": [{"unheard": {}}]},
    {"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "b"}]},
    {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"a": [1]}}}]},
    {"role": "model", "parts": [{"functionCall": {"name": "g", "id": "x"}}]},
    {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"output": "r"}}}]},
    {"role": "user", "parts": [
        {"text": "a"}, {"functionResponse": {"name": "g", "id": "x", "response": {"error": "e"}}}]},
]  # fmt: skip
TALKS = {
    "chat": Talk("messages", CHAT, {"model": "m"}),
    "messages": Talk("messages", MESSAGES, {"model": "m", "max_tokens": 9}),
    "responses": Talk("input", ITEMS, {"model": "m"}),
    "google": Talk("contents", CONTENTS, {"model": "m"}),
}
PATH = {"model": "m", "method": "generateContent"}
ODD: list[Any] = [
    {"role": "nobody"},
    {"role": "user", "content": 7},
    {"role": "user", "content": [{"type": "text"}]},
    3,
    [],
]
NESTED = {"messages": CHAT, "input": ITEMS, "contents": CONTENTS}
FRAMES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"stream": True}),
    ({}, {"temperature": 0.5, "unheard": 1}),
    ({"tools": [{"type": "function", "name": "f", "input_schema": {"default": NESTED},
        "functionDeclarations": [], "function": {"name": "f", "default": NESTED}}]}, {}),
    ({}, {"metadata": NESTED}),
    ({}, {"top_logprobs": 3}),
]  # fmt: skip


@pytest.fixture(autouse=True)
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "SHORTEST", 0)


def outcome(work: Any) -> Any:
    try:
        return work()
    except ApiError as error:
        return error.kind, error.message, error.param


def same(one: Any, other: Any) -> bool:
    """Return whether two outcomes are equal; notes may have another order."""
    if isinstance(one, Request) and isinstance(other, Request):
        alike = set(one.notes) == set(other.notes)
        return alike and structs.replace(one, notes=()) == structs.replace(other, notes=())
    return bool(one == other)


def written(chance: random.Random, talk: Talk, messages: list[Any]) -> bytes:
    before, after = chance.choice(FRAMES)
    separators = chance.choice([(",", ":"), (", ", ": ")])
    body = {**talk.frame, **before, talk.key: messages, **after}
    text = json.dumps(body, separators=separators, ensure_ascii=chance.random() < 0.3)
    if chance.random() < 0.1:
        text = text[:-1] + f',"{talk.key}":[{json.dumps(talk.messages[1])}]}}'
    if chance.random() < 0.1:
        text = text[: chance.randrange(len(text))]
    return text.encode()


def repeats_of(chance: random.Random, body: bytes, known: list[History]) -> Repeats | None:
    """Return what the body repeats, as it is found while the body arrives in pieces."""
    arriving = Arriving([one.body for one in known])
    at = 0
    while at < len(body):
        step = chance.randrange(1, len(body) + 1)
        arriving.add(body[at : at + step])
        at += step
    whole, repeats = arriving.body()
    assert whole == body
    if repeats is not None:
        assert repeats.earlier[: repeats.length] == body[: repeats.length]
    return repeats


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dialect", TALKS)
def test_a_body_that_goes_on_is_read_as_a_whole_one(
    dialect: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, talk, read = random.Random(seed), TALKS[dialect], DIALECTS.get(dialect)
    parse_on, parse, decode = read.parse_on, read.parse, bodies.decode
    assert parse_on is not None
    decoded: list[bytes] = []
    monkeypatch.setattr(bodies, "decode", lambda body: decoded.append(body) or decode(body))
    read_on = 0
    for _ in range(60):
        messages: list[Any] = []
        known: list[History] = []
        for _ in range(12):
            messages = messages[: chance.randrange(max(0, len(messages) - 2), len(messages) + 1)]
            messages = messages + chance.choices(talk.messages, k=chance.randrange(4))
            if chance.random() < 0.1:
                messages = [*messages, chance.choice(ODD)]
            body = written(chance, talk, messages)
            decoded.clear()
            found = outcome(
                lambda body=body, known=known: parse_on(
                    body, PATH, {}, Known(known, repeats_of(chance, body, known))
                )
            )
            read_on += len(decoded) == 1 and decoded[0] != body
            if not isinstance(found[0], Request):
                assert found == outcome(lambda body=body: parse(body, PATH, {}))
                messages = messages[:-1]
                continue
            request, history, repeats = found
            assert same(request, parse(body, PATH, {}))
            if repeats is not None:
                assert repeats[0][: repeats[1]] == body[: repeats[1]]
            if history is not None:
                parts = pairwise((history.start, *history.ends))
                elements = [json.loads(body[start:end].strip(b", ")) for start, end in parts]
                assert elements == json.loads(body)[talk.key]
                known = [history, *known][: chance.randrange(1, 4)]
    assert read_on > 20


@pytest.mark.parametrize("dialect", TALKS)
def test_only_what_is_new_is_read(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    talk, read = TALKS[dialect], DIALECTS.get(dialect)
    assert read.parse_on is not None
    said = json.dumps(talk.messages[1])
    messages = [said.replace("It", f"({number})") for number in range(50)]
    frame = json.dumps(talk.frame)[:-1]
    bodies_ = [f'{frame}, "{talk.key}": [{", ".join(messages[:n])}]}}'.encode() for n in (40, 50)]
    first, history, _ = read.parse_on(bodies_[0], PATH, {}, Known())
    assert history is not None
    decode = bodies.decode
    seen: list[bytes] = []
    monkeypatch.setattr(bodies, "decode", lambda body: seen.append(body) or decode(body))
    request, _, repeats = read.parse_on(bodies_[1], PATH, {}, Known([history]))
    assert all(a is b for a, b in zip(request.messages, first.messages, strict=False))
    assert len(request.messages) == 50
    assert request.messages == read.parse(bodies_[1], PATH, {}).messages
    assert len(seen) == 1
    assert b"(39)" not in seen[0]
    assert repeats == (bodies_[0], len(bodies_[0]) - 2)


def test_a_rewritten_end_is_read_again() -> None:
    """Clients move their cache marks, and so send the last messages in another form."""
    talk, read = TALKS["messages"], DIALECTS.get("messages")
    assert read.parse_on is not None
    messages = [dict(talk.messages[1], content=f"{number}") for number in range(40)]
    first, history, _ = read.parse_on(
        json.dumps({**talk.frame, "messages": messages}).encode(), PATH, {}, Known()
    )
    assert history is not None
    messages[-2:] = [{"role": "user", "content": [{"type": "text", "text": "38"}]}] * 3
    body = json.dumps({**talk.frame, "messages": messages}).encode()
    request, history, _ = read.parse_on(body, PATH, {}, Known([history]))
    assert history is not None
    assert request.messages == read.parse(body, PATH, {}).messages
    assert request.messages[20] is first.messages[20]


def test_a_client_that_writes_a_mark_gets_its_own_message(monkeypatch: pytest.MonkeyPatch) -> None:
    read_on = DIALECTS.get("chat").parse_on
    assert read_on is not None
    body = b'{"model":"m","messages":[{"role":"user","content":"a","cut":"x"}]}'
    _, history, _ = read_on(body, {}, {}, Known())
    assert history is not None
    more = body.replace(b'"}]', b'"},{"role":"user","content":"b"}]')
    decode = bodies.decode
    seen: list[bytes] = []
    monkeypatch.setattr(bodies, "decode", lambda body: seen.append(body) or decode(body))
    request, *_ = read_on(more, {}, {}, Known([history]))
    assert len(seen) == 1
    assert seen[0] != more
    assert [message.content for message in request.messages] == ["a", "b"]
