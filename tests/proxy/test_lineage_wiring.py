"""Test lineage's findings in the record of proxied calls: parents, breaks and retries."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import openai
import pytest

from bridle.engine.scripted import Cut, Refuse, ScriptedCall, ScriptedReply
from bridle.proxy.continuation.continuation import Continuer
from bridle.store.records import BreakReason, CallKind, CallStatus

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
    }
]
IMPOSSIBLE = 1.0
"""A logprob that quarantines a call."""
QUESTION: Any = {"role": "user", "content": "one and two?"}
ADD = ScriptedCall("add", '{"a":1,  "b":2}')


def client_of(bench: Any, session: str = "lamp") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{bench.url}/s/{session}/v1", api_key="x", max_retries=0)


def say(bench: Any, *messages: Any, **fields: Any) -> Any:
    """The assistant's message that the proxy gives for these."""
    reply = client_of(bench).chat.completions.create(
        model="m", messages=list(messages), tools=TOOLS, **fields
    )
    return reply.choices[0].message


def echoed(message: Any, **changes: Any) -> list[Any]:
    """The message as a client sends it back, with a result for each call."""
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "3"}
        for call in message.tool_calls or ()
    ]
    return [message.model_dump(exclude_none=True) | changes, *results]


def metric(bench: Any, name: str) -> float:
    text = httpx.get(f"{bench.url}/metrics").text
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(name)))


def test_an_echo_of_a_quarantined_call_is_a_break_that_says_so(
    stage: Any, start_proxy: Any, model_dir: Any
) -> None:
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    stage.play = lambda _: ScriptedReply("one", tool_calls=(ADD,), logprob=IMPOSSIBLE)
    first = say(bench, QUESTION)
    stage.play = lambda _: "three"
    say(bench, QUESTION, *echoed(first))
    lost, second = bench.calls()
    assert lost.status is CallStatus.QUARANTINED
    assert second.status is CallStatus.COMPLETE
    assert second.parent_call_id == lost.id
    assert second.break_reason is BreakReason.PARENT_WITHOUT_IDS
    assert metric(bench, 'bridle_breaks_total{reason="parent_without_ids"}') == 1


def test_an_echo_of_a_quarantined_call_is_known_after_a_restart(
    stage: Any, start_proxy: Any, model_dir: Any
) -> None:
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    stage.play = lambda _: ScriptedReply("one", logprob=IMPOSSIBLE)
    first = say(bench, QUESTION)
    bench.server.stop()
    stage.play = lambda _: "three"
    again = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    say(again, QUESTION, *echoed(first), {"role": "user", "content": "and then?"})
    lost, second = again.calls()
    assert second.parent_call_id == lost.id
    assert second.break_reason is BreakReason.PARENT_WITHOUT_IDS


