"""Responses requests as canonical ones: items, tools, parameters, and what cannot be used."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from bridle.proxy.dialects.registry import RESPONSES
from bridle.proxy.dialects.responses import request as responses_request
from bridle.proxy.dialects.responses.request import own_messages, with_history
from bridle.proxy.wire.canonical import ApiError, Message, Request, ToolCall

A, B = "call_aaaaaaaaaaaaaaaaaaaaaaaa", "call_bbbbbbbbbbbbbbbbbbbbbbbb"
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: WORD"},
}
AGENTS = {"type": "namespace", "name": "agents", "description": "", "tools": [LOOK]}


def parse(input: Any = "hi", **fields: Any) -> Request:
    body = {"model": "m", "input": input, **fields}
    return RESPONSES.parse(orjson.dumps(body), {}, {})


def notes(request: Request) -> set[tuple[str, str]]:
    return {(note.name, note.detail) for note in request.notes}


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def call(call_id: str, name: str = "look", **fields: Any) -> dict[str, Any]:
    return item("function_call", call_id=call_id, name=name, arguments="{}", **fields)


def test_a_string_is_a_user_message_after_the_instructions() -> None:
    request = parse("hi", instructions="Be brief.")

    assert request.messages == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="hi"),
    )


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": "hi"}, Message(role="user", content="hi")),
        (
            {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
            Message(role="system", content="a"),
        ),
        (
            {"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
            Message(role="user", content="a\nb"),
        ),
        (
            {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            Message(role="assistant", content="a"),
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            Message(role="assistant", content="no"),
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "see"},
                    {
                        "type": "input_image",
                        "image_url": "data:image/png;base64,AA",
                        "detail": "low",
                    },
                ],
            },
            Message(
                role="user",
                content=[
                    {"type": "text", "text": "see"},
                    {
                        "type": "image_url",
                        "image_url": {"url": "data:image/png;base64,AA", "detail": "low"},
                    },
                ],
            ),
        ),
    ],
)
def test_messages_keep_their_role_and_content(message: Any, expected: Message) -> None:
    assert parse([message]).messages == (expected,)


def test_the_items_of_one_reply_become_one_assistant_message_with_anchors() -> None:
    signature = f"bridle.{A[5:]}00"
    request = parse(
        [
            item("reasoning", id=f"rs_{A[5:]}00", encrypted_content=signature, summary=[]),
            item("message", role="assistant", id=f"msg_{A[5:]}01", content="Looking."),
            call(f"{A}00", id=f"fc_{A[5:]}02"),
            call(f"{A}01"),
            item("function_call_output", call_id=f"{A}00", output="1"),
            item(
                "function_call_output",
                call_id=f"{A}01",
                output=[{"type": "input_text", "text": "2"}],
            ),
        ]
    )

    assert request.messages == (
        Message(
            role="assistant",
            content="Looking.",
            tool_calls=(ToolCall(f"{A}00", "look", "{}"), ToolCall(f"{A}01", "look", "{}")),
            anchors=(f"rs_{A[5:]}00", signature, f"msg_{A[5:]}01", f"fc_{A[5:]}02"),
        ),
        Message(role="tool", content="1", tool_call_id=f"{A}00"),
        Message(role="tool", content="2", tool_call_id=f"{A}01"),
    )


def test_calls_of_one_reply_are_reunited_around_their_outputs() -> None:
    request = parse(
        [
            call(f"{A}00"),
            item("function_call_output", call_id=f"{A}00", output="1"),
            call(f"{A}01"),
            item("function_call_output", call_id=f"{A}01", output="2"),
        ]
    )

    assert [message.role for message in request.messages] == ["assistant", "tool", "tool"]


def test_replies_of_two_calls_stay_two_messages() -> None:
    request = parse(
        [
            item("message", role="assistant", id=f"msg_{A[5:]}00", content="one"),
            item("message", role="assistant", id=f"msg_{B[5:]}00", content="two"),
        ]
    )

    assert [message.content for message in request.messages] == ["one", "two"]


def test_assistant_messages_without_ids_stay_apart_and_keep_their_calls() -> None:
    request = parse(
        [
            {"role": "assistant", "content": "one"},
            {"role": "assistant", "content": "two"},
            call("x"),
        ]
    )

    assert [(m.content, len(m.tool_calls)) for m in request.messages] == [("one", 0), ("two", 1)]


@pytest.mark.parametrize("place", ["content", "summary"])
def test_reasoning_is_read_from_content_or_summary(place: str) -> None:
    kind = "reasoning_text" if place == "content" else "summary_text"
    request = parse([item("reasoning", id="rs_1", **{place: [{"type": kind, "text": "hm"}]})])

    assert request.messages == (Message(role="assistant", reasoning="hm"),)


def test_late_system_messages_keep_their_place() -> None:
    request = parse([{"role": "user", "content": "a"}, {"role": "developer", "content": "b"}])

    assert [message.role for message in request.messages] == ["user", "system"]
    assert notes(request) == {("role_converted", "developer as system")}


def test_namespaces_are_flattened_in_tools_and_history() -> None:
    request = parse([call("x", namespace="agents")], tools=[LOOK, AGENTS])

    assert [tool["function"]["name"] for tool in request.tools] == ["look", "agents__look"]
    assert request.messages[0].tool_calls[0].name == "agents__look"
    assert ("namespace_flattened", "agents") in notes(request)


def test_custom_tools_become_functions_of_one_string() -> None:
    request = parse(
        [
            item("custom_tool_call", call_id="x", name="patch", input='say "hi"'),
            item("custom_tool_call_output", call_id="x", output="done"),
        ],
        tools=[PATCH],
    )

    function = request.tools[0]["function"]
    assert function["parameters"]["required"] == ["input"]
    assert "lark" in function["description"]
    assert "start: WORD" in function["description"]
    assert orjson.loads(request.messages[0].tool_calls[0].arguments) == {"input": 'say "hi"'}
    assert request.messages[1] == Message(role="tool", content="done", tool_call_id="x")


def test_function_tools_are_unflattened() -> None:
    strict = {**LOOK, "description": "Looks.", "strict": True}
    request = parse(tools=[strict, {"type": "function", "name": "bare", "strict": False}])

    assert request.tools == (
        {
            "type": "function",
            "function": {
                "name": "look",
                "description": "Looks.",
                "parameters": {"type": "object"},
                "strict": True,
            },
        },
        {
            "type": "function",
            "function": {"name": "bare", "parameters": {"type": "object", "properties": {}}},
        },
    )


def test_a_providers_own_tools_are_dropped_with_a_note() -> None:
    request = parse(tools=[{"type": "web_search"}], tool_choice="required")

    assert request.tools == ()
    assert request.tool_choice is None
    assert notes(request) == {
        ("tool_dropped", "web_search"),
        ("tool_choice_dropped", "required without usable tools"),
    }


@pytest.mark.parametrize(
    ("kind", "fields", "name"),
    [
        ("local_shell_call", {"action": {"command": ["ls"]}}, "local_shell"),
        ("apply_patch_call", {"operation": {"type": "delete_file", "path": "a"}}, "apply_patch"),
    ],
)
def test_client_side_builtin_calls_become_function_calls(kind: str, fields: Any, name: str) -> None:
    request = parse(
        [item(kind, call_id="x", **fields), item(f"{kind}_output", call_id="x", output="ok")]
    )

    made = request.messages[0].tool_calls[0]
    assert (made.name, orjson.loads(made.arguments)) == (name, *fields.values())
    assert request.messages[1] == Message(role="tool", content="ok", tool_call_id="x")
    assert ("item_converted", kind) in notes(request)


@pytest.mark.parametrize("kind", ["web_search_call", "something_new"])
def test_items_without_a_place_in_chat_are_shown_as_text(kind: str) -> None:
    request = parse([item(kind, id="x", query="tea"), {"role": "user", "content": "hi"}])

    assert '"query":"tea"' in str(request.messages[0].content)
    assert request.messages[1].content == "hi"
    assert notes(request) == {("item_as_text", kind)}


@pytest.mark.parametrize("kind", ["compaction", "compaction_summary", "context_compaction"])
def test_history_that_only_the_provider_can_read_is_refused(kind: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse([item(kind, encrypted_content="AA"), {"role": "user", "content": "hi"}])
    assert (caught.value.status, caught.value.param) == (400, "input[0]")
    assert "send the messages" in caught.value.message


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_file", "file_data": "AA"},
        {"type": "input_image", "file_id": "f"},
        {"type": "input_audio"},
    ],
)
def test_files_that_are_not_here_are_refused_with_a_remedy(part: Any) -> None:
    with pytest.raises(ApiError) as caught:
        parse([{"role": "user", "content": [part]}])
    assert (caught.value.status, caught.value.param) == (400, "input[0].content[0]")
    assert "send" in caught.value.message


def test_an_item_reference_is_an_anchor_to_be_looked_up() -> None:
    request = parse([item("item_reference", id=f"msg_{A[5:]}00"), {"id": "msg_other"}])

    assert request.messages == (Message(role="assistant", anchors=(f"msg_{A[5:]}00",)),)
    assert request.references == (f"msg_{A[5:]}00", "msg_other")


def test_a_known_item_stands_for_the_reference_to_it() -> None:
    identifier = f"msg_{A[5:]}00"
    whole = item("message", id=identifier, role="assistant", content=[])
    whole["content"].append({"type": "output_text", "text": "hi"})
    body = orjson.dumps({"model": "m", "input": [item("item_reference", id=identifier)]})
    request = responses_request.parse_with(body, {identifier: whole})

    assert request.messages == parse([whole]).messages
    assert request.references == ()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        (None, None),
        ({"type": "function", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
        ({"type": "custom", "name": "patch"}, {"type": "function", "function": {"name": "patch"}}),
        ({"type": "file_search"}, "auto"),
    ],
)
def test_tool_choice_in_chat_shape(given: Any, expected: Any) -> None:
    assert parse(tools=[LOOK, PATCH], tool_choice=given).tool_choice == expected


def test_allowed_tools_narrow_the_tools() -> None:
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "custom", "name": "patch"}],
    }
    request = parse(tools=[LOOK, PATCH], tool_choice=choice)

    assert [tool["function"]["name"] for tool in request.tools] == ["patch"]
    assert request.tool_choice == "required"


def test_parameters_reach_the_engine() -> None:
    schema = {"type": "object", "properties": {}}
    request = parse(
        tools=[LOOK],
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        parallel_tool_calls=False,
        stream=True,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        previous_response_id="resp_1",
        reasoning={"effort": "minimal", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "out", "schema": schema, "strict": True}},
    )

    assert request.sampling.temperature == 0.5
    assert request.sampling.top_p == 0.9
    assert request.sampling.max_tokens == 7
    assert request.parallel_tool_calls is False
    assert request.stream
    assert (request.wants.logprobs, request.wants.top_logprobs) == (True, 2)
    assert request.previous_response_id == "resp_1"
    assert request.extra == {"reasoning_effort": "low"}
    assert request.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "out", "schema": schema, "strict": True},
    }
    assert request.own.reasoning_summary
    assert request.own.encrypted_reasoning


def test_effort_none_switches_thinking_off() -> None:
    assert parse(reasoning={"effort": "none"}).template_kwargs == {"enable_thinking": False}


def test_unknown_fields_are_dropped_with_a_note() -> None:
    request = parse(text={"verbosity": "low"}, moderation={"a": 1}, store=False)

    assert notes(request) == {
        ("field_dropped", "text.verbosity"),
        ("field_dropped", "moderation"),
        ("response_not_stored", ""),
    }


@pytest.mark.parametrize(
    ("fields", "noted"),
    [
        ({"truncation": "auto"}, ["truncation"]),
        ({"max_tool_calls": 1}, ["max_tool_calls"]),
        ({"truncation": "disabled", "background": False, "max_tool_calls": None}, []),
    ],
)
def test_an_echoed_field_without_its_effect_is_noted(
    fields: dict[str, Any], noted: list[str]
) -> None:
    assert [note.detail for note in parse(**fields).notes] == noted


def test_history_goes_between_instructions_and_input() -> None:
    request = parse("next", instructions="New rules.", previous_response_id="resp_1")
    history = [Message(role="user", content="first"), Message(role="assistant", content="reply")]

    whole = with_history(request, history)

    assert [message.content for message in whole.messages] == [
        "New rules.",
        "first",
        "reply",
        "next",
    ]
    assert [message.content for message in own_messages(whole)] == ["first", "reply", "next"]
    assert [m.content for m in own_messages(with_history(parse("x"), history))][-1] == "x"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": ["a"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].type"),
        ({"tools": [AGENTS | {"tools": [{}]}]}, "tools[0].tools[0].type"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_output_tokens": 1.5}, "max_output_tokens"),
        ({"max_output_tokens": 2**63}, "max_output_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"conversation": {"name": 1}}, "conversation.id"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": [1]}, "include[0]"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    body = {"model": "m", "input": "hi", **fields}
    with pytest.raises(ApiError) as caught:
        RESPONSES.parse(orjson.dumps(body), {}, {})

    error = caught.value
    assert (error.kind, error.status, error.param) == ("invalid_request", 400, param)
    assert param in error.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        RESPONSES.parse(body, {}, {})

    assert caught.value.status == 400


def test_json_too_deep_to_be_written_is_the_clients_error() -> None:
    deep = b'{"a":' * 400 + b"1" + b"}" * 400
    body = b'{"model":"m","input":"hi","tools":[{"type":"function","name":"f","parameters":%b}]}'
    with pytest.raises(ApiError) as caught:
        RESPONSES.parse(body % deep, {}, {})

    assert caught.value.param == "tools[0].parameters"


def test_an_empty_input_with_nothing_before_it_is_refused_by_its_own_name() -> None:
    body = {"model": "m", "input": []}
    with pytest.raises(ApiError) as caught:
        responses_request.parse_with(orjson.dumps(body), {})
    assert caught.value.param == "input"
    responses_request.parse_with(orjson.dumps({**body, "instructions": "go"}), {})
    responses_request.parse_with(orjson.dumps({**body, "previous_response_id": "resp_1"}), {})
