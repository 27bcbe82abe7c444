"""The requests of the installed harnesses, recorded against these dialects.

They were sent after three turns with two parallel calls, a failing one and reasoning. Texts are
shortened and identities blanked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bridle.proxy.dialects.registry import GOOGLE, MESSAGES, RESPONSES
from bridle.proxy.wire import minting
from bridle.proxy.wire.canonical import Request

FIXTURES = Path(__file__).parent / "fixtures"
PATH = {"model": "gemini-2.5-pro", "method": "streamGenerateContent"}


def codex() -> Request:
    return RESPONSES.parse((FIXTURES / "codex.json").read_bytes(), {}, {})


def claude_code() -> Request:
    return MESSAGES.parse((FIXTURES / "claude_code.json").read_bytes(), {}, {"beta": "true"})


def gemini_cli() -> Request:
    body = (FIXTURES / "gemini_cli.json").read_bytes()
    return GOOGLE.parse(body, PATH, {"alt": "sse"})


@pytest.mark.parametrize("request_of", [codex, claude_code, gemini_cli])
def test_each_assistant_turn_names_one_call_and_each_result_its_call(request_of: object) -> None:
    request: Request = request_of()  # type: ignore[operator]
    turns = [message for message in request.messages if message.role == "assistant"]
    results = [message for message in request.messages if message.role == "tool"]

    calls = []
    for turn in turns:
        values = [*turn.anchors, *(call.id for call in turn.tool_calls)]
        assert len(minting.call_ids(values)) == 1
        assert turn.anchors
        calls += [call.id for call in turn.tool_calls]
    assert [len(turn.tool_calls) for turn in turns] == [2, 1]
    assert sorted(calls) == sorted(str(result.tool_call_id) for result in results)
    assert request.stream


def test_codex_keeps_reasoning_and_its_tools() -> None:
    request = codex()
    names = [tool["function"]["name"] for tool in request.tools]

    assert [message.role for message in request.messages[:4]] == [
        "system",
        "system",
        "user",
        "user",
    ]
    assert all(m.reasoning == "Let me think." for m in request.messages if m.role == "assistant")
    assert "exec_command" in names
    assert "multi_agent_v1__spawn_agent" in names
    assert {note.name for note in request.notes} == {
        "namespace_flattened",
        "tool_dropped",
        "role_converted",
        "response_not_stored",
    }


def test_claude_code_keeps_its_inline_system_message_and_the_order_of_results() -> None:
    request = claude_code()

    assert [message.role for message in request.messages] == [
        "system",
        "user",
        "system",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
    ]
    assert str(request.messages[0].content).startswith("x-anthropic-billing-header:")
    first, second = (call.id for call in request.messages[3].tool_calls)
    assert [m.tool_call_id for m in request.messages[4:6]] == [second, first]
    assert {note.name for note in request.notes} == {"field_dropped", "tool_error_flag"}


def test_gemini_cli_drops_thoughts_but_echoes_signatures() -> None:
    request = gemini_cli()

    assert all(message.reasoning is None for message in request.messages)
    assert request.wants.reasoning
    assert {note.name for note in request.notes} == {"field_dropped"}


def test_codex_code_mode_brings_its_tools_inside_the_conversation() -> None:
    """Two-level names, freeform tools and tools that come as an item: all of them at once."""
    body = (FIXTURES / "codex_code_mode.json").read_bytes()
    request = RESPONSES.parse(body, {}, {})
    names = [tool["function"]["name"] for tool in request.tools]
    turn, result = request.messages[-2:]

    assert names[0] == "functions__exec"
    assert "clock__sleep" in names
    assert turn.tool_calls[0].name == "functions__exec"
    assert turn.tool_calls[0].arguments == '{"input":"text(\\"hé \\" + (1+1))"}'
    assert result.tool_call_id == turn.tool_calls[0].id
    assert turn.reasoning == "Let me think."
    assert request.own.tools["functions__exec"].custom
