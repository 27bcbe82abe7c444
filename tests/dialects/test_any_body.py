"""No body, however strange, is anything but a request or a named 400."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridle.proxy.dialects.messages.request import parse_count
from bridle.proxy.dialects.registry import GOOGLE, MESSAGES, RESPONSES
from bridle.proxy.wire.canonical import (
    ApiError,
    ChoiceReply,
    Finished,
    Reply,
    Request,
    Started,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)

PATH = {"model": "m", "method": "streamGenerateContent"}


def _responses(body: bytes) -> Request:
    return RESPONSES.parse(body, {}, {})


def _messages(body: bytes) -> Request:
    return MESSAGES.parse(body, {}, {})


def _count(body: bytes) -> Request:
    return parse_count(body, {}, {})


def _google(body: bytes) -> Request:
    return GOOGLE.parse(body, PATH, {"alt": "sse"})


def _google_count(body: bytes) -> Request:
    return GOOGLE.parse(body, PATH | {"method": "countTokens"}, {})


RESPONSES_BODY: dict[str, Any] = {
    "model": "m",
    "instructions": "s",
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "u", "detail": "low"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "id": "i", "content": "a"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "i"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "o"}],
        },
        {"type": "custom_tool_call", "call_id": "d", "name": "p", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "y"},
        {"type": "local_shell_call", "call_id": "e", "action": {"command": []}},
        {"type": "item_reference", "id": "z"},
        {"type": "additional_tools", "tools": [{"type": "function", "name": "late"}]},
    ],
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True},
        {"type": "custom", "name": "p", "format": {"type": "grammar", "definition": "d"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}]},
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"},
    "include": ["reasoning.encrypted_content"],
    "temperature": 1,
    "max_output_tokens": 5,
    "stream": True,
    "client_metadata": {"a": "b"},
}
MESSAGES_BODY: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "d"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "i", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "i",
                    "is_error": True,
                    "content": [{"type": "image", "source": {"type": "url", "url": "u"}}],
                },
                {"type": "document", "source": {"type": "content", "content": []}, "title": "t"},
                {"type": "search_result", "title": "t", "source": "s", "content": []},
            ],
        },
        {"role": "system", "content": "s"},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}, "description": "d"}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["a"],
}
GOOGLE_BODY: dict[str, Any] = {
    "contents": [
        {
            "role": "user",
            "parts": [{"text": "a"}, {"inlineData": {"mimeType": "image/png", "data": "AA"}}],
        },
        {
            "role": "model",
            "parts": [
                {"text": "t", "thought": True},
                {"functionCall": {"name": "f", "args": {"a": 1}}, "thoughtSignature": "AA=="},
            ],
        },
        {
            "role": "user",
            "parts": [{"functionResponse": {"name": "f", "response": {"output": "o"}}}],
        },
    ],
    "systemInstruction": {"parts": [{"text": "s"}]},
    "tools": [
        {
            "functionDeclarations": [
                {
                    "name": "f",
                    "parameters": {
                        "type": "OBJECT",
                        "properties": {
                            "a": {"type": "ARRAY", "items": {"type": "STRING"}, "minItems": "1"}
                        },
                    },
                }
            ]
        }
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
    "generationConfig": {
        "temperature": 1,
        "topK": 4,
        "maxOutputTokens": 5,
        "stopSequences": ["a"],
        "responseMimeType": "application/json",
        "responseSchema": {"type": "OBJECT"},
        "thinkingConfig": {"thinkingBudget": 0, "includeThoughts": True},
        "candidateCount": 1,
    },
}
PARSERS: list[tuple[Callable[[bytes], Request], dict[str, Any]]] = [
    (_responses, RESPONSES_BODY),
    (_messages, MESSAGES_BODY),
    (_count, MESSAGES_BODY),
    (_google, GOOGLE_BODY),
    (_google_count, {"generateContentRequest": GOOGLE_BODY}),
]
DIALECTS: dict[str, Any] = {
    "responses": RESPONSES,
    "messages": MESSAGES,
    "google": GOOGLE,
}


def outcome(parse: Callable[[bytes], Request], body: bytes) -> Request | ApiError:
    try:
        return parse(body)
    except ApiError as error:
        return error


def check(parse: Callable[[bytes], Request], body: Any) -> None:
    """``body`` parses into something that can be sent on and answered, or is a 400."""
    request = outcome(parse, orjson.dumps(body))
    if isinstance(request, ApiError):
        assert (request.kind, request.status) == ("invalid_request", 400)
        assert request.message
        return
    chat = [message.to_chat() for message in request.messages]
    orjson.dumps([chat, request.tools, request.tool_choice, request.response_format])
    orjson.dumps([dict(request.extra), request.template_kwargs])
    dialect = DIALECTS[request.dialect]
    emitter = dialect.emitter(request, dialect.mint("call_" + "a" * 24, 0, request.model))
    call = ToolCallDelta(0, "call_x", "f", "{}")
    emitter.begin()
    for event in (Started(1), TextDelta("a"), call, Finished("tool_calls"), Usage(1, 1)):
        emitter.event(event)
    emitter.end()


@pytest.mark.parametrize(("parse", "body"), PARSERS)
def test_the_bodies_that_are_mutated_here_are_valid(
    parse: Callable[[bytes], Request], body: dict[str, Any]
) -> None:
    assert parse(orjson.dumps(body)).messages


@pytest.mark.parametrize("parse", [parse for parse, _ in PARSERS])
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_arbitrary_json_is_a_request_or_a_400(
    parse: Callable[[bytes], Request], json_values: Any, data: Any
) -> None:
    check(parse, data.draw(json_values))


@pytest.mark.parametrize(("parse", "body"), PARSERS)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_mutated_body_is_a_request_or_a_400(
    parse: Callable[[bytes], Request], body: dict[str, Any], mutated: Any, data: Any
) -> None:
    check(parse, data.draw(mutated(body)))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("parse", "body"), PARSERS)
@settings(max_examples=10_000, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_ten_thousand_mutated_bodies_are_requests_or_400s(
    parse: Callable[[bytes], Request], body: dict[str, Any], mutated: Any, data: Any
) -> None:
    check(parse, data.draw(mutated(body)))


@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_a_400(body: bytes) -> None:
    for parse, _ in PARSERS:
        with pytest.raises(ApiError):
            parse(body)


@pytest.mark.parametrize("depth", [230, 240, 244, 248, 252, 256, 400, 1100])
def test_no_depth_of_nesting_breaks_a_request_or_a_reply(depth: int) -> None:
    deep: Any = b'{"a":' * depth + b"1" + b"}" * depth
    tool = b'{"type":"function","name":"f","parameters":%b}' % deep
    bodies = [
        (_responses, b'{"model":"m","input":"hi","tools":[%b]}' % tool),
        (_messages, orjson.dumps(MESSAGES_BODY).replace(b'{"a":1}', deep)),
        (_google, orjson.dumps(GOOGLE_BODY).replace(b'{"a":1}', deep)),
    ]
    for parse, body in bodies:
        parsed = outcome(parse, body)
        if isinstance(parsed, ApiError):
            assert parsed.status == 400
            parsed = parse(orjson.dumps(_valid(parse)))
        dialect = DIALECTS[parsed.dialect]
        minted = dialect.mint("call_" + "a" * 24, 0, "m")
        emitter = dialect.emitter(parsed, minted)
        call = ToolCallDelta(0, "call_x", "f", deep.decode())
        for event in (Started(1), call, Finished("tool_calls"), Usage(1, 1)):
            emitter.event(event)
        assert emitter.end()
        choice = ChoiceReply(tool_calls=[ToolCall("call_x", "f", deep.decode())])
        assert dialect.reply(parsed, minted, Reply(choices=[choice]))


def _valid(parse: Callable[[bytes], Request]) -> dict[str, Any]:
    return next(body for parser, body in PARSERS if parser is parse)
