"""Test that a stream says the same as a plain reply, and that an echo keeps what was said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from bridle.proxy.dialects.registry import GOOGLE, MESSAGES, RESPONSES
from bridle.proxy.wire import minting
from bridle.proxy.wire.canonical import Message, Reply, Request

RUN = {"type": "custom", "name": "run"}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
HI = [{"role": "user", "content": "hi"}]
HI_GOOGLE = [{"role": "user", "parts": [{"text": "hi"}]}]
PATH = {"model": "m", "method": "streamGenerateContent"}


def responses(input: Any = "hi", **fields: Any) -> Request:
    body = {"model": "m", "input": input, "tools": [LOOK, RUN], "stream": True, **fields}
    return RESPONSES.parse(orjson.dumps(body), {}, {})


def messages(conversation: Any = HI) -> Request:
    body = {"model": "m", "max_tokens": 9, "messages": conversation}
    return MESSAGES.parse(orjson.dumps(body), {}, {})


def google(contents: Any = HI_GOOGLE) -> Request:
    config = {"thinkingConfig": {"includeThoughts": True}}
    body = {"contents": contents, "generationConfig": config}
    return GOOGLE.parse(orjson.dumps(body), PATH, {"alt": "sse"})


def events_of(stream: bytes) -> list[Any]:
    blocks = stream.split(b"\n\n")[:-1]
    return [orjson.loads(block.split(b"data: ", 1)[1]) for block in blocks]


def says(message: Message, reply: Reply, *, blank: bool = False) -> None:
    """``message`` says what ``reply`` said; blank text beside calls only where ``blank``."""
    choice = reply.choices[0]
    dropped = choice.tool_calls and choice.text.isspace()
    assert (message.content or "") == ("" if dropped and not blank else choice.text)
    assert (message.reasoning or "") == choice.reasoning
    assert [(call.id, call.name) for call in message.tool_calls] == [
        (call.id, call.name) for call in choice.tool_calls
    ]
    for echoed, said in zip(message.tool_calls, choice.tool_calls, strict=True):
        assert orjson.loads(echoed.arguments) == orjson.loads(said.arguments)


def names(message: Message, call_id: str) -> None:
    values = [*message.anchors, *(call.id for call in message.tool_calls)]
    assert minting.call_ids(values) == (call_id,)


@given(st.data())
def test_responses(
    turns: Any, streamed: Callable[..., bytes], mint: Any, fold: Any, call_id: str, data: Any
) -> None:
    events = data.draw(turns)
    extras: dict[str, Any] = data.draw(
        st.sampled_from(
            [{}, {"reasoning": {"summary": "auto"}}, {"include": ["reasoning.encrypted_content"]}]
        )
    )
    asked, reply = responses(**extras), fold(events)

    plain = orjson.loads(RESPONSES.reply(asked, mint(RESPONSES, asked), reply))
    stream = events_of(streamed(RESPONSES, asked, events))

    assert stream[-1]["response"] == plain
    done = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
    assert done == plain["output"]
    if plain["output"]:
        (message,) = responses(plain["output"]).messages
        says(message, reply)
        names(message, call_id)


@given(st.data())
def test_messages(
    turns: Any, streamed: Callable[..., bytes], mint: Any, fold: Any, call_id: str, data: Any
) -> None:
    events = data.draw(turns)
    asked, reply = messages(), fold(events)

    plain = orjson.loads(MESSAGES.reply(asked, mint(MESSAGES, asked), reply))
    gathered = gather_message(events_of(streamed(MESSAGES, asked, events)))

    assert gathered == plain
    if plain["content"]:
        conversation = [*HI, {"role": "assistant", "content": plain["content"]}, *HI]
        message = messages(conversation).messages[1]
        says(message, reply)
        if message.reasoning or message.tool_calls:
            names(message, call_id)


@given(st.data())
def test_google(
    turns: Any, streamed: Callable[..., bytes], mint: Any, fold: Any, call_id: str, data: Any
) -> None:
    events = data.draw(turns)
    asked, reply = google(), fold(events)

    plain = orjson.loads(GOOGLE.reply(asked, mint(GOOGLE, asked), reply))
    chunks = events_of(streamed(GOOGLE, asked, events))
    streamed_parts = [part for chunk in chunks for part in parts_of(chunk)]

    assert joined(streamed_parts) == joined(parts_of(plain))
    assert chunks[-1]["candidates"][0]["finishReason"] == plain["candidates"][0]["finishReason"]
    assert chunks[-1]["usageMetadata"] == plain["usageMetadata"]
    for parts in (streamed_parts, parts_of(plain)):
        contents = [*HI_GOOGLE, {"role": "model", "parts": parts}]
        message = google(contents).messages[1]
        says(message, reply, blank=True)
        if reply.choices[0].text or reply.choices[0].tool_calls:
            names(message, call_id)


def gather_message(events: list[Any]) -> Any:
    """The message that a client puts together from a stream, by the API's rules."""
    message = events[0]["message"]
    pieces: dict[int, str] = {}
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    held = pieces.get(event["index"], "")
                    pieces[event["index"]] = held + delta["partial_json"]
                else:
                    add_delta(message["content"][event["index"]], delta)
            case "content_block_stop":
                if (held := pieces.get(event["index"])) is not None:
                    message["content"][event["index"]]["input"] = orjson.loads(held)
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    assert events[-1] == {"type": "message_stop"}
    return message


def add_delta(block: Any, delta: Any) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]


def parts_of(response: Any) -> list[Any]:
    return [part for candidate in response["candidates"] for part in candidate["content"]["parts"]]


def joined(parts: list[Any]) -> list[Any]:
    """Parts with neighbouring texts of one sort run together."""
    whole: list[Any] = []
    for part in parts:
        if part == {"text": ""}:
            continue
        last = whole[-1] if whole else {}
        if "text" in part and "text" in last and part.get("thought") == last.get("thought"):
            last["text"] += part["text"]
        else:
            whole.append(dict(part))
    return whole
