"""Hermes tool calls in text: what is a call, what is text, however the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.serve.deltas import Content, Delta, ToolArguments, ToolName
from bridle.engine.serve.hermes import HermesParser

Folded = tuple[str, list[tuple[str, str]]]

FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_call",
    "</tool_",
    '{"name": "f", "arguments": {"a": 1}}',
    '{"name": "f", "arguments": {"a": "}{\\"</b>"}}',
    '{"arguments": {"a": [1, {"b": 2}]}, "name": "g"}',
    '{"name": "h", "arguments": "{\\"x\\": 1}"}',
    '{"name": "h", "arguments": "not json"}',
    '{"name": "\\ud800", "arguments": {}}',
    '{"name": "f"',
    ', "arguments": {',
    "}",
    '"',
    "\\",
    "{",
    "\n",
    " ",
    "text",
    "é😀",
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


def fold(deltas: list[Delta]) -> Folded:
    content, calls = "", []
    for delta in deltas:
        match delta:
            case Content(text):
                content += text
            case ToolName(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case ToolArguments(index, text):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, calls


def parse(pieces: list[str]) -> Folded:
    parser = HermesParser()
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return fold(deltas + parser.flush())


@given(texts, st.data())
def test_any_cut_of_a_text_gives_the_same_fold(text: str, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10).map(sorted))
    edges = [0, *cuts, len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    assert parse(pieces) == parse([text]) == parse(list(text))


@given(texts)
def test_text_without_calls_comes_out_as_it_went_in(text: str) -> None:
    content, calls = parse([text])
    if not calls:
        assert content == text


@given(texts)
def test_what_comes_out_can_always_be_sent(text: str) -> None:
    content, calls = parse([text])
    json.dumps([content, calls], ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", []),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
        (
            'Now:\n<tool_call>\n{"name": "f", "arguments": {"a": {"b": "}"}}}\n</tool_call>',
            "Now:\n",
            [("f", '{"a": {"b": "}"}}')],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
            '<tool_call>{"name": "g", "arguments": {"b": 2}}</tool_call>\n',
            "",
            [("f", '{"a": 1}'), ("g", '{"b": 2}')],
        ),
        (
            '<tool_call>{"arguments": {"a": "é"}, "name": "f"}</tool_call> done',
            " done",
            [("f", '{"a": "é"}')],
        ),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            [("f", '{"a": 1}')],
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        ('<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
        ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
        ('<tool_call>["f"]</tool_call>', '<tool_call>["f"]</tool_call>', []),
        ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
        ("a <tool_cal", "a <tool_cal", []),
    ],
)
def test_calls_and_text_are_told_apart(
    text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert parse([text]) == (content, calls)


def test_the_name_comes_before_the_arguments_and_both_before_the_end() -> None:
    parser = HermesParser()
    assert parser.push('<tool_call>\n{"name": "f", "arguments": ') == []
    assert parser.push('{"key') == [ToolName(0, "f"), ToolArguments(0, '{"key')]
    assert parser.push('": 1}') == [ToolArguments(0, '": 1}')]
    assert parser.push("}\n</tool_call>") == []
    assert parser.flush() == []
