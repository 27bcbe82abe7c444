"""An engine's chunks and its whole body say the same, whatever dialect of vLLM's shape it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bridle.proxy.engines.reply import ReplyDecoder
from bridle.proxy.wire.canonical import ApiError, Finished, Minted, ReasoningDelta, Started, Tokens
from bridle.proxy.wire.fold import Fold

MINTED = Minted("call_abcdefghij234567klmnopqr", 1, "chatcmpl-x", "m")


def events(*payloads: Any, choices: int = 1, detail: bool = False) -> list[Any]:
    reply = ReplyDecoder(MINTED, choices=choices, detail=detail)
    found = [event for payload in payloads for event in reply.events(json.dumps(payload).encode())]
    return found + reply.last_events()


def fold(events: list[Any]) -> Any:
    whole = Fold()
    whole.take(events)
    return whole.reply()


def chunk(delta: dict[str, Any] | None = None, ids: list[int] | None = None, **more: Any) -> Any:
    content = [{"token": "t", "logprob": -0.5, "bytes": None} for _ in ids or ()]
    choice = {"index": 0, "delta": delta or {}, "token_ids": ids, "logprobs": {"content": content}}
    return {"choices": [choice | more]}


def call(arguments: str, **more: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "function": {"arguments": arguments}} | more]}


WHOLE = {
    "prompt_token_ids": [1, 2, 3],
    "choices": [
        {
            "index": 0,
            "message": {
                "content": "ab",
                "reasoning": "hm",
                "tool_calls": [{"id": "theirs", "function": {"name": "f", "arguments": '{"a":1}'}}],
            },
            "token_ids": [7, 8, 9],
            "logprobs": {"content": [{"logprob": -0.5}] * 3},
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},
    },
}
CHUNKS = [
    {"prompt_token_ids": [1, 2, 3], "choices": [{"index": 0, "delta": {"role": "assistant"}}]},
    chunk({"reasoning": "hm"}, [7]),
    chunk({"content": "a"}),
    chunk({"content": "b"}),
    # A parser holds the text back: the delta is empty, the token is there.
    chunk({}, [8]),
    chunk(call("", id="theirs", function={"name": "f", "arguments": '{"a"'})),
    chunk(call(":1}"), [9]),
    chunk({}, finish_reason="tool_calls"),
    {"choices": [], "usage": WHOLE["usage"]},
]


def test_the_stream_folds_to_the_whole_reply() -> None:
    assert fold(events(*CHUNKS)) == fold(events(WHOLE))


def reasoning_tokens(*payloads: Any) -> int:
    used = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}
    return events(*payloads, used)[-1].reasoning_tokens


def test_tokens_of_reasoning_are_counted_where_the_engine_counts_none() -> None:
    thought = [chunk({}, [1]), chunk({"reasoning": "h"}, [2]), chunk({}, [3])]
    ended = [
        chunk({"reasoning_content": "m"}, [4, 5]),
        chunk({}, [6]),
        chunk({"content": "a"}, [7]),
    ]
    end = chunk({}, finish_reason="stop")

    assert reasoning_tokens(*thought, *ended, end) == 5
    assert reasoning_tokens(chunk({"content": "a"}, [1]), end) == 0


def test_a_whole_message_that_is_reasoning_alone_is_counted() -> None:
    def whole(**message: Any) -> Any:
        choice = chunk(ids=[1, 2], finish_reason="length")["choices"][0]
        return {"choices": [choice | {"delta": None, "message": message}]}

    assert reasoning_tokens(whole(reasoning="hm")) == 2
    assert reasoning_tokens(whole(reasoning="hm", content="a")) == 0


def test_tool_call_ids_are_minted_from_the_call() -> None:
    (choice,) = fold(events(WHOLE)).choices
    assert choice.tool_calls[0].id == "call_abcdefghij234567klmnopqr00"


def test_tokens_come_before_the_text_that_they_stand_for() -> None:
    kinds = [type(event) for event in events(*CHUNKS)]
    assert kinds[0] is Started
    assert kinds.index(Tokens) < kinds.index(ReasoningDelta)


def test_both_names_of_reasoning_are_read() -> None:
    told = events(chunk({"reasoning_content": "hm"}), chunk({}, finish_reason="stop"))
    assert ReasoningDelta("hm") in told


def test_details_are_kept_only_when_wanted() -> None:
    asked = events(chunk({}, [7], finish_reason="stop"), detail=True)
    unasked = events(chunk({}, [7], finish_reason="stop"))
    assert next(e for e in asked if isinstance(e, Tokens)).detail
    assert next(e for e in unasked if isinstance(e, Tokens)).detail is None


def test_a_stop_string_is_told_and_a_stop_token_is_not() -> None:
    text, token = (
        events(chunk({}, finish_reason="stop", stop_reason=reason)) for reason in ("END", 2)
    )
    assert Finished("stop", stop_sequence="END") in text
    assert Finished("stop") in token


@pytest.mark.parametrize(
    "payloads",
    [
        [chunk({"content": "a"}, [7])],
        [chunk({}, finish_reason="abort")],
        [{"error": {"message": "out of memory"}}],
        [{"choices": [{"index": -1, "delta": {}}]}],
        [{"choices": 5}],
    ],
)
def test_what_is_not_a_finished_reply_is_an_upstream_error(payloads: list[Any]) -> None:
    with pytest.raises(ApiError) as caught:
        events(*payloads)
    assert caught.value.kind == "upstream_error"


def test_every_choice_must_finish() -> None:
    with pytest.raises(ApiError):
        events(chunk({}, finish_reason="stop"), choices=2)


FINISHED = chunk({"content": "a"}, [7], finish_reason="stop")


@pytest.mark.parametrize(
    ("payloads", "found"),
    [
        ([FINISHED], None),
        ([FINISHED, chunk({"role": "assistant", "content": ""}, None)], None),
        ([chunk({"content": "b"}, [8], index=1), FINISHED], "choice_not_asked_for"),
        ([FINISHED, chunk({}, [8])], "output_after_finish"),
        ([FINISHED, chunk({"content": "b"})], "output_after_finish"),
        ([FINISHED, chunk({"reasoning": "b"})], "output_after_finish"),
        ([FINISHED, chunk(call("{}"))], "output_after_finish"),
    ],
)
def test_what_the_request_cannot_have_got_is_named(payloads: list[Any], found: str | None) -> None:
    reply = ReplyDecoder(MINTED, choices=1, detail=False)
    for payload in payloads:
        reply.events(json.dumps(payload).encode())
    reply.last_events()
    assert (reply.contradiction or "").partition(":")[0] == (found or "")


def test_a_choice_that_was_not_asked_for_stands_for_no_other() -> None:
    with pytest.raises(ApiError, match="before it was finished"):
        events(chunk({}, finish_reason="stop"), chunk({}, finish_reason="stop", index=5), choices=2)


def test_completions_lists_are_read_as_entries() -> None:
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [-0.1, -0.2], "top_logprobs": None}
    choice = {
        "index": 0,
        "text": "ab",
        "logprobs": logprobs,
        "token_ids": [5, 6],
        "prompt_token_ids": [1],
        "finish_reason": "stop",
    }
    reply = fold(events({"choices": [choice]}, detail=True))
    assert reply.prompt_token_ids == [1]
    assert reply.choices[0].logprobs == [-0.1, -0.2]
    assert [entry["token"] for entry in reply.choices[0].detail] == ["a", "b"]


def test_invalid_utf_8_is_the_engines_fault() -> None:
    reply = ReplyDecoder(MINTED, choices=1, detail=False)
    with pytest.raises(ApiError, match="malformed") as caught:
        reply.events(b'{"choices": [{"delta": {"content": "\xff\xfe"}}]}')
    assert caught.value.status == 502
