"""Test the results of single habits of upstreams: one rule a test."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from bridle.proxy.engines.reply import ReplyDecoder
from bridle.proxy.settings import OtherModel
from bridle.proxy.wire.canonical import ApiError, Minted, Started
from bridle.proxy.wire.fold import Fold
from bridle.store.records import CallStatus

ODD = runpy.run_path(str(Path(__file__).with_name("odd_upstream.py")))
Sent, Theatre = ODD["Sent"], ODD["OddUpstreams"]
MINTED = Minted("call_abcdefghij234567klmnopqr", 1, "chatcmpl-x", "m")
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "get_time")]


def decoded(*payloads: Any, choices: int = 1) -> tuple[Any, set[str], ReplyDecoder]:
    """The reply, the names of its notes, and the decoder."""
    decoder, fold = ReplyDecoder(MINTED, choices=choices, detail=False, tools=TOOLS), Fold()
    for payload in payloads:
        text = payload if isinstance(payload, str) else json.dumps(payload)
        fold.take(decoder.events(text.encode()))
    fold.take(decoder.last_events())
    return fold.reply(), {note.name for note in decoder.notes}, decoder


def said(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def piece(arguments: Any = "", **more: Any) -> dict[str, Any]:
    """A chunk with one piece of a call; ``name`` goes into its function."""
    function = {"arguments": arguments} | {k: more.pop(k) for k in ("name",) if k in more}
    return said(tool_calls=[{"function": function} | more])


END = said("stop")


def calls(*payloads: Any) -> tuple[list[tuple[str, str]], set[str]]:
    reply, notes, _ = decoded(*payloads, END)
    return [(call.name, call.arguments) for call in reply.choices[0].tool_calls], notes


OSLO, ROME = '{"city":"Oslo"}', '{"city":"Rome"}'


@pytest.mark.parametrize(
    ("payloads", "note"),
    [
        ([piece(OSLO, id="a", name="weather"), piece(ROME, id="b", name="weather")], "by_id"),
        ([piece(OSLO, name="weather"), piece(ROME, name="weather")], "by_name"),
        (
            [piece(name="weather"), piece(OSLO), piece(name="weather"), piece(ROME)],
            "by_name",
        ),
        ([piece(OSLO, index=0, id="a", name="weather"), piece(ROME, index=0, id="b")], "by_id"),
    ],
)
def test_calls_without_an_index_of_their_own_are_told_apart(payloads: Any, note: str) -> None:
    if "name" not in payloads[-1]["choices"][0]["delta"]["tool_calls"][0]["function"]:
        payloads = [*payloads, piece(index=0, id="b", name="weather")]
    found, notes = calls(*payloads)
    assert found == [("weather", OSLO), ("weather", ROME)]
    assert f"tool_call_{note}" in notes


def test_a_name_that_comes_in_pieces_is_one_name() -> None:
    found, notes = calls(piece(index=0, id="a", name="get_"), piece("{}", index=0, name="time"))
    assert (found, "tool_call_name_in_pieces" in notes) == ([("get_time", "{}")], True)


def test_a_call_that_is_sent_again_is_one_call() -> None:
    whole = piece(OSLO, index=0, id="a", name="weather")
    assert calls(whole, whole) == ([("weather", OSLO)], {"tool_call_repeated"})


def test_broken_arguments_are_kept_with_a_note() -> None:
    found, notes = calls(piece('{"city": Oslo', index=0, id="a", name="weather"))
    assert (found, notes) == ([("weather", '{"city": Oslo')], {"tool_call_arguments_broken"})


@pytest.mark.parametrize(
    "payloads",
    [
        [piece(OSLO, index=0, id="a")],
        [piece(OSLO + ROME, index=0, id="a", name="weather")],
        [piece(OSLO, index=0, id="a", name="weather"), piece(ROME, index=0)],
        [
            piece(OSLO, index=0, id="a", name="weather"),
            piece(ROME, index=0, id="a", name="weather"),
        ],
        [piece(OSLO, name="weather"), said(content="so"), piece(ROME)],
    ],
    ids=["nameless", "two_in_one", "two_in_pieces", "one_id", "after_its_end"],
)
def test_calls_that_cannot_be_told_apart_are_an_error(payloads: Any) -> None:
    with pytest.raises(ApiError, match="the engine sent"):
        calls(*payloads)


def test_a_call_that_the_token_limit_cut_before_its_name_is_left_out_with_a_note() -> None:
    reply, notes, _ = decoded(piece(index=0, id="a"), said("length"))
    assert (reply.choices[0].tool_calls, notes) == ([], {"tool_call_cut"})


def test_what_follows_a_call_waits_until_the_call_is_whole() -> None:
    decoder = ReplyDecoder(MINTED, choices=1, detail=False)

    def kinds(payload: Any) -> list[str]:
        found = decoder.events(json.dumps(payload).encode())
        return [type(event).__name__ for event in found if not isinstance(event, Started)]

    assert kinds(piece('{"a"', index=0, id="a", name="f")) == ["ToolCallDelta"]
    assert kinds(piece("{}", index=1, id="b", name="g")) == []
    assert kinds(said(content="text")) == []
    assert kinds(piece(":1}", index=0)) == ["ToolCallDelta"] * 2 + ["TextDelta"]


def test_an_object_of_arguments_is_text_with_a_note() -> None:
    found, notes = calls(piece({"city": "Oslo"}, index=0, id="a", name="weather"))
    assert (found, notes) == ([("weather", OSLO)], {"arguments_were_an_object"})


@pytest.mark.parametrize("word", ["eos_token", "eos", "STOP", "end_turn", "COMPLETE"])
def test_an_odd_word_for_the_end_is_a_stop_with_a_note(word: str) -> None:
    reply, notes, _ = decoded(said(content="hi"), said(word))
    assert (reply.choices[0].finish_reason, notes) == ("stop", {"finish_word"})


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("MAX_TOKENS", "length"),
        ("model_length", "length"),
        ("max_tokens", "length"),
        ("tool_use", "tool_calls"),
        ("SAFETY", "content_filter"),
    ],
)
def test_an_odd_word_for_another_end_is_that_end(word: str, reason: str) -> None:
    assert decoded(said(word))[0].choices[0].finish_reason == reason


def test_an_unknown_word_for_the_end_is_an_error_and_an_empty_one_is_none() -> None:
    with pytest.raises(ApiError, match="gave up"):
        decoded(said("gave up"))
    assert decoded(said("", content="hi"), END)[0].choices[0].text == "hi"


@pytest.mark.parametrize(
    "payload",
    [
        said(content="theirs") | {"id": "y"},
        said(content="theirs") | {"prompt_token_ids": [9]},
    ],
    ids=["id", "prompt"],
)
def test_a_chunk_of_another_reply_is_an_error(payload: Any) -> None:
    first = said(content="ours") | {"prompt_token_ids": [1, 2]}
    with pytest.raises(ApiError, match="mixed replies"):
        decoded(first, payload, END)


def test_a_whole_message_after_its_pieces_says_nothing_twice() -> None:
    call = {"id": "a", "function": {"name": "weather", "arguments": OSLO}}
    message = {"content": "hi", "reasoning": "hmm", "tool_calls": [call]}
    whole = {"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    for pieces in ([said(content="hi")], [said(content="hi"), piece(OSLO, id="a", name="weather")]):
        reply, notes, _ = decoded(*pieces, whole)
        (choice,) = reply.choices
        assert (choice.text, choice.reasoning) == ("hi", "")
        assert [(one.name, one.arguments) for one in choice.tool_calls] == [("weather", OSLO)]
        assert "message_repeated" in notes
    reply, notes, _ = decoded(said(role="assistant"), whole)
    assert (reply.choices[0].text, reply.choices[0].reasoning) == ("hi", "hmm")
    assert "message_repeated" not in notes


def test_media_beside_the_text_are_noted_as_not_sent() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    reply, notes, decoder = decoded(said(content="hi", images=[picture]), END)
    assert (reply.choices[0].text, notes) == ("hi", {"media_not_sent"})
    assert [note.detail for note in decoder.notes] == ["images"]
    assert decoded(said(content="hi", audio={"id": "a"}), END)[1] == {"media_not_sent"}


def test_the_same_prompt_ids_again_and_late_ones_are_taken() -> None:
    ids = {"prompt_token_ids": [1, 2]}
    reply, notes, _ = decoded(said(content="a"), said(content="b") | ids, END | ids)
    assert (list(reply.prompt_token_ids), notes) == ([1, 2], {"prompt_ids_late"})


def test_a_choice_that_was_not_asked_for_is_not_merged() -> None:
    foreign = said(content="theirs")
    foreign["choices"][0]["index"] = 1
    reply, _, decoder = decoded(said(content="ours"), foreign, END)
    assert [choice.text for choice in reply.choices] == ["ours"]
    assert (decoder.contradiction or "").startswith("choice_not_asked_for")


@pytest.mark.parametrize(
    "chunks",
    [
        (r'"\ud83d"', r'"\ude00 x"'),
        (r'"a\uD83D"', r'"\uDE00"', r'" x"'),
    ],
)
def test_a_character_in_two_chunks_is_one_character(chunks: tuple[str, ...]) -> None:
    payloads = ['{"choices":[{"delta":{"content":' + chunk + "}}]}" for chunk in chunks]
    reply, notes, _ = decoded(*payloads, END)
    assert reply.choices[0].text.strip("a") == "😀 x"
    assert notes == {"surrogate_pair_joined"}


def test_half_a_character_is_replaced_with_a_note() -> None:
    reply, notes, _ = decoded(r'{"choices":[{"delta":{"content":"a\ud83d"}}]}', END)
    assert reply.choices[0].text == "a\ufffd"
    assert "surrogate_replaced" in notes


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None, "completion_tokens": None}])
def test_usage_that_is_null_is_absent(usage: Any) -> None:
    reply, _, _ = decoded(said(content="hi"), END, {"choices": [], "usage": usage})
    assert (reply.usage.completion_tokens if reply.usage else 0) == 0


def test_usage_in_floats_is_counted() -> None:
    usage = {"prompt_tokens": 3.0, "completion_tokens": 2.0}
    reply, notes, _ = decoded(END, {"choices": None, "usage": usage})
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 2)
    assert "usage_odd" in notes


def test_a_legacy_function_call_is_a_tool_call() -> None:
    payload = said(function_call={"name": "weather", "arguments": OSLO})
    found, notes = calls(payload)
    assert (found, notes) == ([("weather", OSLO)], {"function_call_converted"})


def test_a_part_that_is_not_known_is_an_error() -> None:
    with pytest.raises(ApiError, match="'hologram'"):
        decoded(said(content=[{"type": "hologram", "url": "x"}]), END)


# -- through the proxy -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    found = Theatre(tmp_path_factory.mktemp("habits"), failures_to_eject=3)
    yield found
    found.close()


TOO_LONG = (
    "This model's maximum context length is 10 tokens. However, your request has 20 input tokens"
)
ERRORS = [
    ({"error": {"message": "no GPU", "code": 500}}, 502, "upstream_error", "no GPU"),
    ({"error": "no GPU"}, 502, "upstream_error", "no GPU"),
    ({"object": "error", "message": "bad tool", "code": 400}, 400, "invalid_request", "bad tool"),
    ({"error": {"message": "slow down", "type": "rate_limit_error"}}, 429, "rate_limit", "slow"),
    ({"object": "error", "message": TOO_LONG, "code": 400}, 400, "context_overflow", "20"),
    ({"detail": TOO_LONG}, 400, "context_overflow", "20"),
    ({"detail": [{"msg": "no such field"}]}, 502, "upstream_error", "no such field"),
    ([{"error": {"message": "quota", "code": 429}}], 429, "rate_limit", "quota"),
    (
        {"error": {"message": "x", "type": "exceed_context_size_error"}},
        400,
        "context_overflow",
        "x",
    ),
    (
        {"id": "x", "choices": None, "base_resp": {"status_code": 1002, "status_msg": "too fast"}},
        429,
        "rate_limit",
        "too fast",
    ),
    (
        {"base_resp": {"status_code": 1008, "status_msg": "insufficient balance"}},
        502,
        "upstream_error",
        "insufficient balance",
    ),
]


# Every error in every form, and every form in every dialect.
@pytest.mark.parametrize("form", ["whole", "event", "later"])
@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_an_error_inside_a_200_keeps_its_text_and_its_class(
    theatre: Any, form: str, number: int
) -> None:
    error, status, kind, words = ERRORS[number]
    dialect = ("chat", "responses", "messages", "google")[(number + len(form)) % 4]
    event = b"data: %b\n\n" % json.dumps(error).encode()
    first = b"data: %b\n\n" % json.dumps(said(content="so")).encode()
    sent = {"whole": [json.dumps(error).encode()], "event": [event], "later": [first, event]}[form]
    got = theatre.ask(Sent(sent), dialect, stream=True, external=True)
    row = theatre.reader.call(got.call_id)
    assert got.status == (200 if form == "later" else status)
    assert words in got.error["message"]
    assert (row.status, row.reason) == (CallStatus.FAILED, kind)


def test_what_replies_say_never_takes_an_engine_from_other_sessions(theatre: Any) -> None:
    junk = [
        [b"data: {not json\n\n"],
        [b'data: {"error": {"message": "out of memory", "code": 503}}\n\n'],
        [b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(said("gave up")).encode()],
        [b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(piece(OSLO, index=0)).encode()],
        [b'{"error": "no"}'],
    ]
    for pieces in junk * 3:
        assert theatre.ask(Sent(pieces), "chat", stream=True).error
        assert theatre.ask(Sent(pieces), "messages", stream=False).error
    right = [b"data: %b\n\n" % json.dumps(one).encode() for one in (said(content="hi"), END)]
    got = theatre.ask(Sent([*right, b"data: [DONE]\n\n"]), "chat", stream=True)
    assert (got.status, got.text) == (200, "hi")


# -- fields that an upstream wants back ------------------------------------------------------------

WEATHER: Any = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


class Demanding:
    """An upstream that refuses an assistant message with calls and without ``field``."""

    def __init__(self, raw: Any, field: str, *, refuses: bool = False) -> None:
        self.raw, self.field, self.refuses = raw, field, refuses
        self.statuses: list[int] = []
        raw.answer = self.answer

    def message(self, again: bool) -> dict[str, Any]:
        if again:
            return {"role": "assistant", "content": "Sunny.", "reasoning_content": "I know."}
        call: dict[str, Any] = {
            "id": "theirs",
            "type": "function",
            "function": {"name": "weather", "arguments": OSLO},
        }
        message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
        if self.field == "extra_content":
            call["extra_content"] = {"google": {"thought_signature": "sig"}}
        elif self.field == "reasoning_details":
            message["reasoning_details"] = [{"type": "reasoning.encrypted", "data": "abc"}]
        return message | {"reasoning_content": "I need the weather."}

    async def answer(self, _receive: Any, send: Any) -> None:
        asked = json.loads(self.raw.bodies[-1])
        old = [one for one in asked["messages"] if one["role"] == "assistant"]
        shown = json.dumps(old)
        lacks = bool(old) and self.field not in shown
        status, kind = (200, b"application/json")
        body: Any
        if lacks is not self.refuses and old:
            status = 400
            body = {"error": {"message": f"messages.1: the field {self.field} is wrong"}}
        elif asked.get("stream"):
            kind = b"text/event-stream"
        message = self.message(bool(old))
        choice = {"index": 0, "finish_reason": "stop" if old else "tool_calls"}
        if status == 200:
            body = {"id": "x", "choices": [choice | {"message": message}], "usage": None}
        data = json.dumps(body).encode() if not asked.get("stream") or status != 200 else b""
        if not data:
            parts = [{"delta": message, "index": 0}, choice | {"delta": {}}]
            chunks = [json.dumps({"id": "x", "choices": [part]}) for part in parts]
            data = "".join(f"data: {one}\n\n" for one in [*chunks, "[DONE]"]).encode()
        self.statuses.append(status)
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})


@pytest.fixture
def external(stage: Any, raw_engine: Any, start_proxy: Any) -> Any:
    other = OtherModel((raw_engine.base_url,), "theirs", None, external=True)
    return start_proxy(stage.engine.base_url, other_models={"ext": other})


def two_turns(url: str, sdk: str, stream: bool) -> str:
    """A question, a tool call, its result, and the text of the answer."""
    if sdk == "openai":
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "weather?"}]
        tools: Any = [{"type": "function", "function": WEATHER}]

        def ask() -> Any:
            given: Any = {"model": "ext", "messages": messages, "tools": tools}
            if not stream:
                return client.chat.completions.create(**given).choices[0].message
            with client.chat.completions.stream(**given) as events:
                return events.get_final_completion().choices[0].message

        (call,) = ask().tool_calls
        made = {"id": call.id, "type": "function", "function": call.function.model_dump()}
        made["function"] = {name: made["function"][name] for name in ("name", "arguments")}
        messages.append({"role": "assistant", "content": None, "tool_calls": [made]})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        return str(ask().content)
    other = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)
    history: list[Any] = [{"role": "user", "content": "weather?"}]
    offered: Any = [{"name": "weather", "input_schema": WEATHER["parameters"]}]

    def say() -> Any:
        given: Any = {"model": "ext", "max_tokens": 99, "messages": history, "tools": offered}
        if not stream:
            return other.messages.create(**given)
        with other.messages.stream(**given) as events:
            return events.get_final_message()

    first = say()
    made_call = first.content[-1]
    history.append({"role": "assistant", "content": first.content})
    result = {"type": "tool_result", "tool_use_id": made_call.id, "content": "sunny"}
    history.append({"role": "user", "content": [result]})
    return str(say().content[-1].text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
@pytest.mark.parametrize("name", ["reasoning_content", "extra_content", "reasoning_details"])
def test_an_upstream_gets_back_what_it_sent_though_the_client_left_it_out(
    external: Any, raw_engine: Any, name: str, sdk: str, stream: bool
) -> None:
    upstream = Demanding(raw_engine, name)
    assert two_turns(external.url, sdk, stream) == "Sunny."
    assert upstream.statuses == [200, 200]
    echoed = json.loads(raw_engine.bodies[-1])["messages"][1]
    assert echoed["tool_calls"][0]["id"] == "theirs"
    if name == "reasoning_content":
        assert echoed[name] == "I need the weather."
    assert [call.status for call in external.calls()] == [CallStatus.COMPLETE] * 2


def test_an_upstream_that_refuses_its_own_field_is_asked_without_it(
    external: Any, raw_engine: Any
) -> None:
    upstream = Demanding(raw_engine, "reasoning_content", refuses=True)
    for _ in range(2):
        assert two_turns(external.url, "openai", stream=False) == "Sunny."
    assert upstream.statuses == [200, 400, 200, 200, 200]
    notes = {note.name for call in external.calls() for note in call.notes}
    assert "upstream_fields_learned" in notes


def test_a_restarted_proxy_learns_from_the_refusal_what_an_upstream_wants(
    external: Any, raw_engine: Any, start_proxy: Any, stage: Any
) -> None:
    upstream = Demanding(raw_engine, "reasoning_content")
    history = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "Oslo?", "reasoning_content": "Where?"},
        {"role": "user", "content": "yes"},
    ]
    client = openai.OpenAI(base_url=f"{external.url}/v1", api_key="x", max_retries=0)
    for _ in range(2):
        reply = client.chat.completions.create(model="ext", messages=history)  # type: ignore[arg-type]
        assert reply.choices[0].message.content == "Sunny."
    assert upstream.statuses == [400, 200, 200]
