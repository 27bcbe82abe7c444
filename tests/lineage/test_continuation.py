"""Exact prompts: recorded ids plus the tail, for the shapes of all main template families."""

from __future__ import annotations

import re
import time

import msgspec
import numpy as np
import orjson
import pytest

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.proxy.continuation.continuation import Continuer
from bridle.proxy.continuation.probe import TOOL
from bridle.proxy.continuation.tail import Setting, Shape
from bridle.proxy.engines.request import engine_request
from bridle.proxy.wire.canonical import Message, ToolCall
from bridle.store.records import BreakReason, CallStatus, new_id

SYSTEM = Message("system", "You are careful.")
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Find a word — ☕.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    },
)
ONE_CALL_ONLY = {"llama3", "harmony"}
NO_TOOLS = {"gemma"}
KEEPS_HISTORY = {"chatml_kept", "llama3", "gemma", "deepseek"}
REWRITES_HISTORY = {"qwen3", "glm", "harmony", "mistral"}


def family(tokenizer: Tokenizer) -> str:
    return re.sub(r"\d+$", "", tokenizer.directory.name) + (
        "3" if tokenizer.directory.name.startswith(("qwen3", "llama3")) else ""
    )


def without_rewrites(name: str, text: str) -> str:
    """Return ``text`` without the places that the family's template writes anew.

    It writes them anew as a conversation goes on. This is the closed list of what exact and
    rendered prompts may differ in.
    """
    if name == "qwen3":
        return re.sub(r"<think>\n.*?</think>\n\n", "", text, flags=re.DOTALL)
    if name == "glm":
        return re.sub(r"\n<think>.*?</think>", "", text, flags=re.DOTALL)
    if name == "harmony":
        thought = r"<\|start\|>assistant<\|channel\|>analysis<\|message\|>.*?<\|end\|>"
        return re.sub(thought, "", text, flags=re.DOTALL).replace("<|return|>", "<|end|>")
    if name == "mistral":
        text = re.sub(r"\[AVAILABLE_TOOLS\].*?\[/AVAILABLE_TOOLS\]", "", text, flags=re.DOTALL)
        return text.replace(f"{SYSTEM.content}\n\n", "")
    return text


def conversation(name: str):
    """(new messages' builder, reply) of a talk that uses all that the family can do."""
    many = name not in ONE_CALL_ONLY
    thinks = name not in ("llama3", "mistral", "gemma", "deepseek")
    thought = {"reasoning": "Let me ponder — ☕."} if thinks else {}
    call = ("look_up", '{"word": "café"}')
    yield (lambda p: [SYSTEM, Message("user", "What is a café?")]), ("A house. ☕",), thought
    if name in NO_TOOLS:
        yield (lambda p: [Message("user", "Ça va?\n\n  Go on.")]), ("Yes.",), thought
        yield (lambda p: [Message("user", "北京?")]), ("привет",), thought
        return
    # Some templates have no place for words beside a call.
    words = "Let me see." if name not in ("llama3", "mistral") else None
    yield (lambda p: [Message("user", "Look it up.")]), (words, call), thought
    yield (lambda p: p.results("12 cafés\n")), (None, call), thought
    if many:
        yield (lambda p: p.results("none ☕")), (None, call, ("look_up", '{"word": "bar"}')), {}
        yield (lambda p: p.results("1", "<tool_call> 2")), ("Three.",), thought
    else:
        yield (lambda p: p.results("none ☕")), ("Three.",), thought
    yield (lambda p: [Message("user", "And <|im_end|> or [INST]?")]), (None, call), thought
    yield (lambda p: p.results("")), ("None.",), thought


def talk_to(policy, tokenizer: Tokenizer):
    """A session with the whole conversation; yields after each prompt that continues one."""
    name = family(tokenizer)
    session = policy(tokenizer, tools=() if name in NO_TOOLS else TOOLS)
    for new, said, thought in conversation(name):
        link, request, prompt = session.ask(*new(session))
        yield session, link, request, prompt
        session.reply(*said, **thought)


# — exact prompts —


def test_a_prompt_is_the_parents_ids_and_a_tail_in_every_family(policy, tokenizer) -> None:
    turns = list(talk_to(policy, tokenizer))
    assert len(turns) >= 3
    for _, link, _, prompt in turns[1:]:
        path = link.parent.path_ids()
        assert prompt.break_reason is None
        assert prompt.token_ids[: len(path)].tolist() == path.tolist()
        assert 0 < prompt.tail_token_count == len(prompt.token_ids) - len(path)


