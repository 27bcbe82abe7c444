"""The ``thread`` of the Messages API: the conversation goes on from the record, or is refused.

A refusal has the words upon which the official SDKs send the whole history.
"""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest

from bridle.engine.scripted import ScriptedCall, ScriptedReply

http = httpx.Client(timeout=60, trust_env=False)
TOOL = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CREATE = {"type": "create"}


def weather_agent(request: Any) -> ScriptedReply:
    if request.messages[-1]["role"] == "tool":
        return ScriptedReply("It is sunny.")
    return ScriptedReply(reasoning="Ask.", tool_calls=[ScriptedCall("weather", {"city": "Paris"})])


def continuing(message_id: str) -> dict[str, Any]:
    return {"type": "continue", "previous_message_id": message_id}


def ask(url: str, messages: list[Any], path: str = "/s/paris", **more: Any) -> httpx.Response:
    body = {"model": "m", "max_tokens": 500, "messages": messages, **more}
    return http.post(f"{url}{path}/v1/messages", json=body)


def results(message: Any) -> dict[str, Any]:
    (used,) = [block for block in message["content"] if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": used["id"], "content": "sunny"}
    return {"role": "user", "content": [result]}


@pytest.mark.parametrize("tokenizer", [True, False])
def test_a_continued_thread_goes_on_from_the_record(
    stage: Any, start_proxy: Any, model_dir: Any, tokenizer: bool
) -> None:
    stage.play = weather_agent
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir if tokenizer else None)
    question = [{"role": "user", "content": "Weather in Paris?"}]
    first = ask(bench.url, question, system="Be kind.", tools=[TOOL], thread=CREATE).json()
    second = ask(bench.url, [results(first)], thread=continuing(first["id"]))
    assert second.status_code == 200, second.text
    more = [{"role": "user", "content": "And Rome?"}]
    third = ask(bench.url, more, thread=continuing(second.json()["id"])).json()
    assert third["stop_reason"] == "tool_use"
    sent = stage.requests[-1]
    assert [message["role"] for message in sent.messages] == [
        *("system", "user", "assistant", "tool", "assistant", "user"),
    ]
    assert [tool["function"]["name"] for tool in sent.tools] == ["weather"]
    calls = bench.calls()
    assert len({call.session_id for call in calls}) == 1
    assert [call.parent_call_id for call in calls] == [None, calls[0].id, calls[1].id]
    if tokenizer:
        assert [call.break_reason for call in calls] == [None, None, None]


def test_a_thread_without_any_session_key_stays_one_session(stage: Any, bench: Any) -> None:
    stage.play = weather_agent
    question = [{"role": "user", "content": "Weather in Paris?"}]
    first = ask(bench.url, question, "", tools=[TOOL], thread=CREATE).json()
    assert ask(bench.url, [results(first)], "", thread=continuing(first["id"])).status_code == 200
    assert len({call.session_id for call in bench.calls()}) == 1


def test_a_choice_of_tool_names_a_tool_of_the_thread(stage: Any, bench: Any) -> None:
    stage.play = weather_agent
    question = [{"role": "user", "content": "Weather in Paris?"}]
    first = ask(bench.url, question, tools=[TOOL], thread=CREATE).json()
    choice = {"type": "tool", "name": "weather"}
    for name, status in (("weather", 200), ("other", 400)):
        reply = ask(
            bench.url,
            [results(first)],
            thread=continuing(first["id"]),
            tool_choice=choice | {"name": name},
        )
        assert reply.status_code == status, reply.text


@pytest.mark.parametrize("given", [None, CREATE])
def test_a_request_that_continues_no_thread_is_as_any_other(bench: Any, given: Any) -> None:
    assert ask(bench.url, [{"role": "user", "content": "hi"}], thread=given).status_code == 200


def details(reply: httpx.Response) -> Any:
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["details"]


@pytest.mark.parametrize("name", ["msg_nope", "msg_" + "a" * 24, "resp_1", "", None])
def test_an_unknown_message_is_not_found(bench: Any, name: Any) -> None:
    reply = ask(bench.url, [{"role": "user", "content": "hi"}], thread=continuing(name))
    assert details(reply) == {"error_code": "thread_not_found"}
    counted = http.post(
        f"{bench.url}/v1/messages/count_tokens",
        json={"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        | {"thread": continuing(name)},
    )
    assert details(counted) == {"error_code": "thread_not_found"}


def test_the_tokens_of_a_continued_thread_are_those_of_all_of_it(bench: Any) -> None:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    alone = http.post(f"{bench.url}/v1/messages/count_tokens", json=body).json()
    first = ask(bench.url, body["messages"], thread=CREATE).json()
    body["thread"] = continuing(first["id"])
    whole = http.post(f"{bench.url}/v1/messages/count_tokens", json=body).json()
    assert whole["input_tokens"] > alone["input_tokens"] + first["usage"]["input_tokens"] / 2


def test_a_message_of_another_key_is_not_found(bench: Any) -> None:
    mine, other = (http.post(f"{bench.url}/bridle/v1/sessions", json={}).json() for _ in range(2))
    url, hi = f"{bench.url}/v1/messages", [{"role": "user", "content": "hi"}]
    body = {"model": "m", "max_tokens": 50, "messages": hi}
    made = http.post(url, json=body, headers={"x-api-key": mine["key"]}).json()
    body["thread"] = continuing(made["id"])
    theirs = http.post(url, json=body, headers={"x-api-key": other["key"]})
    assert details(theirs) == {"error_code": "thread_not_found"}
    assert http.post(url, json=body, headers={"x-api-key": mine["key"]}).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"), [("system", "Be rude."), ("tools", [TOOL]), ("messages", [])]
)
def test_what_a_thread_cannot_be_continued_with_is_named(
    bench: Any, field: str, value: Any
) -> None:
    hi = [{"role": "user", "content": "hi"}]
    first = ask(bench.url, hi).json()
    body = {"model": "m", "max_tokens": 50, "messages": hi, field: value}
    body["thread"] = continuing(first["id"])
    reply = http.post(f"{bench.url}/s/paris/v1/messages", json=body)
    assert details(reply) == {"error_code": "thread_unsupported_request", "unsupported": [field]}


def test_the_official_tool_runner_keeps_the_whole_history_in_view(stage: Any, bench: Any) -> None:
    stage.play = weather_agent

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Weather of a city."""
        return f"{city}: sunny"

    client = anthropic.Anthropic(base_url=f"{bench.url}/s/run", api_key="x", max_retries=0)
    runner = client.beta.messages.tool_runner(
        model="m",
        max_tokens=500,
        tools=[weather],
        messages=[{"role": "user", "content": "Weather in Paris?"}],
    )
    last = runner.until_done()
    assert last.content[-1].text == "It is sunny."  # type: ignore[union-attr]
    calls = bench.calls()
    assert [call.parent_call_id for call in calls] == [None, calls[0].id]
    assert [m["role"] for m in stage.requests[-1].messages] == ["user", "assistant", "tool"]
