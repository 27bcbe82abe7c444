"""Messages replies, read back by Anthropic's own client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import orjson
import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from bridle.proxy.dialects.messages.reply import count
from bridle.proxy.dialects.messages.request import parse_count
from bridle.proxy.dialects.registry import MESSAGES
from bridle.proxy.wire.canonical import (
    ApiError,
    Event,
    Finished,
    ReasoningDelta,
    Request,
    Started,
    TextDelta,
    ToolCallDelta,
    Usage,
)

DIALECT = MESSAGES
HI: list[Any] = [{"role": "user", "content": "hi"}]


def request() -> Request:
    body = {"model": "m", "max_tokens": 9, "messages": HI, "stream": True}
    return DIALECT.parse(orjson.dumps(body), {}, {})


def reply_events(call_id: str) -> list[Event]:
    return [
        Started(11),
        ReasoningDelta("hm "),
        ReasoningDelta("ok"),
        TextDelta("Hel"),
        TextDelta("lo"),
        ToolCallDelta(0, f"{call_id}00", "look", '{"a"'),
        ToolCallDelta(0, arguments=": 1}"),
        ToolCallDelta(1, f"{call_id}01", "bare"),
        Finished("tool_calls"),
        Usage(11, 7, 3, 2),
    ]


def events_of(stream: bytes) -> list[dict[str, Any]]:
    events = []
    for block in stream.split(b"\n\n")[:-1]:
        name, data = block.split(b"\n", 1)
        event = orjson.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        events.append(event)
    return events


@pytest.fixture
def client(server: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(api_key="k", base_url=server.url, max_retries=0)


def test_events_come_in_the_providers_order(streamed: Callable[..., bytes], call_id: str) -> None:
    events = events_of(streamed(DIALECT, request(), reply_events(call_id)))

    shown = [
        (event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events
    ]
    assert shown == [
        ("message_start", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("content_block_start", 3, None),
        ("content_block_stop", 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]


def test_every_event_has_all_that_the_sdk_types_demand(
    streamed: Callable[..., bytes], call_id: str
) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    for event in events_of(streamed(DIALECT, request(), reply_events(call_id))):
        adapter.validate_python(event)


def test_the_client_gathers_the_whole_message(
    client: anthropic.Anthropic, server: Any, streamed: Callable[..., bytes], call_id: str
) -> None:
    server.answer(streamed(DIALECT, request(), reply_events(call_id)), "text/event-stream")

    with client.messages.stream(model="m", max_tokens=9, messages=HI) as stream:
        message = stream.get_final_message()

    thinking, text, look, bare = message.content
    assert thinking.type == "thinking"
    assert (thinking.thinking, thinking.signature) == ("hm ok", f"bridle.{call_id[5:]}00")
    assert text.type == "text"
    assert text.text == "Hello"
    assert look.type == "tool_use"
    assert (look.id, look.name, look.input) == (f"{call_id}00", "look", {"a": 1})
    assert bare.type == "tool_use"
    assert bare.input == {}
    assert message.stop_reason == "tool_use"
    assert (message.usage.input_tokens, message.usage.output_tokens) == (11, 7)
    assert message.usage.cache_read_input_tokens == 0


def test_a_plain_reply_is_read_by_the_client(
    client: anthropic.Anthropic, server: Any, mint: Any, fold: Any, call_id: str
) -> None:
    reply = fold(reply_events(call_id))
    server.answer(DIALECT.reply(request(), mint(DIALECT, request()), reply))

    message = client.messages.create(model="m", max_tokens=9, messages=HI)

    assert [block.type for block in message.content] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
    ]
    assert message.usage.input_tokens == 11


@pytest.mark.parametrize(
    ("finished", "called", "expected"),
    [
        (Finished("stop"), False, ("end_turn", None)),
        (Finished("stop", stop_sequence="END"), False, ("stop_sequence", "END")),
        (Finished("length"), True, ("max_tokens", None)),
        (Finished("tool_calls"), True, ("tool_use", None)),
        (Finished("stop"), True, ("tool_use", None)),
        (Finished("content_filter"), False, ("refusal", None)),
    ],
)
def test_the_stop_reason_is_in_the_providers_words(
    streamed: Callable[..., bytes],
    mint: Any,
    fold: Any,
    call_id: str,
    finished: Finished,
    called: bool,
    expected: tuple[str, str | None],
) -> None:
    call = [ToolCallDelta(0, f"{call_id}00", "look", "{}")] if called else [TextDelta("a")]
    events = [Started(1), *call, finished, Usage(1, 1)]

    delta = events_of(streamed(DIALECT, request(), events))[-2]["delta"]
    plain = orjson.loads(DIALECT.reply(request(), mint(DIALECT, request()), fold(events)))

    assert (delta["stop_reason"], delta["stop_sequence"]) == expected
    assert (plain["stop_reason"], plain["stop_sequence"]) == expected


def test_the_start_waits_for_the_prompts_length(mint: Any) -> None:
    emitter = DIALECT.emitter(request(), mint(DIALECT, request()))

    assert emitter.begin() == b""
    (start,) = events_of(emitter.event(Started(123)))
    assert start["message"]["usage"]["input_tokens"] == 123


def test_a_late_count_is_told_with_the_end(
    client: anthropic.Anthropic, server: Any, streamed: Callable[..., bytes]
) -> None:
    events = [Started(None), TextDelta("a"), Finished("stop"), Usage(123, 1)]
    server.answer(streamed(DIALECT, request(), events), "text/event-stream")

    with client.messages.stream(model="m", max_tokens=9, messages=HI) as stream:
        assert stream.get_final_message().usage.input_tokens == 123


def test_keep_alives_change_nothing_for_the_client(
    client: anthropic.Anthropic, server: Any, mint: Any, call_id: str
) -> None:
    emitter = DIALECT.emitter(request(), mint(DIALECT, request()))
    stream = [emitter.begin(), emitter.keep_alive()]
    for event in reply_events(call_id):
        stream += [emitter.event(event), emitter.keep_alive()]
    stream.append(emitter.end())
    server.answer(b"".join(stream), "text/event-stream")

    with client.messages.stream(model="m", max_tokens=9, messages=HI) as read:
        assert len(read.get_final_message().content) == 4


def test_a_reply_without_content_is_still_a_message(
    client: anthropic.Anthropic, server: Any, streamed: Callable[..., bytes]
) -> None:
    server.answer(streamed(DIALECT, request(), []), "text/event-stream")

    with client.messages.stream(model="m", max_tokens=9, messages=HI) as stream:
        assert stream.get_final_message().content == []


@pytest.mark.parametrize(
    ("texts", "called", "shown"),
    [
        (["\n", "\n"], True, None),
        (["\n\n", "Hi"], True, "\n\nHi"),
        (["\n\n"], False, "\n\n"),
    ],
)
def test_blank_text_is_shown_only_with_other_text_or_alone(
    streamed: Callable[..., bytes],
    mint: Any,
    fold: Any,
    call_id: str,
    texts: list[str],
    called: bool,
    shown: str | None,
) -> None:
    call = [ToolCallDelta(0, f"{call_id}00", "look", "{}")] if called else []
    said = [Started(1), *map(TextDelta, texts), *call, Finished("stop"), Usage(1, 1)]
    events = events_of(streamed(DIALECT, request(), said))
    plain = orjson.loads(DIALECT.reply(request(), mint(DIALECT, request()), fold(said)))

    deltas = [event["delta"].get("text") for event in events if "delta" in event]
    assert "".join(text for text in deltas if text) == (shown or "")
    texts_shown = [block["text"] for block in plain["content"] if block["type"] == "text"]
    assert texts_shown == ([shown] if shown else [])


def test_nothing_that_completes_the_last_block_comes_before_the_end(
    mint: Any, call_id: str
) -> None:
    emitter = DIALECT.emitter(request(), mint(DIALECT, request()))
    before = b"".join(emitter.event(event) for event in reply_events(call_id))

    assert events_of(before)[-1]["type"] == "content_block_start"
    assert [event["type"] for event in events_of(emitter.end())] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_a_failure_inside_the_stream_is_raised_by_the_client(
    client: anthropic.Anthropic, server: Any, mint: Any
) -> None:
    emitter = DIALECT.emitter(request(), mint(DIALECT, request()))
    stream = emitter.event(Started(1)) + emitter.event(TextDelta("a"))
    stream += emitter.fail(ApiError("overloaded", "no engine", status=503))
    server.answer(stream, "text/event-stream")

    with (
        pytest.raises(anthropic.APIStatusError, match="no engine"),
        client.messages.stream(model="m", max_tokens=9, messages=HI) as read,
    ):
        read.get_final_message()


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "3", "no", "[" * 2000])
def test_arguments_that_are_no_object_survive_the_round_trip(
    mint: Any, fold: Any, call_id: str, arguments: str
) -> None:
    events = [ToolCallDelta(0, f"{call_id}00", "look", arguments), Finished("tool_calls")]
    plain = orjson.loads(DIALECT.reply(request(), mint(DIALECT, request()), fold(events)))
    messages = [*HI, {"role": "assistant", "content": plain["content"]}]
    body = {"model": "m", "max_tokens": 9, "messages": messages}

    echoed = DIALECT.parse(orjson.dumps(body), {}, {}).messages[1]

    assert echoed.tool_calls[0].arguments == arguments


@pytest.mark.parametrize("arguments", ['{"run": "rm "a""}', '{"run": x}', '{"run": "r', "no", " "])
def test_a_stream_never_shows_a_part_of_broken_arguments_as_all_of_them(
    client: anthropic.Anthropic,
    server: Any,
    mint: Any,
    fold: Any,
    streamed: Callable[..., bytes],
    call_id: str,
    arguments: str,
) -> None:
    pieces = [ToolCallDelta(0, arguments=letter) for letter in arguments]
    events = [ToolCallDelta(0, f"{call_id}00", "run"), *pieces, Finished("tool_calls")]
    plain = orjson.loads(DIALECT.reply(request(), mint(DIALECT, request()), fold(events)))
    server.answer(streamed(DIALECT, request(), events), "text/event-stream")

    with client.messages.stream(model="m", max_tokens=9, messages=HI) as stream:
        (read,) = stream.get_final_message().content

    (whole,) = plain["content"]
    assert read.type == "tool_use"
    assert read.input == whole["input"]


def test_a_tool_call_in_scattered_pieces_is_the_engines_failure(mint: Any, call_id: str) -> None:
    emitter = DIALECT.emitter(request(), mint(DIALECT, request()))
    emitter.event(ToolCallDelta(0, f"{call_id}00", "look", "{"))
    emitter.event(TextDelta("a"))

    with pytest.raises(ApiError) as caught:
        emitter.event(ToolCallDelta(0, arguments="}"))
    assert caught.value.kind == "upstream_error"


def test_a_count_is_read_by_the_client(client: anthropic.Anthropic, server: Any) -> None:
    server.answer(count(42))

    assert client.messages.count_tokens(model="m", messages=HI).input_tokens == 42
    assert parse_count(server.received[0][1], {}, {}).messages[0].content == "hi"