def test_exact_and_rendered_prompts_differ_only_where_the_template_rewrites(
    policy, tokenizer
) -> None:
    name = family(tokenizer)
    for session, _, _, prompt in talk_to(policy, tokenizer):
        exact = tokenizer.decode(session.prompt_ids(prompt))
        rendered = session.rendered()
        assert without_rewrites(name, exact) == without_rewrites(name, rendered)
        if name in KEEPS_HISTORY:
            assert exact == rendered


def test_any_other_difference_would_be_seen(policy, tokenizer) -> None:
    """The comparison above objects to a prompt that lacks any one token of its tail.

    It also objects to one that ends the parent's reply twice.
    """
    name = family(tokenizer)
    tried = 0
    for session, link, _, prompt in talk_to(policy, tokenizer):
        rendered = without_rewrites(name, session.rendered())
        ids = session.prompt_ids(prompt)
        if link.base is None or "[AVAILABLE_TOOLS]" in tokenizer.decode(ids[link_end(link) :]):
            continue  # tools that move with the last user turn are among what may differ
        for at in range(link_end(link), len(ids)):
            lacking = tokenizer.decode(ids[:at] + ids[at + 1 :])
            assert without_rewrites(name, lacking) != rendered
            tried += 1
        at = link_end(link)
        twice = tokenizer.decode(ids[:at] + ids[at - 1 :])
        assert without_rewrites(name, twice) != rendered
    assert tried > 20


def link_end(link) -> int:
    """Return the place where the tail begins."""
    return len(link.base.path_ids(link.choice))


def test_a_family_that_rewrites_history_is_kept_exact_all_the_same(policy, tokenizers) -> None:
    assert set(tokenizers) == KEEPS_HISTORY | REWRITES_HISTORY
    for name in sorted(REWRITES_HISTORY):
        differ = [
            tokenizers[name].decode(session.prompt_ids(prompt)) != session.rendered()
            for session, _, _, prompt in talk_to(policy, tokenizers[name])
        ]
        assert any(differ), name


def test_nothing_sampled_is_tokenised_again(policy, tokenizer) -> None:
    """A reply in ids that the tokenizer would never choose comes back as it was."""
    session = policy(tokenizer)
    session.ask(Message("user", "What is a café?"))
    words = session.words(Message("assistant", "A house of coffee."))
    before, house, after = words.partition("coffee")
    pieces = [before, *house, after]
    odd = [token_id for piece in pieces for token_id in tokenizer.encode(piece)]
    assert tokenizer.decode(odd) == words
    turn = session.reply("A house of coffee.", sampled=odd)
    _, _, prompt = session.ask(Message("user", "Go on."))
    path = turn.path_ids().tolist()
    assert tokenizer.encode(tokenizer.decode(path)) != path
    assert prompt.token_ids[: len(path)].tolist() == path


def test_a_reply_without_its_end_gets_one(policy, tokenizer) -> None:
    session = policy(tokenizer)
    session.ask(Message("user", "What is a café?"))
    words = session.words(Message("assistant", "A house of"))
    ids = tokenizer.encode(words)[:-1]
    session.reply("A house of", sampled=ids, status=CallStatus.PARTIAL)
    _, _, prompt = session.ask(Message("user", "Go on."))
    exact = tokenizer.decode(prompt.token_ids.tolist())
    name = family(tokenizer)
    assert without_rewrites(name, exact) == without_rewrites(name, session.rendered())


@pytest.mark.parametrize("stop", ["<|im_end|>", "<|endoftext|>"])
def test_another_stop_token_than_the_templates_is_kept(policy, tokenizers, stop: str) -> None:
    tokenizer = tokenizers["chatml_kept"]
    session = policy(tokenizer)
    session.reply("Yes.", sampled=tokenizer.encode(f"Yes.{stop}"), new=[Message("user", "Is it?")])
    _, _, prompt = session.ask(Message("user", "Go on."))
    text = tokenizer.decode(prompt.token_ids.tolist())
    assert text.endswith(f"Yes.{stop}\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n")


