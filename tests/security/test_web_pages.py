"""A web page in the user's browser reaches no server of ours."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.web_pages import refusal

CHAT = "/v1/chat/completions"
ASK = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}

PAGES = [
    {"origin": "https://attacker.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:1"},
    {"origin": "http://localhost:3000"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]
HOSTS = ["a b", "127.0.0.1:80:80", "127.0.0.1:x", "@127.0.0.1", "[::1", "127.0.0.1/x", ""]


@pytest.fixture
def engine(model_dir: Any) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(
        model_dir, lambda _: ScriptedReply("4"), served_model_name="policy"
    ) as running:
        yield running


@pytest.fixture(params=["proxy", "engine"])
def server(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    """Base URL, a path, and the key that opens it."""
    if request.param == "proxy":
        lab = request.getfixturevalue("lab")
        return lab.url, CHAT, lab.session()["key"]
    return request.getfixturevalue("engine").base_url, CHAT, "none"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_is_refused_even_with_the_key(
    server: tuple[str, str, str], page: dict[str, str]
) -> None:
    url, path, key = server
    headers = {"authorization": f"Bearer {key}", "content-type": "text/plain"} | page
    assert httpx.post(url + path, json=ASK, headers=headers).status_code == 403
    own = {"authorization": f"Bearer {key}", "origin": url, "sec-fetch-site": "same-origin"}
    assert httpx.post(url + path, json=ASK, headers=own).status_code in (200, 422)


@pytest.mark.parametrize("host", HOSTS)
def test_a_malformed_host_is_refused(server: tuple[str, str, str], host: str) -> None:
    assert _status(server[0], f"host: {host}\r\n") == 400


def test_two_hosts_are_refused(server: tuple[str, str, str]) -> None:
    assert _status(server[0], "host: 127.0.0.1\r\nhost: localhost\r\n") == 400


@pytest.mark.parametrize("lab", [{"keyless_recording": True}], indirect=True)
def test_a_name_that_was_rebound_to_loopback_records_nothing_without_a_key(lab: Any) -> None:
    headers = {"host": "attacker.example", "origin": "http://attacker.example"}
    assert lab.ask("POST", CHAT, json=ASK).status_code == 200
    assert httpx.post(lab.url + CHAT, json=ASK, headers=headers).status_code == 401


def test_a_rebound_name_reaches_no_keyless_engine(engine: ScriptedEngine) -> None:
    url = engine.base_url
    headers = {"host": "attacker.example", "origin": "http://attacker.example"}
    assert httpx.post(f"{url}/pause", headers=headers).status_code == 403


def test_programs_are_served() -> None:
    for host in (b"localhost", b"127.0.0.1:8484", b"[::1]:8484"):
        assert refusal([(b"host", host)], only_loopback=True) is None
    assert refusal([(b"host", b"proxy:8484")]) is None
    assert refusal([]) is None


def _status(url: str, host_lines: str) -> int:
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80), timeout=10) as connection:
        head = f"GET /healthz HTTP/1.1\r\n{host_lines}connection: close\r\n\r\n"
        connection.sendall(head.encode())
        return int(connection.recv(65536).split()[1])
