"""Tool calls in text: what is a call, what is text, in each markup and however the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.serve.deltas import Content, Delta, ToolArguments, ToolName
from bridle.engine.serve.markup import READ, reader

Folded = tuple[str, list[tuple[str, str]]]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "dry": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                },
            },
        },
    }
]
JSON = [
    '{"name": "f", "arguments": {"a": 1}}',
    '{"name": "f", "arguments": {"a": "}{\\"</b>"}}',
    '{"arguments": {"a": [1, {"b": 2}]}, "name": "g"}',
    '{"name": "h", "arguments": "{\\"x\\": 1}"}',
    '{"name": "h", "parameters": {"x": null}}',
    '{"name": "h", "arguments": "not json"}',
    '{"name": "\\ud800", "arguments": {}}',
    '{"name": "f"',
    ', "arguments": {',
]
TEXT = ["}", '"', "\\", "{", "[", "]", ",", ";", "\n", " ", "text", "f", "é😀", "3", "null"]
DEEPSEEK = [
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "function",
    "<｜tool▁sep｜>",
    "```json",
    "```",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call",
]
QWEN = [
    "<function=f>",
    "<function=",
    "<parameter=city>",
    "<parameter=days>",
    "\n</parameter>",
    "</parameter>",
    "</function>",
    ">",
]
DSML = [
    '<｜DSML｜invoke name="f">',
    '<｜DSML｜parameter name="city" string="true">',
    '<｜DSML｜parameter name="days" string="false">',
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    '">',
]
HERMES = ["<tool_call>", "</tool_call>", "<tool_call", "</tool_"]
GLM = ["<arg_key>", "city", "days", "</arg_key>", "<arg_value>", "</arg_value>", *HERMES]
FRAGMENTS = {
    "hermes": [*HERMES, *JSON],
    "llama_json": ["<|python_tag|>", "<|python", *JSON],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL", "[ARGS]{", *JSON],
    "deepseek_v3": [*DEEPSEEK, *JSON],
    "deepseek_v31": [*DEEPSEEK, *JSON],
    "deepseek_v32": ["<｜DSML｜function_calls>", "</｜DSML｜function_calls>", *DSML],
    "deepseek_v4": ["<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", *DSML],
    "nemotron_v2": ["<TOOLCALL>", "</TOOLCALL>", "<TOOL", "<TOOLCALL>[", *JSON],
    "functionary": ["<function=f>", "<function=", "</function>", "<func", "<function=f>{", *JSON],
    "glm": GLM,
    "poolside": GLM,
    "qwen_xml": [*HERMES, *QWEN],
    "seed_oss": ["<seed:tool_call>", "</seed:tool_call>", *QWEN],
}


@st.composite
def replies(draw: st.DrawFn) -> tuple[str, str]:
    markup = draw(st.sampled_from(sorted(READ)))
    pieces = st.lists(st.sampled_from([*FRAGMENTS[markup], *TEXT]), max_size=14)
    return markup, "".join(draw(pieces))


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


def parse(markup: str, pieces: list[str]) -> Folded:
    parser = reader(markup, TOOLS)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return fold(deltas + parser.flush())


@given(replies(), st.data())
def test_any_cut_of_a_text_gives_the_same_fold(reply: tuple[str, str], data: st.DataObject) -> None:
    markup, text = reply
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10).map(sorted))
    edges = [0, *cuts, len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    assert parse(markup, pieces) == parse(markup, [text]) == parse(markup, list(text))


@given(replies())
def test_text_without_calls_comes_out_as_it_went_in(reply: tuple[str, str]) -> None:
    content, calls = parse(reply[0], [reply[1]])
    if not calls:
        assert content == reply[1]


@given(replies())
def test_what_comes_out_can_always_be_sent(reply: tuple[str, str]) -> None:
    json.dumps(parse(reply[0], [reply[1]]), ensure_ascii=False).encode()


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
def test_calls_and_text_are_told_apart_in_hermes(
    text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert parse("hermes", [text]) == (content, calls)


def test_the_name_comes_before_the_arguments_and_both_before_the_end() -> None:
    parser = reader("hermes")
    assert parser.push('<tool_call>\n{"name": "f", "arguments": ') == []
    assert parser.push('{"key') == [ToolName(0, "f"), ToolArguments(0, '{"key')]
    assert parser.push('": 1}') == [ToolArguments(0, '": 1}')]
    assert parser.push("}\n</tool_call>") == []
    assert parser.flush() == []


CITY = {"city": "Ghent & <b>\n", "days": 3, "dry": None}
SEVERAL: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "llama_json": (
        '<|python_tag|>{"name": "f", "parameters": {"city": "a"}}; '
        '{"type": "function", "name": "g", "parameters": {}}',
        [("f", {"city": "a"}), ("g", {})],
    ),
    "mistral": (
        '[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{"city": "[TOOL_CALLS]"}[TOOL_CALLS]g[ARGS]{}',
        [("f", {"city": "[TOOL_CALLS]"}), ("g", {})],
    ),
    "mistral array": (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}, "id": "abcdefgh1"}, '
        '{"name": "g", "arguments": {}}]',
        [("f", {"a": "]"}), ("g", {})],
    ),
    "deepseek_v3": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```'
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("f", {"a": 1}), ("g", {})],
    ),
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("f", {"a": 1}), ("g", {})],
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="city" string="true">Ghent & <b>\n</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="dry" string="false">null</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        [("f", CITY), ("g", {})],
    ),
    "nemotron_v2": (
        '<TOOLCALL>[{"name": "f", "arguments": {"city": "Ghent"}}, '
        '{"name": "g", "arguments": {}}]</TOOLCALL>',
        [("f", {"city": "Ghent"}), ("g", {})],
    ),
    "functionary": (
        '<function=f>{"city": "Ghent"}</function><function=g>{}</function>',
        [("f", {"city": "Ghent"}), ("g", {})],
    ),
    "glm": (
        "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Ghent & <b>\n</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "<arg_key>dry</arg_key>\n<arg_value>null</arg_value>\n</tool_call>\n"
        "<tool_call>g</tool_call>",
        [("f", CITY), ("g", {})],
    ),
    "qwen_xml": (
        "<tool_call>\n<function=f>\n<parameter=city>\nGhent & <b>\n\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=dry>\nNone\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        [("f", CITY), ("g", {})],
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_parallel_calls_are_read_and_the_text_before_them_is_content(name: str) -> None:
    markup, (text, wanted) = name.split()[0], SEVERAL[name]
    before = "" if markup == "llama_json" else "Now:\n"
    content, calls = parse(markup, [before + text])
    assert content == before
    assert [(called, json.loads(arguments)) for called, arguments in calls] == wanted


@pytest.mark.parametrize(
    ("markup", "begun", "pieces"),
    [
        ("mistral", "[TOOL_CALLS]f[ARGS]", ['{"city": "G', 'hent"', "}"]),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": ', ['{"city": "G', 'hent"', "}"]),
        ("llama_json", '{"name": "f", "parameters": ', ['{"city": "G', 'hent"', "}"]),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>",
            ['{"city": "G', 'hent"', "}"],
        ),
    ],
)
def test_json_arguments_are_emitted_as_they_come(
    markup: str, begun: str, pieces: list[str]
) -> None:
    parser = reader(markup, TOOLS)
    parser.push(begun)
    first, *later = [parser.push(piece) for piece in pieces]
    assert first in ([ToolName(0, "f"), ToolArguments(0, pieces[0])], [ToolArguments(0, pieces[0])])
    assert later == [[ToolArguments(0, piece)] for piece in pieces[1:]]


@pytest.mark.parametrize(
    ("markup", "begun", "closing"),
    [
        ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=city>\n", "\n</parameter>"),
        ("glm", "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>", "</arg_value>"),
        (
            "deepseek_v32",
            '<｜DSML｜invoke name="f"><｜DSML｜parameter name="city" string="true">',
            "</｜DSML｜parameter>",
        ),
    ],
)
def test_texts_in_elements_become_json_as_they_come(markup: str, begun: str, closing: str) -> None:
    parser = reader(markup, TOOLS)
    assert fold(parser.push(begun)) == ("", [("f", '{"city": "')])
    assert parser.push('G"') == [ToolArguments(0, 'G\\"')]
    assert parser.push("hent") == [ToolArguments(0, "hent")]
    assert parser.push(closing) == [ToolArguments(0, '"')]
    assert parser.flush() == []


def test_a_call_keeps_the_id_that_the_model_gave_it() -> None:
    parser = reader("mistral")
    assert parser.push("[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{}") == [
        ToolName(0, "f", "abcdefgh1"),
        ToolArguments(0, "{}"),
    ]


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("3", 3),
        ("3.5", 3.5),
        ('{"a": [true]}', {"a": [True]}),
        ("true", True),
        ("True", "True"),
        ("NaN", "NaN"),
        ("Ghent", "Ghent"),
        ("", ""),
    ],
)
def test_a_value_without_a_schema_is_json_where_it_can_be(value: str, read: Any) -> None:
    text = f"<tool_call>g<arg_key>k</arg_key><arg_value>{value}</arg_value></tool_call>"
    ((_, arguments),) = parse("glm", [text])[1]
    assert json.loads(arguments) == {"k": read}


def test_json_that_is_an_answer_is_let_through_as_soon_as_it_shows() -> None:
    parser = reader("llama_json")
    assert parser.push('{"answer') == []
    assert parser.push('": ') == [Content('{"answer": ')]
    assert parser.push("4}") == [Content("4}")]