def test_tails_of_several_turns_and_late_system_messages_are_exact(policy, tokenizers) -> None:
    session = policy(tokenizers["qwen3"], tools=TOOLS)
    session.reply(None, ("look_up", '{"word": "a"}'), new=[Message("user", "Look.")])
    new = [*session.results("1"), Message("system", "Be brief."), Message("user", "And?")]
    _, _, prompt = session.ask(*new)
    assert prompt.break_reason is None
    assert (
        tokenizers["qwen3"]
        .decode(prompt.token_ids.tolist())
        .endswith(session.rendered().partition("<tool_response>")[2])
    )


def test_template_arguments_of_the_request_reach_the_tail(policy, tokenizers) -> None:
    session = policy(tokenizers["qwen3"])
    session.reply("Yes.", new=[Message("user", "Is it?")])
    _, _, prompt = session.ask(Message("user", "Sure?"), template_kwargs={"enable_thinking": False})
    assert tokenizers["qwen3"].decode(prompt.token_ids.tolist()).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("asked", [{}, {"template_kwargs": {"enable_thinking": True}}])
def test_a_reasoning_effort_reads_in_the_tail_as_the_engine_renders_it(
    policy, tokenizers, asked: dict
) -> None:
    session = policy(tokenizers["qwen3"])
    session.reply("Yes.", new=[Message("user", "Is it?")])
    _, request, prompt = session.ask(
        Message("user", "Sure?"), extra={"reasoning_effort": "none"}, **asked
    )
    text = tokenizers["qwen3"].decode(prompt.token_ids.tolist())
    assert text.endswith("<think>\n\n</think>\n\n") is not bool(asked)
    body = b"".join(engine_request(request, request.sampling, stream=False).body("m"))
    assert orjson.loads(body)["chat_template_kwargs"] == request.template_arguments


def test_a_reasoning_effort_has_the_tail_opened_for_thought(policy, tokenizers, tmp_path) -> None:
    """The tail opens as at vLLM, for a template that thinks only when it is told to."""
    source = tokenizers["qwen3"].chat_template_source
    told = "enable_thinking is defined and enable_thinking is false"
    assert told in source
    tokenizer = with_template(
        tokenizers["qwen3"], tmp_path, source.replace(told, "not enable_thinking")
    )
    session = policy(tokenizer)
    session.reply("Yes.", new=[Message("user", "Is it?")])
    _, _, prompt = session.ask(Message("user", "Sure?"), extra={"reasoning_effort": "high"})
    text = tokenizer.decode(prompt.token_ids.tolist())
    assert text.endswith("Sure?<|im_end|>\n<|im_start|>assistant\n")


def test_arguments_that_change_the_beginning_have_all_rendered_anew(
    policy, tokenizers, tmp_path
) -> None:
    source = tokenizers["harmony"].chat_template_source.replace(
        "Reasoning: medium<|end|>'", "Reasoning: ' + reasoning_effort|default('medium') + '<|end|>'"
    )
    tokenizer = with_template(tokenizers["harmony"], tmp_path, source)
    session = policy(tokenizer)
    low, high = {"extra": {"reasoning_effort": "low"}}, {"extra": {"reasoning_effort": "high"}}
    first = session.reply("Yes.", new=[Message("user", "Is it?")], **low)
    _, _, same = session.ask(Message("user", "Sure?"), **low)
    link, _, other = session.ask(**high)
    assert same.token_ids is not None
    assert link.base is first
    assert other.token_ids is None
    assert other.break_reason is BreakReason.TEMPLATE_REWROTE_HISTORY
    session.reply("Yes!", **high)
    _, _, again = session.ask(Message("user", "Really?"), **high)
    assert again.token_ids is not None
    assert again.break_reason is None


def test_a_word_like_the_marker_in_a_message_does_no_harm(policy, tokenizers) -> None:
    session = policy(tokenizers["qwen3"])
    session.reply("Yes.", new=[Message("user", "Is it?")])
    _, _, prompt = session.ask(Message("user", "XbridleX and XbridleXX"))
    text = tokenizers["qwen3"].decode(prompt.token_ids.tolist())
    assert text.endswith("user\nXbridleX and XbridleXX<|im_end|>\n<|im_start|>assistant\n")


def test_a_late_system_message_is_not_taken_for_another_conversations_first(
    policy, tokenizers
) -> None:
    rule, question = Message("system", "Answer in French."), Message("user", "Go on.")
    early = policy(tokenizers["chatml_kept"])
    early.reply("Yes.", new=[rule, Message("user", "Is it?")])
    early.ask(question)
    late = policy(tokenizers["chatml_kept"])
    late.continuer = early.continuer
    late.reply("Yes.", new=[Message("user", "Is it?")])
    _, _, prompt = late.ask(rule, question)
    assert tokenizers["chatml_kept"].decode(prompt.token_ids.tolist()) == late.rendered()


