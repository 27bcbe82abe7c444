"""Test that in rendered mode each break says what exactness would have saved."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from bridle.proxy.continuation.prompt import CallPrompt
from bridle.proxy.wire.canonical import Message, ToolCall
from bridle.store.records import BreakReason

SYSTEM, USER = Message("system", "You are careful."), Message("user", "What is a café?")
NEXT = Message("user", "Go on.")
TOOLS = ({"type": "function", "function": {"name": "look_up", "parameters": {}}},)


def begun(policy, tokenizer, sampled: str, message: Message, *, tools=()):
    """A session with one call whose reply was ``sampled``; ``message`` is what the client got."""
    session = policy(tokenizer, tools=tools)
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    session.reply(
        message.content,
        *calls,
        reasoning=message.reasoning,
        sampled=tokenizer.encode(sampled),
        new=[SYSTEM, USER],
    )
    return session


def verdict(session, *new: Message, rendered: str | None = None) -> BreakReason | None:
    """The first reason."""
    return next(iter(reasons(session, *new, rendered=rendered)), None)


def reasons(session, *new: Message, rendered: str | None = None) -> tuple[BreakReason, ...]:
    link, _, _ = session.ask(*new)
    text = rendered if rendered is not None else session.rendered()
    return session.breaks(link, session.tokenizer.encode(text))


def echo(session, **changes) -> None:
    session.messages[-1] = msgspec.structs.replace(session.messages[-1], **changes)


KEPT, HOUSE = "A house.<|im_end|>", Message("assistant", "A house.")
THOUGHT = "<think>\nHm.\n</think>\n\n" + KEPT, Message("assistant", "A house.", reasoning="Hm.")
LINE = "A house.\n<|im_end|>"
REWROTE = BreakReason.TEMPLATE_REWROTE_HISTORY
BROKEN = {
    "a rendering that begins with the parents ids": ("chatml_kept", KEPT, HOUSE, {}, None),
    "reasoning that the harness dropped": (
        *("chatml_kept", *THOUGHT),
        *({-1: HOUSE}, BreakReason.REASONING_DROPPED),
    ),
    "reasoning that the template strips": ("qwen3", *THOUGHT, {}, REWROTE),
    "another token at the end of a reply": (
        *("harmony", "<|channel|>final<|message|>A house.<|return|>", HOUSE, {}, REWROTE),
    ),
    "text that the harness stripped": (
        *("chatml_kept", LINE, Message("assistant", "A house.\n")),
        *({-1: HOUSE}, BreakReason.EDITED),
    ),
    "text that the parser stripped": ("chatml_kept", LINE, HOUSE, {}, REWROTE),
    "a system prompt written differently": (
        *("chatml_kept", KEPT, HOUSE),
        *({0: Message("system", "You are careful. ")}, BreakReason.SYSTEM_CHANGED),
    ),
    "an earlier turn written differently": (
        *("chatml_kept", KEPT, HOUSE),
        *({1: Message("user", "What is a café? ")}, BreakReason.EDITED),
    ),
    "tools that the template moves": ("mistral", " A house.</s>", HOUSE, {}, REWROTE),
}
"""The template, the sampled reply and its message, the messages that the harness wrote differently,
and the reason."""


@pytest.mark.parametrize("case", BROKEN)
def test_a_break_has_the_reason_of_its_first_difference(policy, tokenizers, case: str) -> None:
    template, sampled, message, changed, reason = BROKEN[case]
    tools = TOOLS if template == "mistral" else ()
    session = begun(policy, tokenizers[template], sampled, message, tools=tools)
    for position, other in changed.items():
        session.messages[position] = other
    assert verdict(session, NEXT) is reason


def test_a_first_call_is_no_break(policy, tokenizers) -> None:
    assert verdict(policy(tokenizers["qwen3"]), USER) is None


ARGUMENTS = '{"word":"caf\\u00e9"}'
CALLED = f'<tool_call>\n{{"name": "look_up", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>'


def called(policy, tokenizers):
    message = Message("assistant", None, tool_calls=(ToolCall("", "look_up", ARGUMENTS),))
    return begun(policy, tokenizers["chatml_kept"], CALLED, message, tools=TOOLS)


def test_arguments_that_the_template_serialises_anew(policy, tokenizers) -> None:
    session = called(policy, tokenizers)
    assert verdict(session, *session.results("1")) is BreakReason.ARGUMENTS_RESERIALISED


def test_arguments_that_the_harness_serialised_anew(policy, tokenizers) -> None:
    session = called(policy, tokenizers)
    (call,) = session.messages[-1].tool_calls
    echo(session, tool_calls=(msgspec.structs.replace(call, arguments='{"word": "café"}'),))
    assert verdict(session, *session.results("1")) is BreakReason.ARGUMENTS_RESERIALISED


def test_ids_that_the_tokenizer_would_not_choose(policy, tokenizers) -> None:
    tokenizer = tokenizers["chatml_kept"]
    session = policy(tokenizer)
    odd = [i for letter in "coffee house" for i in tokenizer.encode(letter)]
    odd.append(tokenizer.token_id("<|im_end|>"))
    session.reply("coffee house", sampled=odd, new=[USER])
    assert verdict(session, NEXT) is BreakReason.RETOKENISED


def test_a_clock_in_the_template(policy, tokenizers) -> None:
    session = begun(
        policy, tokenizers["llama3"], "A house.<|eot_id|>", Message("assistant", "A house.")
    )
    session.ask(NEXT)
    later = session.rendered().replace("Today Date: ", "Today Date: not ")
    assert verdict(session, rendered=later) is BreakReason.TEMPLATE_REWROTE_HISTORY


def test_the_first_of_several_rewritten_replies_tells_the_reason(policy, tokenizers) -> None:
    tokenizer = tokenizers["chatml_kept"]
    session = called(policy, tokenizers)
    session.reply(
        "A house.",
        reasoning="Hm.",
        sampled=tokenizer.encode("<think>\nHm.\n</think>\n\nA house.<|im_end|>"),
        new=session.results("1"),
    )
    echo(session, reasoning=None)
    assert verdict(session, NEXT) is BreakReason.ARGUMENTS_RESERIALISED


THOUGHT_AND_CALLED = f"<think>\nHm.\n</think>\n\nA house.\n{CALLED}"


def thought_and_called(policy, tokenizer):
    """A reply that thinks, speaks and calls, under a template that rewrites arguments."""
    call = ToolCall("", "look_up", ARGUMENTS)
    message = Message("assistant", "A house.", reasoning="Hm.", tool_calls=(call,))
    return begun(policy, tokenizer, THOUGHT_AND_CALLED, message, tools=TOOLS)


@pytest.mark.parametrize(
    ("echoed", "named"),
    [
        (
            {"reasoning": None},
            (BreakReason.REASONING_DROPPED, BreakReason.ARGUMENTS_RESERIALISED),
        ),
        (
            {"reasoning": None, "content": None},
            (
                BreakReason.REASONING_DROPPED,
                BreakReason.EDITED,
                BreakReason.ARGUMENTS_RESERIALISED,
            ),
        ),
        ({"reasoning": "Hm."}, (BreakReason.ARGUMENTS_RESERIALISED,)),
    ],
)
def test_all_that_one_reply_lost_is_named_after_the_first_difference(
    policy, tokenizers, echoed, named
) -> None:
    session = thought_and_called(policy, tokenizers["chatml_kept"])
    echo(session, **echoed)
    assert reasons(session, *session.results("1")) == named


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: [Message("system", "Be bold."), *m[1:]], BreakReason.SYSTEM_CHANGED),
        (lambda m: [m[0], Message("user", "Edited."), *m[2:]], BreakReason.EDITED),
    ],
)
def test_a_lineage_that_broke_keeps_its_own_reason(policy, tokenizers, change, reason) -> None:
    session = called(policy, tokenizers)
    results = session.results("1")
    session.messages = change(session.messages)
    assert verdict(session, *results) is reason


def test_a_tail_that_is_not_local_is_named_only_when_the_rendering_breaks(
    policy, tokenizers
) -> None:
    session = begun(
        policy, tokenizers["chatml_kept"], "A house.<|im_end|>", Message("assistant", "A house.")
    )
    link, _, _ = session.ask(NEXT)
    prompt = CallPrompt(None, BreakReason.TAIL_NOT_LOCAL)
    kept = np.asarray(session.tokenizer.encode(session.rendered()), dtype=np.uint32)
    same, _ = session.held.grow("call_a", link, [], kept)
    assert prompt.verdict(link, same) == (None, ())
    other, _ = session.held.grow("call_b", link, [], kept[1:])
    assert prompt.verdict(link, other) == (BreakReason.TAIL_NOT_LOCAL, ())
