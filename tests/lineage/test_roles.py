"""Conversations that a template refuses are brought into a form that it takes, and no others."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.proxy.continuation.roles import (
    QUESTIONS,
    TOOLS,
    RoleRules,
    rules_from,
)
from bridle.proxy.wire.canonical import Message, ToolCall

OWN = Path(__file__).parent / "templates"
_TRL = find_spec("trl")
GENUINE = sorted((Path(str(_TRL.origin)).parent / "chat_templates").glob("*.jinja")) if _TRL else []
TEMPLATES = [*sorted(OWN.glob("*.jinja")), *GENUINE]


def say(role: str, text: str, **fields: object) -> Message:
    return Message(role, text, **fields)  # type: ignore[arg-type]


def call(number: int, text: str | None = None) -> Message:
    made = ToolCall(f"call{number:05d}", "look_up", f'{{"word": "w{number}"}}')
    return Message("assistant", text, tool_calls=(made,))


def parallel(number: int, text: str | None = None) -> Message:
    """Two calls at once."""
    calls = call(number).tool_calls + call(number + 1).tool_calls
    return Message("assistant", text, tool_calls=calls)


def result(number: int, text: str) -> Message:
    return Message("tool", text, tool_call_id=f"call{number:05d}", name="look_up")


WITHOUT_TOOLS = (
    say("system", "alpha1."),
    say("system", "alpha2."),
    say("user", "alpha3."),
    say("system", "alpha4."),
    say("assistant", "alpha5."),
    say("user", "alpha6."),
    say("user", "alpha7."),
    say("assistant", "alpha8."),
    say("assistant", "alpha9."),
    say("system", "beta1."),
    say("user", "beta2."),
    say("assistant", "beta3."),
    say("system", "beta4."),
)


def with_tools(text: str | None = None) -> tuple[Message, ...]:
    """Calls that have this text beside them."""
    return (
        *WITHOUT_TOOLS[:3],
        call(1, text),
        result(1, "beta6."),
        say("user", "beta7."),
        say("user", "beta8."),
        call(2, text),
        result(2, "gamma1."),
        say("system", "gamma2."),
        parallel(3, text),
        result(3, "gamma3."),
        result(4, "gamma4."),
    )


@pytest.fixture(scope="module")
def renderer(tokenizers: dict[str, Tokenizer], tmp_path_factory: pytest.TempPathFactory):
    """Makes a tokenizer with a template out of a file."""

    def made(path: Path) -> Tokenizer:
        directory = tmp_path_factory.mktemp(path.stem)
        source = tokenizers["qwen3"].directory
        shutil.copy(source / "tokenizer.json", directory / "tokenizer.json")
        config = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        (directory / "chat_template.jinja").write_text(path.read_text())
        return Tokenizer(directory)

    return made


def rules_of(tokenizer: Tokenizer) -> RoleRules:
    def answer(messages, tools) -> str | None:
        try:
            chats = [message.to_chat() for message in messages]
            return tokenizer.render(chats, TOOLS if tools else None)
        except TemplateError:
            return None

    return rules_from([answer(*question) for question in QUESTIONS])


def rendered(tokenizer: Tokenizer, messages, tools=None) -> str:
    return tokenizer.render([message.to_chat() for message in messages], tools)


def conversations(tokenizer: Tokenizer) -> list[tuple[Message, ...]]:
    """Return conversations of which nothing but the order of roles may be refused."""
    for text in (None, "Let me see."):
        asked = (say("user", "alpha."), call(1, text), result(1, "beta."))
        try:
            if "beta." in rendered(tokenizer, asked, TOOLS):
                return [WITHOUT_TOOLS, with_tools(text)]
        except TemplateError:
            continue
    return [WITHOUT_TOOLS]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_template_takes_what_it_is_sent_and_shows_all_of_it_in_order(path, renderer) -> None:
    tokenizer = renderer(path)
    rules = rules_of(tokenizer)
    for conversation in conversations(tokenizer):
        shaped, notes = rules.shape(conversation)
        tools = TOOLS if conversation is not WITHOUT_TOOLS else None
        text = rendered(tokenizer, shaped, tools)
        turns = [one for one in conversation[2:] if one.content and not one.tool_calls]
        places = [text.rfind(str(one.content)) for one in turns]
        assert -1 not in places
        assert places == sorted(places)
        assert all(str(one.content) in text for one in conversation[:2])
        if rules == RoleRules():
            assert (shaped, notes) == (conversation, ())
        else:
            assert bool(notes) == (shaped != conversation)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_new_turns_are_shaped_as_they_are_at_the_end_of_the_whole(path, renderer) -> None:
    rules = rules_of(renderer(path))
    for conversation in (WITHOUT_TOOLS, with_tools()):
        whole, _ = rules.shape(conversation)
        for at, message in enumerate(conversation[:-1], 1):
            following = conversation[at].role
            split = len(message.tool_calls) > 1 and not rules.parallel_calls
            if message.role == "assistant" and following != "assistant" and not split:
                tail = rules.shape_tail(conversation[at:])
                assert whole[-len(tail) :] == tail


def test_calls_at_once_get_a_reply_each_before_the_result_that_answers_them() -> None:
    asked, both = say("user", "alpha."), parallel(1, "beta.")
    unanswered = (asked, both, result(2, "two"), say("user", "gamma."))

    whole, notes = RoleRules(parallel_calls=False).shape(
        (asked, both, result(2, "two"), result(1, "one"), say("user", "gamma."))
    )
    partly, _ = RoleRules(parallel_calls=False).shape(unanswered)

    assert whole == (
        asked,
        call(1, "beta."),
        result(1, "one"),
        call(2),
        result(2, "two"),
        say("user", "gamma."),
    )
    assert [note.name for note in notes] == ["parallel_calls_split"]
    assert partly == (asked, call(1, "beta."), call(2), result(2, "two"), say("user", "gamma."))
    assert RoleRules().shape(unanswered)[0] == unanswered


def test_calls_without_text_get_one_where_the_template_raises_on_them() -> None:
    asked, bare, said = say("user", "alpha."), call(1), call(2, "beta.")
    conversation = (asked, bare, result(1, "one"), said, result(2, "two"))

    whole, notes = RoleRules(bare_calls=False).shape(conversation)

    assert whole == (asked, call(1, "(no text)"), result(1, "one"), said, result(2, "two"))
    assert [note.name for note in notes] == ["text_added"]
