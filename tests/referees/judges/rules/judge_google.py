"""Google's own SDK, with its chats and its automatic function calls."""

from __future__ import annotations

from typing import Any

import pytest
from asked import QUESTION, TURNS, City
from google import genai
from google.genai import errors, types

THINKING = types.GenerateContentConfig(thinking_config=types.ThinkingConfig(include_thoughts=True))


@pytest.fixture
def client(url: str) -> genai.Client:
    options = types.HttpOptions(base_url=url, retry_options=types.HttpRetryOptions(attempts=1))
    return genai.Client(api_key="k", http_options=options)


def test_models(client: genai.Client) -> None:
    for listed in client.models.list():
        assert listed.name
        assert client.models.get(model=listed.name).name == listed.name


def test_content(client: genai.Client, model: str) -> None:
    reply = client.models.generate_content(model=model, contents=QUESTION, config=THINKING)
    assert (reply.text or "").strip() == "The answer is four."
    assert reply.usage_metadata is not None
    counted = client.models.count_tokens(model=model, contents=QUESTION)
    assert counted.total_tokens == reply.usage_metadata.prompt_token_count


def test_content_stream(client: genai.Client, model: str) -> None:
    chunks = list(
        client.models.generate_content_stream(model=model, contents=QUESTION, config=THINKING)
    )
    parts = [part for chunk in chunks for part in chunk.parts or ()]
    assert any(part.thought for part in parts)
    used = chunks[-1].usage_metadata
    assert used is not None
    assert used.thoughts_token_count


def test_parsed(client: genai.Client, model: str) -> None:
    said = 'Say exactly: {"name": "Oslo", "people": 700000}'
    config = types.GenerateContentConfig(
        response_mime_type="application/json", response_schema=City
    )
    reply = client.models.generate_content(model=model, contents=said, config=config)
    assert reply.parsed == City(name="Oslo", people=700000)


@pytest.mark.parametrize("streamed", [False, True])
def test_chat(client: genai.Client, model: str, streamed: bool) -> None:
    chat = client.chats.create(model=model, config=THINKING)
    for turn in range(TURNS):
        if streamed:
            list(chat.send_message_stream(QUESTION))
        else:
            chat.send_message(QUESTION)
        assert len(chat.get_history(curated=True)) >= 2 * (turn + 1)


@pytest.mark.parametrize("streamed", [False, True])
def test_automatic_calls(client: genai.Client, model: str, streamed: bool) -> None:
    called = []

    def weather(city: str) -> str:
        """Return the weather of a city."""
        called.append(city)
        return f"Sunny in {city}."

    config = types.GenerateContentConfig(
        tools=[weather], thinking_config=types.ThinkingConfig(include_thoughts=True)
    )
    chat = client.chats.create(model=model, config=config)
    for turn in range(TURNS):
        if streamed:
            said = "".join(chunk.text or "" for chunk in chat.send_message_stream(QUESTION))
        else:
            said = chat.send_message(QUESTION).text or ""
        assert said.strip() == "The answer is four."
        assert len(called) == turn + 1


def test_errors(client: genai.Client, model: str) -> None:
    hot: Any = {"temperature": -1}
    with pytest.raises(errors.ClientError):
        client.models.generate_content(model=model, contents=QUESTION, config=hot)
    with pytest.raises(errors.ClientError):
        client.models.get(model="models/no-such-model")
