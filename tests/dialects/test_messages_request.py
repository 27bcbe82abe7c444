"""Messages requests as canonical ones: blocks, tools, parameters, and what cannot be used."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from bridle.proxy.dialects.messages.request import parse_count
from bridle.proxy.dialects.registry import MESSAGES
from bridle.proxy.wire.canonical import ApiError, Message, Request, ToolCall

A = "call_aaaaaaaaaaaaaaaaaaaaaaaa"
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
HI = [{"role": "user", "content": "hi"}]


def parse(messages: Any = HI, **fields: Any) -> Request:
    body = {"model": "m", "max_tokens": 9, "messages": messages, **fields}
    return MESSAGES.parse(orjson.dumps(body), {}, {})


def notes(request: Request) -> set[tuple[str, str]]:
    return {(note.name, note.detail) for note in request.notes}


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("Be brief.", "Be brief."),
        (
            [text("billing: 1"), text("rules", cache_control={"type": "ephemeral"})],
            "billing: 1\nrules",
        ),
    ],
)
def test_system_comes_first_as_it_was_sent(system: Any, expected: str) -> None:
    assert parse(system=system).messages[0] == Message(role="system", content=expected)


def test_system_messages_inside_the_conversation_keep_their_place() -> None:
    request = parse([*HI, {"role": "system", "content": [text("note")]}, *HI])

    assert [message.role for message in request.messages] == ["user", "system", "user"]


def test_an_assistant_turn_keeps_thinking_text_calls_and_anchors() -> None:
    signature = f"bridle.{A[5:]}00"
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": signature},
        {"type": "redacted_thinking", "data": f"bridle.{A[5:]}01"},
        text("Looking."),
        {"type": "tool_use", "id": f"{A}00", "name": "look", "input": {"b": 1, "a": "é"}},
    ]
    request = parse([*HI, {"role": "assistant", "content": blocks}, *HI])

    assert request.messages[1] == Message(
        role="assistant",
        content="Looking.",
        reasoning="hm",
        tool_calls=(ToolCall(f"{A}00", "look", '{"b":1,"a":"é"}'),),
        anchors=(signature, f"bridle.{A[5:]}01"),
    )


def test_foreign_signatures_are_no_anchors() -> None:
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "ErUBCkYIBRgC"}]

    assert parse([*HI, {"role": "assistant", "content": blocks}, *HI]).messages[1].anchors == ()


def test_parallel_results_keep_their_order_and_come_before_the_text_after_them() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "b", "content": "two"},
        {"type": "tool_result", "tool_use_id": "a", "content": [text("one"), text("more")]},
        {"type": "tool_result", "tool_use_id": "c"},
        text("go on"),
    ]

    assert parse([{"role": "user", "content": results}]).messages == (
        Message(role="tool", content="two", tool_call_id="b"),
        Message(role="tool", content="one\nmore", tool_call_id="a"),
        Message(role="tool", content="", tool_call_id="c"),
        Message(role="user", content="go on"),
    )


def test_text_before_a_result_stays_before_it() -> None:
    blocks = [text("see"), {"type": "tool_result", "tool_use_id": "a", "content": "one"}]

    assert [m.role for m in parse([{"role": "user", "content": blocks}]).messages] == [
        "user",
        "tool",
    ]


@pytest.mark.parametrize(("content", "told"), [("boom", "boom"), (None, "error")])
def test_a_failed_result_keeps_its_text_and_is_noted(content: Any, told: str) -> None:
    block = {"type": "tool_result", "tool_use_id": "a", "content": content, "is_error": True}
    request = parse([{"role": "user", "content": [block]}])

    assert request.messages[0].content == told
    assert notes(request) == {("tool_error_flag", "")}


@pytest.mark.parametrize(
    ("block", "part"),
    [
        (
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": "AA"},
            },
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        ),
        (
            {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}},
            {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
        ),
    ],
)
def test_images_become_image_parts(block: Any, part: Any) -> None:
    content = [text("see"), block]
    assert parse([{"role": "user", "content": content}]).messages[0].content == [
        {"type": "text", "text": "see"},
        part,
    ]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    assert parse([{"role": "user", "content": [result]}]).messages[0].content == [part]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"type": "document", "source": {"type": "text", "data": "d"}, "title": "T"}, "T\nd"),
        ({"type": "document", "source": {"type": "content", "content": [text("d")]}}, "d"),
        ({"type": "document", "source": {"type": "content", "content": "d"}}, "d"),
        (
            {"type": "search_result", "title": "T", "source": "s", "content": [text("d")]},
            "T\ns\nd",
        ),
        ({"type": "tool_reference", "tool_name": "look"}, "look"),
    ],
)
def test_documents_and_results_become_text(block: Any, expected: str) -> None:
    assert parse([{"role": "user", "content": [block]}]).messages[0].content == expected


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ({"type": "document", "source": {"type": "base64", "data": "AA"}}, ".source"),
        ({"type": "document", "source": {"type": "file", "file_id": "f"}}, ".source"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, ".source"),
        ({"type": "container_upload", "file_id": "f"}, ""),
        ({"type": "tool_addition", "tool": {}}, ""),
        ({"type": "compaction", "content": "So far.", "tool_changes": [{}]}, ".tool_changes"),
    ],
)
def test_blocks_that_cannot_be_read_are_refused_with_a_remedy(block: Any, field: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse([{"role": "user", "content": [text("hi"), block]}])
    assert (caught.value.status, caught.value.param) == (400, f"messages[0].content[1]{field}")
    assert "send" in caught.value.message


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_blocks_of_tools_that_a_provider_runs_are_shown_as_text(role: str) -> None:
    used = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"q": "tea"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": [{"title": "T"}]}
    request = parse([{"role": role, "content": [text("hi"), used, found]}])

    assert '"q":"tea"' in str(request.messages[0].content)
    assert '"title":"T"' in str(request.messages[0].content)
    assert notes(request) - {("prefill", "")} == {
        ("block_as_text", "server_tool_use"),
        ("block_as_text", "web_search_tool_result"),
    }


def test_the_summary_of_a_compaction_stands_for_what_it_summarises() -> None:
    block = {"type": "compaction", "content": "They greeted.", "encrypted_content": "AA"}
    request = parse([{"role": "assistant", "content": [block]}, {"role": "user", "content": "on"}])
    assert [message.content for message in request.messages] == ["They greeted.", "on"]
    failed = parse(
        [{"role": "user", "content": [{"type": "compaction", "content": None}, text("on")]}]
    )
    assert failed.messages[0].content == "on"


def test_claude_codes_own_context_management_passes() -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    assert parse(context_management={"edits": edits}).messages


def test_only_custom_tools_reach_the_engine() -> None:
    tools = [LOOK, {"type": "web_search_20250305", "name": "web_search"}, {"name": "bare"}]
    request = parse(tools=tools)

    assert request.tools == (
        {
            "type": "function",
            "function": {
                "name": "look",
                "description": "Looks.",
                "parameters": {"type": "object"},
            },
        },
        {
            "type": "function",
            "function": {"name": "bare", "parameters": {"type": "object", "properties": {}}},
        },
    )
    assert notes(request) == {("tool_dropped", "web_search_20250305")}


@pytest.mark.parametrize(
    ("given", "choice", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        (
            {"type": "tool", "name": "look"},
            {"type": "function", "function": {"name": "look"}},
            None,
        ),
    ],
)
def test_tool_choice_in_chat_shape(given: Any, choice: Any, parallel: bool | None) -> None:
    request = parse(tools=[LOOK], tool_choice=given)

    assert (request.tool_choice, request.parallel_tool_calls) == (choice, parallel)


def test_parameters_reach_the_engine() -> None:
    schema = {"type": "object"}
    request = parse(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stop_sequences=["END"],
        stream=True,
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "max", "format": {"type": "json_schema", "schema": schema}},
    )

    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.max_tokens, sampling.stop) == (9, ("END",))
    assert request.stream
    assert request.extra == {"reasoning_effort": "high"}
    assert request.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": schema},
    }
    assert notes(request) == {
        ("field_dropped", "thinking.budget_tokens"),
        ("effort_converted", "max as high"),
    }


def test_disabled_thinking_is_switched_off() -> None:
    assert parse(thinking={"type": "disabled"}).template_kwargs == {"enable_thinking": False}


def test_cache_marks_and_betas_mean_nothing() -> None:
    marked = [text("hi", cache_control={"type": "ephemeral"})]

    assert parse([{"role": "user", "content": marked}], betas=["x"]).messages == parse().messages
    assert parse([{"role": "user", "content": marked}], betas=["x"]).notes == ()


def test_a_conversation_that_ends_in_assistant_text_is_continued() -> None:
    request = parse([*HI, {"role": "assistant", "content": "The answer is"}])

    assert request.extra == {"continue_final_message": True, "add_generation_prompt": False}
    assert notes(request) == {("prefill", "")}


def test_a_count_needs_no_max_tokens() -> None:
    body = {"model": "m", "messages": HI, "tools": [LOOK]}

    assert parse_count(orjson.dumps(body), {}, {}).tools != ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
            "messages[0].content[0].name",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].source",
        ),
        ({"system": 3}, "system"),
        ({"tools": [{}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [LOOK], "tool_choice": {"type": "most"}}, "tool_choice.type"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice.name"),
        ({"stop_sequences": [1]}, "stop_sequences[0]"),
        ({"thinking": {}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": HI, **fields}
    with pytest.raises(ApiError) as caught:
        MESSAGES.parse(orjson.dumps(body), {}, {})

    error = caught.value
    assert (error.kind, error.status, error.param) == ("invalid_request", 400, param)
    assert param in error.message
