"""Gemini requests as canonical ones: contents, tools, parameters, and what cannot be used."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from bridle.proxy.dialects.registry import GOOGLE
from bridle.proxy.wire import minting
from bridle.proxy.wire.canonical import ApiError, Message, Minted, Request, ToolCall

A = "call_aaaaaaaaaaaaaaaaaaaaaaaa"
SIGNATURE = minting.as_base64(Minted(A, 0, "", "m").signature(1))
HI = [{"role": "user", "parts": [{"text": "hi"}]}]
LOOK = {"functionDeclarations": [{"name": "look", "description": "Looks."}]}


def parse(contents: Any = HI, method: str = "generateContent", **fields: Any) -> Request:
    body = orjson.dumps({"contents": contents, **fields})
    return GOOGLE.parse(body, {"model": "m", "method": method}, {"alt": "sse"})


def notes(request: Request) -> set[tuple[str, str]]:
    return {(note.name, note.detail) for note in request.notes}


def content(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


def called(name: str = "look", **fields: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {"a": 1}, **fields}}


def answered(response: Any, name: str = "look", **fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response, **fields}}


@pytest.mark.parametrize(
    "field",
    [
        {"systemInstruction": {"parts": [{"text": "Be"}, {"text": "brief."}]}},
        {"system_instruction": {"role": "user", "parts": {"text": "Be\nbrief."}}},
        {"systemInstruction": "Be\nbrief."},
    ],
)
def test_the_system_instruction_comes_first_in_either_spelling(field: Any) -> None:
    assert parse(**field).messages[0] == Message(role="system", content="Be\nbrief.")


def test_a_model_turn_keeps_thoughts_text_calls_and_anchors() -> None:
    request = parse(
        [
            *HI,
            content(
                "model",
                {"text": "hm", "thought": True},
                {"text": "Looking.", "thoughtSignature": SIGNATURE},
                called(id=f"{A}00"),
            ),
            *HI,
        ]
    )

    assert request.messages[1] == Message(
        role="assistant",
        content="Looking.",
        reasoning="hm",
        tool_calls=(ToolCall(f"{A}00", "look", '{"a":1}'),),
        anchors=(SIGNATURE,),
    )


def test_a_signature_restores_the_id_of_its_call() -> None:
    request = parse([*HI, content("model", called() | {"thoughtSignature": SIGNATURE})])

    assert request.messages[1].tool_calls[0].id == f"{A}01"


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "one"}, "one"),
        ({"result": "one"}, "one"),
        ({"error": "boom"}, "boom"),
        ({"result": 1}, '{"result":1}'),
        ({"a": "1", "b": 2}, '{"a":"1","b":2}'),
        (None, ""),
    ],
)
def test_a_function_response_is_a_tool_message(response: Any, text: str) -> None:
    request = parse(
        [*HI, content("model", called(id="x")), content("user", answered(response, id="x"))]
    )

    assert request.messages[2] == Message(role="tool", content=text, tool_call_id="x")


def test_responses_without_ids_answer_the_oldest_call_of_their_name() -> None:
    request = parse(
        [
            *HI,
            content("model", called("look"), called("run"), called("look")),
            content(
                "user",
                answered({"output": "1"}, "look"),
                answered({"output": "2"}, "look"),
                answered({"output": "3"}, "run"),
            ),
        ]
    )

    calls = [call.id for call in request.messages[1].tool_calls]
    assert len(set(calls)) == 3
    assert [m.tool_call_id for m in request.messages[2:]] == [calls[0], calls[2], calls[1]]


def test_an_unknown_response_id_is_repaired_with_a_note() -> None:
    request = parse(
        [*HI, content("model", called(id="x")), content("user", answered({}, id="look-1"))]
    )

    assert request.messages[2].tool_call_id == "x"
    assert notes(request) == {("call_id_repaired", "")}


def test_text_around_responses_keeps_its_place() -> None:
    request = parse(
        [content("user", {"text": "a"}, answered({"output": "1"}, id="x"), {"text": "b"})]
    )

    assert [(m.role, m.content) for m in request.messages] == [
        ("user", "a"),
        ("tool", "1"),
        ("user", "b"),
    ]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (
            {"inlineData": {"mimeType": "image/png", "data": "-_A="}},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,+/A="}},
        ),
        (
            {"inline_data": {"mime_type": "audio/wav", "data": "AA=="}},
            {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        ),
        (
            {"fileData": {"mimeType": "image/png", "fileUri": "https://a/b.png"}},
            {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
        ),
    ],
)
def test_media_become_chat_parts(part: Any, expected: Any) -> None:
    assert parse([content("user", part)]).messages[0].content == [expected]


def test_a_part_of_an_unknown_kind_is_shown_as_text() -> None:
    code = {"executableCode": {"language": "PYTHON", "code": "print(6 * 7)"}}
    result = {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "42"}}
    request = parse([content("user", {"text": "hi"}), content("model", code, result)])

    assert "print(6 * 7)" in str(request.messages[1].content)
    assert "42" in str(request.messages[1].content)
    assert notes(request) == {
        ("part_as_text", "executableCode"),
        ("part_as_text", "codeExecutionResult"),
    }


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({"inlineData": {"mimeType": "application/pdf", "data": ""}}, "inlineData"),
        ({"fileData": {"fileUri": "gs://a"}}, "fileData"),
    ],
)
def test_files_that_cannot_be_read_are_refused_with_a_remedy(part: Any, name: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse([content("user", {"text": "hi"}, part)])
    assert (caught.value.status, caught.value.param) == (400, f"contents[0].parts[1].{name}")
    assert "send its text" in caught.value.message


def test_google_schemas_become_json_schemas() -> None:
    parameters = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "format": "enum", "nullable": True, "enum": ["A"]},
            "many": {"type": "ARRAY", "items": {"type": "INTEGER"}, "minItems": "2"},
            "either": {"any_of": [{"type": "NUMBER"}, {"type": "BOOLEAN"}], "nullable": True},
        },
        "required": ["type"],
        "propertyOrdering": ["type", "many"],
    }
    request = parse(tools=[{"functionDeclarations": [{"name": "f", "parameters": parameters}]}])

    assert request.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "enum": ["A", None]},
            "many": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
            "either": {"anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "null"}]},
        },
        "required": ["type"],
    }


def test_a_json_schema_is_left_as_it_is() -> None:
    schema = {"type": "object", "properties": {"STRING": {"type": "string"}}}
    declaration = {"name": "f", "parametersJsonSchema": schema}
    request = parse(tools=[{"function_declarations": [declaration]}])

    assert request.tools[0]["function"]["parameters"] == schema


def test_googles_own_tools_are_dropped_with_a_note() -> None:
    request = parse(tools=[{"googleSearch": {}}, LOOK])

    assert len(request.tools) == 1
    assert notes(request) == {("tool_dropped", "googleSearch")}


@pytest.mark.parametrize(
    ("calling", "choice"),
    [
        ({"mode": "AUTO"}, "auto"),
        ({"mode": "NONE"}, "none"),
        ({"mode": "ANY"}, "required"),
        (
            {"mode": "ANY", "allowedFunctionNames": ["look"]},
            {"type": "function", "function": {"name": "look"}},
        ),
        ({}, None),
    ],
)
def test_tool_config_in_chat_shape(calling: Any, choice: Any) -> None:
    request = parse(tools=[LOOK], toolConfig={"functionCallingConfig": calling})

    assert request.tool_choice == choice


@pytest.mark.parametrize(("mode", "choice"), [("ANY", "required"), ("VALIDATED", "auto")])
def test_of_allowed_functions_the_engine_gets_no_others(mode: str, choice: str) -> None:
    declared = [{"name": name} for name in ("look", "listen", "run")]
    calling = {"mode": mode, "allowedFunctionNames": ["look", "run"]}
    request = parse(
        tools=[{"functionDeclarations": declared}], toolConfig={"functionCallingConfig": calling}
    )

    assert [tool["function"]["name"] for tool in request.tools] == ["look", "run"]
    assert request.tool_choice == choice


def test_parameters_reach_the_engine() -> None:
    request = parse(
        method="streamGenerateContent",
        generationConfig={
            "temperature": 0.5,
            "topP": 0.9,
            "top_k": 40,
            "maxOutputTokens": 7,
            "stopSequences": ["END"],
            "seed": 3,
            "candidateCount": 2,
            "responseLogprobs": True,
            "logprobs": 2,
            "responseMimeType": "application/json",
            "responseSchema": {"type": "OBJECT"},
            "thinkingConfig": {"includeThoughts": True, "thinkingLevel": "LOW"},
        },
    )

    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert (sampling.max_tokens, sampling.stop, sampling.seed, sampling.n) == (7, ("END",), 3, 2)
    assert (request.wants.logprobs, request.wants.top_logprobs) == (True, 2)
    assert request.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": {"type": "object"}},
    }
    assert request.extra == {"reasoning_effort": "low"}
    assert request.wants.reasoning
    assert request.stream


def test_a_thinking_budget_of_nothing_switches_thinking_off() -> None:
    request = parse(generationConfig={"thinkingConfig": {"thinkingBudget": 0}})

    assert request.template_kwargs == {"enable_thinking": False}


def test_counting_reads_a_whole_request_or_its_contents() -> None:
    whole = {"model": "models/x", "contents": HI, "systemInstruction": "s"}
    body = orjson.dumps({"generateContentRequest": whole})
    request = GOOGLE.parse(body, {"model": "m", "method": "countTokens"}, {})

    assert [message.role for message in request.messages] == ["system", "user"]
    assert parse(method="countTokens").messages == parse().messages


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"contents": None}, "contents"),
        ({"contents": [1]}, "contents[0]"),
        ({"contents": [content("robot")]}, "contents[0].role"),
        ({"contents": [content("user", {"text": 3})]}, "contents[0].parts[0].text"),
        (
            {"contents": [content("model", {"functionCall": {}})]},
            "contents[0].parts[0].functionCall.name",
        ),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        ({"generationConfig": {"temperature": "hot"}}, "generationConfig.temperature"),
        ({"generationConfig": {"candidateCount": 0}}, "generationConfig.candidateCount"),
        ({"cachedContent": "c"}, "cachedContent"),
        (
            {"tools": [LOOK], "toolConfig": {"functionCallingConfig": {"mode": "SOME"}}},
            "toolConfig.functionCallingConfig.mode",
        ),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    body = orjson.dumps({"contents": HI, **fields})
    with pytest.raises(ApiError) as caught:
        GOOGLE.parse(body, {"model": "m"}, {})

    error = caught.value
    assert (error.kind, error.status, error.param) == ("invalid_request", 400, param)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ApiError):
        parse(method="embedContent")