def test_an_edited_history_keeps_the_ids_above_the_edit(policy, tokenizers) -> None:
    tokenizer = tokenizers["qwen3"]
    session = policy(tokenizer, tools=TOOLS)
    first = session.reply(None, ("look_up", '{"word":"a"}'), new=[Message("user", "Look.")])
    session.reply(None, ("look_up", '{"word":"b"}'), new=session.results("long text"))
    session.messages[2] = msgspec.structs.replace(session.messages[2], content="[cleared]")
    link, _, prompt = session.ask(*session.results("2"))
    path = first.path_ids().tolist()
    assert link.base is first
    assert prompt.break_reason is BreakReason.EDITED
    assert prompt.token_ids[: len(path)].tolist() == path
    text = tokenizer.decode(prompt.token_ids.tolist())
    assert "[cleared]" in text
    assert "long text" not in text


def test_the_history_is_never_rendered(policy, tokenizers, monkeypatch) -> None:
    tokenizer = tokenizers["qwen3"]
    session = policy(tokenizer, tools=TOOLS)
    session.reply(None, ("look_up", '{"word": "a"}'), new=[SYSTEM, Message("user", "Look.")])
    for n in range(10):
        session.reply(None, ("look_up", '{"word": "a"}'), new=session.results(str(n)))
    rendered, encoded = [], []
    render, encode = tokenizer.render, tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "render", lambda m, *a, **k: rendered.append(len(m)) or render(m, *a, **k)
    )
    monkeypatch.setattr(tokenizer, "encode", lambda t: encoded.append(len(t)) or encode(t))
    _, _, prompt = session.ask(*session.results("last"))
    assert prompt.token_ids is not None
    assert max(rendered) <= 4
    assert max(encoded) < 100


# — when exactness is not to be had —


def test_a_first_request_is_rendered_by_the_engine_and_is_no_break(policy, tokenizer) -> None:
    _, _, prompt = policy(tokenizer).ask(Message("user", "Hi."))
    assert (prompt.token_ids, prompt.break_reason, prompt.tail_token_count) == (None, None, 0)


@pytest.mark.parametrize("missing", ["prompt", "reply"])
def test_a_parent_without_ids_is_a_named_break(tokenizers, talk, missing: str) -> None:
    session, said = talk.Talk(), Message("assistant", "Ho.")
    sampled = [] if missing == "reply" else [5]
    given = None if missing == "prompt" else [1]
    link = session.ask(Message("user", "Hi."))
    talk.ended(session.held, new_id("call"), link, [(said, sampled)], prompt_token_ids=given)
    request = talk.request(Message("user", "Hi."), said, Message("user", "?"))
    link = session.held.find(request)
    prompt = Continuer(tokenizers["qwen3"]).prompt(link, request)
    assert (prompt.token_ids, prompt.break_reason) == (None, BreakReason.PARENT_WITHOUT_IDS)


def not_local(policy, tokenizer, *new: Message, **fields) -> None:
    session = policy(tokenizer)
    session.reply("Yes.", sampled=tokenizer.encode("Yes."), new=[Message("user", "Is it?")])
    _, _, prompt = session.ask(*new, **fields)
    assert prompt.token_ids is None
    assert prompt.break_reason is BreakReason.TAIL_NOT_LOCAL


def test_a_late_system_message_that_moves_to_the_top_is_rendered_in_full(
    policy, tokenizers
) -> None:
    not_local(policy, tokenizers["deepseek"], Message("system", "Brief!"), Message("user", "?"))


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_what_the_template_refuses_is_left_to_the_engine(policy, tokenizers, name: str) -> None:
    not_local(policy, tokenizers[name], Message("user", "One."), Message("user", "Two."))


def test_pictures_are_left_to_the_engine(policy, tokenizers) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    not_local(policy, tokenizers["qwen3"], Message("user", [picture]))


def test_going_on_with_an_unfinished_turn_is_left_to_the_engine(policy, tokenizers) -> None:
    not_local(policy, tokenizers["qwen3"], extra={"continue_final_message": True})


