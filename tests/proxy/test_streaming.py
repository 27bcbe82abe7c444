"""Streams are real, and their ends are held until the record is durable."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedReply, Stall
from bridle.proxy.settings import Limits
from bridle.store.errors import StoreBusy, StoreUnavailable
from bridle.store.records import CallStatus
from bridle.store.writing.writer import Writer

CHAT = "/v1/chat/completions"


@dataclass
class Door:
    """The store's door: ends of calls wait before it."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Door:
    held = Door()
    commit = Writer.end_call

    async def end_call(self: Writer, ended: Any) -> None:
        held.reached.set()
        await asyncio.to_thread(held.opened.wait, 60)
        await commit(self, ended)

    monkeypatch.setattr(Writer, "end_call", end_call)
    return held


@pytest.fixture
def failing_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def end_call(self: Writer, ended: Any) -> None:
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(Writer, "end_call", end_call)


def test_the_first_token_leaves_before_the_engine_has_its_second(
    bench: Any, stage: Any, ask: Any, events: Any
) -> None:
    stage.play = lambda _: ScriptedReply("The answer is four.", fault=Stall(60, after_tokens=1))
    with httpx.stream("POST", bench.url + CHAT, json=ask | {"stream": True}) as response:
        seen = b""
        for piece in response.iter_raw():
            seen += piece
            if b'"content":"The"' in seen:
                break
    first = [event["choices"][0]["delta"].get("content") for event in events(seen)]
    assert first == ["", "The"]


@pytest.mark.parametrize("stream", [True, False])
def test_nothing_tells_the_client_that_it_is_over_before_the_commit(
    bench: Any, ask: Any, door: Door, stream: bool
) -> None:
    seen: list[bytes] = []
    text_seen, over = threading.Event(), threading.Event()

    def read() -> None:
        with httpx.stream("POST", bench.url + CHAT, json=ask | {"stream": stream}) as response:
            for piece in response.iter_raw():
                seen.append(piece)
                if b"four" in piece:
                    text_seen.set()
        over.set()

    threading.Thread(target=read, daemon=True).start()
    if stream:
        assert text_seen.wait(20)
    # The engine is done and the record is at the store's door: nothing more may come.
    assert door.reached.wait(20)
    assert not over.wait(0.2)
    before = b"".join(seen)
    assert b'finish_reason":"stop' not in before
    assert b"[DONE]" not in before
    if not stream:
        assert before == b""
    assert bench.call().status is CallStatus.OPEN

    door.opened.set()
    assert over.wait(20)
    assert bench.call().status is CallStatus.COMPLETE
    assert b'"finish_reason":"stop"' in b"".join(seen)


def test_a_reply_that_cannot_be_recorded_is_an_error(
    bench: Any, ask: Any, failing_commit: None
) -> None:
    response = httpx.post(bench.url + CHAT, json=ask)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "store_unavailable"


def test_a_stream_that_cannot_be_recorded_ends_with_an_error_and_without_done(
    bench: Any, ask: Any, failing_commit: None, events: Any
) -> None:
    response = httpx.post(bench.url + CHAT, json=ask | {"stream": True})
    told = events(response.content)
    assert told[-1]["error"]["code"] == "store_unavailable"
    assert all(event["choices"][0]["finish_reason"] is None for event in told[:-1])


def test_a_store_that_takes_no_more_beginnings_is_down_too(
    bench: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bench.url}/s/lamp{CHAT}"
    assert httpx.post(url, json=ask).status_code == 200

    def full(*_: Any) -> None:
        raise StoreBusy("20000 records wait to be written")

    monkeypatch.setattr(Writer, "begin_call", full)
    assert httpx.post(url, json=ask).status_code == 503
    assert [call.status for call in bench.calls()] == [CallStatus.COMPLETE]


def test_a_silent_stream_gets_protocol_events(
    stage: Any, start_proxy: Any, ask: Any, events: Any
) -> None:
    stage.play = lambda _: ScriptedReply("The answer is four.", fault=Stall(0.5, after_tokens=1))
    bench = start_proxy(stage.engine.base_url, limits=Limits(keep_alive_s=0.1))
    response = httpx.post(bench.url + CHAT, json=ask | {"stream": True})
    deltas = [e["choices"][0]["delta"] for e in events(response.content)[:-1]]
    assert deltas.count({}) >= 3  # the finish chunk has an empty delta, too
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == "The answer is four."


def test_the_streamed_bytes_are_the_recorded_bytes(bench: Any, ask: Any) -> None:
    response = httpx.post(bench.url + CHAT, json=ask | {"stream": True})
    call = bench.call()
    assert bench.reader.response_body(call.id) == response.content
    assert bench.reader.request_body(call.id) == response.request.content


def test_several_choices_stream_side_by_side_and_are_each_recorded(
    bench: Any, ask: Any, events: Any
) -> None:
    response = httpx.post(bench.url + CHAT, json=ask | {"stream": True, "n": 2})
    told = events(response.content)
    texts = ["", ""]
    for event in told[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["The answer is four."] * 2
    sampled = bench.reader.sampled(bench.call().id)
    assert len(sampled) == 2
    assert list(sampled[0].token_ids) == list(sampled[1].token_ids)


def test_a_client_that_reads_slowly_holds_the_engine_back_and_gets_all(
    raw_engine: Any, start_proxy: Any, ask: Any, events: Any
) -> None:
    text, chunks, sent = "x" * 131_072, 200, 0

    def data(choice: dict[str, Any]) -> bytes:
        return b"data: %b\n\n" % json.dumps({"choices": [{"index": 0, **choice}]}).encode()

    async def answer(_: Any, send: Any) -> None:
        nonlocal sent
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(chunks):
            choice = {"delta": {"content": text}, "token_ids": [number]}
            body = data(choice | {"logprobs": {"content": [{"logprob": -0.5}]}})
            await send({"type": "http.response.body", "body": body, "more_body": True})
            sent += 1
        end = data({"delta": {}, "finish_reason": "stop"}) + b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": end, "more_body": False})

    raw_engine.answer = answer
    limits = Limits(reply_characters=1 << 26)
    bench = start_proxy(raw_engine.base_url, model="m", limits=limits)
    sent = 0  # The proxy has asked how the engine samples.
    with httpx.stream("POST", bench.url + CHAT, json=ask | {"stream": True}, timeout=60) as reply:
        settled = -1
        while settled != sent:
            settled = sent
            time.sleep(0.3)
        assert 0 < sent < chunks
        told = events(b"".join(reply.iter_raw()))
    said = [event["choices"][0]["delta"].get("content", "") for event in told[:-1]]
    assert "".join(said) == text * chunks
    assert told[-1] == "[DONE]"
    assert bench.call().sampled_tokens == chunks
