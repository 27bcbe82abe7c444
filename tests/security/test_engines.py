"""Test which address an engine may have, and which engines get the upstream's key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.serve.transport import ServerThread
from bridle.proxy.engines.addresses import require_engine_address
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings

ADMIN = "admin-key-of-the-test-0123456789"
UPSTREAM = "upstream-key-of-the-test-0123456789"
CHAT = "/v1/chat/completions"
ASK = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 plus 2?"}]}


@dataclass
class Listener:
    """An engine that answers no call and keeps what it was sent."""

    url: str
    keys: list[bytes | None]


@contextmanager
def listening() -> Iterator[Listener]:
    keys: list[bytes | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        keys.append(dict(scope["headers"]).get(b"authorization"))
        status = 200 if scope["path"] in ("/health", "/v1/models") else 500
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"data":[{"id":"policy"}]}'})

    with ServerThread(app) as server:
        yield Listener(server.base_url, keys)


def test_the_upstream_key_goes_to_the_engines_that_the_operator_named_alone(
    tmp_path: Path,
) -> None:
    with listening() as named, listening() as added:
        settings = ProxySettings(
            named.url, str(tmp_path / "s.db"), admin_key=ADMIN, upstream_api_key=UPSTREAM
        )
        with ProxyServer(settings, grace_s=1) as proxy:
            headers = {"authorization": f"Bearer {ADMIN}"}
            with httpx.Client(base_url=proxy.base_url, headers=headers) as operator:
                operator.post("/bridle/v1/engines", json={"url": added.url}).raise_for_status()
                for _ in range(4):
                    operator.post(CHAT, json=ASK)
                engines = operator.get("/bridle/v1/engines").json()
                (first,) = [one["name"] for one in engines if one["url"] == named.url]
                operator.delete(f"/bridle/v1/engines/{first}").raise_for_status()
                operator.post(CHAT, json=ASK)
    assert f"Bearer {UPSTREAM}".encode() in named.keys
    assert added.keys
    assert set(added.keys) == {None}


def said(what: str, key: str) -> tuple[int, bytes]:
    """The status and the body of an engine that puts ``key`` into what it says."""
    text = f"you sent {key}"
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    match what:
        case "a refusal":
            return 400, json.dumps({"error": {"message": text, "param": key}}).encode()
        case "a failure":
            return 500, json.dumps({"error": text}).encode()
        case "an error in the stream":
            return 200, b"data: " + json.dumps({"error": {"message": text}}).encode() + b"\n\n"
        case "a whole reply":
            return 200, json.dumps({"choices": [choice | {"message": {"content": text}}]}).encode()
    chunk = json.dumps({"model": key, "choices": [choice | {"delta": {"content": text}}]})
    return 200, f"data: {chunk}\n\ndata: [DONE]\n\n".encode()


@pytest.mark.parametrize(
    "what",
    ["a refusal", "a failure", "an error in the stream", "a whole reply", "a stream", "models"],
)
def test_what_an_engine_says_of_a_key_is_neither_told_nor_stored(tmp_path: Path, what: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        status, body = 200, b'{"data":[{"id":"policy %s"}]}' % UPSTREAM.encode()
        if scope["path"] == CHAT:
            status, body = said(what, UPSTREAM if what != "a failure" else ADMIN)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    store = tmp_path / "s.db"
    with ServerThread(app) as engine:
        settings = ProxySettings(
            engine.base_url, str(store), admin_key=ADMIN, upstream_api_key=UPSTREAM
        )
        with ProxyServer(settings, grace_s=1) as proxy:
            headers = {"authorization": f"Bearer {ADMIN}"}
            with httpx.Client(base_url=proxy.base_url, headers=headers) as client:
                body = ASK | {"stream": what.endswith("stream")}
                answers = client.post(CHAT, json=body).text + client.get("/v1/models").text
    kept = b"".join(file.read_bytes() for file in tmp_path.glob("s.db*"))
    for key in (UPSTREAM, ADMIN):
        assert key not in answers
        assert key.encode() not in kept
    assert "[a key of the proxy]" in answers


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254",
        "http://169.254.169.254/latest/meta-data",
        "http://[fe80::1]:8000",
        "http://[::ffff:169.254.169.254]",
        "http://[fd00:ec2::254]",
        "http://100.100.100.200",
        "http://metadata.google.internal",
        "http://2852039166",
    ],
)
def test_link_local_and_metadata_addresses_are_no_engines(lab: Any, url: str) -> None:
    refused = lab.ask("POST", "/bridle/v1/engines", ADMIN, json={"url": url})
    assert refused.status_code == 422
    assert refused.json()["error"]["param"] == "url"
    assert len(lab.ask("GET", "/bridle/v1/engines", ADMIN).json()) == 1


def test_other_addresses_are_engines() -> None:
    for url in ("http://127.0.0.1:8000", "http://10.0.0.7:8000", "http://[::1]:8000"):
        require_engine_address(url)
