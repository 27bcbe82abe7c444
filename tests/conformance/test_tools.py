"""Hermes tool calls, whole and in streams."""

from __future__ import annotations

import json
from typing import Any


def test_a_tool_call_is_parsed_out_of_the_text(api: Any) -> None:
    choice = api.chat("call")["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"]
    assert call["function"]["name"] == "lookup"
    assert json.loads(call["function"]["arguments"]) == {"key": "blue", "limit": 3}
    assert choice["message"]["content"].strip() == "Let me look."
    assert choice["finish_reason"] == "tool_calls"


def test_parallel_calls_are_all_parsed(api: Any) -> None:
    calls = api.chat("calls")["choices"][0]["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"])["key"] for call in calls] == ["blue", "red"]
    assert len({call["id"] for call in calls}) == 2


def test_without_parallel_calls_only_the_first_is_shown(api: Any) -> None:
    both = api.chat("calls")["choices"][0]["token_ids"]
    whole = api.chat("calls", parallel_tool_calls=False)["choices"][0]
    assert len(whole["message"]["tool_calls"]) == 1
    # An engine may hide the second call, or end the turn after the first.
    assert both[: len(whole["token_ids"]) - 1] == whole["token_ids"][:-1]
    fold = api.fold(api.stream("calls", parallel_tool_calls=False))
    assert [json.loads(call["arguments"])["key"] for call in fold.calls] == ["blue"]


def test_a_streamed_call_gives_its_name_first_and_its_arguments_in_pieces(api: Any) -> None:
    pieces = [
        call
        for chunk in api.fine_stream("call")
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls") or ()
    ]
    assert pieces[0]["function"]["name"] == "lookup"
    assert pieces[0]["id"]
    assert pieces[0]["type"] == "function"
    assert all(not piece["function"].get("name") for piece in pieces[1:])
    arguments = [piece["function"].get("arguments") or "" for piece in pieces]
    assert sum(map(bool, arguments)) >= 3
    assert json.loads("".join(arguments)) == {"key": "blue", "limit": 3}


def test_chunks_whose_text_a_parser_holds_back_still_carry_their_tokens(api: Any) -> None:
    chunks = api.fine_stream("call")
    silent = [
        choice
        for chunk in chunks
        for choice in chunk["choices"]
        if choice.get("token_ids")
        and not any(choice["delta"].get(key) for key in ("content", "tool_calls", "reasoning"))
    ]
    assert silent
    assert all(len(each["token_ids"]) == len(each["logprobs"]["content"]) for each in silent)
    whole = api.chat("call")
    assert api.fold(chunks).token_ids == whole["choices"][0]["token_ids"]


def test_a_stream_that_called_tools_finishes_with_tool_calls(api: Any) -> None:
    assert api.fold(api.stream("call")).finish_reason == "tool_calls"


def test_a_malformed_call_comes_out_as_text(api: Any) -> None:
    choice = api.chat("broken")["choices"][0]
    assert not choice["message"].get("tool_calls")
    assert choice["message"]["content"] == api.replies["broken"][1][0]
    assert choice["finish_reason"] == "stop"


def test_with_tool_choice_none_the_markup_stays_in_the_text(api: Any) -> None:
    choice = api.chat("call", tool_choice="none")["choices"][0]
    assert choice["message"]["content"] == api.replies["call"][1][0]
    assert not choice["message"].get("tool_calls")
    assert choice["finish_reason"] == "stop"


def test_tool_choice_auto_is_the_default(api: Any) -> None:
    explicit = api.chat("call", tool_choice="auto")["choices"][0]
    assert explicit["message"]["tool_calls"][0]["function"]["name"] == "lookup"


def test_a_truncated_call_keeps_finish_reason_length(api: Any) -> None:
    full = len(api.chat("call")["choices"][0]["token_ids"])
    fold = api.fold(api.stream("call", max_tokens=full - 8))
    assert fold.finish_reason == "length"
    assert fold.calls[0]["name"] == "lookup"
