"""Test that a digest depends on a message's meaning alone, not on its spelling."""

from __future__ import annotations

import pytest

from bridle.proxy.session.digests import (
    Digester,
    digest_of,
    meaning_text,
    system_digest,
    value_digest,
)
from bridle.proxy.wire.canonical import Message, ToolCall


def calls(arguments: str, name: str = "f", call_id: str = "a") -> tuple[ToolCall, ...]:
    return (ToolCall(call_id, name, arguments),)


def text(words: str, **marks: object) -> dict[str, object]:
    return {"type": "text", "text": words, **marks}


SAME = {
    "content null and empty": (
        Message("assistant", None, tool_calls=calls("{}")),
        Message("assistant", "", tool_calls=calls("{}")),
    ),
    "content empty and no blocks": (Message("user", ""), Message("user", [])),
    "text and one block": (Message("user", "hi"), Message("user", [text("hi")])),
    "blocks and lines": (Message("user", "a\nb"), Message("user", [text("a"), text("b")])),
    "cache marks": (
        Message("user", [text("hi", cache_control={"type": "ephemeral"})]),
        Message("user", [text("hi")]),
    ),
    "white space at the ends": (Message("user", " hi \n"), Message("user", "hi")),
    "white space at line ends": (Message("user", "a  \r\n\nb"), Message("user", "a\nb")),
    "arguments serialised again": (
        Message("assistant", tool_calls=calls('{"b": 1, "a": "é"}')),
        Message("assistant", tool_calls=calls('{"a":"\\u00e9","b":1.0}')),
    ),
    "a control character that was sampled raw": (
        Message("assistant", tool_calls=calls('{"a": "k\x1c"}')),
        Message("assistant", tool_calls=calls('{"a":"k\\u001c"}')),
    ),
    "what only Python takes for a number": (
        Message("assistant", tool_calls=calls('{"a":NaN,  "b":1.0}')),
        Message("assistant", tool_calls=calls('{"b": 1, "a": NaN}')),
    ),
    "half a surrogate": (
        Message("assistant", tool_calls=calls('{"a":"\\ud83d",  "b":1}')),
        Message("assistant", tool_calls=calls('{"b": 1, "a": "\\ud83d"}')),
    ),
    "no arguments": (
        Message("assistant", tool_calls=calls("")),
        Message("assistant", tool_calls=calls("{}")),
    ),
    "arguments serialised twice": (
        Message("assistant", tool_calls=calls('{"a":1}')),
        Message("assistant", tool_calls=calls('"{\\"a\\":1}"')),
    ),
    "reasoning dropped": (
        Message("assistant", "hi", reasoning="thinking"),
        Message("assistant", "hi"),
    ),
    "reasoning written into the text": (
        Message("assistant", "hi", reasoning="thinking"),
        Message("assistant", "<think>\nthinking\n</think>\n\nhi"),
    ),
    "other call ids": (
        Message("assistant", tool_calls=calls("{}", call_id="a")),
        Message("assistant", tool_calls=calls("{}", call_id="b")),
    ),
}

