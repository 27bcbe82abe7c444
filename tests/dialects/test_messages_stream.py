"""Messages replies, read back by Anthropic's own client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import orjson
import pytest

from bridle.proxy.dialects.messages.reply import count
from bridle.proxy.dialects.messages.request import parse_count
from bridle.proxy.dialects.registry import MESSAGES
from bridle.proxy.wire.canonical import (
    Finished,
    Request,
    Started,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from support.providers import typed_events as events_of

DIALECT = MESSAGES
HI: list[Any] = [{"role": "user", "content": "hi"}]


def request() -> Request:
    body = {"model": "m", "max_tokens": 9, "messages": HI, "stream": True}
    return DIALECT.parse(orjson.dumps(body), {}, {})


@pytest.fixture
def client(server: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(api_key="k", base_url=server.url, max_retries=0)


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


def test_a_count_is_read_by_the_client(client: anthropic.Anthropic, server: Any) -> None:
    server.answer(count(42))

    assert client.messages.count_tokens(model="m", messages=HI).input_tokens == 42
    assert parse_count(server.received[0][1], {}, {}).messages[0].content == "hi"
