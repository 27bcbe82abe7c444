"""Test faults at the engine or the client: the answer, and the entry in the record."""

from __future__ import annotations

import asyncio
import gzip
import sqlite3
from contextlib import closing
from typing import Any

import httpx
import orjson
import pytest

from bridle.engine.contract.contract import MISSING_LOGPROB
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.scripted import Cut, Fail, Refuse, ScriptedEngine, ScriptedReply, Stall
from bridle.proxy.dialects.chat.stream import ChatEmitter
from bridle.proxy.settings import Limits
from bridle.reconstruct.episodes import episode_of
from bridle.reconstruct.session import LoadedSession
from bridle.store.records import CallStatus
from support.processes import free_port

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "kind"), [(429, "rate_limit_error"), (500, "server_error"), (503, None)]
)
def test_an_engines_refusal_keeps_its_status(
    bench: Any, stage: Any, ask: Any, stream: bool, status: int, kind: str | None
) -> None:
    stage.play = lambda _: Refuse(status, "not now")
    response = httpx.post(bench.url + CHAT, json=ask | {"stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["message"] == "not now"
    if kind:
        assert response.json()["error"]["type"] == kind
    call = bench.call()
    assert call.status is CallStatus.FAILED
    assert call.error["status"] == status


@pytest.mark.parametrize("model", ["m", None])
@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_is_not_there_is_a_502(
    start_proxy: Any, ask: Any, stream: bool, model: str | None
) -> None:
    """Also when it has never told the name of its model."""
    port = free_port()
    bench = start_proxy(f"http://127.0.0.1:{port}", model=model)
    response = httpx.post(bench.url + CHAT, json=ask | {"stream": stream})
    assert response.status_code == 502
    assert str(port) not in response.text
    assert bench.call().reason == "upstream_unreachable"
    assert httpx.get(bench.url + "/readyz").status_code == 503
    assert httpx.get(bench.url + "/healthz").status_code == 200
    while response.status_code != 503:
        response = httpx.post(bench.url + CHAT, json=ask | {"stream": stream})
    assert float(response.headers["retry-after"]) > 0
    assert {call.status for call in bench.calls()} == {CallStatus.FAILED}


def test_a_cut_stream_is_kept_as_partial(bench: Any, stage: Any, ask: Any, events: Any) -> None:
    stage.play = lambda _: ScriptedReply("The answer is four.", fault=Cut(after_tokens=2))
    response = httpx.post(bench.url + CHAT, json=ask | {"stream": True})
    assert "error" in events(response.content)[-1]
    call = bench.call()
    assert call.status is CallStatus.PARTIAL
    assert call.sampled_tokens == 2
    assert call.replies[0].content == "The answer"


def test_an_error_in_mid_stream_is_told_and_the_tokens_before_it_are_kept(
    bench: Any, stage: Any, ask: Any, events: Any
) -> None:
    stage.play = lambda _: ScriptedReply("The answer is four.", fault=Fail(after_tokens=2))
    response = httpx.post(bench.url + CHAT, json=ask | {"stream": True})
    assert "failed in mid-stream" in events(response.content)[-1]["error"]["message"]
    assert bench.call().status is CallStatus.PARTIAL
    assert bench.call().sampled_tokens == 2


@pytest.mark.parametrize("fault", [Cut(after_tokens=0), Fail(after_tokens=1)])
def test_a_whole_reply_that_breaks_is_a_502_or_500_and_failed(
    bench: Any, stage: Any, ask: Any, fault: Any
) -> None:
    stage.play = lambda _: ScriptedReply("The answer is four.", fault=fault)
    response = httpx.post(bench.url + CHAT, json=ask)
    assert response.status_code in (500, 502)
    assert bench.call().status is CallStatus.FAILED


@pytest.mark.parametrize("after", [0, 2])
def test_a_stalled_engine_is_given_up(
    stage: Any, start_proxy: Any, ask: Any, events: Any, after: int
) -> None:
    stage.play = lambda _: ScriptedReply("The answer is four.", fault=Stall(30, after_tokens=after))
    bench = start_proxy(stage.engine.base_url, limits=Limits(stall_timeout_s=1.0))
    response = httpx.post(bench.url + CHAT, json=ask | {"stream": True})
    if after == 0:
        assert response.status_code == 504
        assert bench.call().status is CallStatus.FAILED
    else:
        assert events(response.content)[-1]["error"]["code"] == "upstream_timeout"
        assert bench.call().status is CallStatus.PARTIAL
    assert bench.call().reason == "upstream_timeout"


def chunk(text: str, ids: list[int]) -> bytes:
    logprobs = ",".join('{"token":"x","logprob":-0.5}' for _ in ids)
    return (
        b'data: {"prompt_token_ids":[1,2],"choices":[{"index":0,"delta":{"content":"%b"},'
        b'"logprobs":{"content":[%b]},"token_ids":%b}]}\n\n'
        % (text.encode(), logprobs.encode(), str(ids).encode())
    )


async def start(send: Any, status: int = 200, kind: bytes = b"text/event-stream") -> None:
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def write(send: Any, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


@pytest.mark.parametrize(
    "junk",
    [
        b"data: {not json}\n\n",
        b"data: []\n\n",
        b'data: {"choices":[{"delta":{"content":7}}]}\n\n',
        b'data: {"choices":[{"token_ids":[-1]}]}\n\n',
        b'data: {"choices":[{"finish_reason":"who knows","delta":{}}]}\n\n',
    ],
)
def test_a_malformed_chunk_ends_the_stream_and_what_came_before_is_kept(
    raw_engine: Any, start_proxy: Any, ask: Any, events: Any, junk: bytes
) -> None:
    async def answer(_receive: Any, send: Any) -> None:
        await start(send)
        await write(send, chunk("Hi", [7]) + junk, more=False)

    raw_engine.answer = answer
    bench = start_proxy(raw_engine.base_url, model="m")
    response = httpx.post(bench.url + CHAT, json=ask | {"stream": True})
    told = events(response.content)
    assert told[1]["choices"][0]["delta"]["content"] == "Hi"
    assert told[-1]["error"]["code"] == "upstream_error"
    assert bench.call().status is CallStatus.PARTIAL
    assert bench.call().sampled_tokens == 1


@pytest.mark.parametrize("stream", [True, False])
def test_what_came_with_the_end_that_an_engine_gave_a_reply_up_with_is_kept(
    raw_engine: Any, start_proxy: Any, ask: Any, stream: bool
) -> None:
    async def answer(_receive: Any, send: Any) -> None:
        await start(send)
        last = chunk(" there", [8, 9])[:-5] + b',"finish_reason":"abort"}]}\n\n'
        if stream:
            await write(send, chunk("Hi", [7]) + last + b"data: [DONE]\n\n", more=False)
        else:
            whole = last.removeprefix(b"data: ").replace(b'"delta"', b'"message"')
            await write(send, whole, more=False)

    raw_engine.answer = answer
    bench = start_proxy(raw_engine.base_url, model="m")
    response = httpx.post(bench.url + CHAT, json=ask | {"stream": stream})
    assert "abort" in response.text
    assert response.status_code == (200 if stream else 502)
    call = bench.call()
    assert (call.status, call.reason) == (CallStatus.PARTIAL, "upstream_error")
    assert call.sampled_tokens == (3 if stream else 2)
    assert call.replies[0].content == ("Hi there" if stream else " there")


@pytest.mark.parametrize("body", [b"<html>", b'{"choices":[{"index":0}]}', b"[]", b""])
def test_a_malformed_whole_reply_is_a_502(
    raw_engine: Any, start_proxy: Any, ask: Any, body: bytes
) -> None:
    async def answer(_receive: Any, send: Any) -> None:
        await start(send, kind=b"application/json")
        await write(send, body, more=False)

    raw_engine.answer = answer
    bench = start_proxy(raw_engine.base_url, model="m")
    response = httpx.post(bench.url + CHAT, json=ask)
    assert response.status_code == 502
    assert bench.call().status is CallStatus.FAILED


def test_a_call_without_logprobs_is_complete_and_none_of_its_tokens_is_trained(
    bench: Any, stage: Any, ask: Any
) -> None:
    stage.play = lambda _: ScriptedReply("The answer is four.", logprob=MISSING_LOGPROB)
    response = httpx.post(bench.url + CHAT, json=ask)
    assert response.status_code == 200
    call = bench.call()
    assert call.status is CallStatus.COMPLETE
    metrics = httpx.get(bench.url + "/metrics").text
    assert 'bridle_events_total{name="logprobs_missing"} 1.0' in metrics
    account = episode_of(LoadedSession.load(bench.reader, call.session_id)).conservation
    assert account.trained == 0
    assert account.untrained == {"logprob_missing": call.sampled_tokens}


def test_usage_that_contradicts_the_ids_quarantines(
    raw_engine: Any, start_proxy: Any, ask: Any
) -> None:
    async def answer(_receive: Any, send: Any) -> None:
        await start(send)
        end = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":5}}\n\n'
        await write(send, chunk("Hi", [7]) + end + usage + b"data: [DONE]\n\n", more=False)

    raw_engine.answer = answer
    bench = start_proxy(raw_engine.base_url, model="m")
    httpx.post(bench.url + CHAT, json=ask | {"stream": True})
    assert bench.call().status is CallStatus.QUARANTINED
    assert bench.call().reason.startswith("usage_mismatch")


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":%d}}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([chunk("Hi", [7]), FINISH, USAGE % 1], None),
        ([chunk("Hi", [7]), FINISH, chunk("!", [8]), USAGE % 2], "output_after_finish"),
        ([chunk("Hi", [7]).replace(b":0", b":3", 1), FINISH, USAGE % 1], "choice_not_asked_for"),
        ([chunk("Hi", [60_000]), FINISH, USAGE % 1], "id_beyond_vocabulary"),
        ([chunk("Hi", [7]).replace(b"[1,2]", b"[]"), FINISH, USAGE % 1], "prompt_empty"),
    ],
)
def test_a_reply_that_the_request_cannot_have_got_is_quarantined(
    raw_engine: Any,
    start_proxy: Any,
    ask: Any,
    model_dir: Any,
    pieces: list[bytes],
    reason: str | None,
) -> None:
    async def answer(_receive: Any, send: Any) -> None:
        await start(send)
        await write(send, b"".join(pieces) + b"data: [DONE]\n\n", more=False)

    raw_engine.answer = answer
    bench = start_proxy(raw_engine.base_url, model="m", tokenizer_dir=model_dir)
    assert httpx.post(bench.url + CHAT, json=ask | {"stream": True}).status_code == 200
    call = bench.call()
    assert call.status is (CallStatus.QUARANTINED if reason else CallStatus.COMPLETE)
    assert (call.reason or "").partition(":")[0] == (reason or "")


@pytest.mark.parametrize(
    ("fields", "others"),
    [
        ({"min_tokens": 0, "ignore_eos": False, "logit_bias": {}}, ()),
        ({"min_tokens": 2, "ignore_eos": True}, ("ignore_eos", "min_tokens")),
        ({"logit_bias": {"5": 1}, "bad_words": ["x"]}, ("bad_words", "logit_bias")),
        ({"allowed_token_ids": [5]}, ("allowed_token_ids",)),
        ({"truncate_prompt_tokens": 9}, ("truncate_prompt_tokens",)),
    ],
)
def test_settings_of_the_client_that_change_the_sampler_are_recorded(
    raw_engine: Any, start_proxy: Any, ask: Any, fields: dict[str, Any], others: tuple[str, ...]
) -> None:
    async def answer(_receive: Any, send: Any) -> None:
        await start(send)
        await write(send, chunk("Hi", [7]) + FINISH + USAGE % 1 + b"data: [DONE]\n\n", more=False)

    raw_engine.answer = answer
    bench = start_proxy(raw_engine.base_url, model="m")
    httpx.post(bench.url + CHAT, json=ask | fields | {"stream": True})
    assert bench.call().sampler.others == others


def test_a_client_that_leaves_aborts_the_engine_and_its_tokens_are_kept(
    bench: Any, stage: Any, ask: Any, until: Any
) -> None:
    stage.play = lambda _: ScriptedReply("The answer is four.", fault=Stall(60, after_tokens=2))
    with httpx.stream("POST", bench.url + CHAT, json=ask | {"stream": True}) as response:
        for piece in response.iter_raw():
            if b"answer" in piece:
                break
    until(lambda: [call.status is not CallStatus.OPEN for call in bench.calls()] == [True])
    call = bench.call()
    assert (call.status, call.reason) == (CallStatus.PARTIAL, "client_disconnected")
    assert call.sampled_tokens == 2
    until(lambda: stage.engine.backend.running == 0)


def test_a_client_that_leaves_before_any_token_is_failed(
    bench: Any, stage: Any, ask: Any, until: Any
) -> None:
    stage.play = lambda _: ScriptedReply("The answer is four.", fault=Stall(60))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(bench.url + CHAT, json=ask, timeout=1.5)
    until(lambda: [call.status is not CallStatus.OPEN for call in bench.calls()] == [True])
    assert bench.call().status is CallStatus.FAILED
    assert bench.call().reason == "client_disconnected"
    until(lambda: stage.engine.backend.running == 0)


def test_a_client_that_leaves_after_the_terminal_event_got_a_complete_call(
    bench: Any, ask: Any
) -> None:
    with httpx.stream("POST", bench.url + CHAT, json=ask | {"stream": True}) as response:
        seen = b""
        for piece in response.iter_raw():
            seen += piece
            if b"[DONE]" in seen:
                break
    assert bench.call().status is CallStatus.COMPLETE


def test_a_pooled_connection_that_has_died_is_replaced_unseen(
    raw_engine: Any, start_proxy: Any, ask: Any
) -> None:
    served = {"choices": [{"index": 0, "message": {"content": "Hi"}, "finish_reason": "stop"}]}

    async def answer(_receive: Any, send: Any) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"connection", b"close" if len(raw_engine.bodies) == 1 else b"x")],
            }
        )
        await write(send, httpx.Request("POST", "http://x", json=served).content, more=False)
        await asyncio.sleep(0)

    raw_engine.answer = answer
    bench = start_proxy(raw_engine.base_url, model="m")
    for _ in range(3):
        assert httpx.post(bench.url + CHAT, json=ask).status_code == 200


