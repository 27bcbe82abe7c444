"""``verifiers``: its parsers put streams together to the replies that are not streamed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from asked import CHAT_TOOLS, MODEL, PARAMETERS, QUESTION
from verifiers.v1.dialects import DIALECTS

HI = [{"role": "user", "content": QUESTION}]
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": PARAMETERS} for name in ("weather", "time")
]
MESSAGES_TOOLS = [{"name": tool["name"], "input_schema": PARAMETERS} for tool in TOOLS]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "tools": CHAT_TOOLS},
    "/v1/responses": {"input": HI, "tools": TOOLS},
    "/v1/messages": {"messages": HI, "tools": MESSAGES_TOOLS, "max_tokens": 999},
}


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.routes[0])
def test_stream(dialect: Any, tools: bool, url: str) -> None:
    (route,) = dialect.routes
    body = {"model": MODEL} | BODIES[route]
    if not tools:
        del body["tools"]
    assert dialect.parse_request(body).messages
    answered = httpx.post(url + route, json=body, timeout=60).raise_for_status()
    whole = dialect.parse_response(dialect.validate_response(answered.json()))
    body["stream"] = True
    if route == "/v1/chat/completions":
        body["stream_options"] = {"include_usage": True}
    streamed = httpx.post(url + route, json=body, timeout=60)
    parser, ended = dialect.stream_parser(), False
    for event in filter(None, streamed.raise_for_status().content.split(b"\n\n")):
        parser.feed(event + b"\n\n")
        ended = ended or dialect.is_terminal_event(event + b"\n\n")
    assert ended
    folded = parser.finish()
    assert folded.finish_reason == whole.finish_reason
    for name in ("content", "reasoning_content"):
        assert getattr(folded.message, name) == getattr(whole.message, name)
    ours, theirs = folded.message.tool_calls or [], whole.message.tool_calls or []
    assert [(call.name, call.arguments) for call in ours] == [
        (call.name, call.arguments) for call in theirs
    ]
    assert len(ours) == (2 if tools else 0)
    assert folded.usage.completion_tokens == whole.usage.completion_tokens