@pytest.mark.parametrize(
    "name", ["add_generation_prompt", "documents", "messages", "self", "tools"]
)
def test_template_arguments_of_the_renderer_are_left_to_the_engine(
    policy, tokenizers, name: str
) -> None:
    not_local(policy, tokenizers["qwen3"], Message("user", "?"), template_kwargs={name: True})


def test_a_template_that_looks_at_the_whole_conversation_is_found_out(
    policy, tokenizers, tmp_path
) -> None:
    source = (
        "{%- for m in messages %}<|im_start|>{{ m.role }} of {{ messages | length }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    tokenizer = with_template(tokenizers["qwen3"], tmp_path, source)
    report = Continuer(tokenizer).report
    assert (report.usable, report.tails_local) == (True, False)
    assert any("read differently" in reason for reason in report.reasons)
    not_local(policy, tokenizer, Message("user", "?"))


def test_a_tail_that_depends_on_the_history_is_rendered_with_it(
    policy, tokenizers, tmp_path
) -> None:
    source = (
        "{%- for m in messages %}<|im_start|>{{ m.role }} {{ loop.index }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {{ messages | length + 1 }}\n"
        "{% endif %}"
    )
    session = policy(with_template(tokenizers["qwen3"], tmp_path, source))
    assert not session.continuer.report.tails_local
    for _ in range(2):
        # The same words each time: only the place of the turn differs.
        session.reply("Yes.", new=[Message("user", "Is it?")])
    _, _, prompt = session.ask(Message("user", "Is it?"))
    assert prompt.token_ids is not None
    assert prompt.break_reason is None
    assert session.tokenizer.decode(list(prompt.token_ids)) == session.rendered()


UNFINDABLE = {
    "a reply is not rendered": (
        "{%- for m in messages if m.role != 'assistant' %}<|im_start|>{{ m.content }}<|im_end|>"
        "{% endfor %}",
        "does not render an assistant's text",
    ),
    "a reply closes in words, differently at the end": (
        "{%- for m in messages %}{{ m.role }}: {{ m.content }}"
        "{{ ' (over)' if loop.last else ' (next)' }}{% endfor %}",
        "closes a reply differently",
    ),
    "a reply has an end only at the end": (
        "{%- for m in messages %}{{ m.role }}: {{ m.content }}"
        "{{ '<|im_end|>' if loop.last and m.role == 'assistant' }}{% endfor %}",
        "no special token ends a reply",
    ),
}


@pytest.mark.parametrize("case", UNFINDABLE)
def test_an_end_of_reply_that_cannot_be_found_is_a_named_break(
    policy, tokenizers, tmp_path, case: str
) -> None:
    source, objection = UNFINDABLE[case]
    tokenizer = with_template(tokenizers["qwen3"], tmp_path, source)
    report = Continuer(tokenizer).report
    assert not report.tails_local
    assert any(objection in reason for reason in report.reasons)
    not_local(policy, tokenizer, Message("user", "?"))


def test_an_end_of_turn_that_is_no_token_of_its_own_is_found_out(tokenizers, tmp_path) -> None:
    source = tokenizers["qwen3"].chat_template_source
    tokenizer = with_template(tokenizers["qwen3"], tmp_path, source)
    tokenizer.backend.encode_special_tokens = True
    report = Continuer(tokenizer).report
    assert not report.tails_local
    assert any("not a token of its own" in reason for reason in report.reasons)


def test_a_template_without_special_tokens_continues_too(policy, tokenizers, tmp_path) -> None:
    source = (
        "{%- for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
        "{%- if add_generation_prompt %}### assistant:\n{% endif %}"
    )
    tokenizer = with_template(tokenizers["qwen3"], tmp_path, source)
    assert Continuer(tokenizer).report.end_of_turn_ids == frozenset()
    session = policy(tokenizer)
    session.reply("Yes.", sampled=tokenizer.encode("Yes."), new=[Message("user", "Is it?")])
    _, _, prompt = session.ask(Message("user", "Sure?"))
    assert tokenizer.decode(prompt.token_ids.tolist()) == session.rendered()


def test_a_template_that_renders_nothing_is_reported(tokenizers, tmp_path) -> None:
    source = "{{ raise_exception('never') }}"
    report = Continuer(with_template(tokenizers["qwen3"], tmp_path, source)).report
    assert not report.usable
    assert not report.tails_local


def with_template(tokenizer: Tokenizer, directory, source: str) -> Tokenizer:
    for file in tokenizer.directory.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "chat_template.jinja").write_text(source)
    return Tokenizer(directory)


# — the report —

