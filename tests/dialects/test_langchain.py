"""LangChain over Responses: what it gathers, and what it sends back names its call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from bridle.proxy.dialects.registry import RESPONSES
from bridle.proxy.wire import minting
from bridle.proxy.wire.canonical import (
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    Usage,
)


@tool
def look(place: str) -> str:
    """Looks at a place."""
    return place


@pytest.mark.parametrize("version", ["v0", "responses/v1", "v1"])
@pytest.mark.parametrize("streaming", [False, True])
def test_langchain_echoes_a_turn_that_names_its_call(
    server: Any,
    streamed: Callable[..., bytes],
    mint: Any,
    fold: Any,
    call_id: str,
    streaming: bool,
    version: Any,
) -> None:
    dialect = RESPONSES
    body = {"model": "m", "input": "hi", "stream": streaming}
    asked = dialect.parse(orjson.dumps(body), {}, {})
    events = [
        Started(11),
        ReasoningDelta("hm"),
        TextDelta("Looking."),
        ToolCallDelta(0, f"{call_id}00", "look", '{"place": "here"}'),
        Finished("tool_calls"),
        Usage(11, 7),
    ]
    if streaming:
        server.answer(streamed(dialect, asked, events), "text/event-stream")
    else:
        server.answer(dialect.reply(asked, mint(dialect, asked), fold(events)))
    model = ChatOpenAI(
        model="m",
        api_key=SecretStr("k"),
        base_url=f"{server.url}/v1",
        use_responses_api=True,
        output_version=version,
        streaming=streaming,
    ).bind_tools([look])

    said = model.invoke("hi")
    (call,) = said.tool_calls
    model.invoke([HumanMessage("hi"), said, ToolMessage("x", tool_call_id=call["id"])])

    assert call["args"] == {"place": "here"}
    assert said.usage_metadata is not None
    assert said.usage_metadata["input_tokens"] == 11
    echoed = dialect.parse(server.received[1][1], {}, {})
    assert [message.role for message in echoed.messages] == ["user", "assistant", "tool"]
    turn = echoed.messages[1]
    assert turn.content == "Looking."
    assert minting.call_ids([*turn.anchors, turn.tool_calls[0].id]) == (call_id,)
    assert turn.anchors
