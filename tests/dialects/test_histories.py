"""A body that goes on from an earlier one is read as if it were read whole."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from msgspec import structs

from bridle.proxy.dialects.chat import request as chat
from bridle.proxy.dialects.chat.request import parse, parse_on
from bridle.proxy.wire import histories
from bridle.proxy.wire.canonical import ApiError, Request
from bridle.proxy.wire.histories import History

MESSAGES: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": 'It says "messages":[1] and \\"messages\\":[2], é ☕ \U0001f600'},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "x": {}}]},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}]},
    {"role": "tool", "tool_call_id": "c", "content": "r"},
    {"role": "assistant", "content": "b", "reasoning_details": [{}]},
]  # fmt: skip
ODD: list[Any] = [
    {"role": "nobody"},
    {"role": "user", "content": 7},
    {"role": "user", "content": [{"type": "text"}]},
    3,
    [],
]
FRAMES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"model": "m"}, {"stream": True}),
    ({}, {"model": "m", "temperature": 0.5, "unheard": 1}),
    ({"model": "m", "tools": [{"type": "function", "function": {
        "name": "f", "default": {"messages": MESSAGES}}}]}, {}),
    ({"model": "m"}, {"metadata": {"messages": MESSAGES}}),
    ({"model": "m"}, {"top_logprobs": 3}),
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
    """Whether two outcomes are equal; notes may have another order."""
    if isinstance(one, Request) and isinstance(other, Request):
        alike = set(one.notes) == set(other.notes)
        return alike and structs.replace(one, notes=()) == structs.replace(other, notes=())
    return bool(one == other)


def written(chance: random.Random, messages: list[Any]) -> bytes:
    before, after = chance.choice(FRAMES)
    separators = chance.choice([(",", ":"), (", ", ": ")])
    body = {**before, "messages": messages, **after}
    text = json.dumps(body, separators=separators, ensure_ascii=chance.random() < 0.3)
    if chance.random() < 0.1:
        text = text[:-1] + ',"messages":[{"role":"user","content":"twice"}]}'
    if chance.random() < 0.1:
        text = text[: chance.randrange(len(text))]
    return text.encode()


@pytest.mark.parametrize("seed", range(3))
def test_a_body_that_goes_on_is_read_as_a_whole_one(seed: int) -> None:
    chance = random.Random(seed)
    read_on = 0
    for _ in range(60):
        messages: list[Any] = []
        known: list[History] = []
        for _ in range(12):
            messages = messages[: chance.randrange(max(0, len(messages) - 2), len(messages) + 1)]
            messages = messages + chance.choices(MESSAGES, k=chance.randrange(4))
            if chance.random() < 0.1:
                messages = [*messages, chance.choice(ODD)]
            body = written(chance, messages)
            found = outcome(lambda body=body, known=known: parse_on(body, known))
            if not isinstance(found[0], Request):
                assert found == outcome(lambda body=body: parse(body, {}, {}))
                messages = messages[:-1]
                continue
            request, history = found
            assert same(request, parse(body, {}, {}))
            if history is not None:
                shared = [one for one in known if one.messages and request.messages]
                read_on += any(one.messages[0] is request.messages[0] for one in shared)
                parts = pairwise((history.start, *history.ends))
                elements = [json.loads(body[start:end].strip(b", ")) for start, end in parts]
                assert elements == json.loads(body)["messages"]
                known = [history, *known][: chance.randrange(1, 4)]
    assert read_on > 20


def test_only_what_is_new_is_read() -> None:
    messages = [{"role": "user", "content": f"{number}"} for number in range(50)]
    body = json.dumps({"model": "m", "messages": messages[:40]}).encode()
    _, history = parse_on(body, [])
    assert history is not None
    request, _ = parse_on(json.dumps({"model": "m", "messages": messages}).encode(), [history])
    assert all(a is b for a, b in zip(request.messages, history.messages, strict=False))
    assert [message.content for message in request.messages] == [str(n) for n in range(50)]


def test_a_client_that_writes_a_mark_gets_its_own_message(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"a","cut":"x"}]}'
    _, history = parse_on(body, [])
    assert history is not None
    more = body.replace(b'"}]', b'"},{"role":"user","content":"b"}]')
    decode = chat.decode
    seen: list[bytes] = []
    monkeypatch.setattr(chat, "decode", lambda body: seen.append(body) or decode(body))
    request, _ = parse_on(more, [history])
    assert len(seen) == 1
    assert seen[0] != more
    assert [message.content for message in request.messages] == ["a", "b"]