KEPT, STRIPPED, NONE = "kept", "stripped after the next user turn", "not rendered"
VERDICTS = {
    #              prefix  thinking  late   alternation tools  end
    "chatml_kept": (True, KEPT, True, False, True, ["<|im_end|>"]),
    "qwen3": (False, STRIPPED, True, False, True, ["<|im_end|>"]),
    "llama3": (True, NONE, True, False, True, ["<|eot_id|>"]),
    "mistral": (False, NONE, False, True, True, ["</s>"]),
    "gemma": (True, NONE, False, True, False, ["<end_of_turn>"]),
    "glm": (False, STRIPPED, True, False, True, []),
    "deepseek": (True, NONE, True, False, True, ["<｜end▁of▁sentence｜>"]),
    "harmony": (False, STRIPPED, True, False, True, ["<|return|>", "<|call|>"]),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_probe_tells_what_each_family_does(tokenizers, name: str) -> None:
    prefix, thinking, late_system, alternation, tools, ends = VERDICTS[name]
    report = Continuer(tokenizers[name]).report
    assert report.usable
    assert report.tails_local
    assert report.system
    assert report.prefix_preserving is prefix
    assert report.thinking == thinking
    assert report.late_system is late_system
    assert report.alternation is alternation
    assert report.tools is tools
    assert report.parallel_calls is (tools and name not in ONE_CALL_ONLY)
    assert report.arguments_reserialised is tools
    assert report.end_of_turn_ids == {tokenizers[name].token_id(end) for end in ends}
    assert report.reasons


def test_the_probe_takes_less_than_a_second(tokenizer) -> None:
    start = time.perf_counter()
    Continuer(tokenizer)
    assert time.perf_counter() - start < 1.0


def test_a_template_that_refuses_long_call_ids_is_reported(tokenizers, tmp_path) -> None:
    source = tokenizers["mistral"].chat_template_source.replace(
        "{%- for call in message.tool_calls %}",
        "{%- for call in message.tool_calls %}"
        "{%- if call.id | length != 9 %}{{ raise_exception('nine characters!') }}{%- endif %}",
    )
    report = Continuer(with_template(tokenizers["mistral"], tmp_path, source)).report
    assert report.tools
    assert report.ids_refused
    assert any("of another form" in reason for reason in report.reasons)


def test_given_ids_are_sent_as_they_are(tokenizers, talk) -> None:
    request = msgspec.structs.replace(talk.request(), dialect="completions", prompt=(5, 6))
    link = talk.Talk().held.find(request)
    prompt = Continuer(tokenizers["qwen3"]).prompt(link, request)
    assert np.array_equal(prompt.token_ids, [5, 6])


def test_calls_that_vanish_are_reported_and_continue_by_a_surrogate_without_them(
    tokenizers, tmp_path
) -> None:
    source = (
        "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    continuer = Continuer(with_template(tokenizers["qwen3"], tmp_path, source))
    report = continuer.report
    assert report.calls_vanish
    assert not report.tools
    assert report.tails_local
    assert any("vanish" in reason for reason in report.reasons)


def test_a_generation_prompt_that_history_lacks_is_no_preserved_prefix(
    tokenizers, tmp_path
) -> None:
    source = (
        "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "<think>\n{% endif %}"
    )
    report = Continuer(with_template(tokenizers["qwen3"], tmp_path, source)).report
    assert report.tails_local
    assert not report.prefix_preserving


def test_text_that_a_template_moves_behind_the_results_does_not_break_the_tail(
    tokenizers, tmp_path
) -> None:
    source = (
        "{%- for m in messages %}{% if m.role == 'tool' %}<tool_response>{{ m.content }}"
        "</tool_response>{% if messages[loop.index0 - 1].content %}"
        "{{ messages[loop.index0 - 1].content }}<|im_end|>\n{% endif %}"
        "{% elif m.role == 'assistant' and m.tool_calls %}<|im_start|>assistant\n"
        "{% for c in m.tool_calls %}<tool_call>{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    continuer = Continuer(with_template(tokenizers["qwen3"], tmp_path, source))
    reply = Message(
        "assistant", "Let me see.", tool_calls=(ToolCall("c1", "look_up", '{"word": "a"}'),)
    )
    tail = (Message("tool", "12", tool_call_id="c1"),)
    shape = continuer._prober.proven(reply, tail, Setting(tools=(TOOL,)))
    assert shape is Shape.CALLS
