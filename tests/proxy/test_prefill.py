"""A reply that goes on from a beginning in the request is one turn with it from then on."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from bridle.engine.scripted import ScriptedReply
from bridle.store.records import BreakReason

QUESTION = {"role": "user", "content": "2 + 2?"}
BEGUN = '{"answer":'


def ask(url: str, messages: list[Any], **more: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 50, "messages": messages, **more}
    reply = httpx.post(f"{url}/s/sum/v1/messages", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


@pytest.mark.parametrize("restart", [False, True])
def test_a_turn_after_a_prefilled_one_continues_it_exactly(
    stage: Any, start_proxy: Any, model_dir: Any, restart: bool
) -> None:
    stage.play = lambda _: ScriptedReply(" 4}")
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    first = ask(bench.url, [QUESTION, {"role": "assistant", "content": BEGUN}])
    said = {"role": "assistant", "content": BEGUN + first["content"][0]["text"]}
    if restart:
        bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    second = ask(bench.url, [QUESTION, said, {"role": "user", "content": "Thanks."}])
    more = {"role": "assistant", "content": second["content"]}
    thanked = [QUESTION, said, {"role": "user", "content": "Thanks."}, more]
    ask(bench.url, [*thanked, {"role": "user", "content": "Bye."}])
    calls = bench.calls()
    assert [call.parent_call_id for call in calls] == [None, calls[0].id, calls[1].id]
    assert [call.break_reason for call in calls] == [None, None, None]
    prompts = [bench.reader.prompt_token_ids(call.id) for call in calls]
    for n in (0, 1):
        path = np.concatenate([prompts[n], bench.reader.sampled(calls[n].id)[0].token_ids])
        assert np.array_equal(prompts[n + 1][: len(path)], path)


def test_a_prefilled_turn_later_on_is_a_break_with_its_reason(
    stage: Any, start_proxy: Any, model_dir: Any
) -> None:
    stage.play = lambda _: ScriptedReply(" 4}")
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    first = ask(bench.url, [QUESTION])
    said = {"role": "assistant", "content": first["content"]}
    ask(bench.url, [QUESTION, said, QUESTION, {"role": "assistant", "content": BEGUN}])
    before, call = bench.calls()
    assert call.parent_call_id == before.id
    assert call.break_reason in (None, BreakReason.TAIL_NOT_LOCAL)


def test_other_beginnings_of_a_reply_are_other_questions(stage: Any, bench: Any) -> None:
    for begun in (None, BEGUN, "[", BEGUN):
        ask(bench.url, [QUESTION, *([{"role": "assistant", "content": begun}] if begun else [])])
    calls = bench.judged()
    again = [[note.detail.split()[0] for note in call.notes if note.name == "asked_again"]
             for call in calls]  # fmt: skip
    assert again == [[], [], [], [calls[1].id]]


def test_a_thread_is_continued_after_a_prefilled_reply(stage: Any, bench: Any) -> None:
    stage.play = lambda _: ScriptedReply(" 4}")
    first = ask(bench.url, [QUESTION, {"role": "assistant", "content": BEGUN}])
    thread = {"type": "continue", "previous_message_id": first["id"]}
    ask(bench.url, [{"role": "user", "content": "Thanks."}], thread=thread)
    sent = [(one["role"], one["content"]) for one in stage.requests[-1].messages]
    assert sent[1] == ("assistant", BEGUN + " 4}")
    assert [role for role, _ in sent] == ["user", "assistant", "user"]
    assert bench.calls()[1].parent_call_id == bench.calls()[0].id
