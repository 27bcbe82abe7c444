"""Official SDK clients against the proxy: sync and async, whole and streamed, with tools."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest
from google import genai
from google.genai import errors, types

from bridle.engine.scripted import Refuse, ScriptedCall, ScriptedEngine, ScriptedReply
from bridle.recipes.models.tiny_tokenizer import CHATML_TOOLS_TEMPLATE as TEMPLATE
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.store.records import CallStatus

SAID = [{"role": "user", "content": "x"}]
TOOL = {
    "name": "add",
    "description": "adds",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
}
CALLS = (ScriptedCall("add", {"a": 1, "b": 2}), ScriptedCall("add", {"a": 3, "b": 4}))


def two_turns(request: Any) -> ScriptedReply:
    """Two calls at once, then a text; always with reasoning."""
    if request.messages[-1]["role"] == "tool":
        return ScriptedReply("The sum is 3 and 7.", reasoning="one two three")
    return ScriptedReply("one", reasoning="four five", tool_calls=CALLS)


@pytest.fixture
def bench(stage: Any, start_proxy: Any, model_dir: Any) -> Any:
    stage.play = two_turns
    return start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)


@pytest.fixture
def chat(bench: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{bench.url}/v1", api_key="x", max_retries=0)


@pytest.fixture
def claude(bench: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=bench.url, api_key="x", max_retries=0)


def check_two_turns(bench: Any, stage: Any) -> None:
    """Both calls are complete, the second continues the first by id and by its exact tokens."""
    first, second = bench.calls()
    assert [first.status, second.status] == [CallStatus.COMPLETE] * 2
    assert (second.parent_call_id, second.lineage_rule) == (first.id, "minted_id")
    assert second.break_reason is None
    path = [
        *bench.reader.prompt_token_ids(first.id),
        *bench.reader.sampled(first.id)[0].token_ids,
    ]
    assert list(stage.requests[1].prompt_ids)[: len(path)] == path
    assert first.session_id == second.session_id
    assert [call.name for call in first.replies[0].tool_calls] == ["add", "add"]


@pytest.mark.parametrize("stream", [True, False])
def test_openai_chat(bench: Any, stage: Any, chat: openai.OpenAI, stream: bool) -> None:
    tools: Any = [{"type": "function", "function": TOOL}]
    messages: list[Any] = [{"role": "user", "content": "1+2 and 3+4?"}]
    for _ in range(2):
        if stream:
            with chat.chat.completions.stream(
                model="m", messages=messages, tools=tools, stream_options={"include_usage": True}
            ) as events:
                for _event in events:
                    pass
                reply = events.get_final_completion()
        else:
            reply = chat.chat.completions.create(model="m", messages=messages, tools=tools)
        message = reply.choices[0].message
        assert reply.usage is not None
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            assert json.loads(call.function.arguments) in ({"a": 1, "b": 2}, {"a": 3, "b": 4})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
    assert reply.choices[0].finish_reason == "stop"
    assert message.content is not None
    assert message.content.strip() == "The sum is 3 and 7."
    check_two_turns(bench, stage)


async def test_openai_chat_async(bench: Any, stage: Any) -> None:
    stage.play = lambda _: "The answer is four."
    async with openai.AsyncOpenAI(base_url=f"{bench.url}/v1", api_key="x") as client:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        models = [model.id async for model in client.models.list()]
    assert text == "The answer is four."
    assert models == [stage.engine.model]
    assert bench.call().status is CallStatus.COMPLETE


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("history", ["items", "references", "stored"])
def test_openai_responses(
    bench: Any, stage: Any, chat: openai.OpenAI, stream: bool, history: str
) -> None:
    tools: Any = [{"type": "function", **TOOL, "strict": False}]
    question: list[Any] = [{"role": "user", "content": "1+2 and 3+4?"}]
    fields: dict[str, Any] = {"model": "m", "tools": tools, "instructions": "one two"}

    def respond(**more: Any) -> Any:
        if not stream:
            return chat.responses.create(**fields, **more)
        with chat.responses.stream(**fields, **more) as events:
            for _event in events:
                pass
            return events.get_final_response()

    first = respond(input=question)
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls
    ]
    if history == "stored":
        second = respond(input=outputs, previous_response_id=first.id)
    else:
        echoed: list[Any] = [item.model_dump(exclude_none=True) for item in first.output]
        if history == "references":
            echoed = [{"type": "item_reference", "id": item["id"]} for item in echoed]
        second = respond(input=[*question, *echoed, *outputs])
    assert second.output_text.strip() == "The sum is 3 and 7."
    assert second.usage is not None
    assert second.usage.output_tokens == bench.calls()[1].sampled_tokens
    check_two_turns(bench, stage)


def test_a_response_that_is_not_stored_here_is_a_404(chat: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        chat.responses.create(model="m", input="x", previous_response_id="resp_unknown")


@pytest.mark.parametrize("identifier", ["msg_unknown", f"msg_{'a' * 24}00"])
def test_an_item_that_is_not_stored_here_is_a_404(chat: openai.OpenAI, identifier: str) -> None:
    reference: Any = {"type": "item_reference", "id": identifier}
    with pytest.raises(openai.NotFoundError, match=f"Item with id '{identifier}' not found"):
        chat.responses.create(model="m", input=[reference])


def test_a_referenced_custom_call_is_continued_as_the_client_got_it(
    bench: Any, stage: Any, chat: openai.OpenAI
) -> None:
    custom: Any = [{"type": "custom", "name": "patch", "description": "applies a patch"}]
    stage.play = lambda request: (
        ScriptedReply("Done.")
        if request.messages[-1]["role"] == "tool"
        else ScriptedReply(tool_calls=(ScriptedCall("patch", {"input": "*** Begin"}),))
    )
    first = chat.responses.create(model="m", tools=custom, input="Patch it.")
    (call,) = first.output
    assert call.id is not None
    reference: Any = {"type": "item_reference", "id": call.id}
    output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
    chat.responses.create(
        model="m", tools=custom, input=[{"role": "user", "content": "Patch it."}, reference, output]
    )

    one, two = bench.calls()
    assert (two.parent_call_id, two.break_reason) == (one.id, None)
    (echoed,) = (m for m in stage.requests[-1].messages if m["role"] == "assistant")
    assert json.loads(echoed["tool_calls"][0]["function"]["arguments"]) == {"input": "*** Begin"}


@pytest.mark.parametrize("stream", [True, False])
def test_anthropic_messages(
    bench: Any, stage: Any, claude: anthropic.Anthropic, stream: bool
) -> None:
    tool: Any = {"name": "add", "description": "adds", "input_schema": TOOL["parameters"]}
    messages: list[Any] = [{"role": "user", "content": "1+2 and 3+4?"}]
    fields: Any = {
        "model": "claude-x",
        "max_tokens": 256,
        "tools": [tool],
        "system": "one two",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    for _ in range(2):
        if stream:
            with claude.messages.stream(messages=messages, **fields) as events:
                reply = events.get_final_message()
        else:
            reply = claude.messages.create(messages=messages, **fields)
        messages.append({"role": "assistant", "content": [b.to_dict() for b in reply.content]})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
            for block in reply.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
        row = bench.calls()[-1]
        assert reply.usage.input_tokens == row.prompt_tokens
        assert reply.usage.output_tokens == row.sampled_tokens
    assert reply.model == "claude-x"
    assert reply.stop_reason == "end_turn"
    assert [block.type for block in reply.content] == ["thinking", "text"]
    check_two_turns(bench, stage)


def test_anthropic_counts_tokens_as_the_engine_does(
    bench: Any, claude: anthropic.Anthropic
) -> None:
    messages: Any = [{"role": "user", "content": "one two three"}]
    counted = claude.messages.count_tokens(model="m", messages=messages).input_tokens
    assert not bench.calls()
    claude.messages.create(model="m", messages=messages, max_tokens=64)
    assert bench.call().prompt_tokens == counted


@pytest.mark.parametrize(
    ("more", "prefill"),
    [
        ({"thinking": {"type": "disabled"}}, []),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, []),
        ({}, [{"role": "assistant", "content": "The answer is"}]),
    ],
    ids=["thinking", "template arguments", "prefill"],
)
def test_a_count_is_of_the_prompt_that_the_engine_makes(
    start_proxy: Any, tmp_path: Any, more: Any, prefill: Any
) -> None:
    no_thought = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    train_tokenizer(tmp_path / "model", ["one two three"], template=TEMPLATE + no_thought)
    with ScriptedEngine(tmp_path / "model", lambda _: ScriptedReply("four")) as engine:
        bench = start_proxy(engine.base_url)
        claude = anthropic.Anthropic(base_url=bench.url, api_key="x", max_retries=0)
        messages = [{"role": "user", "content": "one two three"}, *prefill]
        counted = claude.messages.count_tokens(model="m", messages=messages, **more).input_tokens
        reply = claude.messages.create(model="m", messages=messages, max_tokens=64, **more)
        assert counted == reply.usage.input_tokens == bench.call().prompt_tokens


@pytest.mark.parametrize("stream", [True, False])
def test_an_assistant_message_at_the_end_is_gone_on_with(
    stage: Any, claude: anthropic.Anthropic, stream: bool
) -> None:
    stage.play = lambda _: " four."
    asked: Any = {
        "model": "m",
        "max_tokens": 64,
        "messages": [*SAID, {"role": "assistant", "content": "The answer is"}],
    }
    if stream:
        with claude.messages.stream(**asked) as events:
            reply = events.get_final_message()
    else:
        reply = claude.messages.create(**asked)
    assert reply.content[0].text == " four."  # type: ignore[union-attr]
    assert stage.requests[0].prompt_text.endswith("<|im_start|>assistant\nThe answer is")


def test_each_client_raises_its_own_errors(
    bench: Any, stage: Any, chat: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    stage.play = lambda _: Refuse(429, "slow down")
    messages: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.RateLimitError):
        chat.chat.completions.create(model="m", messages=messages)
    with pytest.raises(openai.RateLimitError):
        chat.responses.create(model="m", input="x")
    with pytest.raises(anthropic.RateLimitError):
        claude.messages.create(model="m", messages=messages, max_tokens=8)
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model="m", messages=[], max_tokens=8)
    assert [call.error["status"] for call in bench.calls()] == [429] * 3


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_google_generate_content(bench: Any, stage: Any, stream: bool) -> None:
    client = genai.Client(api_key="x", http_options={"base_url": bench.url})
    declared = {
        "name": "add",
        "description": "adds",
        "parameters_json_schema": TOOL["parameters"],
    }
    config: Any = {
        "tools": [{"function_declarations": [declared]}],
        "automatic_function_calling": {"disable": True},
    }

    def generate(contents: list[Any]) -> tuple[list[Any], Any]:
        """All parts of the reply, and its usage."""
        if stream:
            replies = [
                *client.models.generate_content_stream(model="m", contents=contents, config=config)
            ]
        else:
            replies = [client.models.generate_content(model="m", contents=contents, config=config)]
        parts = [part for reply in replies for part in reply.candidates[0].content.parts or ()]
        return parts, replies[-1].usage_metadata

    asked: list[Any] = [{"role": "user", "parts": [{"text": "one and two?"}]}]
    parts, _ = generate(asked)
    calls = [part.function_call for part in parts if part.function_call]
    assert [call.args for call in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    results = [
        {"function_response": {"id": call.id, "name": "add", "response": {"output": value}}}
        for call, value in zip(calls, ("3", "7"), strict=True)
    ]
    told = [part.model_dump(exclude_none=True) for part in parts]
    parts, usage = generate(
        [*asked, {"role": "model", "parts": told}, {"role": "user", "parts": results}]
    )
    text = "".join(part.text for part in parts if part.text and not part.thought)
    assert text.strip() == "The sum is 3 and 7."
    check_two_turns(bench, stage)
    last = bench.calls()[-1]
    # Gemini counts thoughts beside candidates; together they are what was sampled.
    counted = (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0)
    assert (usage.prompt_token_count, counted) == (last.prompt_tokens, last.sampled_tokens)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("sends_ids", [True, False], ids=["ids", "signatures"])
def test_of_candidates_that_show_the_same_the_one_that_is_sent_back_is_continued(
    bench: Any, stage: Any, stream: bool, sends_ids: bool
) -> None:
    thoughts = iter(("four", "five", "six"))

    def play(request: Any) -> ScriptedReply:
        if request.messages[-1]["role"] == "tool":
            return ScriptedReply("The sum is 3.")
        return ScriptedReply(reasoning=next(thoughts), tool_calls=CALLS[:1])

    stage.play = play
    client = genai.Client(api_key="x", http_options={"base_url": bench.url})
    declared = {"name": "add", "parameters_json_schema": TOOL["parameters"]}
    config: Any = {
        "tools": [{"function_declarations": [declared]}],
        "automatic_function_calling": {"disable": True},
    }
    asked: list[Any] = [{"role": "user", "parts": [{"text": "one and two?"}]}]
    generate = client.models.generate_content_stream if stream else client.models.generate_content
    replies: Any = generate(model="m", contents=asked, config=config | {"candidate_count": 3})
    (called,) = [
        part
        for reply in (replies if stream else [replies])
        for candidate in reply.candidates
        for part in candidate.content.parts
        if candidate.index == 1 and part.function_call
    ]
    if not sends_ids:
        called.function_call.id = None
    result = types.FunctionResponse(
        id=called.function_call.id, name="add", response={"output": "3"}
    )
    told = [
        *asked,
        types.Content(role="model", parts=[called]),
        types.Content(role="user", parts=[types.Part(function_response=result)]),
    ]
    client.models.generate_content(model="m", contents=told, config=config)

    first, second = bench.calls()
    assert second.parent_call_id == first.id
    prompt, sampled = bench.reader.prompt_token_ids(first.id), bench.reader.sampled(first.id)
    path = [*prompt, *sampled[1].token_ids]
    assert list(stage.requests[-1].prompt_ids)[: len(path)] == path


def test_a_google_chat_that_streams_is_continued(bench: Any, stage: Any) -> None:
    """The client sends every chunk of a reply back as a content of its own."""
    client = genai.Client(api_key="x", http_options={"base_url": bench.url})
    declared = {"name": "add", "parameters_json_schema": TOOL["parameters"]}
    config: Any = {
        "tools": [{"function_declarations": [declared]}],
        "thinking_config": {"include_thoughts": True},
        "automatic_function_calling": {"disable": True},
    }
    talk = client.chats.create(model="m", config=config)
    list(talk.send_message_stream("one and two?"))
    results = [
        types.Part.from_function_response(name="add", response={"output": value})
        for value in ("3", "7")
    ]
    list(talk.send_message_stream(results))
    check_two_turns(bench, stage)
    assert [message["role"] for message in stage.requests[1].messages] == [
        *("user", "assistant", "tool", "tool")
    ]


def test_an_engine_that_is_always_streamed_serves_whole_replies_with_all_their_tokens(
    stage: Any, start_proxy: Any, ask: Any
) -> None:
    stage.play = two_turns
    bench = start_proxy(stage.engine.base_url, stream_upstream=True)
    asked = ask | {"logprobs": True, "tools": [{"type": "function", "function": TOOL}]}
    whole = httpx.post(f"{bench.url}/v1/chat/completions", json=asked).json()
    call = bench.call()
    assert (call.status, call.stream) == (CallStatus.COMPLETE, False)
    assert whole["usage"]["completion_tokens"] == call.sampled_tokens
    assert len(whole["choices"][0]["logprobs"]["content"]) == call.sampled_tokens
    assert len(whole["choices"][0]["message"]["tool_calls"]) == 2


def test_websocket_upgrade_of_responses_is_a_426(bench: Any) -> None:
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    response = httpx.get(bench.url + "/v1/responses", headers=upgrade)
    assert response.status_code == 426
    assert response.headers["upgrade"]
    assert httpx.head(bench.url + "/api/hello").status_code == 200
    wrong = httpx.put(bench.url + "/v1/messages")
    assert wrong.status_code == 405
    assert wrong.json()["type"] == "error"
    assert httpx.post(bench.url + "/v1beta/nothing").json()["error"]["status"] == "NOT_FOUND"


@pytest.mark.parametrize(
    "path",
    [
        "/v1beta/models/policy:bogus",
        "/s/lamp/v1/models/policy:bogus",
        "/v1/responses/compact",
    ],
)
def test_a_route_of_a_provider_that_is_not_served_is_a_404(bench: Any, path: str) -> None:
    response = httpx.post(bench.url + path, json={})
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["message"] == f"nothing is served at {path}"
    assert error.get("status") == ("NOT_FOUND" if "models" in path else None)


def test_a_wrong_method_is_the_clients_fault_in_googles_words(bench: Any) -> None:
    response = httpx.get(bench.url + "/v1beta/models/policy:generateContent")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["status"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/chat/completions", "end the base URL in /v1"),
        ("/s/lamp/responses", "end the base URL in /v1"),
        ("/v1/v1/messages", "leave /v1 out of the base URL"),
        ("/s/lamp/v1/v1beta/models/m:generateContent", "leave /v1 out of the base URL"),
        ("/v1/nothing", None),
        ("/nothing", None),
    ],
)
def test_a_base_url_with_v1_too_much_or_missing_is_told_so(
    bench: Any, path: str, told: str | None
) -> None:
    response = httpx.post(bench.url + path, json={})
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert message.startswith(f"nothing is served at {path}")
    assert message.endswith(path) if told is None else told in message


def test_anthropics_client_is_told_of_an_unknown_model_in_its_own_words(
    claude: anthropic.Anthropic,
) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.models.retrieve("nothing")
    assert caught.value.type == "not_found_error"


@pytest.mark.parametrize("version", ["v1", "v1beta", "v1alpha"])
def test_googles_client_reads_models_by_every_version_of_its_api(
    bench: Any, stage: Any, version: str
) -> None:
    options: Any = {"base_url": bench.url, "api_version": version}
    client = genai.Client(api_key="x", http_options=options)
    name = f"models/{stage.engine.model}"
    assert [model.name for model in client.models.list()] == [name]
    assert client.models.get(model=stage.engine.model).name == name


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "a\0", "messages": SAID}),
        ("/v1/responses", {"model": "a\0", "input": "x"}),
        ("/v1/messages/count_tokens", {"model": "a\0", "messages": SAID}),
        ("/v1beta/models/a%00:generateContent", {"contents": [{"parts": [{"text": "x"}]}]}),
    ],
)
def test_a_models_name_that_no_database_holds_is_refused_before_the_engine_is_asked(
    bench: Any, stage: Any, path: str, body: dict[str, Any]
) -> None:
    """PostgreSQL stores no NUL in a text: the call's record would be lost."""
    response = httpx.post(bench.url + path, json=body)
    assert response.status_code == 400
    assert "NUL" in response.json()["error"]["message"]
    assert not stage.requests


def test_a_colon_in_a_models_name_is_part_of_it(bench: Any) -> None:
    client = genai.Client(api_key="x", http_options={"base_url": bench.url})
    reply = client.models.generate_content(model="qwen3:4b", contents="hi")
    assert reply.model_version == bench.call().model_requested == "qwen3:4b"


def test_what_google_has_and_we_have_not_is_refused_in_its_words(bench: Any) -> None:
    client = genai.Client(api_key="x", http_options={"base_url": bench.url, "api_version": "v1"})
    with pytest.raises(errors.ClientError) as caught:
        client.models.embed_content(model="m", contents="hi")
    assert (caught.value.code, caught.value.status) == (404, "NOT_FOUND")
