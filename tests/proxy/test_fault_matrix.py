"""Every fault of an engine, in every dialect, streaming or not.

The tests check what the client receives and what the record shows, that no token is lost, and that
nothing is counted twice.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.serve.transport import ServerThread
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import Limits, ProxySettings
from bridle.proxy.wire.sse import SseParser
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus
from support.asgi import read_body
from support.processes import free_port

STALL_S = 0.6
KEPT = 2
"""Tokens that the engine sends before it fails in mid-stream."""
SAMPLED = 3
OVERFLOW = (
    "This model's maximum context length is 100 tokens. However, your prompt contains 250 tokens. "
    "Please reduce the length of the input prompt."
)

COMPLETE, PARTIAL, FAILED = CallStatus.COMPLETE, CallStatus.PARTIAL, CallStatus.FAILED


@dataclass(frozen=True)
class Fault:
    """A fault of the engine, and the result that must come of it."""

    status: int
    """HTTP status when nothing has been sent to the client yet."""
    reason: str | None
    midway: bool = False
    """It happens after ``KEPT`` tokens, when the engine streams."""
    retry_after: str | None = None


FAULTS = {
    "refused": Fault(502, "upstream_unreachable"),
    "slow": Fault(200, None),
    "stalled": Fault(504, "upstream_timeout"),
    "stalled_midway": Fault(504, "upstream_timeout", midway=True),
    "cut": Fault(502, "upstream_error", midway=True),
    "429": Fault(429, "rate_limit", retry_after="7"),
    "500": Fault(500, "upstream_error", retry_after="7"),
    "503": Fault(503, "overloaded", retry_after="7"),
    "malformed": Fault(502, "upstream_error", midway=True),
    "wrong_model": Fault(404, "not_found"),
    "overflow": Fault(400, "context_overflow"),
}

DIALECTS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    ),
    "google": ("/v1beta/models/m", {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}),
}

OVERFLOW_WORDS = {
    "chat": "context_length_exceeded",
    "completions": "context_length_exceeded",
    "responses": "context_length_exceeded",
    "messages": "prompt is too long: 250 tokens > 100 maximum",
    "google": "exceeds the maximum number of tokens allowed (100)",
}
TERMINAL = {
    "chat": b"[DONE]",
    "completions": b"[DONE]",
    "responses": b"response.completed",
    "messages": b"message_stop",
    "google": b'"finishReason"',
}


def choice(number: int, whole: bool, text: bool) -> dict[str, Any]:
    """Token ``number`` as a chunk's choice, or all tokens as a reply's."""
    count = SAMPLED if whole else 1
    said = "x" * count
    values = [-0.5] * count
    entries: dict[str, Any] = {"content": [{"token": "x", "logprob": value} for value in values]}
    if text:
        entries = {"token_logprobs": values, "tokens": ["x"] * count}
    last = whole or number == SAMPLED - 1
    return {
        "index": 0,
        **({"text": said} if text else {"message" if whole else "delta": {"content": said}}),
        "logprobs": entries,
        "token_ids": [*range(10, 10 + count)] if whole else [10 + number],
        "finish_reason": "stop" if last else None,
    }


USAGE = {"prompt_tokens": 2, "completion_tokens": SAMPLED}


@dataclass
class Engine:
    """Answers as ``fault`` says; counts how often it was asked."""

    fault: str = "slow"
    asked: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = await read_body(receive)
        self.asked += 1
        if self.fault == "stalled":
            await asyncio.sleep(2 * STALL_S)
            return
        if self.fault == "slow":
            await asyncio.sleep(STALL_S / 4)
        refusals = {
            "429": (429, "Slow down."),
            "500": (500, "Broken."),
            "503": (503, "Busy."),
            "wrong_model": (404, "The model `m` does not exist."),
            "overflow": (400, OVERFLOW),
        }
        if self.fault in refusals:
            status, message = refusals[self.fault]
            await self._start(send, status, (b"retry-after", b"7"))
            told = {"error": {"message": message, "type": "x", "param": None, "code": status}}
            await self._write(send, json.dumps(told).encode(), more=False)
            return
        await self._start(send, 200)
        await self._reply(send, json.loads(body), text=scope["path"] == "/v1/completions")

    async def _reply(self, send: Any, request: Any, text: bool) -> None:
        broken = FAULTS[self.fault].midway
        if not request["stream"]:
            whole = {
                "choices": [choice(0, True, text)],
                "usage": USAGE,
                "prompt_token_ids": [1, 2],
            }
            body = json.dumps(whole).encode()
            await self._write(send, body[: len(body) // 2] if broken else body, more=True)
        else:
            for number in range(KEPT if broken else SAMPLED):
                event: dict[str, Any] = {"choices": [choice(number, False, text)]}
                if number == 0:
                    event["prompt_token_ids"] = [1, 2]
                await self._write(send, b"data: %b\n\n" % json.dumps(event).encode(), more=True)
        if self.fault == "stalled_midway":
            await asyncio.sleep(2 * STALL_S)
        if self.fault in ("cut", "stalled_midway"):
            return  # the server closes a connection whose response was not finished
        if self.fault == "malformed":
            await self._write(send, b'data: {"choices": 7}\n\n', more=False)
            return
        if request["stream"]:
            usage = json.dumps({"choices": [], "usage": USAGE}).encode()
            await self._write(send, b"data: %b\n\ndata: [DONE]\n\n" % usage, more=True)
        await self._write(send, b"", more=False)

    @staticmethod
    async def _start(send: Any, status: int, *headers: tuple[bytes, bytes]) -> None:
        start = {"type": "http.response.start", "status": status, "headers": [*headers]}
        await send(start)

    @staticmethod
    async def _write(send: Any, body: bytes, *, more: bool) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})


@dataclass
class Stand:
    """One engine, a proxy before it, and a proxy before nothing."""

    engine: Engine
    proxy: ProxyServer
    alone: ProxyServer
    reader: Reader = field(repr=False)
    client: httpx.Client = field(repr=False)

    def ask(self, fault: str, dialect: str, stream: bool) -> tuple[str, httpx.Response]:
        """The session's name and the client's response."""
        self.engine.fault = fault
        path, body = DIALECTS[dialect]
        if dialect == "google":
            path += ":streamGenerateContent?alt=sse" if stream else ":generateContent"
        else:
            body = body | {"model": "m", "stream": stream}
        name = f"{fault}-{dialect}-{stream}"
        return name, self.client.post(f"{self.server(fault).base_url}/s/{name}{path}", json=body)

    def server(self, fault: str) -> ProxyServer:
        return self.alone if fault == "refused" else self.proxy

    def counted(self, fault: str, metric: str) -> float:
        """Sum of a counter over its labels."""
        text = self.client.get(self.server(fault).base_url + "/metrics").text
        found = re.findall(rf"^{metric}_total(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in found)


@pytest.fixture(scope="module")
def stand(
    tmp_path_factory: pytest.TempPathFactory, audit_store: Callable[[Path], None]
) -> Iterator[Stand]:
    path: Path = tmp_path_factory.mktemp("faults") / "bridle.db"
    engine = Engine()
    server = ServerThread(engine, host="127.0.0.1", port=0)
    server.start()
    nowhere = f"http://127.0.0.1:{free_port()}"
    proxies = [
        ProxyServer(
            ProxySettings(
                upstream_url=url,
                store_url=str(path),
                model="m",
                limits=Limits(stall_timeout_s=STALL_S, failures_to_eject=10_000, health_check_s=0),
            ),
            grace_s=1,
        )
        for url in (server.base_url, nowhere)
    ]
    for proxy in proxies:
        proxy.start()
    reader = Reader(str(path))
    with httpx.Client(timeout=30) as client:
        yield Stand(engine, *proxies, reader, client)
    reader.close()
    for proxy in proxies:
        proxy.stop()
    server.stop()
    audit_store(path)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(3)
def test_a_fault_is_told_in_the_dialects_shape_and_recorded_once(
    stand: Stand, fault: str, dialect: str, stream: bool
) -> None:
    expected = FAULTS[fault]
    asked = stand.engine.asked
    calls = stand.counted(fault, "bridle_calls")
    tokens = stand.counted(fault, "bridle_sampled_tokens")

    name, response = stand.ask(fault, dialect, stream)

    kept = SAMPLED if fault == "slow" else KEPT if expected.midway and stream else 0
    told_in_stream = kept == KEPT
    assert response.status_code == (200 if told_in_stream else expected.status), response.text
    if fault == "slow":
        assert not stream or TERMINAL[dialect] in response.content
    elif told_in_stream:
        check_stream_error(dialect, response.content)
    else:
        check_error(dialect, response, expected)
        if fault == "overflow":
            assert OVERFLOW_WORDS[dialect] in response.text

    session = stand.reader.session_by_name(name)
    assert session is not None
    (call,) = stand.reader.calls(session.id)
    status = COMPLETE if fault == "slow" else PARTIAL if kept else FAILED
    assert (call.status, call.reason, call.dialect) == (status, expected.reason, dialect)
    assert (call.sampled_tokens or 0) == kept
    spans = [span for span in stand.reader.spans(session.id) if span.logprobs is not None]
    assert [list(span.token_ids) for span in spans] == ([[*range(10, 10 + kept)]] if kept else [])

    assert stand.engine.asked - asked == (0 if fault == "refused" else 1)
    assert stand.counted(fault, "bridle_calls") - calls == 1
    assert stand.counted(fault, "bridle_sampled_tokens") - tokens == kept


def check_error(dialect: str, response: httpx.Response, expected: Fault) -> None:
    """A response of its own, as the provider's clients read it."""
    assert response.headers["content-type"].startswith("application/json")
    assert response.headers.get("retry-after") == expected.retry_after
    told = response.json()
    assert told["error"]["message"]
    if dialect == "messages":
        assert told["type"] == "error"
        assert told["error"]["type"].endswith(("_error", "_large"))
    elif dialect == "google":
        assert told["error"]["code"] == expected.status
        assert told["error"]["status"].isupper()
    else:
        assert {"message", "type", "param", "code"} <= told["error"].keys()


def check_stream_error(dialect: str, stream: bytes) -> None:
    """The provider's mid-stream error, last, and nothing that says the reply is whole."""
    assert TERMINAL[dialect] not in stream
    parser = SseParser()
    last = json.loads([*parser.feed(stream), *parser.finish()][-1])
    if dialect == "responses":
        assert last["type"] == "response.failed"
        assert last["response"]["error"]["message"]
    elif dialect == "messages":
        assert last["type"] == "error"
        assert last["error"]["message"]
    else:
        assert last["error"]["message"]