OTHER = {
    "another word": (Message("user", "hi"), Message("user", "ho")),
    "another role": (Message("user", "hi"), Message("system", "hi")),
    "indentation": (Message("user", "if x:\n  y"), Message("user", "if x:\ny")),
    "another argument": (
        Message("assistant", tool_calls=calls('{"a":1}')),
        Message("assistant", tool_calls=calls('{"a":2}')),
    ),
    "true is not one": (
        Message("assistant", tool_calls=calls('{"a":true}')),
        Message("assistant", tool_calls=calls('{"a":1}')),
    ),
    "another tool": (
        Message("assistant", tool_calls=calls("{}", "f")),
        Message("assistant", tool_calls=calls("{}", "g")),
    ),
    "an image": (
        Message("user", "hi"),
        Message("user", [text("hi"), {"type": "image_url", "image_url": {"url": "data:"}}]),
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_a_rewrite_keeps_the_digest(case: str) -> None:
    one, other = SAME[case]
    assert digest_of(one) == digest_of(other)


@pytest.mark.parametrize("case", OTHER)
def test_a_change_of_meaning_changes_the_digest(case: str) -> None:
    one, other = OTHER[case]
    assert digest_of(one) != digest_of(other)


def test_parallel_results_have_one_digest_in_any_order() -> None:
    turn = Message("assistant", tool_calls=(ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}")))
    one, two = Message("tool", "1", tool_call_id="a"), Message("tool", "2", tool_call_id="b")
    digester = Digester()
    forth, back = digester.units([turn, one, two]), digester.units([turn, two, one])
    assert forth[1].digest == back[1].digest
    assert forth[1].form != back[1].form
    swapped = [
        Message("tool", "2", tool_call_id="a"),
        Message("tool", "1", tool_call_id="b"),
    ]
    assert digester.units([turn, *swapped])[1].digest != forth[1].digest


def test_a_reply_split_over_messages_is_one_unit() -> None:
    whole = Message("assistant", "hm", tool_calls=calls("{}"))
    split = [Message("assistant", "hm"), Message("assistant", None, tool_calls=calls("{}"))]
    digester = Digester()
    (one,), (other,) = digester.units([whole]), digester.units(split)
    assert one.digest == other.digest
    assert (other.start, other.end) == (0, 2)


def test_calls_folded_into_text_are_calls_again() -> None:
    folded = (
        "Let me see.\nCalling tools:\n[{'id': 'call_x', 'type': 'function', "
        "'function': {'name': 'f', 'arguments': {'a': 1}}}]"
    )
    (unit,) = Digester().units([Message("assistant", folded)])
    assert unit.digest == digest_of(
        Message("assistant", "Let me see.", tool_calls=calls('{"a": 1}'))
    )


@pytest.mark.parametrize("literal", ["[{'a': 1}]", "[", "f()", "(" * 500, "[{'function': 3}]"])
def test_text_that_only_looks_folded_stays_text(literal: str) -> None:
    message = Message("assistant", f"Calling tools:\n{literal}")
    (unit,) = Digester().units([message])
    assert unit.message == message


def test_the_changing_billing_block_is_no_part_of_the_system_prompt() -> None:
    def prompt(mark: str) -> list[Message]:
        billing = text(f"x-anthropic-billing-header: cc_version=2.1; cch={mark};")
        return [Message("system", [billing, text("You are Claude Code.")])]

    assert system_digest(prompt("a"))[0] == system_digest(prompt("b"))[0]
    joined = Message("system", "x-anthropic-billing-header: cch=c;\nYou are Claude Code.")
    assert system_digest([joined])[0] == system_digest(prompt("a"))[0]
    assert (
        system_digest([Message("system", "You are another.")])[0] != system_digest(prompt("a"))[0]
    )


def test_tools_are_compared_as_values_without_cache_marks() -> None:
    one = [{"type": "function", "function": {"name": "f", "parameters": {"a": 1, "b": 2}}}]
    other = [
        {
            "function": {"parameters": {"b": 2, "a": 1}, "name": "f"},
            "type": "function",
            "cache_control": {"type": "ephemeral"},
        }
    ]
    assert value_digest(one) == value_digest(other)


def test_normalising_white_space_takes_linear_time() -> None:
    assert meaning_text(" " * 1_000_000 + "x" + " " * 1_000_000 + "\ny") == "x\ny"


def test_the_cache_of_digests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.proxy.session.digests._FORMS_KEPT", 10)
    digester = Digester()
    digester.units([Message("user", str(n)) for n in range(100)])
    assert 0 < len(digester._known) <= 10


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


@pytest.mark.parametrize("arguments", ["{", "[" * 5000, nested(300), nested(900), "9" * 5000])
def test_no_arguments_are_too_odd_to_be_told_from_others(arguments: str) -> None:
    one, same, other = (
        digest_of(Message("assistant", tool_calls=calls(given)))
        for given in (arguments, f" {arguments}\n", "{}")
    )
    assert one == same
    assert one != other
