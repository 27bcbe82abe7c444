"""Responses that are stored: read, deleted, or not stored at all; and counts in the record."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import orjson
import pytest

from bridle.reconstruct.audit import audit
from bridle.store.records import CallKind, CallStatus

http = httpx.Client(timeout=60, trust_env=False)
HI: Any = {"role": "user", "content": "hi"}


@pytest.fixture
def client(bench: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{bench.url}/s/lamp/v1", api_key="x", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_response_is_read_back_as_it_was(client: openai.OpenAI, stream: bool) -> None:
    if stream:
        *_, last = client.responses.create(model="m", input="hi", stream=True)
        made = last.response  # type: ignore[union-attr]
    else:
        made = client.responses.create(model="m", input="hi")
    read = client.responses.retrieve(made.id)
    assert read.output_text == "The answer is four."
    assert read.model_dump() == made.model_dump()


def test_a_deleted_response_is_gone_for_clients_and_kept_in_the_record(
    bench: Any, client: openai.OpenAI
) -> None:
    made = client.responses.create(model="m", input="hi")
    after = client.responses.create(model="m", input="on", previous_response_id=made.id)
    item: Any = {"type": "item_reference", "id": made.output[0].id}
    assert client.responses.create(model="m", input=[item]).id
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="m", input="on", previous_response_id=made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="m", input=[item])
    assert client.responses.retrieve(after.id).id == after.id
    assert client.responses.create(model="m", input="x", previous_response_id=after.id).id
    first = bench.calls()[0]
    assert first.status is CallStatus.COMPLETE
    assert "response_deleted" in {note.name for note in first.notes}
    assert bench.reader.response_body(first.id)
    assert not [v for one in audit(bench.reader, bodies=True) for v in one.violations]


def test_store_false_is_honoured(bench: Any, client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="m", input="on", previous_response_id=made.id)
    item: Any = {"type": "item_reference", "id": made.output[0].id}
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="m", input=[item])
    assert "response_not_stored" in {note.name for note in bench.call().notes}


def test_a_reply_that_says_an_events_name_is_stored_as_any_other(
    start_proxy: Any, raw_engine: Any
) -> None:
    said = {"choices": [{"delta": {"content": "response.output_item.done"}}]}
    over = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    stream = b"".join(b"data: %b\n\n" % orjson.dumps(chunk) for chunk in (said, over))

    async def answer(_receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": stream + b"data: [DONE]\n\n"})

    raw_engine.answer = answer
    url = start_proxy(raw_engine.base_url, model="m").url
    client = openai.OpenAI(base_url=f"{url}/s/lamp/v1", api_key="x", max_retries=0)
    *_, last = client.responses.create(model="m", input="hi", stream=True)
    item: Any = {"type": "item_reference", "id": last.response.output[0].id}  # type: ignore[union-attr]
    *_, last = client.responses.create(model="m", input=[item], stream=True)
    assert last.type == "response.completed"


def test_only_the_sessions_own_key_reads_continues_or_deletes(bench: Any) -> None:
    mine, other = (http.post(f"{bench.url}/bridle/v1/sessions", json={}).json() for _ in range(2))

    def opened(session: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{bench.url}/v1", api_key=session["key"], max_retries=0)

    made = opened(mine).responses.create(model="m", input="hi")
    for method in (opened(other).responses.retrieve, opened(other).responses.delete):
        with pytest.raises(openai.NotFoundError):
            method(made.id)
    item: Any = [{"type": "item_reference", "id": made.output[0].id}]
    for asked in ({"previous_response_id": made.id, "input": "on"}, {"input": item}):
        with pytest.raises(openai.NotFoundError):
            opened(other).responses.create(model="m", **asked)
        assert opened(mine).responses.create(model="m", **asked).id
    assert opened(mine).responses.retrieve(made.id).id == made.id


@pytest.mark.parametrize("name", ["resp_nope", "chatcmpl-1", "resp_" + "a" * 24, "%00", "x y"])
def test_what_was_never_a_response_is_a_404(bench: Any, name: str) -> None:
    for method in ("GET", "DELETE"):
        reply = http.request(method, f"{bench.url}/v1/responses/{name}")
        assert reply.status_code == 404, reply.text
        assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_chat_reply_is_no_response(bench: Any, ask: Any) -> None:
    made = http.post(f"{bench.url}/v1/chat/completions", json=ask).json()
    name = made["id"].replace("chatcmpl-", "resp_")
    assert http.get(f"{bench.url}/v1/responses/{name}").status_code == 404


def test_counted_prompts_are_recorded_as_counts(bench: Any) -> None:
    client = anthropic.Anthropic(base_url=f"{bench.url}/s/lamp", api_key="x")
    messages: Any = [{"role": "user", "content": "two and two?"}]
    counted = client.messages.count_tokens(model="m", messages=messages)
    said = client.messages.create(model="m", max_tokens=64, messages=messages)
    assert said.usage.input_tokens == counted.input_tokens
    body = {"contents": [{"role": "user", "parts": [{"text": "two and two?"}]}]}
    url = f"{bench.url}/s/lamp/v1beta/models/m:countTokens"
    assert http.post(url, json=body).json()["totalTokens"] == counted.input_tokens
    first, call, last = bench.calls()
    assert [one.kind for one in (first, last)] == [CallKind.COUNT] * 2
    assert [one.dialect for one in (first, last)] == ["messages", "google"]
    assert first.usage["prompt_tokens"] == counted.input_tokens
    assert (first.status, first.notes, call.parent_call_id) == (CallStatus.COMPLETE, (), None)
    assert not [v for one in audit(bench.reader, bodies=True) for v in one.violations]


def test_a_count_that_belongs_to_no_session_is_counted_as_such(bench: Any) -> None:
    body = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
    assert http.post(f"{bench.url}/v1beta/models/m:countTokens", json=body).status_code == 200
    assert bench.calls() == []
    metrics = http.get(f"{bench.url}/metrics").text
    assert 'bridle_events_total{name="count_without_session"} 1.0' in metrics


def test_the_input_of_a_response_is_listed_after_what_it_continues(client: openai.OpenAI) -> None:
    first = client.responses.create(model="m", input="hi")
    message: Any = {"role": "assistant", "content": "Yes?"}
    item: Any = {"type": "item_reference", "id": first.output[-1].id}
    second = client.responses.create(
        model="m", input=[message, item, HI], previous_response_id=first.id
    )
    listed = [*client.responses.input_items.list(second.id, order="asc", limit=2)]
    said = [part.text for one in listed for part in one.content]  # type: ignore[union-attr]
    assert said == ["hi", "The answer is four.", "Yes?", "The answer is four.", "hi"]
    assert len({one.id for one in listed}) == 5
    newest, *_ = client.responses.input_items.list(second.id)
    assert newest.id == listed[-1].id


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "after=nothing"])
def test_a_page_of_input_that_cannot_be_is_refused(
    bench: Any, client: openai.OpenAI, query: str
) -> None:
    made = client.responses.create(model="m", input="hi")
    reply = http.get(f"{bench.url}/v1/responses/{made.id}/input_items?{query}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, query.partition("=")[0])
    assert http.get(f"{bench.url}/v1/responses/resp_no/input_items").status_code == 404


def test_input_tokens_are_counted_as_the_prompt_is(bench: Any, client: openai.OpenAI) -> None:
    first = client.responses.create(model="m", input="hi")
    asked: Any = {"model": "m", "input": "on", "previous_response_id": first.id}
    counted = client.responses.input_tokens.count(**asked)
    assert counted.input_tokens == client.responses.create(**asked).usage.input_tokens  # type: ignore[union-attr]
    assert [call.kind for call in bench.calls()].count(CallKind.COUNT) == 1
