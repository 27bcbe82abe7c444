"""Responses replies, read back by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import orjson
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from bridle.proxy.dialects.registry import RESPONSES
from bridle.proxy.dialects.responses.stored import StoredResponses
from bridle.proxy.dialects.responses.tools import custom_input
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
from support.providers import typed_events as events_of

DIALECT = RESPONSES
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "look", "parameters": {"type": "object"}},
    {"type": "custom", "name": "run"},
    {
        "type": "namespace",
        "name": "agents",
        "description": "",
        "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}],
    },
]
ENDING = (Finished("tool_calls"), Usage(11, 7, 3, 2))


def request(**fields: Any) -> Request:
    body = {"model": "m", "input": "hi", "stream": True, "tools": TOOLS, **fields}
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
        ToolCallDelta(1, f"{call_id}01", "run", '{"input": "x\\'),
        ToolCallDelta(1, arguments='n\\u00e9"}'),
        ToolCallDelta(2, f"{call_id}02", "agents__spawn", "{}"),
        *ENDING,
    ]


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(api_key="k", base_url=f"{server.url}/v1", max_retries=0)


def test_events_come_in_the_providers_order_and_are_numbered(
    streamed: Callable[..., bytes], call_id: str
) -> None:
    events = events_of(streamed(DIALECT, request(), reply_events(call_id)))

    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_every_event_has_all_that_the_sdk_types_demand(
    streamed: Callable[..., bytes], call_id: str
) -> None:
    """Validation is strict here, unlike in the client, which takes what it gets."""
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    wanted = request(reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"])
    for asked in (request(), wanted):
        for event in events_of(streamed(DIALECT, asked, reply_events(call_id))):
            if "response" in event:
                event["response"]["tools"][2]["description"] = "agents"
            adapter.validate_python(event)


def test_the_client_gathers_the_whole_response(
    client: openai.OpenAI, server: Any, streamed: Callable[..., bytes], call_id: str
) -> None:
    asked = request(include=["reasoning.encrypted_content"])
    server.answer(streamed(DIALECT, asked, reply_events(call_id)), "text/event-stream")

    with client.responses.stream(model="m", input="hi") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        response = stream.get_final_response()

    body = call_id[5:]
    reasoning, message, look, run, spawn = response.output
    assert deltas == ["Hel", "lo"]
    assert response.status == "completed"
    assert response.output_text == "Hello"
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.content or []] == ["hm ok"]
    assert reasoning.encrypted_content == f"bridle.{body}00"
    assert message.id == f"msg_{body}01"
    assert look.type == "function_call"
    assert (look.name, look.call_id, look.arguments) == ("look", f"{call_id}00", '{"a": 1}')
    assert run.type == "custom_tool_call"
    assert (run.name, run.call_id, run.input) == ("run", f"{call_id}01", "x\né")
    assert spawn.type == "function_call"
    assert (spawn.name, spawn.namespace) == ("spawn", "agents")
    assert response.usage is not None
    assert response.usage.input_tokens == 11
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    assert response.usage.total_tokens == 18


def test_structured_output_is_parsed_by_the_client(
    client: openai.OpenAI, server: Any, streamed: Callable[..., bytes]
) -> None:
    class Answer(BaseModel):
        value: int

    events = [Started(1), TextDelta('{"value"'), TextDelta(": 3}"), Finished("stop"), Usage(1, 2)]
    server.answer(streamed(DIALECT, request(), events), "text/event-stream")

    with client.responses.stream(model="m", input="hi", text_format=Answer) as stream:
        response = stream.get_final_response()

    assert response.output_parsed == Answer(value=3)
    sent = orjson.loads(server.received[0][1])
    format_sent = DIALECT.parse(orjson.dumps(sent), {}, {}).response_format
    assert format_sent is not None
    assert format_sent["json_schema"]["schema"]["required"] == ["value"]


def test_a_summary_is_streamed_when_one_was_asked_for(
    streamed: Callable[..., bytes], call_id: str
) -> None:
    asked = request(reasoning={"summary": "auto"})
    events = events_of(streamed(DIALECT, asked, reply_events(call_id)))

    kinds = [event["type"].removeprefix("response.") for event in events[2:9]]
    assert kinds == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    item = events[8]["item"]
    assert item["summary"] == [{"type": "summary_text", "text": "hm ok"}]
    assert "content" not in item
    assert "encrypted_content" not in item


def test_a_failure_after_an_end_that_was_thrown_away_takes_its_place(
    mint: Any, call_id: str
) -> None:
    asked = request()
    emitter = DIALECT.emitter(asked, mint(DIALECT, asked))
    events = [emitter.begin(), *(emitter.event(event) for event in reply_events(call_id))]
    emitter.end()
    events.append(emitter.fail(ApiError("store_unavailable", "down", status=503)))

    whole = events_of(b"".join(events))
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert whole[-1]["type"] == "response.failed"
    assert whole[-1]["response"]["error"] == {"code": "store_unavailable", "message": "down"}
    assert len(whole[-1]["response"]["output"]) == 4


def test_the_response_repeats_what_the_request_determines(
    streamed: Callable[..., bytes],
) -> None:
    asked = request(
        instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, store=False, user="u"
    )
    for event in events_of(streamed(DIALECT, asked, [Finished("stop")])):
        response = event["response"]
        assert response["instructions"] == "Be brief."
        assert response["metadata"] == {"a": "b"}
        assert response["temperature"] == 0.5
        assert response["store"] is False
        assert response["tools"] == [
            {"description": None, "parameters": None, "strict": None, **tool}
            if tool["type"] == "function"
            else tool
            for tool in TOOLS
        ]


def test_logprobs_go_with_the_text_they_belong_to(
    streamed: Callable[..., bytes], mint: Any, fold: Any
) -> None:
    def tokens(*texts: str) -> Tokens:
        detail = [{"token": t, "logprob": -0.5, "bytes": [], "top_logprobs": []} for t in texts]
        return Tokens([1] * len(texts), [-0.5] * len(texts), detail=detail)

    events: list[Event] = [
        tokens("<think>"),
        ReasoningDelta("hm"),
        tokens("Hel"),
        TextDelta("Hel"),
        tokens("lo", "<end>"),
        TextDelta("lo"),
        *ENDING,
    ]
    asked = request(include=["message.output_text.logprobs"])
    whole = events_of(streamed(DIALECT, asked, events))
    deltas = [event for event in whole if event["type"] == "response.output_text.delta"]
    part = whole[-1]["response"]["output"][1]["content"][0]

    assert [[entry["token"] for entry in event["logprobs"]] for event in deltas] == [
        ["Hel"],
        ["lo", "<end>"],
    ]
    assert [entry["token"] for entry in part["logprobs"]] == ["Hel", "lo"]
    plain = orjson.loads(DIALECT.reply(asked, mint(DIALECT, asked), fold(events)))
    assert plain["output"][1]["content"][0] == part


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\n\\"b\\""}', 'a\n"b"'),
        ('{"input":"\\ud83d\\ude00!"}', "😀!"),
        ('{"input":"\\\\ud83d"}', "\\ud83d"),
        ('{"input": "cut', '{"input": "cut'),
        ('{"other": 1, "input": "late"}', "late"),
        ('{"input": 3}', '{"input": 3}'),
        ("not json", "not json"),
        ("[" * 5000, "[" * 5000),
        ("", ""),
    ],
)
def test_a_freeform_input_is_read_from_the_arguments_that_carry_it(
    arguments: str, text: str
) -> None:
    assert custom_input(arguments) == text


def test_a_deletion_is_answered_in_the_providers_shape() -> None:
    assert orjson.loads(StoredResponses.deleted("resp_1")) == {
        "id": "resp_1",
        "object": "response",
        "deleted": True,
    }
