"""Other words in the bodies of providers: what changes, and what keeps its bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bridle.proxy.dialects.registry import DIALECTS
from bridle.proxy.dialects.wording import ReplyWords, Wording
from bridle.proxy.replay.aliases import Aliases
from bridle.proxy.replay.grafted_body import GraftedBodies
from bridle.proxy.wire.sse import SseParser


def wording_of(dialect: str) -> Wording:
    native = DIALECTS.get(dialect).native
    assert native is not None
    return native.wording


def renamed(text: str) -> str:
    return text.replace("8001", "9081")


def block(index: int, piece: str) -> dict[str, Any]:
    delta = {"type": "input_json_delta", "partial_json": piece}
    return {"type": "content_block_delta", "index": index, "delta": delta}


def written(*events: Any) -> bytes:
    return b"".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events)


def test_arguments_are_renamed_where_a_piece_cuts_the_name() -> None:
    """Every event stays, in its order; the last piece of a call has all of its arguments."""
    ping, stop = {"type": "ping"}, {"type": "content_block_stop", "index": 0}
    events = [block(0, '{"id": 8'), ping, block(0, "00"), block(0, "1}"), stop, block(1, "8001")]
    words = ReplyWords(wording_of("messages"), renamed)
    body = b"".join(words.events(written(one)) for one in events) + words.end()
    read = [json.loads(one) for one in SseParser().feed(body)]
    assert len(read) == len(events)
    pieces = {0: "", 1: ""}
    for event in read:
        if "delta" in event:
            pieces[event["index"]] += event["delta"]["partial_json"]
    assert pieces == {0: '{"id": 9081}', 1: "9081"}
    assert read.index(stop) == 4


@pytest.mark.parametrize(
    "body",
    [
        b'{ "content": [{"type":"text","text":"8001"}], "big": 1e400, "n": 1.0 }',
        b"no JSON 8001",
        b"data: [DONE]\n\n",
        b': 8001\n\ndata: not JSON\n\nevent: x\ndata:  {"type": "x", "b":1.0}\r\n\r\n',
    ],
)
def test_bytes_without_arguments_stay_as_they_are(body: bytes) -> None:
    assert ReplyWords(wording_of("messages"), renamed).recorded(body) == body


@pytest.mark.parametrize(
    ("dialect", "call"),
    [
        ("messages", {"type": "tool_use", "id": "toolu_8001", "input": {"id": 8001}}),
        ("responses", {"call_id": "c8001", "arguments": '{"id": 8001}', "name": "8001"}),
        ("responses", {"item_id": "c8001", "arguments": '{"id": 8001}'}),
        ("responses", {"call_id": "c8001", "input": "kill 8001"}),
        ("google", {"functionCall": {"name": "f8001", "args": {"id": 8001}}}),
    ],
)
def test_nothing_but_the_arguments_of_a_call_is_renamed(dialect: str, call: Any) -> None:
    body = json.dumps([{"signature": "8001", "call": call}]).encode()
    made = ReplyWords(wording_of(dialect), renamed).whole(body).decode()
    assert made.count("9081") == 1
    assert made.count("8001") == body.decode().count("8001") - 1


def test_a_message_is_recognised_when_its_cache_mark_moves() -> None:
    """Claude Code marks the last message, and writes a marked text as a block."""
    wording, graft = wording_of("messages"), GraftedBodies()

    def body(*messages: Any, day: str) -> bytes:
        system = [{"type": "text", "text": f"Today is {day}.", "cache_control": {"type": "e"}}]
        return json.dumps({"system": system, "messages": messages, "max_tokens": 9}).encode()

    def said(text: str, **mark: Any) -> Any:
        return {"role": "user", "content": [{"type": "text", "text": text, **mark}]}

    mark: Any = {"cache_control": {"type": "ephemeral"}}
    graft.learn(body(said("on Tue", **mark), day="Tue"), body(said("on Mon"), day="Mon"), wording)
    plain = {"role": "user", "content": "on Tue"}
    later = graft.body(body(plain, said("on Tue, too", **mark), day="Tue"), Aliases(), wording)
    assert later is not None
    wanted = body({"role": "user", "content": "on Mon"}, said("on Tue, too", **mark), day="Mon")
    assert json.loads(later) == json.loads(wanted)
    assert graft.body(wanted, Aliases(), wording) is None


def test_elements_in_another_number_are_replaced_as_a_whole() -> None:
    wording, graft = wording_of("messages"), GraftedBodies()
    one, two = {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
    graft.learn(b'{"system": [%b]}' % json.dumps(one).encode(), _system(one, two), wording)
    assert json.loads(graft.body(_system(one), Aliases(), wording) or b"") == {"system": [one, two]}


def test_an_element_of_another_shape_is_replaced_by_the_recorded_one() -> None:
    wording, graft = wording_of("messages"), GraftedBodies()
    one, two = {"type": "text", "text": "a"}, {"type": "text", "text": "b", "more": "c"}
    graft.learn(_system(one), _system(two), wording)
    assert json.loads(graft.body(_system(one), Aliases(), wording) or b"") == {"system": [two]}


def _system(*blocks: Any) -> bytes:
    return json.dumps({"system": blocks}).encode()
