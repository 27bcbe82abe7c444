"""Conversation objects of Responses, with OpenAI's own client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from bridle.reconstruct.audit import audit_session
from bridle.store.records import CallKind

SAID = "The answer is four."


def client_of(url: str, path: str = "", key: str = "x") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}{path}/v1", api_key=key, max_retries=0)


@pytest.fixture(params=["/s/lamp", ""], ids=["named", "anonymous"])
def client(bench: Any, request: Any) -> openai.OpenAI:
    return client_of(bench.url, request.param)


def texts(client: openai.OpenAI, conversation: str) -> list[str]:
    found: list[Any] = [*client.conversations.items.list(conversation, order="asc", limit=2)]
    return [item.content[0].text for item in found]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_three_turns_in_a_conversation_are_one_chain(
    bench: Any, stage: Any, client: openai.OpenAI, stream: bool
) -> None:
    first: Any = {"type": "message", "role": "user", "content": "I am Ada."}
    made = client.conversations.create(items=[first], metadata={"topic": "names"})
    assert client.conversations.retrieve(made.id) == made
    assert made.metadata == {"topic": "names"}
    for turn in range(3):
        given: Any = {"model": "m", "input": f"turn {turn}", "conversation": made.id}
        if stream:
            *_, last = client.responses.create(**given, stream=True)
            reply = last.response
        else:
            reply = client.responses.create(**given)
        assert reply.conversation.id == made.id
    asked = stage.requests[-1].messages
    assert [message["content"] for message in asked] == [
        "I am Ada.",
        *("turn 0", SAID, "turn 1", SAID),
        "turn 2",
    ]
    assert texts(client, made.id) == [*(one["content"] for one in asked), SAID]
    calls = [call for call in bench.judged() if call.kind is not CallKind.SIDE]
    assert [call.parent_call_id for call in calls] == [None, calls[0].id, calls[1].id]
    assert {call.session_id for call in bench.calls()} == {calls[0].session_id}
    assert audit_session(bench.reader, calls[0].session_id).clean


def test_items_are_added_read_and_deleted(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    one: Any = {"type": "message", "role": "user", "content": "one"}
    call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    done: Any = {"type": "function_call_output", "call_id": "c", "output": "2"}
    added = client.conversations.items.create(made.id, items=[one, call, done])
    assert [item.type for item in added.data] == [
        "message",
        "function_call",
        "function_call_output",
    ]
    ids: list[str] = [str(item.id) for item in added.data]
    assert client.conversations.items.retrieve(ids[0], conversation_id=made.id) == added.data[0]
    client.responses.create(model="m", input="on", conversation={"id": made.id})
    assert client.conversations.items.delete(ids[0], conversation_id=made.id).id == made.id
    left = [item.type for item in client.conversations.items.list(made.id, order="asc")]
    assert left == ["function_call", "function_call_output", "message", "message"]
    with pytest.raises(openai.NotFoundError, match=ids[0]):
        client.conversations.items.retrieve(ids[0], conversation_id=made.id)


def test_a_conversation_is_updated_and_deleted(bench: Any, client: openai.OpenAI) -> None:
    made = client.conversations.create(metadata={"a": "1"})
    assert client.conversations.update(made.id, metadata={"b": "2"}).metadata == {"b": "2"}
    assert client.conversations.retrieve(made.id).metadata == {"b": "2"}
    gone = client.conversations.delete(made.id)
    assert (gone.id, gone.deleted) == (made.id, True)
    for ask in (
        lambda: client.conversations.retrieve(made.id),
        lambda: client.conversations.items.list(made.id),
        lambda: client.responses.create(model="m", input="on", conversation=made.id),
    ):
        with pytest.raises(openai.NotFoundError, match=f"'{made.id}' not found"):
            ask()
    assert len(bench.calls()) == 3, "the record keeps what a client deleted"


def test_another_proxy_on_the_store_knows_the_conversation(
    bench: Any, stage: Any, start_proxy: Any
) -> None:
    client = client_of(bench.url, "/s/lamp")
    made = client.conversations.create(metadata={"a": "1"})
    client.responses.create(model="m", input="hi", conversation=made.id)
    other = client_of(start_proxy(stage.engine.base_url).url, "/s/lamp")
    other.responses.create(model="m", input="on", conversation=made.id)
    assert texts(client, made.id) == texts(other, made.id) == ["hi", SAID, "on", SAID]
    assert other.conversations.retrieve(made.id).metadata == {"a": "1"}


def test_only_its_own_session_has_a_conversation(bench: Any) -> None:
    keys = [
        httpx.post(f"{bench.url}/bridle/v1/sessions", json={}, timeout=60).json()["key"]
        for _ in range(2)
    ]
    mine, other = (client_of(bench.url, key=key) for key in keys)
    made = mine.conversations.create()
    for stranger in (other, client_of(bench.url, "/s/other")):
        with pytest.raises(openai.NotFoundError):
            stranger.conversations.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            stranger.responses.create(model="m", input="on", conversation=made.id)
    assert mine.conversations.retrieve(made.id).id == made.id


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"conversation": "conv_a", "previous_response_id": "resp_a"}, "mutually exclusive"),
        ({"conversation": {"name": "x"}}, "conversation.id"),
    ],
)
def test_a_wrong_conversation_is_refused(bench: Any, given: Any, field: str) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        client_of(bench.url).responses.create(model="m", input="on", **given)


def test_wrong_items_are_refused(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    many: Any = [{"role": "user", "content": "x"}] * 21
    wrong: Any = [{"text": "x"}]
    for items, words in ((many, "at most 20"), (wrong, "items.0..type")):
        with pytest.raises(openai.BadRequestError, match=words):
            client.conversations.items.create(made.id, items=items)
