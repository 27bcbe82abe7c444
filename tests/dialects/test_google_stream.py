"""Gemini replies, read back by Google's own client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from google import genai
from google.genai import types

from bridle.proxy.dialects.google.reply import count
from bridle.proxy.dialects.registry import GOOGLE
from bridle.proxy.wire import minting
from bridle.proxy.wire.canonical import (
    ApiError,
    Event,
    Finished,
    ReasoningDelta,
    Request,
    Started,
    TextDelta,
    Tokens,
    ToolCallDelta,
    Usage,
)

DIALECT = GOOGLE
HI = [{"role": "user", "parts": [{"text": "hi"}]}]
THOUGHTS = {"thinkingConfig": {"includeThoughts": True}}


def request(method: str = "streamGenerateContent", alt: str = "sse", **config: Any) -> Request:
    body = orjson.dumps({"contents": HI, "generationConfig": config})
    return DIALECT.parse(body, {"model": "m", "method": method}, {"alt": alt})


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


def chunks_of(stream: bytes) -> list[dict[str, Any]]:
    return [orjson.loads(block.removeprefix(b"data: ")) for block in stream.split(b"\n\n")[:-1]]


@pytest.fixture
def client(server: Any) -> genai.Client:
    options = types.HttpOptions(
        base_url=server.url, retry_options=types.HttpRetryOptions(attempts=1)
    )
    return genai.Client(api_key="k", http_options=options)


def test_what_the_client_echoes_from_a_chat_names_its_call(
    client: genai.Client, server: Any, mint: Any, fold: Any, call_id: str
) -> None:
    asked = request("generateContent")
    server.answer(DIALECT.reply(asked, mint(DIALECT, asked), fold(reply_events(call_id))))
    chat = client.chats.create(model="m")
    chat.send_message("hi")
    chat.send_message("more")

    path, body = server.received[1]
    assert path.endswith("/models/m:generateContent")
    echoed = DIALECT.parse(body, {"model": "m"}, {}).messages[1]
    assert minting.call_ids(echoed.anchors) == (call_id,)
    assert [call.id for call in echoed.tool_calls] == [f"{call_id}00", f"{call_id}01"]


def test_a_streamed_reply_comes_back_from_a_chat_as_one_turn(
    client: genai.Client, server: Any, streamed: Callable[..., bytes], call_id: str
) -> None:
    server.answer(
        streamed(DIALECT, request(**THOUGHTS), reply_events(call_id)), "text/event-stream"
    )
    chat = client.chats.create(model="m")
    list(chat.send_message_stream("hi"))
    list(chat.send_message_stream("more"))

    _, echoed, _ = DIALECT.parse(server.received[1][1], {"model": "m"}, {}).messages
    assert (echoed.reasoning, echoed.content) == ("hm ok", "Hello")
    assert [call.id for call in echoed.tool_calls] == [f"{call_id}00", f"{call_id}01"]


def test_what_the_client_sends_is_understood(client: genai.Client, server: Any) -> None:
    def look(place: str) -> str:
        """Looks at a place."""
        return place

    server.answer(b'{"candidates": []}')
    config = types.GenerateContentConfig(
        system_instruction="Be brief.",
        tools=[look],
        tool_config=types.ToolConfig(
            function_calling_config=types.FunctionCallingConfig(
                mode=types.FunctionCallingConfigMode.ANY
            )
        ),
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        max_output_tokens=7,
        response_mime_type="application/json",
        response_schema={"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}},
        thinking_config=types.ThinkingConfig(include_thoughts=True, thinking_budget=0),
    )
    image = types.Part.from_bytes(data=b"\xff\xef\xff", mime_type="image/png")
    client.models.generate_content(model="m", contents=["hi", image], config=config)

    parsed = DIALECT.parse(server.received[0][1], {"model": "m"}, {})
    assert parsed.messages[0].content == "Be brief."
    assert isinstance(parsed.messages[1].content, list)
    assert parsed.messages[1].content[1]["image_url"]["url"] == "data:image/png;base64,/+//"
    function = parsed.tools[0]["function"]
    assert function["name"] == "look"
    assert function["parameters"]["properties"]["place"]["type"] == "string"
    assert parsed.tool_choice == "required"
    assert parsed.sampling.max_tokens == 7
    assert parsed.response_format is not None
    schema = parsed.response_format["json_schema"]["schema"]
    assert schema["properties"]["a"]["type"] == "integer"
    assert parsed.template_kwargs == {"enable_thinking": False}


def test_thoughts_are_shown_only_to_those_who_ask(
    streamed: Callable[..., bytes], mint: Any, fold: Any, call_id: str
) -> None:
    shown = streamed(DIALECT, request(), reply_events(call_id))
    plain = DIALECT.reply(request(), mint(DIALECT, request()), fold(reply_events(call_id)))

    assert b'"thought":' not in shown
    assert b'"thought":' not in plain


def test_without_sse_the_stream_is_one_json_array(mint: Any, call_id: str) -> None:
    asked = request(alt="json")
    emitter = DIALECT.emitter(asked, mint(DIALECT, asked))
    stream = [emitter.begin(), emitter.keep_alive()]
    for event in reply_events(call_id):
        stream += [emitter.event(event), emitter.keep_alive()]
    stream.append(emitter.end())

    assert emitter.content_type.startswith("application/json")
    assert len(orjson.loads(b"".join(stream))) == 4


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("ended", [False, True])
def test_a_failure_closes_the_array(mint: Any, begun: bool, ended: bool) -> None:
    asked = request(alt="json")
    emitter = DIALECT.emitter(asked, mint(DIALECT, asked))
    stream = emitter.begin() + (emitter.event(TextDelta("a")) if begun else b"")
    if ended:
        emitter.end()
    stream += emitter.fail(ApiError("overloaded", "no engine", status=503))

    assert orjson.loads(stream)[-1]["error"]["status"] == "UNAVAILABLE"


def test_keep_alives_change_nothing_for_the_client(
    client: genai.Client, server: Any, mint: Any, call_id: str
) -> None:
    emitter = DIALECT.emitter(request(), mint(DIALECT, request()))
    stream = [emitter.begin(), emitter.keep_alive()]
    for event in reply_events(call_id):
        stream += [emitter.event(event), emitter.keep_alive()]
    stream.append(emitter.end())
    server.answer(b"".join(stream), "text/event-stream")

    chat = client.chats.create(model="m")
    chunks = [*chat.send_message_stream("hi")]
    list(chat.send_message_stream("more"))

    texts = [part.text for chunk in chunks for part in chunk.parts or [] if part.text]
    assert "".join(texts) == "Hello"
    first, echoed, _ = DIALECT.parse(server.received[1][1], {"model": "m"}, {}).messages
    assert (first.content, echoed.content) == ("hi", "Hello")
    assert [call.id for call in echoed.tool_calls] == [f"{call_id}00", f"{call_id}01"]


def test_candidates_are_told_apart(streamed: Callable[..., bytes], mint: Any, fold: Any) -> None:
    events: list[Event] = [
        TextDelta("a", choice=0),
        TextDelta("b", choice=1),
        Finished("stop", choice=0),
        Finished("length", choice=1),
    ]
    asked = request(candidateCount=2)
    chunks = chunks_of(streamed(DIALECT, asked, events))
    plain = orjson.loads(DIALECT.reply(asked, mint(DIALECT, asked), fold(events)))

    assert [c["candidates"][0]["index"] for c in chunks[:2]] == [0, 1]
    assert [c["finishReason"] for c in chunks[-1]["candidates"]] == ["STOP", "MAX_TOKENS"]
    assert [c["finishReason"] for c in plain["candidates"]] == ["STOP", "MAX_TOKENS"]


def test_logprobs_are_given_when_asked_for(
    streamed: Callable[..., bytes], mint: Any, fold: Any
) -> None:
    top = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]
    detail = [{"token": "a", "logprob": -0.5, "top_logprobs": top}]
    events: list[Event] = [
        Tokens([1], [-0.5], detail=detail),
        TextDelta("a"),
        Tokens([2], [-0.5], detail=detail),
        Finished("stop"),
    ]
    asked = request(responseLogprobs=True, logprobs=2)
    chunks = chunks_of(streamed(DIALECT, asked, events))
    plain = orjson.loads(DIALECT.reply(asked, mint(DIALECT, asked), fold(events)))

    chosen = [
        entry
        for chunk in chunks
        for entry in chunk["candidates"][0]["logprobsResult"]["chosenCandidates"]
    ]
    assert chosen == [{"token": "a", "logProbability": -0.5}] * 2
    whole = plain["candidates"][0]["logprobsResult"]
    assert whole["chosenCandidates"] == chosen
    assert len(whole["topCandidates"][0]["candidates"]) == 2


def test_a_count_is_read_by_the_client(client: genai.Client, server: Any) -> None:
    server.answer(count(42))

    assert client.models.count_tokens(model="m", contents="hi").total_tokens == 42
    path, body = server.received[0]
    method = path.rsplit(":", 1)[1]
    assert DIALECT.parse(body, {"model": "m", "method": method}, {}).messages[0].content == "hi"
