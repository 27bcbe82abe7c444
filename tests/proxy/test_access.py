"""Closed by default: who may come in, and that no secret stays."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.vllm.control import ANNOUNCE_WEIGHTS, LOAD_WEIGHTS, TAKE_WEIGHTS
from bridle.proxy.app import create_app
from bridle.proxy.session.wrong_keys import WrongKeys
from bridle.proxy.settings import Limits, ProxySettings, is_loopback

ADMIN = "admin-key-of-the-test-0123456789"
PATHS = {
    "chat": (
        "/v1/chat/completions",
        {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    ),
    "completions": ("/v1/completions", {"model": "m", "prompt": "x"}),
    "responses": ("/v1/responses", {"model": "m", "input": "x"}),
    "messages": (
        "/v1/messages",
        {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "x"}]},
    ),
    "google": (
        "/v1beta/models/m:generateContent",
        {"contents": [{"role": "user", "parts": [{"text": "x"}]}]},
    ),
}
ERROR_KEYS = {
    "chat": {"message", "type", "param", "code"},
    "completions": {"message", "type", "param", "code"},
    "responses": {"message", "type", "param", "code"},
    "messages": {"message", "type"},
    "google": {"message", "code", "status"},
}
HEADERS = [
    lambda key: {"authorization": f"Bearer {key}"},
    lambda key: {"x-api-key": key},
    lambda key: {"x-goog-api-key": key},
]


@pytest.fixture
def bench(stage: Any, start_proxy: Any) -> Any:
    return start_proxy(stage.engine.base_url, admin_key=ADMIN)


@pytest.fixture
def closed(stage: Any, start_proxy: Any) -> Any:
    """A proxy that is bound off loopback, so that even loopback clients need a key."""
    return start_proxy(stage.engine.base_url, admin_key=ADMIN, host="0.0.0.0")  # noqa: S104


def new_session(bench: Any, **fields: Any) -> Any:
    response = httpx.post(
        f"{bench.url}/bridle/v1/sessions",
        json=fields,
        headers={"authorization": f"Bearer {ADMIN}"},
    )
    assert response.status_code == 201, response.text
    return response.json()


def test_an_address_that_keeps_sending_wrong_keys_waits_and_a_right_key_still_enters(
    bench: Any,
) -> None:
    url = f"{bench.url}/bridle/v1/sessions"
    with httpx.Client() as client:
        began = time.monotonic()
        for number in range(25):
            wrong = client.get(url, headers={"authorization": f"Bearer wrong-{number}"})
            assert wrong.status_code == 401
        waited = time.monotonic() - began
        right = client.get(url, headers={"authorization": f"Bearer {ADMIN}"})
    assert right.status_code == 200
    assert waited >= 0.05 * sum(range(1, 6))


def test_the_delay_of_wrong_keys_grows_to_a_limit_and_ends_with_the_minute() -> None:
    now = 0.0
    wrong = WrongKeys(clock=lambda: now)
    delays = [wrong.delay("10.0.0.1") for _ in range(300)]
    assert delays[:20] == [0.0] * 20
    assert delays == sorted(delays)
    assert sum(delays) > 400
    assert wrong.delay("10.0.0.2") == 0.0
    now = 61.0
    assert wrong.delay("10.0.0.1") == 0.0


def test_no_more_than_some_addresses_are_remembered() -> None:
    wrong = WrongKeys()
    for number in range(5000):
        wrong.delay(f"10.0.{number // 256}.{number % 256}")
    assert len(wrong._latest) <= 4096


@pytest.mark.parametrize("dialect", PATHS)
def test_a_wrong_key_is_a_401_in_the_dialects_shape(bench: Any, dialect: str) -> None:
    path, body = PATHS[dialect]
    response = httpx.post(bench.url + path, json=body, headers={"x-api-key": "brk_wrong"})
    assert response.status_code == 401
    assert ERROR_KEYS[dialect] <= set(response.json()["error"])
    assert "brk_wrong" not in response.text


@pytest.mark.parametrize("dialect", PATHS)
def test_off_loopback_no_request_comes_in_without_a_key(closed: Any, dialect: str) -> None:
    path, body = PATHS[dialect]
    assert httpx.post(closed.url + path, json=body).status_code == 401
    anything = {"authorization": "Bearer sk-anything"}
    assert httpx.post(closed.url + path, json=body, headers=anything).status_code == 401


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/bridle/v1/sessions", "/bridle/v1/policy"]
)
def test_off_loopback_the_other_routes_are_closed_too(closed: Any, path: str) -> None:
    assert httpx.get(closed.url + path).status_code == 401
    opened = httpx.get(closed.url + path, headers={"authorization": f"Bearer {ADMIN}"})
    assert opened.status_code == 200


@pytest.mark.parametrize("header", HEADERS)
def test_a_session_key_opens_its_session_in_all_three_header_forms(
    closed: Any, header: Any
) -> None:
    session = new_session(closed)
    path, body = PATHS["chat"]
    response = httpx.post(closed.url + path, json=body, headers=header(session["key"]))
    assert response.status_code == 200
    assert response.headers["x-bridle-session"] == session["id"]


def test_a_session_key_opens_nothing_else(closed: Any) -> None:
    mine, other = new_session(closed), new_session(closed)
    key = {"authorization": f"Bearer {mine['key']}"}
    path, body = PATHS["chat"]
    elsewhere = httpx.post(f"{closed.url}/s/{other['id']}{path}", json=body, headers=key)
    assert elsewhere.status_code == 403
    control = f"{closed.url}/bridle/v1"
    assert httpx.get(f"{control}/sessions", headers=key).status_code == 403
    assert httpx.put(f"{control}/policy", json={"version": 9}, headers=key).status_code == 403
    assert httpx.get(f"{control}/sessions/{other['id']}", headers=key).status_code == 403
    assert httpx.get(f"{control}/sessions/{mine['id']}", headers=key).status_code == 403


def test_an_expired_or_sealed_session_is_closed(bench: Any) -> None:
    path, body = PATHS["chat"]
    short = new_session(bench, ttl_s=0.05)
    time.sleep(0.1)
    key = {"authorization": f"Bearer {short['key']}"}
    assert httpx.post(bench.url + path, json=body, headers=key).status_code == 401
    sealed = new_session(bench)
    key = {"authorization": f"Bearer {sealed['key']}"}
    seal = f"{bench.url}/bridle/v1/sessions/{sealed['id']}/seal"
    scores = {"authorization": f"Bearer {sealed['verifier_key']}"}
    assert httpx.post(seal, json={"outcome": "completed"}, headers=scores).json()["sealed_at"]
    assert httpx.post(bench.url + path, json=body, headers=key).status_code == 403


@pytest.mark.parametrize(
    ("client", "host_header", "status"),
    [
        ("127.0.0.1", "127.0.0.1:80", 200),
        ("::1", "[::1]:80", 200),
        ("127.0.0.1", "localhost", 200),
        ("192.0.2.7", "127.0.0.1", 401),
        (None, "127.0.0.1", 401),
        # A web page that reaches us through a name that was rebound to 127.0.0.1.
        ("127.0.0.1", "attacker.example", 401),
    ],
)
async def test_only_loopback_clients_of_a_loopback_name_come_in_without_a_key(
    stage: Any, tmp_path: Path, client: str | None, host_header: str, status: int
) -> None:
    settings = ProxySettings(upstream_url=stage.engine.base_url, store_url=str(tmp_path / "s.db"))
    app = create_app(settings)
    await app.start()
    try:
        sent: list[Any] = []
        body = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
        received = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            message = next(received, None)
            return message if message is not None else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"host", host_header.encode()), (b"x-forwarded-for", b"127.0.0.1")],
            "client": (client, 4711) if client else None,
        }
        await app(scope, receive, send)
        assert sent[0]["status"] == status
    finally:
        await app.stop()


LOOPBACK = ("127.0.0.1", "127.8.8.8", "::1", "localhost")
ELSEWHERE = ("0.0.0.0", "10.0.0.1", "", None, "x.y")  # noqa: S104


@pytest.mark.parametrize(
    ("host", "expected"), [(h, True) for h in LOOPBACK] + [(h, False) for h in ELSEWHERE]
)
def test_what_counts_as_loopback(host: str | None, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_body_beyond_the_limit_is_a_413(stage: Any, start_proxy: Any, ask: Any) -> None:
    bench = start_proxy(stage.engine.base_url, limits=Limits(body_bytes=1000))
    big = ask | {"user": "x" * 2000}
    assert httpx.post(bench.url + "/v1/chat/completions", json=big).status_code == 413

    def in_pieces() -> Any:
        for _ in range(50):
            yield b"x" * 100

    streamed = httpx.post(bench.url + "/v1/chat/completions", content=in_pieces())
    assert streamed.status_code == 413
    assert not bench.calls()


def test_the_control_api_reads_no_strangers_body_and_none_beyond_the_limit(
    stage: Any, start_proxy: Any
) -> None:
    bench = start_proxy(
        stage.engine.base_url,
        admin_key=ADMIN,
        host="0.0.0.0",  # noqa: S104
        limits=Limits(body_bytes=1000),
    )
    url = f"{bench.url}/bridle/v1/sessions"
    assert httpx.post(url, content=b"{not json").status_code == 401
    admin = f"authorization: Bearer {ADMIN}\r\n"
    for headers, status in (("", b"401"), (admin, b"413")):
        head = f"POST /bridle/v1/sessions HTTP/1.1\r\nhost: proxy\r\n{headers}"
        with socket.create_connection(("127.0.0.1", bench.server.port), timeout=10) as stranger:
            # Most of the body never comes, and nobody waits for it.
            stranger.sendall(f"{head}content-length: 100000000\r\n\r\n{{".encode())
            assert stranger.recv(65536).startswith(b"HTTP/1.1 " + status)
    assert httpx.post(url, json={}, headers={"x-api-key": ADMIN}).status_code == 201


@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [
        (b"GET /healthz HTTP/1.1\r\nhost: a\r\nendless: ", b"a" * 65536),
        (b"GET /healthz HTTP/1.1\r\nhost: a\r\n", b"x: y\r\n" * 10000),
        (b"GET /", b"a" * 65536),
        (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
            b"1\r\na\r\n0\r\n",
            b"x: y\r\n" * 10000,
        ),
    ],
    ids=["value", "fields", "path", "trailer"],
)
def test_a_stranger_whose_head_never_ends_is_left(
    stage: Any, start_proxy: Any, begins: bytes, goes_on: bytes
) -> None:
    host = "0.0.0.0"  # noqa: S104
    bench = start_proxy(stage.engine.base_url, admin_key="an-admin-key-0123456789", host=host)
    with socket.create_connection(("127.0.0.1", bench.server.port), timeout=10) as stranger:
        stranger.sendall(begins)
        with pytest.raises(ConnectionError):
            stranger.sendall(goes_on * 500)
    assert httpx.get(bench.url + "/healthz").status_code == 200


def test_headers_beyond_the_limit_are_a_431(stage: Any, start_proxy: Any, ask: Any) -> None:
    bench = start_proxy(stage.engine.base_url, limits=Limits(header_bytes=2000))
    response = httpx.post(
        bench.url + "/v1/chat/completions", json=ask, headers={"x-long": "x" * 3000}
    )
    assert response.status_code == 431


def test_engine_control_routes_are_not_reachable(bench: Any) -> None:
    paths = ["/pause", "/resume", "/collective_rpc", "/tokenize", "/load_lora_adapter"]
    paths += [ANNOUNCE_WEIGHTS, *TAKE_WEIGHTS, LOAD_WEIGHTS, "/shutdown_weight_transfer_engine"]
    for path in [*paths, "/update_weight_version", "/weight_checker"]:
        for prefix in ("", "/v1", "/s/work", "/s/work/v1"):
            answer = httpx.post(bench.url + prefix + path, json={})
            assert answer.status_code == 404, prefix + path


def test_client_credentials_never_reach_the_engine(
    raw_engine: Any, start_proxy: Any, ask: Any
) -> None:
    async def answer(_receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    raw_engine.answer = answer
    bench = start_proxy(raw_engine.base_url, model="m", upstream_api_key="engine-key")
    secrets = {"authorization": "Bearer sk-client", "x-api-key": "sk-client", "cookie": "sk-client"}
    httpx.post(bench.url + "/v1/chat/completions", json=ask, headers=secrets)
    assert raw_engine.headers
    for headers in raw_engine.headers:
        assert headers[b"authorization"] == b"Bearer engine-key"
        assert b"sk-client" not in b"".join(headers.values())


def test_no_secret_is_stored_or_logged(
    stage: Any, start_proxy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    bench = start_proxy(
        stage.engine.base_url, admin_key=ADMIN, upstream_api_key="engine-key-0123456789"
    )
    session = new_session(bench)
    path, body = PATHS["chat"]
    secrets = [session["key"], ADMIN, "engine-key-0123456789", "sk-client-0123456789"]
    for key in (session["key"], "brk_unknown-0123456789", "sk-client-0123456789"):
        for header in HEADERS:
            httpx.post(bench.url + path, json=body, headers=header(key) | {"cookie": key})
    bench.server.stop()
    files = b"".join(f.read_bytes() for f in bench.store_path.parent.glob("bridle.db*"))
    told = caplog.text
    for secret in [*secrets, "brk_unknown-0123456789"]:
        assert secret.encode() not in files
        assert secret not in "".join(
            line for line in told.splitlines() if "httpx" not in line and "httpcore" not in line
        )
    assert bench.reader.session(session["id"]).key_hash
