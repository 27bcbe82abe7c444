"""Chat requests, good and bad, and what their clients do and do not get to see."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import reduce
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridle.engine.scripted import ScriptedCall, ScriptedReply
from bridle.proxy.dialects.registry import CHAT, COMPLETIONS
from bridle.proxy.engines.request import constraint, engine_request
from bridle.proxy.wire.canonical import ApiError
from bridle.store.records import Note

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
PART = "messages[0].content[0]"
TEXT = f"{PART}.text"
DEEP: Any = reduce(lambda inner, _: {"cache_control": inner}, range(900), 1)


def parse(**fields: Any) -> Any:
    return CHAT.parse(json.dumps({"model": "m", "messages": MESSAGES} | fields).encode(), {}, {})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "bard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"n": 0}, "n"),
        ({"stop": [1]}, "stop[0]"),
        ({"stream": "yes"}, "stream"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, TEXT),
        ({"messages": [{"role": "user", "content": [{"text": None}]}]}, TEXT),
        ({"messages": [{"role": "user", "content": [{"type": "x", "y": 2**70}]}]}, PART),
        ({"messages": [{"role": "user", "content": [{"type": DEEP, "text": "x"}]}]}, PART),
        ({"chat_template_kwargs": {"x": 2**70}}, "chat_template_kwargs"),
        ({"tools": [{"function": {"name": "f", "parameters": DEEP}}]}, "tools"),
        ({"response_format": {"type": DEEP}}, "response_format"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param


@pytest.mark.parametrize("levels", range(236, 258, 3))
def test_what_is_let_in_can_be_sent_on_however_deep_it_is(levels: int) -> None:
    deep: Any = reduce(lambda inner, _: {"x": inner}, range(levels), 1)
    messages = [{"role": "user", "content": [{"type": "x", "y": deep}]}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    for fields in ({"messages": messages}, {"tools": tools}, {"chat_template_kwargs": deep}):
        request = None
        with suppress(ApiError):  # it is too deep
            request = parse(**fields)
        if request is not None:
            assert b"".join(engine_request(request, request.sampling, stream=False).body("m"))


def test_a_forwarded_number_too_long_to_be_read_is_a_400_that_names_it() -> None:
    body = json.dumps({"model": "m", "messages": MESSAGES, "min_tokens": 1}).encode()
    with pytest.raises(ApiError) as caught:
        CHAT.parse(body.replace(b"1}", b"1" * 5000 + b"}"), {}, {})
    assert (caught.value.status, caught.value.param) == (400, "min_tokens")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'"x"', b"[" * 100_000])
def test_what_is_not_a_json_object_is_a_400(bench: Any, body: bytes) -> None:
    response = httpx.post(bench.url + PATH, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_unknown_fields_are_forwarded_when_harmless_and_noted_when_dropped() -> None:
    request = parse(
        logit_bias={"5": 1}, user="u", service_tier="auto", kv_transfer_params={}, store=None
    )
    assert request.extra == {"logit_bias": {"5": 1}, "user": "u"}
    assert {(note.name, note.detail) for note in request.notes} == {
        ("field_dropped", "service_tier"),
        ("field_dropped", "kv_transfer_params"),
    }


def test_what_no_engine_takes_of_a_message_is_noted_once() -> None:
    """The fields of an answer that says nothing by them are echoed, too, by official clients."""
    nothing = {"refusal": None, "audio": None, "function_call": None, "thinking_blocks": []}
    answer = {"role": "assistant", "content": "hello", **nothing}
    assert parse(messages=[*MESSAGES, answer, *MESSAGES]).notes == ()
    said = answer | {"refusal": "I will not.", "reasoning_details": [{"type": "reasoning.text"}]}
    request = parse(messages=[*MESSAGES, said, *MESSAGES, said, *MESSAGES])
    assert request.notes == (Note("field_dropped", "messages.reasoning_details"),)
    refused = answer | {"content": None, "refusal": "I will not."}
    assert parse(messages=[*MESSAGES, refused, *MESSAGES]).messages[1].content == "I will not."
    for name in ("audio", "function_call"):
        with pytest.raises(ApiError) as caught:
            parse(messages=[*MESSAGES, answer | {"content": None, name: {"id": "a"}}])
        assert (caught.value.status, caught.value.param) == (400, f"messages[1].{name}")


def test_developer_messages_are_system_messages_in_their_place() -> None:
    request = parse(messages=[*MESSAGES, {"role": "developer", "content": "be brief"}])
    assert [message.role for message in request.messages] == ["user", "system"]
    assert request.notes[0].name == "role_converted"


def test_tools_that_are_not_functions_are_dropped_with_a_note() -> None:
    request = parse(tools=[{"type": "web_search"}], tool_choice={"type": "custom"})
    assert request.tools == ()
    assert [note.name for note in request.notes] == ["tool_dropped", "tool_choice_dropped"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_allowed_tools_the_engine_gets_no_others(mode: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "buy", "sell")]
    allowed = {"mode": mode, "tools": [tools[1], tools[0]]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    request = parse(tools=tools, tool_choice=choice)
    assert request.tools == (tools[0], tools[1])
    assert request.tool_choice == mode
    assert request.notes == ()
    nothing = parse(tools=tools[2:], tool_choice=choice)
    assert (nothing.tools, nothing.tool_choice) == ((), None)


@pytest.mark.parametrize(
    ("allowed", "param"),
    [
        (None, "tool_choice.allowed_tools"),
        ({"tools": []}, "tool_choice.allowed_tools.mode"),
        ({"mode": "none", "tools": []}, "tool_choice.allowed_tools.mode"),
        ({"mode": "auto", "tools": ["look"]}, "tool_choice.allowed_tools.tools[0]"),
    ],
)
def test_allowed_tools_that_cannot_be_read_are_refused_by_name(allowed: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert caught.value.param == param


def test_arguments_and_reasoning_are_read_in_either_form() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    request = parse(
        messages=[
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "3"}]},
        ]
    )
    assert request.messages[0].tool_calls[0].arguments == '{"a":1}'
    assert request.messages[0].reasoning == "hm"


@pytest.mark.parametrize("stream", [True, False])
def test_ids_and_logprobs_are_not_shown_unasked(bench: Any, ask: Any, stream: bool) -> None:
    text = httpx.post(bench.url + PATH, json=ask | {"stream": stream}).text
    assert "token_ids" not in text
    assert '"logprob"' not in text


@pytest.mark.parametrize("stream", [True, False])
def test_ids_and_logprobs_are_shown_to_those_who_ask(
    bench: Any, ask: Any, events: Any, stream: bool
) -> None:
    wants = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "stream": stream}
    response = httpx.post(bench.url + PATH, json=ask | wants)
    bodies = events(response.content)[:-1] if stream else [response.json()]
    ids, entries, prompts = [], [], []
    for body in bodies:
        prompts += body.get("prompt_token_ids") or []
        for choice in body["choices"]:
            ids += choice.get("token_ids") or []
            entries += (choice["logprobs"] or {}).get("content") or []
    call = bench.call()
    assert ids == list(bench.reader.sampled(call.id)[0].token_ids)
    assert prompts == list(bench.reader.prompt_token_ids(call.id))
    assert len(entries) == len(ids)
    assert all(isinstance(entry["logprob"], float) for entry in entries)


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_is_told_under_both_names_and_hidden_on_request(
    bench: Any, stage: Any, ask: Any, events: Any, stream: bool
) -> None:
    stage.play = lambda _: ScriptedReply("The answer is four.", reasoning="one two")
    body = ask | {"stream": stream}
    shown = httpx.post(bench.url + PATH, json=body)
    hidden = httpx.post(bench.url + PATH, json=body | {"include_reasoning": False})
    told = (
        [event["choices"][0]["delta"] for event in events(shown.content)[:-1]]
        if stream
        else [shown.json()["choices"][0]["message"]]
    )
    for name in ("reasoning", "reasoning_content"):
        assert "".join(part.get(name) or "" for part in told).strip() == "one two"
    assert "reasoning_content" not in hidden.text
    assert all(call.replies[0].reasoning.strip() == "one two" for call in bench.calls())


@pytest.mark.parametrize("stream", [True, False])
def test_tool_call_ids_are_ours_and_lead_back_to_the_call(
    bench: Any, stage: Any, ask: Any, events: Any, stream: bool
) -> None:
    calls = (ScriptedCall("add", {"a": 1}), ScriptedCall("add", {"a": 2}))
    stage.play = lambda _: ScriptedReply(tool_calls=calls)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    response = httpx.post(bench.url + PATH, json=ask | {"stream": stream, "tools": tools})
    row = bench.call()
    told = (
        [
            call
            for event in events(response.content)[:-1]
            for choice in event["choices"]
            for call in choice["delta"].get("tool_calls", [])
            if "id" in call
        ]
        if stream
        else response.json()["choices"][0]["message"]["tool_calls"]
    )
    stem = row.id.removeprefix("call_")
    assert [call["id"] for call in told] == [f"call_{stem}00", f"call_{stem}01"]
    recorded = row.replies[0].tool_calls
    assert [call.id for call in recorded] == [call["id"] for call in told]
    assert [json.loads(call.arguments) for call in recorded] == [{"a": 1}, {"a": 2}]


def test_completions_take_text_and_ids(bench: Any, events: Any) -> None:
    path = bench.url + "/v1/completions"
    whole = httpx.post(path, json={"model": "m", "prompt": "one two", "logprobs": 1})
    assert whole.json()["choices"][0]["text"] == "The answer is four."
    assert len(whole.json()["choices"][0]["logprobs"]["tokens"]) == bench.call().sampled_tokens
    streamed = httpx.post(path, json={"model": "m", "prompt": [[5, 6, 7]], "stream": True})
    text = "".join(c["text"] for e in events(streamed.content)[:-1] for c in e["choices"])
    assert text == "The answer is four."
    assert list(bench.reader.prompt_token_ids(bench.calls()[-1].id)) == [5, 6, 7]


def test_streamed_logprobs_of_completions_add_up_to_those_of_the_whole(
    bench: Any, events: Any
) -> None:
    ask = {"model": "m", "prompt": "one two", "logprobs": 1}
    path = bench.url + "/v1/completions"
    whole = httpx.post(path, json=ask).json()["choices"][0]["logprobs"]
    chunks = events(httpx.post(path, json=ask | {"stream": True}).content)[:-1]
    told = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    for name in whole:
        assert [value for one in told if one for value in one[name]] == whole[name], name


@pytest.mark.parametrize(
    "prompt", [["one", "two"], [[1], [2]], [-1], [1.5], [True], [], {}, [[["x"]], 1]]
)
def test_completions_refuse_what_is_not_one_prompt(prompt: Any) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    with pytest.raises(ApiError) as caught:
        COMPLETIONS.parse(body, {}, {})
    assert caught.value.param == "prompt"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        "model",
        "messages",
        "tools",
        "tool_choice",
        "stop",
        "n",
        "stream_options",
        "logprobs",
        "response_format",
        "logit_bias",
        "temperature",
        "prompt",
        "chat_template_kwargs",
        "seed",
    ]
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(changes=st.dictionaries(FIELDS, JSON, max_size=4))
@pytest.mark.parametrize("dialect", [CHAT, COMPLETIONS])
def test_no_json_object_is_worse_than_a_400(dialect: Any, changes: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", "messages": MESSAGES, "prompt": "x"} | changes).encode()
    statuses = []
    try:
        request = dialect.parse(body, {}, {})
        b"".join(engine_request(request, request.sampling, stream=False).body("m"))
    except ApiError as error:
        statuses.append(error.status)
    assert statuses in ([], [400])


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "shaped_by"),
    [
        ({"response_format": SCHEMA}, "response_format json_schema"),
        ({"response_format": {"type": "json_object"}}, "response_format json_object"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"guided_regex": "a+", "response_format": {"type": "text"}}, "guided_regex"),
    ],
)
def test_a_reply_that_a_grammar_shapes_is_noted(fields: dict[str, Any], shaped_by: str) -> None:
    body = json.dumps({"model": "m", "messages": MESSAGES} | fields).encode()
    assert constraint(CHAT.parse(body, {}, {})) == shaped_by


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True},
        {"parallel_tool_calls": False},
        {"response_format": {"type": "text"}},
    ],
)
def test_a_reply_that_no_grammar_shapes_is_not_noted(fields: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", "messages": MESSAGES} | fields).encode()
    assert constraint(CHAT.parse(body, {}, {})) == ""
