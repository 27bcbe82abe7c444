"""The official client of each dialect, reading what the dialect writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import orjson
from anthropic.types import RawMessageStreamEvent
from google import genai
from google.genai import errors, types
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from bridle.proxy.dialects.dialect import Dialect
from bridle.proxy.dialects.registry import CHAT, GOOGLE, MESSAGES, RESPONSES
from bridle.proxy.wire.canonical import Request

HI: list[Any] = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Read:
    """A reply as a client gathered it, in no dialect's words.

    ``calls`` holds the name and the arguments, as an object, of each call.
    """

    reasoning: str = ""
    text: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


@dataclass(frozen=True)
class Client:
    """A dialect with its provider's client.

    ``stream`` and ``plain`` ask the server at a URL and gather its reply; ``event`` is the SDK's
    type of one event of a stream; ``failure`` is raised for an error.
    """

    dialect: Dialect
    request: Request
    stream: Callable[[str], Read]
    plain: Callable[[str], Read]
    event: TypeAdapter[Any]
    failure: type[Exception]


def _parsed(dialect: Dialect, body: dict[str, Any], *path: dict[str, str]) -> Request:
    return dialect.parse(orjson.dumps({"model": "m", "stream": True, **body}), *path or ({}, {}))


def _openai(url: str) -> openai.OpenAI:
    return openai.OpenAI(api_key="k", base_url=f"{url}/v1", max_retries=0)


def _chat_stream(url: str) -> Read:
    # The SDK's own gathering has no final completion for one that was cut.
    reasoning = text = ""
    calls: dict[int, list[str]] = {}
    for chunk in _openai(url).chat.completions.create(model="m", messages=HI, stream=True):
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", "") or ""
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                function = call.function
                name, arguments = calls.setdefault(call.index, ["", ""])
                calls[call.index] = [
                    name or (function and function.name) or "",
                    arguments + ((function and function.arguments) or ""),
                ]
    whole = ((name, orjson.loads(arguments or "{}")) for name, arguments in calls.values())
    return Read(reasoning, text, tuple(whole))


def _chat_plain(url: str) -> Read:
    message = _openai(url).chat.completions.create(model="m", messages=HI).choices[0].message
    calls = tuple(map(_chat_call, message.tool_calls or []))
    return Read(getattr(message, "reasoning_content", None) or "", message.content or "", calls)


def _chat_call(call: Any) -> tuple[str, dict[str, Any]]:
    return call.function.name, orjson.loads(call.function.arguments or "{}")


def _response(response: Any) -> Read:
    items = response.output
    reasoning = [part.text for item in items if item.type == "reasoning" for part in item.content]
    calls = [item for item in items if item.type == "function_call"]
    return Read(
        "".join(reasoning),
        response.output_text,
        tuple((call.name, orjson.loads(call.arguments or "{}")) for call in calls),
    )


def _responses_stream(url: str) -> Read:
    # The SDK's own gathering has no final response for one that was cut.
    *_, last = _openai(url).responses.create(model="m", input="hi", stream=True)
    if last.type not in ("response.completed", "response.incomplete"):
        raise openai.APIError(str(last), request=None, body=None)  # type: ignore[arg-type]
    return _response(last.response)


def _responses_plain(url: str) -> Read:
    return _response(_openai(url).responses.create(model="m", input="hi"))


def _anthropic(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(api_key="k", base_url=url, max_retries=0)


def _message(message: anthropic.types.Message) -> Read:
    blocks = message.content
    return Read(
        "".join(block.thinking for block in blocks if block.type == "thinking"),
        "".join(block.text for block in blocks if block.type == "text"),
        tuple((block.name, dict(block.input)) for block in blocks if block.type == "tool_use"),
    )


def _messages_stream(url: str) -> Read:
    with _anthropic(url).messages.stream(model="m", max_tokens=9, messages=HI) as stream:
        return _message(stream.get_final_message())


def _messages_plain(url: str) -> Read:
    return _message(_anthropic(url).messages.create(model="m", max_tokens=9, messages=HI))


def _gemini(url: str) -> genai.Client:
    retry = types.HttpRetryOptions(attempts=1)
    return genai.Client(
        api_key="k", http_options=types.HttpOptions(base_url=url, retry_options=retry)
    )


def _content(chunks: list[types.GenerateContentResponse]) -> Read:
    parts = [part for chunk in chunks for part in chunk.parts or []]
    calls = [part.function_call for part in parts if part.function_call]
    return Read(
        "".join(part.text or "" for part in parts if part.thought),
        "".join(part.text or "" for part in parts if not part.thought),
        tuple((call.name or "", call.args or {}) for call in calls),
    )


def _google_stream(url: str) -> Read:
    client = _gemini(url)
    return _content([*client.models.generate_content_stream(model="m", contents="hi")])


def _google_plain(url: str) -> Read:
    client = _gemini(url)
    return _content([client.models.generate_content(model="m", contents="hi")])


CLIENTS = {
    client.dialect.name: client
    for client in (
        Client(
            CHAT,
            _parsed(CHAT, {"messages": HI}),
            _chat_stream,
            _chat_plain,
            TypeAdapter(ChatCompletionChunk),
            openai.APIError,
        ),
        Client(
            RESPONSES,
            _parsed(RESPONSES, {"input": "hi"}),
            _responses_stream,
            _responses_plain,
            TypeAdapter(ResponseStreamEvent),
            openai.APIError,
        ),
        Client(
            MESSAGES,
            _parsed(MESSAGES, {"messages": HI, "max_tokens": 9}),
            _messages_stream,
            _messages_plain,
            TypeAdapter(RawMessageStreamEvent),
            anthropic.APIStatusError,
        ),
        Client(
            GOOGLE,
            _parsed(
                GOOGLE,
                {
                    "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
                    "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
                },
                {"model": "m", "method": "streamGenerateContent"},
                {"alt": "sse"},
            ),
            _google_stream,
            _google_plain,
            TypeAdapter(types.GenerateContentResponse),
            errors.ServerError,
        ),
    )
}


def typed_events(stream: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream in which each has its type's name as well."""
    events = []
    for block in stream.split(b"\n\n")[:-1]:
        name, data = block.split(b"\n", 1)
        event = orjson.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        events.append(event)
    return events
