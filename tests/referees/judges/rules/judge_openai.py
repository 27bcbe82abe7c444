"""OpenAI's own SDK, which validates every reply and event strictly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from asked import CHAT_TOOLS, EXACTLY, HI, PARAMETERS, TURNS, City

TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": PARAMETERS, "strict": False}
    for name in ("weather", "time")
]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="k", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    for listed in client.models.list():
        assert client.models.retrieve(listed.id).id == listed.id


def test_chat(client: openai.OpenAI, model: str) -> None:
    reply = client.chat.completions.create(model=model, messages=HI)
    assert (reply.choices[0].message.content or "").strip() == "The answer is four."
    assert reply.usage is not None
    assert reply.usage.total_tokens > 0


def test_chat_choices_and_logprobs(client: openai.OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model, messages=HI, n=2, logprobs=True, top_logprobs=1
    )
    assert len(reply.choices) == 2
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.content


def test_chat_stream(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model, messages=HI, stream_options={"include_usage": True}
    ) as stream:
        final = stream.get_final_completion()
    details = final.usage.completion_tokens_details if final.usage else None
    assert (final.choices[0].message.content or "").strip() == "The answer is four."
    assert details is not None
    assert details.reasoning_tokens


def test_chat_parsed(client: openai.OpenAI, model: str) -> None:
    reply = client.chat.completions.parse(
        model=model, messages=[{"role": "user", "content": EXACTLY}], response_format=City
    )
    assert reply.choices[0].message.parsed == City(name="Oslo", people=700000)


@pytest.mark.parametrize("streamed", [False, True])
def test_chat_tools(client: openai.OpenAI, model: str, streamed: bool) -> None:
    messages = list(HI)
    for _ in range(TURNS):
        if streamed:
            with client.chat.completions.stream(
                model=model, messages=messages, tools=CHAT_TOOLS
            ) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            asked = client.chat.completions.create(model=model, messages=messages, tools=CHAT_TOOLS)
            message = asked.choices[0].message  # type: ignore[assignment]
        calls = message.tool_calls or []
        assert [call.function.name for call in calls] == ["weather", "time"]
        messages.append(message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": call.function.arguments}
            for call in calls
        ]
        messages.append({"role": "user", "content": "And again?"})


def test_completions(client: openai.OpenAI, model: str) -> None:
    assert client.completions.create(model=model, prompt="Two and two").choices[0].text


def test_completions_stream(client: openai.OpenAI, model: str) -> None:
    for chunk in client.completions.create(model=model, prompt="Two and two", stream=True):
        assert chunk.object == "text_completion"


@pytest.mark.parametrize(
    ("failure", "fields"),
    [
        (openai.BadRequestError, {"messages": [{"role": "nobody", "content": "hi"}]}),
        (openai.BadRequestError, {"temperature": "hot"}),
        (openai.NotFoundError, {"extra_headers": {"x-bridle-session": "no such/one?"}}),
    ],
)
def test_chat_errors(
    client: openai.OpenAI, model: str, failure: type[Exception], fields: dict[str, Any]
) -> None:
    if failure is openai.NotFoundError:
        with pytest.raises(failure):
            client.models.retrieve("no-such-model")
        return
    with pytest.raises(failure):
        client.chat.completions.create(**{"model": model, "messages": HI} | fields)


def test_responses(client: openai.OpenAI, model: str) -> None:
    reply = client.responses.create(model=model, input="What is two and two?")
    assert reply.output_text.strip() == "The answer is four."
    assert reply.completed_at is not None
    assert client.responses.retrieve(reply.id).id == reply.id
    again = client.responses.create(model=model, input="And?", previous_response_id=reply.id)
    assert again.previous_response_id == reply.id
    client.responses.delete(reply.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(reply.id)


def test_responses_input(client: openai.OpenAI, model: str) -> None:
    count = client.responses.input_tokens.count(model=model, input="What is two and two?")
    reply = client.responses.create(model=model, input="What is two and two?")
    assert reply.usage is not None
    assert count.input_tokens == reply.usage.input_tokens
    items = list(client.responses.input_items.list(reply.id))
    assert [item.type for item in items] == ["message"]


@pytest.mark.parametrize("summary", [None, "auto"])
def test_responses_stream(client: openai.OpenAI, model: str, summary: Any) -> None:
    reasoning: Any = {"effort": "low", "summary": summary}
    with client.responses.stream(
        model=model, input="What is two and two?", reasoning=reasoning
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.usage is not None
    assert final.usage.output_tokens_details.reasoning_tokens


def test_responses_parsed(client: openai.OpenAI, model: str) -> None:
    reply = client.responses.parse(model=model, input=EXACTLY, text_format=City)
    assert reply.output_parsed == City(name="Oslo", people=700000)


@pytest.mark.parametrize("by", ["items", "previous"])
@pytest.mark.parametrize("streamed", [False, True])
def test_responses_tools(client: openai.OpenAI, model: str, by: str, streamed: bool) -> None:
    items: list[Any] = list(HI)
    previous: Any = openai.omit
    for _ in range(TURNS):
        asked: Any = {"input": items, "tools": TOOLS, "previous_response_id": previous}
        asked |= {"model": model, "include": ["reasoning.encrypted_content"]}
        if streamed:
            with client.responses.stream(**asked) as stream:
                reply: Any = stream.get_final_response()
        else:
            reply = client.responses.create(**asked)
        calls = [item for item in reply.output if item.type == "function_call"]
        assert [call.name for call in calls] == ["weather", "time"]
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": call.arguments}
            for call in calls
        ]
        next_turn = [*results, {"role": "user", "content": "And again?"}]
        if by == "previous":
            items, previous = next_turn, reply.id
        else:
            items += [item.model_dump(exclude_none=True) for item in reply.output] + next_turn


@pytest.mark.parametrize("fields", [{"input": 7}, {"temperature": "hot"}, {"background": True}])
def test_responses_errors(client: openai.OpenAI, model: str, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": model, "input": "hi"} | fields)
    assert json.loads(refused.value.response.text)["error"]["message"]
