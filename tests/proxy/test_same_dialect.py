"""Requests in a dialect that their upstream speaks itself: bytes through, and recorded."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
from tests.support import native_providers as providers
from tests.support.native_providers import KEY, SERVE, TURNS, NativeProvider, Reply
from tests.support.tool_loops import (
    FIELDS,
    Ask,
    ToolLoop,
    by_google,
    by_messages,
    by_previous_response,
    by_responses,
)

from bridle.proxy.dialects.registry import served
from bridle.proxy.services import CannotStart, Services
from bridle.proxy.settings import OtherModel, ProxySettings
from bridle.reconstruct.audit import audit_session
from bridle.store.records import CallKind, CallStatus

MODEL = "the-model"


@dataclass
class Wire(httpx2.BaseTransport):
    """The bytes that an SDK sent and got."""

    sent: list[bytes] = field(default_factory=list)
    got: list[bytes] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    headers: list[httpx2.Headers] = field(default_factory=list)
    _inner: httpx2.HTTPTransport = field(default_factory=httpx2.HTTPTransport)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.sent.append(request.read())
        reply = self._inner.handle_request(request)
        place = len(self.got)
        self.got.append(b"")
        self.statuses.append(reply.status_code)
        self.headers.append(reply.headers)

        def pieces() -> Iterator[bytes]:
            for piece in reply.stream:  # type: ignore[union-attr]
                self.got[place] += piece
                yield piece

        return httpx2.Response(
            reply.status_code, headers=reply.headers, stream=_Stream(pieces), request=request
        )


class _Stream(httpx2.SyncByteStream):
    def __init__(self, pieces: Callable[[], Iterator[bytes]]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces()


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def bench(stage: Any, start_proxy: Any, provider: NativeProvider, dialect: str) -> Any:
    other = OtherModel((provider.base_url,), None, KEY, external=True, dialects=(dialect,))
    return start_proxy(stage.engine.base_url, other_models={"*": other})


WAYS = [
    ("messages", by_messages),
    ("responses", by_responses),
    ("responses", by_previous_response),
    ("google", by_google),
]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize(("dialect", "ask"), WAYS, ids=[way.__name__ for _, way in WAYS])
def test_six_turns_go_through_as_bytes_and_are_one_recorded_chain(
    bench: Any, provider: NativeProvider, wire: Wire, dialect: str, ask: Ask, stream: bool
) -> None:
    with httpx2.Client(transport=wire) as http:
        assert (
            ask(ToolLoop(bench.url, stream, http, fields=FIELDS.get(dialect, {})))
            == f"Step {TURNS - 1}."
        )
    assert wire.sent == [asked.body for asked in provider.asked]
    assert wire.got == [reply.body for reply in provider.replied]
    assert {reply["x-request-id"] for reply in wire.headers} == {"req_theirs"}
    assert "mine" not in json.dumps([asked.headers for asked in provider.asked])
    calls = bench.judged()
    assert [call.status for call in calls] == [CallStatus.COMPLETE] * TURNS
    assert [call.parent_call_id for call in calls] == [None, *(call.id for call in calls[:-1])]
    assert [bench.reader.response_body(call.id) for call in calls] == wire.got
    made = [call.replies[0] for call in calls]
    assert [one.reasoning.startswith("Thinking of step") for one in made] == [True] * TURNS  # type: ignore[union-attr]
    assert [json.loads(one.tool_calls[0].arguments) for one in made[:-1]] == [
        {"step": step} for step in range(TURNS - 1)
    ]
    assert made[-1].content == f"Step {TURNS - 1}."
    usage = calls[0].usage
    assert (usage["cached_tokens"], usage["completion_tokens"]) == (30, 9)
    assert calls[0].model_served is not None
    assert calls[0].model_served.endswith("-theirs")
    assert [call.finish_reason for call in calls][-2:] == ["tool_calls", "stop"]
    assert audit_session(bench.reader, calls[0].session_id).clean


def _request(dialect: str, stream: bool) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of the plainest request in a dialect."""
    path, body = {
        "messages": (
            "/v1/messages?beta=true",
            {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]},
        ),
        "responses": ("/v1/responses", {"model": MODEL, "input": "go"}),
        "google": (
            f"/v1beta/models/{MODEL}:"
            + ("streamGenerateContent?alt=sse&key=mine" if stream else "generateContent"),
            {"contents": [{"role": "user", "parts": [{"text": "go"}]}]},
        ),
    }[dialect]
    if stream and dialect != "google":
        body["stream"] = True
    return path, body


