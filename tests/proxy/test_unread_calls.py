"""Calls that the engine returned as text are noted, counted, and never plain content in silence."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.mark.parametrize(
    ("reply", "tools", "noted"),
    [
        ("[TOOL_CALLS]add[ARGS]{}", TOOLS, ["mistral"]),
        ('<tool_call>{"name": "add", "argum', TOOLS, ["hermes"]),
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', TOOLS, []),
        ("The sum is 3.", TOOLS, []),
        ("[TOOL_CALLS]add[ARGS]{}", None, []),
    ],
)
def test_calls_that_stay_text_are_noted_and_counted(
    bench: Any, stage: Any, reply: str, tools: Any, noted: list[str]
) -> None:
    stage.play = lambda _: reply
    body = {"model": "tiny-policy", "messages": [{"role": "user", "content": "x"}], "tools": tools}
    httpx.post(f"{bench.url}/v1/chat/completions", json=body, timeout=30).raise_for_status()
    (call,) = bench.calls()
    found = [note.detail for note in call.notes if note.name == "tool_calls_unread"]
    assert found == noted
    counted = 'bridle_events_total{name="tool_calls_unread"} 1.0'
    assert (counted in httpx.get(f"{bench.url}/metrics").text) == bool(noted)