def test_a_request_that_echoes_a_running_call_waits_for_its_end(
    stage: Any, start_proxy: Any, model_dir: Any
) -> None:
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    stage.play = lambda _: ScriptedReply("one", tool_calls=(ADD, ADD, ADD), delay=0.02)
    stream = client_of(bench).chat.completions.create(
        model="m", messages=[QUESTION], tools=TOOLS, stream=True
    )
    calls: dict[int, dict[str, Any]] = {}

    def take(chunk: Any) -> None:
        for delta in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
            call = calls.setdefault(
                delta.index,
                {
                    "id": delta.id,
                    "type": "function",
                    "function": {"name": delta.function.name, "arguments": ""},
                },
            )
            call["function"]["arguments"] += delta.function.arguments or ""

    for chunk in stream:
        take(chunk)
        if 1 in calls:
            break
    assert bench.call().status is CallStatus.OPEN
    stage.play = lambda _: "three"
    rest = threading.Thread(target=lambda: [take(chunk) for chunk in stream])
    rest.start()
    done = {**calls[0], "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    assistant = {"role": "assistant", "content": "one", "tool_calls": [done]}
    result = {"role": "tool", "tool_call_id": done["id"], "content": "3"}
    say(bench, QUESTION, assistant, result)
    rest.join()
    first, second = bench.calls()
    assert len(calls) == 3
    assert second.parent_call_id == first.id
    assert second.lineage_rule == "minted_id"
    assert second.break_reason is BreakReason.TRUNCATED


def test_a_request_that_echoes_a_stream_its_client_cut_continues_what_arrived(
    stage: Any, start_proxy: Any, model_dir: Any
) -> None:
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    stage.play = lambda _: ScriptedReply("one", tool_calls=(ADD, ADD), delay=0.03)
    ids: list[str] = []
    with client_of(bench).chat.completions.create(
        model="m", messages=[QUESTION], tools=TOOLS, stream=True
    ) as stream:
        for chunk in stream:
            ids += [call.id for call in chunk.choices[0].delta.tool_calls or () if call.id]
            if len(ids) == 2:
                break
    stage.play = lambda _: "three"
    call = {"id": ids[0], "type": "function"}
    call["function"] = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    assistant = {"role": "assistant", "content": "one", "tool_calls": [call]}
    say(bench, QUESTION, assistant, {"role": "tool", "tool_call_id": ids[0], "content": "3"})
    first, second = bench.calls()
    assert first.status is CallStatus.PARTIAL
    assert second.parent_call_id == first.id
    assert second.break_reason is BreakReason.TRUNCATED


@pytest.mark.parametrize(
    ("reply", "changes", "reason"),
    [
        (
            ScriptedReply("The sum is 3.", reasoning="four five"),
            {},
            BreakReason.TEMPLATE_REWROTE_HISTORY,
        ),
        (
            ScriptedReply("The sum is 3.", reasoning="four five"),
            {"reasoning": None, "reasoning_content": None},
            BreakReason.REASONING_DROPPED,
        ),
        (ScriptedReply(tool_calls=(ADD,)), {}, BreakReason.ARGUMENTS_RESERIALISED),
        (ScriptedReply("The sum is 3."), {}, None),
        (ScriptedReply("The sum is 3.  \n"), {"content": "The sum is 3."}, BreakReason.EDITED),
    ],
)
def test_a_break_is_judged_by_the_ids_and_the_echo(
    stage: Any, start_proxy: Any, reply: ScriptedReply, changes: Any, reason: BreakReason | None
) -> None:
    bench = start_proxy(stage.engine.base_url)
    stage.play = lambda _: reply
    first = say(bench, QUESTION)
    say(bench, QUESTION, *echoed(first, **changes), {"role": "user", "content": "and then?"})
    recorded = bench.calls()[1]
    assert recorded.parent_call_id == bench.calls()[0].id
    assert recorded.break_reason is (None if reason is None else BreakReason.UNEXPLAINED)
    assert bench.judged()[1].break_reason is reason
    counted = metric(bench, 'bridle_breaks_total{reason="unexplained"}')
    assert counted == (reason is not None)


def test_a_request_asked_again_after_a_cut_reply_is_a_retry(stage: Any, bench: Any) -> None:
    stage.play = lambda _: ScriptedReply("one two", fault=Cut(after_tokens=1))
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        say(bench, QUESTION)
    stage.play = lambda _: Refuse(500)
    with pytest.raises(openai.InternalServerError):
        say(bench, QUESTION)
    stage.play = lambda _: "three"
    say(bench, QUESTION)
    cut, refused, last = bench.judged()
    assert (cut.kind, refused.kind, last.kind) == (
        CallKind.RETRY,
        CallKind.RETRY,
        CallKind.MAIN,
    )
    assert f"{refused.id} failed" in [n.detail for n in last.notes if n.name == "retry"]


def test_a_request_asked_again_after_a_whole_reply_is_a_sample_beside_it(bench: Any) -> None:
    say(bench, QUESTION)
    say(bench, QUESTION)
    first, second = bench.judged()
    assert second.kind is CallKind.MAIN
    assert second.parent_call_id is None
    assert [n.detail for n in second.notes if n.name == "asked_again"] == [f"{first.id} complete"]


def test_a_reply_that_the_harness_left_out_is_noted_once(stage: Any, bench: Any) -> None:
    say(bench, QUESTION)
    complaint = {"role": "user", "content": "Call a tool."}
    stage.play, play = lambda _: Refuse(500), stage.play
    with pytest.raises(openai.InternalServerError):
        say(bench, QUESTION, complaint)
    stage.play = play
    say(bench, QUESTION, complaint)
    first, refused, last = bench.judged()
    assert [n.detail for n in last.notes if n.name == "reply_dropped"] == [first.id]
    assert "reply_dropped" not in {n.name for n in refused.notes}
    assert last.parent_call_id is None


def test_every_break_reason_has_a_counter_from_the_start(bench: Any) -> None:
    for reason in BreakReason:
        assert metric(bench, f'bridle_breaks_total{{reason="{reason}"}}') == 0


def test_a_long_tail_is_tokenised_beside_the_event_loop(
    stage: Any, start_proxy: Any, model_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    threads: list[threading.Thread] = []
    prompt = Continuer.prompt

    def watched(self: Continuer, *arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return prompt(self, *arguments)

    monkeypatch.setattr(Continuer, "prompt", watched)
    first = say(bench, QUESTION)
    second = say(bench, QUESTION, *echoed(first))
    history = [QUESTION, *echoed(first), *echoed(second)]
    say(bench, *history, {"role": "user", "content": [{"type": "text", "text": "one " * 5000}]})
    short, other, long = threads
    assert short is other
    assert long is not short
    calls = bench.calls()
    assert [call.break_reason for call in calls] == [None] * 3
    assert calls[2].parent_call_id == calls[1].id