def _asked(bench: Any, dialect: str, stream: bool) -> httpx.Response:
    """Ask the plainest thing in a dialect, and return the response with its bytes."""
    path, body = _request(dialect, stream)
    headers = {"anthropic-version": "2023-06-01"}
    return httpx.post(bench.url + path, json=body, headers=headers, trust_env=False, timeout=60)


OVERFLOW = {
    "messages": {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "prompt is too long: 200001 tokens > 200000 maximum",
        },
    },
    "responses": {
        "error": {
            "message": "Your input exceeds the context window of this model.",
            "type": "invalid_request_error",
            "param": "input",
            "code": "context_length_exceeded",
        }
    },
    "google": {
        "error": {
            "code": 400,
            "message": "The input token count (1048577) exceeds the maximum number of tokens"
            " allowed (1048576).",
            "status": "INVALID_ARGUMENT",
        }
    },
}
REFUSALS = {
    "busy": (429, {"retry-after": "7", "anthropic-ratelimit-requests-remaining": "0"}),
    "overloaded": (529, {"x-should-retry": "true"}),
    "overflow": (400, {}),
    "unavailable": (503, {}),
    "no credit": (402, {}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("case", REFUSALS)
@pytest.mark.parametrize("dialect", SERVE)
def test_a_refusal_comes_back_in_the_providers_own_words(
    bench: Any, provider: NativeProvider, dialect: str, case: str, stream: bool
) -> None:
    status, headers = REFUSALS[case]
    error = OVERFLOW[dialect] if case == "overflow" else {"error": {"message": f"{case} — é"}}
    body = json.dumps(error, indent=3).encode() + b"\n"
    provider.serve = lambda _: Reply([body], status, headers=headers)
    reply = _asked(bench, dialect, stream)
    assert (reply.status_code, reply.content) == (status, body)
    assert headers.items() <= reply.headers.items()
    assert len(provider.asked) == 1, "the client decides whether to ask again"
    call = bench.call()
    assert (call.status, call.error["status"]) == (CallStatus.FAILED, status)
    assert (call.reason == "context_overflow") == (case == "overflow")


@pytest.mark.parametrize("dialect", SERVE)
def test_a_stream_that_breaks_off_keeps_what_came(
    bench: Any, provider: NativeProvider, dialect: str
) -> None:
    serve = provider.serve

    def cut(asked: Any) -> Reply:
        whole = serve(asked)
        end = whole.body.rindex(b"Thinking of step") + 30 if dialect != "messages" else 600
        return Reply([whole.body[:end]], content_type=whole.content_type, cut=True)

    provider.serve = cut
    reply = _asked(bench, dialect, stream=True)
    (sent,) = provider.replied
    ends = [sent.body.rfind(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n")]
    whole_events = sent.body[: max(ends)] if max(ends) > 4 else b""
    if whole_events:
        assert reply.content.startswith(whole_events)
    assert b"error" in reply.content[len(whole_events) :]
    call = bench.call()
    assert call.status in (CallStatus.PARTIAL, CallStatus.FAILED)
    assert call.reason == "upstream_error"
    assert bench.reader.response_body(call.id) == reply.content


@pytest.mark.parametrize("dialect", SERVE)
def test_a_stream_that_the_provider_ends_with_an_error_is_passed_on_unchanged(
    bench: Any, provider: NativeProvider, dialect: str
) -> None:
    error = {
        "messages": {"type": "error", "error": {"type": "overloaded_error", "message": "Busy"}},
        "responses": {"type": "error", "code": "server_error", "message": "Busy", "param": None},
        "google": {"error": {"code": 503, "message": "Busy", "status": "UNAVAILABLE"}},
    }[dialect]
    serve = provider.serve

    def failing(asked: Any) -> Reply:
        whole = serve(asked)
        end = b"\r\n\r\n" if dialect == "google" else b"\n\n"
        first = whole.body.split(end)[0] + end
        last = providers.events([error], typed=dialect != "google")
        return Reply([first, *last], content_type=whole.content_type)

    provider.serve = failing
    reply = _asked(bench, dialect, stream=True)
    assert reply.content == provider.replied[0].body
    call = bench.call()
    assert call.status in (CallStatus.PARTIAL, CallStatus.FAILED)
    assert call.error["message"] == "Busy"


@pytest.mark.parametrize("dialect", SERVE)
def test_a_stream_without_its_end_gets_nothing_added(
    bench: Any, provider: NativeProvider, dialect: str
) -> None:
    serve = provider.serve
    mark = {"messages": b"event: message_stop", "responses": b"event: response.completed"}

    def short(asked: Any) -> Reply:
        whole = serve(asked)
        end = whole.body.rindex(mark.get(dialect, b'data: {"candidates"'))
        return Reply([whole.body[:end]], content_type=whole.content_type)

    provider.serve = short
    assert _asked(bench, dialect, stream=True).content == provider.replied[0].body
    call = bench.call()
    assert (call.status, call.reason) == (CallStatus.PARTIAL, "upstream_error")


@pytest.mark.parametrize("dialect", SERVE)
def test_events_come_while_the_reply_goes_on(
    bench: Any, provider: NativeProvider, dialect: str
) -> None:
    serve, read = provider.serve, threading.Event()

    def slow(asked: Any) -> Reply:
        whole = serve(asked)
        end = b"\r\n\r\n" if dialect == "google" else b"\n\n"
        first = whole.body.split(end)[0] + end
        rest = whole.body.removeprefix(first)
        return Reply([first, rest], content_type=whole.content_type, held=read)

    provider.serve = slow
    path, body = _request(dialect, stream=True)
    headers = {"anthropic-version": "2023-06-01"}
    given: Any = {"json": body, "headers": headers, "trust_env": False, "timeout": 60}
    with httpx.stream("POST", bench.url + path, **given) as reply:
        pieces = reply.iter_raw()
        got = next(pieces)
        read.set()
        assert got + b"".join(pieces) == provider.replied[0].body
    assert bench.call().status is CallStatus.COMPLETE


@pytest.mark.parametrize("dialect", ["messages"])
def test_the_proxys_key_is_removed_from_a_reply_that_quotes_it(
    bench: Any, provider: NativeProvider
) -> None:
    provider.serve = lambda _: Reply([f'{{"error": "no such key: {KEY}"}}'.encode()], 401)
    reply = _asked(bench, "messages", stream=False)
    assert (reply.status_code, KEY in reply.text) == (401, False)
    assert "no such key" in reply.text


@pytest.mark.parametrize("dialect", ["messages", "google"])
def test_a_count_is_the_providers_own(bench: Any, provider: NativeProvider, dialect: str) -> None:
    path, body = {
        "messages": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
        "google": (
            f"/v1beta/models/{MODEL}:countTokens",
            {"contents": [{"role": "user", "parts": [{"text": "a"}]}]},
        ),
    }[dialect]
    body = {"model": MODEL, "max_tokens": 1} | body
    key = httpx.post(f"{bench.url}/bridle/v1/sessions", json={}, trust_env=False, timeout=60).json()
    headers = {"anthropic-version": "2023-06-01"}
    url = f"{bench.url}/s/{key['id']}{path}"
    reply = httpx.post(url, json=body, headers=headers, trust_env=False)
    assert reply.content == provider.replied[0].body
    assert provider.asked[0].path == path
    (call,) = bench.calls()
    assert call.kind is CallKind.COUNT


@pytest.mark.parametrize("dialect", ["messages"])
def test_what_only_the_provider_can_read_goes_through(
    bench: Any, provider: NativeProvider, dialect: str
) -> None:
    """A PDF, a server of tools and a container are carried out there, and the chain holds."""
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjcK"}
    first = {"role": "user", "content": [{"type": "document", "source": pdf}]}
    body: Any = {"model": MODEL, "max_tokens": 9, "mcp_servers": [{"type": "url", "url": "x"}]}
    body |= {"container": {"skills": []}, "messages": [first]}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "mcp-client-2025-11-20"}
    url = f"{bench.url}/v1/messages"
    said = httpx.post(url, json=body, headers=headers, trust_env=False).json()
    done = {"type": "tool_result", "tool_use_id": said["content"][1]["id"], "content": "ok"}
    body["messages"] += [
        {"role": "assistant", "content": said["content"]},
        {"role": "user", "content": [done]},
    ]
    assert httpx.post(url, json=body, headers=headers, trust_env=False).status_code == 200
    assert provider.asked[0].headers["anthropic-beta"] == headers["anthropic-beta"]
    one, two = bench.calls()
    assert two.parent_call_id == one.id


@pytest.mark.parametrize("dialect", SERVE)
def test_the_upstreams_name_of_the_model_is_all_that_changes(
    stage: Any, start_proxy: Any, provider: NativeProvider, dialect: str
) -> None:
    other = OtherModel((provider.base_url,), "th€irs", KEY, external=True, dialects=(dialect,))
    bench = start_proxy(stage.engine.base_url, other_models={MODEL: other})
    body = b'{ "max_tokens":9,"model" : "the-model","input":"go","messages":[{"role":"user",'
    body += b'"content":"{\\"model\\": \\"the-model\\"}"}],"contents":[{"role":"user",'
    body += b'"parts":[{"text":"a","model":"the-model"}]}] }'
    if dialect == "responses":
        body = body.replace(b'"max_tokens":9,', b"")
    path = {
        "messages": "/v1/messages",
        "responses": "/v1/responses",
        "google": f"/v1beta/models/{MODEL}:generateContent",
    }[dialect]
    headers = {"anthropic-version": "2023-06-01", "content-type": "application/json"}
    reply = httpx.post(bench.url + path, content=body, headers=headers, trust_env=False)
    assert reply.status_code == 200, reply.text
    (asked,) = provider.asked
    if dialect == "google":
        assert asked.path == "/v1beta/models/th€irs:generateContent"
        assert asked.body == body
    else:
        renamed = '"model" : "th€irs"'.encode()
        assert asked.body == body.replace(b'"model" : "the-model"', renamed, 1)


@pytest.mark.parametrize("names_its_session", [True, False], ids=["named", "anonymous"])
@pytest.mark.parametrize("sub_agents", ["native", "frozen"])
@pytest.mark.parametrize("dialect", ["messages"])
def test_a_sub_agents_calls_go_to_its_own_upstream_in_that_ones_form(
    stage: Any,
    start_proxy: Any,
    provider: NativeProvider,
    dialect: str,
    sub_agents: str,
    names_its_session: bool,
) -> None:
    """The engine is asked in chat, and the client gets 400 for what only the provider can read."""
    other = OtherModel((provider.base_url,), None, KEY, external=True, dialects=(dialect,))
    bench = start_proxy(
        stage.engine.base_url,
        other_models={"native": other, "frozen": OtherModel((stage.engine.base_url,))},
        role_models={"subagent": sub_agents},
    )
    parent = {"native": "frozen", "frozen": "native"}[sub_agents]
    headers = {"anthropic-version": "2023-06-01"}
    if names_its_session:
        headers["x-claude-code-session-id"] = "s"
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjcK"}
    document = [{"type": "document", "source": pdf}]

    def ask(to: str, agent: dict[str, str]) -> None:
        body: Any = {"model": parent, "max_tokens": 9, "temperature": 1}
        body["messages"] = [{"role": "user", "content": f"{to}, go"}]
        url, given = f"{bench.url}/v1/messages", headers | agent
        asked, sent = len(provider.asked), len(stage.requests)
        reply = httpx.post(url, json=body, headers=given, trust_env=False)
        assert reply.status_code == 200, reply.text
        native = to == "native"
        assert (len(provider.asked) - asked, len(stage.requests) - sent) == (native, not native)
        if native:
            assert json.loads(provider.asked[-1].body) == body
        body |= {"mcp_servers": [{"type": "url", "url": "x"}]}
        body["messages"] = [{"role": "user", "content": document}]
        reply = httpx.post(url, json=body, headers=given, trust_env=False)
        assert reply.status_code == (200 if native else 400), reply.text

    ask(parent, {})
    ask(sub_agents, {"x-claude-code-agent-id": "explorer"})
    agents = {call.role for call in bench.calls()}
    assert agents == {None, "explorer"}


@pytest.mark.parametrize("dialect", ["messages"])
def test_another_dialect_of_the_same_upstream_is_translated(
    bench: Any, provider: NativeProvider
) -> None:
    client = openai.OpenAI(base_url=f"{bench.url}/v1", api_key="mine", max_retries=0)
    provider.serve = lambda asked: Reply(
        [json.dumps({"choices": [{"message": {"content": asked.path}}]}).encode()]
    )
    with pytest.raises(openai.APIStatusError):
        client.responses.create(model=MODEL, input="go")
    assert provider.asked[0].path == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("url", "spoken"),
    [
        ("https://api.anthropic.com", {"messages"}),
        ("https://api.anthropic.com:443/", {"messages"}),
        ("https://api.deepseek.com/anthropic", {"messages"}),
        ("https://api.openai.com/v1", {"responses"}),
        ("https://generativelanguage.googleapis.com", {"google"}),
        ("https://api.anthropic.com.example.org", set()),
        ("https://api.example.com/v1", set()),
    ],
)
def test_providers_are_known_by_their_addresses(url: str, spoken: set[str]) -> None:
    native = {one.name: one.native for one in served() if one.native is not None}
    assert {name for name, one in native.items() if one.addresses.search(url)} == spoken


def test_a_dialect_that_cannot_be_passed_on_is_refused_at_start(tmp_path: Path) -> None:
    engine = "http://127.0.0.1:9"
    other = OtherModel((engine,), None, KEY, external=True, dialects=("chat",))
    store = str(tmp_path / "bridle.db")
    settings = ProxySettings(upstream_url=engine, store_url=store, other_models={"*": other})
    with pytest.raises(CannotStart, match="chat is none of google, messages, responses"):
        asyncio.run(Services.start(settings, served()))
