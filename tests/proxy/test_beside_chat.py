"""Routes beside chat: passed on to the upstream that is named for them, and recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fastapi.testclient import TestClient

from bridle.diagnosis.transcript import turns_of
from bridle.engine.serve.transport import ServerThread
from bridle.proxy.settings import Limits, OtherModel, OtherRoute
from bridle.reconstruct.audit import audit_session
from bridle.reconstruct.session import LoadedSession
from bridle.store.records import CallKind, CallStatus
from bridle.viewer.app import viewer_app
from bridle.viewer.rendering import Source
from support.asgi import read_body

KEY = "the-key-of-the-upstream"
EMBEDDING = {"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}


Asked = tuple[str, str, dict[bytes, bytes], bytes]
"""Method, path with its query, headers and body."""


class Upstream(ServerThread):
    """An upstream that embeds, takes files, and refuses moderations with the key in its words."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        super().__init__(_application(self.asked), host="127.0.0.1", port=0)


def _application(asked: list[Asked]) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = await read_body(receive)
        path = scope["path"] + (
            f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
        )
        asked.append((scope["method"], path, dict(scope["headers"]), body))
        status, reply = 200, {"object": "list", "data": [EMBEDDING], "model": "small"}
        reply["usage"] = {"prompt_tokens": 5, "total_tokens": 5}
        if scope["path"] == "/v1/moderations":
            status, reply = 401, {"error": {"message": f"Incorrect API key provided: {KEY}"}}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(reply).encode()})

    return app


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def bench(start_proxy: Any, stage: Any, upstream: Upstream) -> Any:
    route = OtherRoute(f"{upstream.base_url}/v1/", api_key=KEY)
    names = ("embeddings", "files", "moderations")
    return start_proxy(stage.engine.base_url, routes=dict.fromkeys(names, route))


def opened(bench: Any) -> dict[str, Any]:
    url = f"{bench.server.base_url}/bridle/v1/sessions"
    return dict(httpx.post(url, json={}, trust_env=False).raise_for_status().json())


def test_an_app_that_embeds_and_asks_is_one_session(bench: Any, upstream: Upstream) -> None:
    session = opened(bench)
    with openai.OpenAI(base_url=session["base_urls"]["openai"], api_key=session["key"]) as client:
        made = client.embeddings.create(model="small", input="two words", encoding_format="float")
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "and?"}])

    assert made.data[0].embedding == EMBEDDING["embedding"]
    ((method, path, headers, body),) = upstream.asked
    assert (method, path) == ("POST", "/v1/embeddings")
    assert headers[b"authorization"] == f"Bearer {KEY}".encode()
    side, main = bench.reader.calls(session["id"])
    assert (side.dialect, side.kind, side.role) == ("embeddings", CallKind.SIDE, "embeddings")
    assert (side.model_requested, side.usage) == ("small", {"prompt_tokens": 5})
    assert bench.reader.request_body(side.id) == body
    assert json.loads(bench.reader.response_body(side.id))["data"] == [EMBEDDING]
    assert main.parent_call_id is None
    assert audit_session(bench.reader, session["id"]).clean


def test_a_file_and_a_query_arrive_as_they_were_sent(bench: Any, upstream: Upstream) -> None:
    session = opened(bench)
    url, key = f"/s/{session['id']}/v1/files", {"authorization": f"Bearer {session['key']}"}
    with httpx.Client(base_url=bench.server.base_url, headers=key, trust_env=False) as client:
        form = {"files": {"file": ("a.txt", b"\x00\xff text")}, "data": {"purpose": "x"}}
        asked = client.build_request("POST", url, **form)
        sent = asked.read()
        client.send(asked).raise_for_status()
        client.get(f"{url}/file-1/content", params={"limit": "2"}).raise_for_status()
        refused = client.put(url, content=b"")

    posted, read = upstream.asked
    assert posted[3] == sent
    assert posted[2][b"content-type"].startswith(b"multipart/form-data; boundary=")
    assert read[:2] == ("GET", "/v1/files/file-1/content?limit=2")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, POST, DELETE")


def test_a_refusal_is_passed_on_without_the_proxys_key(bench: Any) -> None:
    session = opened(bench)
    client = openai.OpenAI(
        base_url=session["base_urls"]["openai"], api_key=session["key"], max_retries=0
    )
    with client, pytest.raises(openai.AuthenticationError, match="a key of the proxy") as refusal:
        client.moderations.create(input="words")
    assert KEY not in str(refusal.value)
    (call,) = bench.reader.calls(session["id"])
    assert (call.status, call.reason) == (CallStatus.FAILED, "upstream_error")
    assert call.error == {"status": 401}


def test_a_route_without_an_upstream_names_the_setting(bench: Any) -> None:
    reply = httpx.post(f"{bench.server.base_url}/v1/rerank", json={}, trust_env=False)
    assert reply.status_code == 404
    remedy = "name an upstream with `bridle proxy --set routes.rerank.url=URL`"
    assert reply.json()["error"]["message"] == f"this proxy serves no rerank: {remedy}"


def test_the_provider_of_every_call_serves_the_routes_too(
    start_proxy: Any, upstream: Upstream
) -> None:
    other = OtherModel((upstream.base_url,), api_key=KEY, external=True)
    bench = start_proxy(upstream.base_url, other_models={"*": other})
    reply = httpx.post(f"{bench.server.base_url}/v1/embeddings", json={}, trust_env=False)
    assert reply.raise_for_status().json()["data"] == [EMBEDDING]


@pytest.mark.parametrize("away", [True, False], ids=["unreachable", "too large"])
def test_an_upstream_that_fails_is_named(
    start_proxy: Any, stage: Any, upstream: Upstream, away: bool
) -> None:
    url = "http://127.0.0.1:9" if away else upstream.base_url
    bench = start_proxy(
        stage.engine.base_url,
        routes={"embeddings": OtherRoute(url)},
        limits=Limits(body_bytes=100),
    )
    reply = httpx.post(f"{bench.server.base_url}/v1/embeddings", json={}, trust_env=False)
    assert reply.status_code == 502
    wanted = "cannot be reached" if away else "larger than 100 bytes (body_bytes)"
    assert wanted in reply.json()["error"]["message"]


def test_the_pages_of_its_session_show_the_call(bench: Any) -> None:
    session = opened(bench)
    url, key = session["base_urls"]["openai"], {"authorization": f"Bearer {session['key']}"}
    asked = {"model": "small", "input": "words"}
    httpx.post(f"{url}/embeddings", json=asked, headers=key, trust_env=False).raise_for_status()
    client = TestClient(viewer_app(Source(bench.reader, "store")))
    for page in ("", "/tree", "/audit", "/turns/1/tokens", "/turns/1/request.json"):
        shown = client.get(f"/sessions/{session['id']}{page}")
        assert shown.status_code == 200, page
    assert "small" in shown.text
    (turn,) = turns_of(LoadedSession.load(bench.reader, session["id"]))
    assert (turn.call.kind, turn.call.role) == (CallKind.SIDE, "embeddings")