def test_an_engines_400_is_passed_on_and_names_the_field(bench: Any, ask: Any) -> None:
    response = httpx.post(bench.url + CHAT, json=ask | {"temperature": -1})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert bench.call().status is CallStatus.FAILED


@pytest.mark.parametrize(("limit", "code"), [(8, "context_length_exceeded"), (0, None)])
def test_a_prompt_that_fills_the_context_overflows_it(
    model_dir: Any, start_proxy: Any, ask: Any, limit: int, code: str | None
) -> None:
    """vLLM's words for it are those for a client that wants no token."""
    text = Tokenizer(model_dir).render(ask["messages"])
    size = len(Tokenizer(model_dir).encode(text))
    with ScriptedEngine(model_dir, lambda _: "four", max_model_len=size) as engine:
        bench = start_proxy(engine.base_url)
        told = httpx.post(bench.url + CHAT, json=ask | {"max_tokens": limit})

    assert (told.status_code, told.json()["error"]["code"]) == (400, code)


@pytest.mark.parametrize(
    "wait", [b"inf", b"nan", b"-1", b"1e999", b"Wed, 21 Oct 2026 07:28:00 GMT"]
)
def test_a_retry_after_that_is_no_time_to_wait_is_not_passed_on(
    raw_engine: Any, start_proxy: Any, ask: Any, wait: bytes
) -> None:
    async def answer(_: Any, send: Any) -> None:
        headers = [(b"retry-after", wait)]
        await send({"type": "http.response.start", "status": 429, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    raw_engine.answer = answer
    bench = start_proxy(raw_engine.base_url, model="m")
    response = httpx.post(bench.url + CHAT, json=ask)
    assert response.status_code == 429
    assert "retry-after" not in response.headers
    assert (bench.call().status, bench.call().reason) == (CallStatus.FAILED, "rate_limit")


def test_an_engine_that_goes_away_fails_calls_that_are_recorded(
    stage: Any, start_proxy: Any, ask: Any
) -> None:
    bench = start_proxy(stage.engine.base_url)
    assert httpx.post(bench.url + CHAT, json=ask).status_code == 200
    stage.engine.__exit__()
    assert httpx.post(bench.url + CHAT, json=ask).status_code == 502
    assert [call.status for call in bench.calls()] == [CallStatus.COMPLETE, CallStatus.FAILED]


def test_a_fault_of_our_own_is_a_500_in_the_dialects_shape_and_no_call_stays_open(
    bench: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> bytes:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ChatEmitter, "event", broken)
    response = httpx.post(bench.url + CHAT, json=ask | {"stream": True})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    call = bench.call()
    assert call.reason == "internal"
    assert "internal_error" in {note.name for note in call.notes}


def test_a_stopped_proxy_keeps_what_running_calls_have(bench: Any, stage: Any, ask: Any) -> None:
    stage.play = lambda _: ScriptedReply("The answer is four.", fault=Stall(60, after_tokens=2))
    with httpx.stream("POST", bench.url + CHAT, json=ask | {"stream": True}) as response:
        pieces = response.iter_raw()  # kept: dropping it would hang up
        for piece in pieces:
            if b"answer" in piece:
                break
        bench.server.stop()
    call = bench.call()
    assert (call.status, call.reason) == (CallStatus.PARTIAL, "proxy_stopped")
    assert call.sampled_tokens == 2


def test_a_redirect_is_not_followed_and_says_what_to_do(
    raw_engine: Any, start_proxy: Any, ask: Any
) -> None:
    async def answer(_: Any, send: Any) -> None:
        headers = [(b"location", b"http://elsewhere/v1/chat/completions")]
        await send({"type": "http.response.start", "status": 307, "headers": headers})
        await send({"type": "http.response.body"})

    raw_engine.answer = answer
    bench = start_proxy(raw_engine.base_url, model="m")
    response = httpx.post(bench.url + "/v1/chat/completions", json=ask)
    assert response.status_code == 500
    assert "redirects" in response.json()["error"]["message"]
    assert bench.call().reason == "upstream_error"


def test_a_store_that_cannot_be_read_is_a_503_and_no_value_is_logged(
    bench: Any, ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"model": "m", "max_tokens": 4, "messages": ask["messages"]}
    assert httpx.post(f"{bench.url}/s/first{CHAT}", json=ask).status_code == 200
    with closing(sqlite3.connect(bench.store_path)) as database:
        database.execute("ALTER TABLE sessions RENAME TO elsewhere")
        refused = [
            httpx.post(f"{bench.url}/s/my-secret-name{CHAT}", json=ask),
            httpx.post(f"{bench.url}/s/my-secret-name/v1/messages", json=said),
            httpx.get(f"{bench.url}/bridle/v1/sessions/ses_unknown"),
        ]
        database.execute("ALTER TABLE elsewhere RENAME TO sessions")
    for response in refused:
        assert response.status_code == 503, response.text
        assert response.headers["retry-after"] == "1"
        assert "store" in response.json()["error"]["message"]
    assert refused[1].json()["type"] == "error"
    assert "store_not_read" in caplog.text
    assert "my-secret-name" not in caplog.text


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/bridle/v1/sessions"])
def test_a_compressed_body_is_refused_in_words_that_say_so(
    bench: Any, stage: Any, ask: Any, path: str
) -> None:
    body = gzip.compress(orjson.dumps(ask))
    response = httpx.post(bench.url + path, content=body, headers={"content-encoding": "gzip"})
    assert response.status_code == 415
    assert "Content-Encoding gzip" in response.json()["error"]["message"]
    assert not stage.requests


@pytest.mark.parametrize(
    ("path", "asked", "told"),
    [
        (CHAT, {"max_completion_tokens": 10**6}, "max_completion_tokens=1000000 cannot be"),
        (CHAT, {"max_tokens": 10**6}, "max_tokens=1000000 cannot be greater"),
        ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens must be at least 1"),
        (
            "/v1beta/models/m:generateContent",
            {"generationConfig": {"maxOutputTokens": 10**6}},
            "maxOutputTokens=1000000 cannot be greater",
        ),
        ("/v1beta/models/m:generateContent", {"generationConfig": {"topP": 3}}, "topP must be in"),
    ],
)
def test_what_the_engine_refuses_is_told_and_recorded_by_the_name_that_the_client_gave_it(
    bench: Any, path: str, asked: dict[str, Any], told: str
) -> None:
    said = {
        CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
        "/v1/responses": {"model": "m", "input": "hi"},
    }.get(path, {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]})
    refused = httpx.post(bench.url + path, json=said | asked)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["message"].startswith(told)
    assert error.get("param") in (None, *asked)
    assert bench.call().error["message"] == error["message"]


def test_a_store_that_cannot_be_written_makes_the_proxy_unready(bench: Any) -> None:
    assert httpx.get(bench.url + "/readyz").status_code == 200
    bench.server._app.services.writer.well = False
    response = httpx.get(bench.url + "/readyz")
    assert (response.status_code, response.json()["status"]) == (503, "store_unavailable")


@pytest.mark.parametrize("status", [599, 529, 418])
def test_a_status_that_nobody_knows_is_the_engines_fault(
    bench: Any, stage: Any, ask: Any, status: int
) -> None:
    stage.play = lambda _: Refuse(status, "what")
    response = httpx.post(bench.url + CHAT, json=ask)
    assert response.status_code in (500, 502)
    assert response.json()["error"]["message"] == "what"
