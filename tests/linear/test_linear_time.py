"""Nothing on the way of a request, of a reply or of a page costs more than its length.

Each case doubles one input: what a degenerating policy writes, what a harness echoes, and how an
engine cuts its stream. A policy that repeats one tag must not stop a proxy for all of its clients.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from bridle.engine.contract.markup import TOOL_MARKUP, unread_calls
from bridle.engine.serve.markup import READ, ThinkingParser, reader
from bridle.proxy.continuation.tail import _unused_marker
from bridle.proxy.dialects.registry import DIALECTS
from bridle.proxy.engines.reply import ReplyDecoder
from bridle.proxy.session.match import compare
from bridle.proxy.session.session import Session
from bridle.proxy.wire.canonical import Message, Minted, Request, ToolCall
from bridle.proxy.wire.fold import Fold
from bridle.proxy.wire.sse import SseParser
from bridle.store.call import CallBegun
from bridle.store.records import CallStatus, Choice, SessionRecord, new_id
from bridle.store.writing.redaction import Redactor
from bridle.viewer.differences import _compared

pytestmark = pytest.mark.sampled(5)

Text = Callable[[int], str]
Work = Callable[[], object]

TEXTS: dict[str, Text] = {
    "thinking opened": lambda n: "<think>" * n,
    "thinking opened, closed at the end": lambda n: "<think>" * n + "</think>x",
    "thinking closed": lambda n: "<think>" + "</think>" * n,
    "thinking in pairs": lambda n: "<think>a</think>" * n,
    "thinking nested": lambda n: "<think>" * n + "</think>" * n,
    "thinking after blanks": lambda n: " " * n + "<think>" * n,
    "blanks": lambda n: "x" + " \n" * n + "x",
    "signs": lambda n: "-" * n,
    "words": lambda n: "a " * n,
    "folded calls": lambda n: "Calling tools:" * n,
    "quotes": lambda n: '\\"' * n,
    "summaries": lambda n: "<summary>" * n + "x" * 100 + "</summary>",
}
MARKUP: dict[str, Text] = {
    **{f"opening of {m.name}": lambda n, m=m: (m.opening or m.name) * n for m in TOOL_MARKUP},
    "calls whose element is not closed": lambda n: "<tool_calls" * n,
    "separators": lambda n: "<｜tool▁calls▁begin｜>" + "<｜tool▁sep｜>" * n,
    "assistants": lambda n: "<tool_call>" + "<assistant>" * n,
    "functions": lambda n: "<function=" * n,
    "calls": lambda n: '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * n,
    "a name that does not end": lambda n: '<tool_call>{"name": "' + "a" * n,
    "a key that does not end": lambda n: '<tool_call>{"' + "a" * n,
    "parameters": lambda n: "<tool_call><function=f>" + "<parameter=a>b</parameter>" * n,
}
_PATH = {"model": "m", "method": "generateContent"}


def minted() -> Minted:
    call_id = new_id("call")
    return Minted(call_id, 0, "resp_" + call_id.removeprefix("call_"), "m")


def parsed(dialect: str, body: dict[str, Any]) -> Request:
    return DIALECTS.get(dialect).parse(json.dumps(body).encode(), _PATH, {})


def conversation(dialect: str, *turns: tuple[str, str]) -> dict[str, Any]:
    """A request in which people and model took these turns."""
    if dialect == "google":
        roles = {"assistant": "model"}
        parts = [{"role": roles.get(role, role), "parts": [{"text": text}]} for role, text in turns]
        return {"contents": parts}
    messages = [{"role": role, "content": text} for role, text in turns]
    given = {"model": "m", "max_tokens": 9, "stream": True}
    return {**given, "input" if dialect == "responses" else "messages": messages}


def answered(request: Request, reply: Message) -> Session:
    """A session in which the request got this reply."""
    session = Session(SessionRecord(id=new_id("ses"), created_at=0.0))
    link, call_id = session.find(request), new_id("call")
    choices = [Choice(np.arange(4, dtype=np.uint32), np.zeros(4, np.float32), (), None)]
    growth, _ = session.grow(call_id, link, choices, np.arange(8, dtype=np.uint32))
    session.add(session.turn(call_id, link, CallStatus.COMPLETE, [reply], growth, 8))
    return session


def test_a_cost_that_is_not_linear_is_found(growth):
    def quadratic(n: int) -> Work:
        return lambda: [sum(range(n)) for _ in range(n)]

    grown, _ = growth(quadratic, 128, tries=2)
    assert grown > 3


@pytest.mark.parametrize(
    ("dialect", "name"),
    [
        *(("chat", name) for name in TEXTS),
        # Sessions search every dialect's text alike; parsing it is each dialect's own.
        *product(
            ("messages", "responses", "google"), ("thinking nested", "folded calls", "quotes")
        ),
    ],
)
def test_a_reply_that_is_echoed(is_linear, dialect, name):
    def echo(n: int) -> Work:
        text = TEXTS[name](n)
        session = answered(
            parsed(dialect, conversation(dialect, ("user", "go"))), Message("assistant", text)
        )
        turns = (("user", "go"), ("assistant", text), ("user", "on"))
        body = json.dumps(conversation(dialect, *turns)).encode()
        return lambda: session.find(DIALECTS.get(dialect).parse(body, _PATH, {}))

    is_linear(echo, 1024)


@pytest.mark.parametrize("change", [lambda text: text + " x", lambda text: text[: len(text) // 2]])
@pytest.mark.parametrize("name", TEXTS)
def test_a_reply_that_is_echoed_otherwise_or_in_part(is_linear, name, change):
    def echo(n: int) -> Work:
        text = TEXTS[name](n)
        asked = Message("user", "go")
        session = answered(
            Request(dialect="chat", model="m", messages=(asked,)), Message("assistant", text)
        )
        again = (asked, Message("assistant", change(text)), Message("user", "on"))
        return lambda: session.find(Request(dialect="chat", model="m", messages=again))

    is_linear(echo, 1024)


def _call(index: int, name: str = "f") -> dict[str, Any]:
    return {"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": "{}"}}


def _chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "go"}, *messages], **more}


def _blocks(role: str, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    asked = {"role": "user", "content": "go"}
    return {"model": "m", "max_tokens": 9, "messages": [asked, {"role": role, "content": blocks}]}


def _parts(role: str, parts: list[dict[str, Any]], *more: dict[str, Any]) -> dict[str, Any]:
    return {"contents": [{"role": "user", "parts": [{"text": "go"}]},
                         {"role": role, "parts": parts}, *more]}  # fmt: skip


def _signed(n: int) -> list[str]:
    made = minted()
    return [f"{made.signature(index % 100)}.{index}" for index in range(n)]


def _answers(names: list[str]) -> dict[str, Any]:
    given = [{"functionResponse": {"name": name, "response": {"output": "x"}}} for name in names]
    return {"role": "user", "parts": given}


BODIES: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "messages": ("chat", lambda n: _chat(*[{"role": "user", "content": "u"}] * n)),
    "replies in a row": ("chat", lambda n: _chat(
        *[{"role": "assistant", "content": f"r{i}"} for i in range(n)])),
    "a reply in pieces": ("chat", lambda n: (lambda made: _chat(
        *[{"role": "assistant", "content": "x", "tool_calls": [
            _call(0) | {"id": made.tool_call_id(i % 100)}]} for i in range(n)]))(minted())),
    "parts": ("chat", lambda n: _chat(
        {"role": "user", "content": [{"type": "text", "text": "u"}] * n})),
    "parts of a reply": ("chat", lambda n: _chat(
        {"role": "assistant", "content": [{"type": "text", "text": "u"}] * n})),
    "calls and results": ("chat", lambda n: _chat(
        {"role": "assistant", "tool_calls": [_call(i) for i in range(n)]},
        *[{"role": "tool", "tool_call_id": f"c{i}", "content": "r"} for i in range(n)])),
    "results that stand apart": ("chat", lambda n: _chat(
        {"role": "assistant", "tool_calls": [_call(i) for i in range(n)]},
        *[m for i in range(n) for m in ({"role": "tool", "tool_call_id": f"c{i}", "content": "r"},
                                        {"role": "user", "content": "x"})])),
    "names": ("chat", lambda n: _chat(tools=[
        {"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(n)])),
    "a name": ("chat", lambda n: _chat(
        {"role": "assistant", "tool_calls": [_call(0, "f_" * n)]})),
    "arguments": ("chat", lambda n: _chat({"role": "assistant", "tool_calls": [
        {"id": "c", "type": "function", "function": {
            "name": "f", "arguments": json.dumps({f"k{i}": i for i in range(n)})}}]})),
    "arguments that break off": ("chat", lambda n: _chat({"role": "assistant", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * n}}]})),
    "thinking blocks": ("messages", lambda n: _blocks("assistant", [
        {"type": "thinking", "thinking": "t", "signature": value} for value in _signed(n)])),
    "tool uses": ("messages", lambda n: _blocks("assistant", [
        {"type": "tool_use", "id": f"t{i}", "name": "f", "input": {}} for i in range(n)])),
    "reasoning items": ("responses", lambda n: {"model": "m", "input": [
        {"type": "reasoning", "id": value, "summary": []} for value in _signed(n)]}),
    "function calls": ("responses", lambda n: {"model": "m", "input": [
        {"type": "function_call", "call_id": f"c{i}", "id": value, "name": "f", "arguments": "{}"}
        for i, value in enumerate(_signed(n))]}),
    "signed parts": ("google", lambda n: _parts("model", [
        {"text": "t", "thoughtSignature": value} for value in _signed(n)])),
    "answers backwards": ("google", lambda n: _parts(
        "model", [{"functionCall": {"name": f"f{i}", "args": {}}} for i in range(n)],
        _answers([f"f{i}" for i in reversed(range(n))]))),
    "answers to nothing": ("google", lambda n: _parts(
        "model", [{"functionCall": {"name": "f", "args": {}}}] * n, _answers(["g"] * n))),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_a_request_of_many_things(is_linear, name):
    dialect, make = BODIES[name]

    def request(n: int) -> Work:
        session = answered(parsed(dialect, make(2)), Message("assistant", "hello"))
        body = json.dumps(make(n)).encode()
        return lambda: session.find(DIALECTS.get(dialect).parse(body, _PATH, {}))

    is_linear(request, 256)


def test_the_search_for_a_summary_that_a_text_may_quote(is_linear):
    def quoted(n: int) -> Work:
        session = Session(SessionRecord(id=new_id("ses"), created_at=0.0))
        messages: list[Message] = []
        for word in ("a", "b", "c"):
            messages.append(Message("user", word))
            link = session.find(Request(dialect="chat", model="m", messages=tuple(messages)))
            messages.append(Message("assistant", "-" * 64 + word))
            session.add(session.turn(new_id("call"), link, CallStatus.COMPLETE, [messages[-1]]))
        asked = (Message("user", "-" * n),)
        return lambda: session.find(Request(dialect="chat", model="m", messages=asked))

    is_linear(quoted, 1024)


def test_calls_that_are_echoed_in_another_order(is_linear):
    def reversed_calls(n: int) -> Work:
        calls = tuple(ToolCall(f"c{i}", "f", json.dumps({"i": i})) for i in range(n))
        one = Message("assistant", None, tool_calls=calls)
        other = Message("assistant", None, tool_calls=calls[::-1])
        return lambda: compare(one, other)

    is_linear(reversed_calls, 128)


def test_a_text_that_is_full_of_the_marker_of_tails(is_linear):
    is_linear(lambda n: lambda: _unused_marker([Message("user", "Xbridle" + "X" * n)]), 1024)
    is_linear(lambda n: lambda: _unused_marker([Message("user", "XbridleX" * n)]), 1024)
    assert _unused_marker([Message("user", "XbridleX XbridleXXX")]) == "XbridleXXXX"


@pytest.mark.parametrize("name", TEXTS | MARKUP)
def test_calls_that_nobody_read_are_looked_for(is_linear, name):
    text = (TEXTS | MARKUP)[name]

    def search(n: int) -> Work:
        content = text(n)
        return lambda: unread_calls(content)

    is_linear(search, 1024)


def test_a_history_of_equal_replies_that_no_call_explains(is_linear):
    """Each step of the request has the same reply as each call of the session."""
    said = Message("assistant", None, tool_calls=(ToolCall("c", "f", "{}"),))

    def search(n: int) -> Work:
        session = Session(SessionRecord(id=new_id("ses"), created_at=0.0))
        for number in range(n):
            asked = Request(dialect="chat", model="m", messages=(Message("user", f"{number}"),))
            link, call_id = session.find(asked), new_id("call")
            session.add(session.turn(call_id, link, CallStatus.COMPLETE, [said]))
        result = Message("tool", "r", tool_call_id="c")
        talk = (Message("user", "other"), *[said, result] * n)
        return lambda: session.find(Request(dialect="chat", model="m", messages=talk))

    is_linear(search, 128)


PIECES: dict[str, Callable[[int], dict[str, Any]]] = {
    "text": lambda i: {"content": "a"},
    "blanks": lambda i: {"content": " "},
    "thoughts": lambda i: {"reasoning": "<think>"},
    "thoughts and text": lambda i: {"content": "a"} if i % 2 else {"reasoning": "b"},
    "arguments": lambda i: {"tool_calls": [
        {"index": 0, "id": "c", "function": {"name": None if i else "f", "arguments": "{"}}]},
}  # fmt: skip


@pytest.mark.parametrize("logprobs", [False, True], ids=["plain", "logprobs"])
@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses", "google"])
def test_a_reply_that_is_streamed(is_linear, dialect, name, logprobs):
    body = conversation(dialect, ("user", "go"))
    if logprobs:
        body |= {
            "chat": {"logprobs": True},
            "responses": {"include": ["message.output_text.logprobs"]},
            "google": {"generationConfig": {"responseLogprobs": True}},
        }.get(dialect, {})
    request, spoken = parsed(dialect, body), DIALECTS.get(dialect)

    def stream(n: int) -> Work:
        scored = {"content": [{"token": "a", "logprob": -1.0, "top_logprobs": []}]}
        chunks = [
            json.dumps(
                {"choices": [{"delta": PIECES[name](i), "token_ids": [i], "logprobs": scored}]}
            ).encode()
            for i in range(n)
        ]
        chunks.append(b'{"choices":[{"delta":{},"finish_reason":"stop"}]}')

        def work() -> None:
            made, fold = minted(), Fold()
            decoder, emitter = ReplyDecoder(made, choices=1, detail=True), None
            emitter = spoken.emitter(request, made)
            emitter.begin()
            for chunk in chunks:
                events = decoder.events(chunk)
                fold.take(events)
                for event in events:
                    emitter.event(event)
            emitter.end()
            spoken.reply(request, made, fold.reply())

        return work

    is_linear(stream, 256)


@pytest.mark.parametrize("dialect", ["chat", "responses", "google"])
def test_a_chunk_of_many_logprobs(is_linear, dialect):
    body = (
        conversation(dialect, ("user", "go"))
        | {
            "chat": {"logprobs": True, "top_logprobs": 2},
            "responses": {"include": ["message.output_text.logprobs"]},
            "google": {"generationConfig": {"responseLogprobs": True}},
        }[dialect]
    )
    request, spoken = parsed(dialect, body), DIALECTS.get(dialect)
    entry = {"token": "é", "logprob": -1.0, "top_logprobs": [{"token": "b", "logprob": -2.0}]}

    def chunk(n: int) -> Work:
        scored = {"delta": {"content": "é" * n}, "token_ids": [1] * n, "finish_reason": "stop"}
        sent = json.dumps({"choices": [{**scored, "logprobs": {"content": [entry] * n}}]}).encode()

        def work() -> None:
            made, fold = minted(), Fold()
            decoder, emitter = ReplyDecoder(made, choices=1, detail=True), None
            emitter = spoken.emitter(request, made)
            emitter.begin()
            for event in decoder.events(sent):
                fold.take([event])
                emitter.event(event)
            emitter.end()
            spoken.reply(request, made, fold.reply())

        return work

    is_linear(chunk, 512)


EVENTS = [b"data: {}\n\n", b"data: {}\r\n\r\n", b"data: a\n", b"a", b"\r", b":\n\n", b"xdata:\n"]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 30])
def test_a_stream_in_chunks_of_any_size(is_linear, size, event):
    def feed(n: int) -> Work:
        data = b"data: " + event * n

        def work() -> None:
            parser = SseParser()
            for at in range(0, len(data), size):
                parser.feed(data[at : at + size])
            parser.finish()

        return work

    is_linear(feed, 1024)


@pytest.mark.parametrize("step", [4, 1 << 30], ids=["pieces", "whole"])
@pytest.mark.parametrize("name", TEXTS)
def test_thoughts_that_an_engine_of_ours_reads(is_linear, name, step):
    def read(n: int) -> Work:
        text = TEXTS[name](n)

        def work() -> None:
            parser = ThinkingParser()
            for at in range(0, len(text), step):
                parser.push(text[at : at + step])
            parser.flush()

        return work

    is_linear(read, 1024)


@pytest.mark.parametrize("step", [4, 1 << 30], ids=["pieces", "whole"])
@pytest.mark.parametrize("name", MARKUP)
def test_calls_that_an_engine_of_ours_reads(is_linear, name, step):
    own = name.removeprefix("opening of ")
    if own != name and own not in READ:
        pytest.skip("read by vLLM alone")
    for markup in (own,) if own != name else ("hermes", "qwen_xml", "deepseek_v3", "functionary"):

        def read(n: int, markup: str = markup) -> Work:
            text = MARKUP[name](n)

            def work() -> None:
                reading = reader(markup, ())
                for at in range(0, len(text), step):
                    reading.push(text[at : at + step])
                reading.flush()

            return work

        is_linear(read, 2048)


SECRETS = {
    "-----BEGIN RSA PRIVATE KEY-----": "a key's beginning",
    "Bearer ": "a bearer",
    "sk-aaaaaaaaaaaaaaaaaaaaaaaa ": "one key again and again",
    "eyJ": "a web token's beginning",
    "eyJaaaaaaaaaaaa.": "a web token's parts",
    "github_pat_": "a token's beginning",
    "AKIA": "an access key's beginning",
    "://a:": "a password in a URL, without its end",
    "aws_secret_access_key = '": "an assignment",
    "MTk4NjIyNDgzNDcxOTI1MjQ4.Cl2FMQ.": "a token with dots",
    "a": "letters",
    "\\n": "escapes",
    '"': "quotes",
    '"aaaaaaaa"\n': "lines",
}


def _begun(content: str) -> CallBegun:
    body = json.dumps({"content": content}).encode()
    return CallBegun(
        id="c", session_id="s", dialect="chat", started_at=0.0, request_body=body, stream=False,
        model_requested="m", headers={},
    )  # fmt: skip


@pytest.mark.parametrize("text", SECRETS, ids=SECRETS.values())
def test_a_body_that_is_redacted(is_linear, text):
    redactor = Redactor()

    def redact(n: int) -> Work:
        begun = _begun(text * n)
        plain = dataclasses.replace(begun, request_body=(text * n).encode())
        return lambda: (redactor.begun(begun), redactor.begun(plain))

    is_linear(redact, 256)


def test_a_body_of_many_secrets_is_redacted(is_linear):
    redactor = Redactor()

    def redact(n: int) -> Work:
        begun = _begun(" ".join(f"sk-{index:024d}" for index in range(n)))
        return lambda: redactor.begun(begun)

    is_linear(redact, 128)


LINES: dict[str, Callable[[int], tuple[list[str], list[str]]]] = {
    "long lines": lambda n: (["ab" * n], ["ba" * n]),
    "other lines": lambda n: ([f"a{i}" for i in range(n)], [f"b{i}" for i in range(n)]),
    "alike lines": lambda n: (
        [f"line {i} {'z' * 200}" for i in range(n)],
        [f"Line {i} {'z' * 200}" for i in range(n)],
    ),
    "the same line again": lambda n: (["x"] + ["a"] * n, ["y"] + ["b", "a"] * n),
}


@pytest.mark.parametrize("name", LINES)
def test_a_difference_that_a_page_shows(is_linear, name):
    def show(n: int) -> Work:
        old, new = LINES[name](n)
        return lambda: _compared(old, new)

    is_linear(show, 512)
