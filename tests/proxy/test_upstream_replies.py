"""Replies of upstreams that are not vLLM, read by clients of every dialect and recorded.

``upstream_replies.jsonl`` has one reply a line, as it is on the wire. Each is played to clients
that ask for a stream and to clients that ask for a whole reply: to one of them as the policy's
engine, to the other as an external upstream, without token ids, and to the next dialect the other
way.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridle.reconstruct.audit import audit_session
from bridle.reconstruct.episodes import episode_of
from bridle.reconstruct.session import LoadedSession
from bridle.store.records import CallStatus

HERE = Path(__file__).parent
ODD = runpy.run_path(str(HERE / "odd_upstream.py"))
Sent, Theatre, DIALECTS = ODD["Sent"], ODD["OddUpstreams"], ODD["DIALECTS"]

CASES = [json.loads(line) for line in (HERE / "upstream_replies.jsonl").open()]
OSLO, ROME = {"city": "Oslo"}, {"city": "Rome"}
RIGHT: dict[str, dict[str, Any]] = {
    "same_index": {"calls": [("weather", OSLO), ("weather", ROME)], "note": "tool_call_by_id"},
    "same_index_pieces": {"calls": [("weather", OSLO), ("time", ROME)], "note": "tool_call_by_id"},
    "late_name": {"calls": [("weather", OSLO)], "note": "tool_call_name_late"},
    "interleaved": {"calls": [("weather", OSLO), ("time", ROME)]},
    "choices_null": {"text": "hi", "note": "choices_null"},
    "content_list": {"text": "hi", "thinking": "hmm", "note": "content_was_a_list"},
    "fin_eos_token": {"text": "hi", "note": "finish_word"},
    "fin_eos": {"text": "hi", "note": "finish_word"},
    "lp_null": {"text": "hi", "missing": 1},
    "lp_ninf": {"text": "hi", "missing": 1},
    "lp_nan": {"text": "hi", "missing": 1},
    "json_error_200": {"overflow": (5000, 4096)},
    "sse_first_error": {"overflow": (5000, 4096)},
    "over_llamacpp": {"overflow": (124071, 123904)},
    "over_llamacpp2": {"overflow": (None, None)},
    "needs_reasoning": {"calls": [("weather", OSLO)], "thinking": "I need the weather."},
}
CHATTY = {"calls", "thinking"}
"""The parts of a reply that a text completion cannot have."""
FINISHED = {
    "chat": ("stop", "tool_calls"),
    "completions": ("stop", "stop"),
    "responses": ("completed", "completed"),
    "messages": ("end_turn", "tool_use"),
    "google": ("STOP", "STOP"),
}


@pytest.fixture(scope="module")
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    found = Theatre(tmp_path_factory.mktemp("upstreams"), failures_to_eject=3)
    yield found
    found.close()


def sent(case: dict[str, Any], *, external: bool, completions: bool) -> Any:
    """The case's reply; ``external`` without what only an engine sends."""

    def written(text: str) -> str:
        prefix = "data: " if text.startswith("data: ") else ""
        payload = text.removeprefix("data: ").strip()
        if payload == "[DONE]" or not payload.startswith("{"):
            return text
        body = json.loads(payload)
        if external:
            body.pop("prompt_token_ids", None)
        for choice in body.get("choices") or ():
            if external:
                choice.pop("token_ids", None)
            if completions:
                choice["text"] = choice.pop("delta", choice.pop("message", {})).get("content") or ""
        return prefix + json.dumps(body) + ("\n\n" if prefix else "")

    pieces = [written(chunk).encode() for chunk in case["chunks"]]
    return Sent(pieces, case["status"], dict(case["headers"]))


def notes(row: Any) -> set[str]:
    return {note.name for note in row.notes}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case['case']}-{case['asked_to_stream']}"
)
@pytest.mark.sampled(5)
def test_an_upstreams_reply_is_right_for_client_and_record(
    theatre: Any, case: dict[str, Any], dialect: str, stream: bool
) -> None:
    external = bool((CASES.index(case) + list(DIALECTS).index(dialect) + stream) % 2)
    right = RIGHT[case["case"]]
    if dialect == "completions" and CHATTY & right.keys():
        pytest.skip("a text completion has no calls and no thoughts")
    reply = sent(case, external=external, completions=dialect == "completions")
    got = theatre.ask(reply, dialect, stream=stream, external=external)
    row = theatre.reader.call(got.call_id)
    if "overflow" in right:
        overflows(dialect, got, right["overflow"], case)
        assert (row.status, row.reason) == (CallStatus.FAILED, "context_overflow")
        return
    assert (got.status, got.error) == (200, None)
    assert (got.text, got.thinking) == (right.get("text", ""), right.get("thinking", ""))
    calls = right.get("calls", [])
    assert [(call.name, call.arguments) for call in got.calls] == calls
    assert got.finish == FINISHED[dialect][bool(calls)]
    assert row.status is CallStatus.COMPLETE, row.reason
    recorded = [(c.name, json.loads(c.arguments)) for c in row.replies[0].tool_calls]
    assert recorded == calls
    assert (row.replies[0].content or "") == got.text
    if "note" in right:
        assert right["note"] in notes(row)
    if case["asked_to_stream"] is not stream:
        other = "streamed_reply_to_whole" if case["asked_to_stream"] else "whole_reply_to_stream"
        assert other in notes(row)
    if not external:
        account(theatre, row, right.get("missing", 0))


def overflows(dialect: str, got: Any, numbers: Any, case: dict[str, Any]) -> None:
    """Check for the dialect's own overflow error, which harnesses compact upon.

    It has the upstream's numbers or words.
    """
    assert got.status == 400
    message = got.error["message"]
    match dialect:
        case "messages":
            assert message.startswith("prompt is too long")
        case "google":
            assert message.startswith("The input token count")
        case _:
            assert got.error["code"] == "context_length_exceeded"
    prompt, limit = numbers
    if prompt is None:
        assert "Context size has been exceeded." in message
    else:
        assert str(prompt) in message
        assert str(limit) in message


def account(theatre: Any, row: Any, missing: int) -> None:
    """Every token without a logprob is left out by that name; the others are trained."""
    session = LoadedSession.load(theatre.reader, row.session_id)
    conservation = episode_of(session).conservation
    assert conservation.captured == row.sampled_tokens
    assert conservation.trained == row.sampled_tokens - missing
    assert dict(conservation.untrained) == ({"logprob_missing": missing} if missing else {})
    assert ("logprobs_missing" in notes(row)) is bool(missing)
    assert not audit_session(theatre.reader, row.session_id).violations
