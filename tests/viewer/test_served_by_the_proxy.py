"""The pages under ``/bridle/viewer`` of a proxy: who may see them, and what they record."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.bench.gallery import fill
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.run import viewer_pages
from bridle.store.reading.queries import Reader

KEY = "the-admin-key-of-this-test"
PAGES = "/bridle/viewer"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, list[str]]]:
    """The proxy's address, its store and the sessions in it."""
    store = str(tmp_path_factory.mktemp("served") / "store.db")
    sessions = fill(store, 8, turns=3)
    # No engine is there, and no page needs one.
    settings = ProxySettings("http://127.0.0.1:9", store, admin_key=KEY)
    with ProxyServer(settings, pages=viewer_pages.viewer_pages) as proxy:
        yield proxy.base_url, store, sessions


@pytest.fixture
def client(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[0], trust_env=False, timeout=30) as made:
        yield made


@pytest.fixture
def signed_in(client: httpx.Client) -> httpx.Client:
    assert client.post(f"{PAGES}/login", data={"key": KEY}).status_code == 303
    return client


def test_a_stranger_is_sent_to_the_form(served: Any, client: httpx.Client) -> None:
    session = served[2][0]
    for path in ("/", "/sessions", f"/sessions/{session}", "/runs", "/export?format=chat"):
        reply = client.get(PAGES + path)
        assert (reply.status_code, reply.headers["location"]) == (303, f"{PAGES}/login")
    part = client.get(f"{PAGES}/sessions", headers={"hx-request": "true"})
    assert (part.status_code, part.headers["hx-redirect"]) == (401, f"{PAGES}/login")
    assert "gallery" not in client.get(f"{PAGES}/login").text


def test_the_admin_key_in_a_header_opens_the_pages(client: httpx.Client) -> None:
    page = client.get(f"{PAGES}/sessions", headers={"authorization": f"Bearer {KEY}"})
    assert page.status_code == 200
    assert "gallery-7" in page.text
    wrong = client.get(f"{PAGES}/sessions", headers={"authorization": "Bearer of-no-use"})
    assert wrong.status_code == 303


def test_the_form_takes_only_the_admin_key(client: httpx.Client) -> None:
    wrong = client.post(f"{PAGES}/login", data={"key": "guess"})
    assert wrong.status_code == 401
    assert "not the proxy's admin key" in html.unescape(wrong.text)
    assert "set-cookie" not in wrong.headers
    right = client.post(f"{PAGES}/login", data={"key": KEY})
    cookie = right.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", f"Path={PAGES}"} <= set(cookie.split("; "))
    assert KEY not in cookie
    assert client.get(f"{PAGES}/sessions").status_code == 200
    assert client.post(f"{PAGES}/login", data={"key": "x" * 20_000}).status_code == 413


def test_a_cookie_ends_and_cannot_be_made_without_the_key(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = viewer_pages._cookie(KEY, 4_000_000_000)
    forged = [viewer_pages._cookie("other-key", 4_000_000_000), made + "0", "4000000000.", "x"]
    for cookie, status in [(made, 200), *((each, 303) for each in forged)]:
        headers = {"cookie": f"{viewer_pages.COOKIE}={cookie}"}
        assert client.get(f"{PAGES}/sessions", headers=headers).status_code == status
    headers = {"cookie": f"{viewer_pages.COOKIE}={viewer_pages._cookie(KEY, 1_000_000)}"}
    assert client.get(f"{PAGES}/sessions", headers=headers).status_code == 303


def test_a_page_of_another_site_is_refused(served: Any, signed_in: httpx.Client) -> None:
    for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
        path = f"{PAGES}/sessions/{served[2][0]}/rewards"
        reply = signed_in.post(path, data={"name": "quality", "value": "1"}, headers=headers)
        assert reply.status_code == 403
        assert signed_in.get(f"{PAGES}/sessions", headers=headers).status_code == 403


def test_the_cookie_opens_no_control_route(signed_in: httpx.Client) -> None:
    assert signed_in.get("/bridle/v1/sessions").status_code == 401


@pytest.mark.sampled(0)
def test_every_link_and_file_of_a_page_is_below_its_root(
    served: Any, signed_in: httpx.Client
) -> None:
    for path in ("/sessions", f"/sessions/{served[2][0]}", "/groups", "/runs", "/audit"):
        page = signed_in.get(PAGES + path).text
        for target in set(re.findall(r'(?:href|src|action|hx-get)="(/[^"]+)"', page)):
            assert target.startswith(PAGES)
            assert signed_in.get(target.replace("&amp;", "&")).status_code in (200, 204, 405)


def token_on(client: httpx.Client, page: str) -> str:
    """The token of the form on a session's page."""
    text = client.get(page).text
    return re.findall('name="token" value="([^"]+)"', text)[0]


def test_an_annotation_is_a_reward_of_the_session_or_of_a_turn(
    served: Any, signed_in: httpx.Client
) -> None:
    _, store, (session, *_) = served
    page = f"{PAGES}/sessions/{session}"
    token = {"token": token_on(signed_in, page)}
    form = {**token, "name": "quality", "value": "0.5", "note": "half right"}
    whole = signed_in.post(f"{page}/rewards", data=form)
    assert (whole.status_code, whole.headers["location"]) == (303, page)
    form = {**token, "name": "tool-choice", "value": "-1", "turn": "2"}
    turn = signed_in.post(f"{page}/rewards", data=form)
    assert turn.headers["location"].endswith("#turn-2")
    with Reader(store) as reader:
        given = {r.name: r for r in reader.rewards(session)}
        second = reader.calls(session)[1].id
    assert given["quality"].detail == {"note": "half right"}
    assert (given["quality"].source, given["quality"].call_id) == ("operator", None)
    assert (given["tool-choice"].value, given["tool-choice"].call_id) == (-1.0, second)
    text = signed_in.get(page).text
    assert "half right" in text
    assert "tool-choice <b>-1</b>" in text


def test_a_form_without_the_pages_token_records_nothing(
    served: Any, signed_in: httpx.Client
) -> None:
    page = f"{PAGES}/sessions/{served[2][1]}"
    for token in ({}, {"token": "guess"}, {"token": "\u00e9"}):
        form = {**token, "name": "forged", "value": "1"}
        reply = signed_in.post(f"{page}/rewards", data=form)
        assert (reply.status_code, "open the session" in reply.text) == (403, True)
    assert signed_in.get(f"{page}/rewards", params={"value": "1"}).status_code == 405
    with Reader(served[1]) as reader:
        assert "forged" not in {reward.name for reward in reader.rewards(served[2][1])}


def test_one_click_scores_are_offered_on_this_machine_alone(
    served: Any, signed_in: httpx.Client
) -> None:
    page = f"{PAGES}/sessions/{served[2][1]}"
    assert 'class="score"' in signed_in.get(page).text
    elsewhere = {"host": "bridle.example", "authorization": f"Bearer {KEY}"}
    text = signed_in.get(page, headers=elsewhere).text
    assert "Annotate" in text
    assert 'class="score"' not in text


@pytest.mark.parametrize(
    ("form", "status", "words"),
    [
        ({"name": "quality", "value": "much"}, 422, "value"),
        ({"name": "", "value": "1"}, 422, "name"),
        ({"name": "quality", "value": "1", "turn": "99"}, 404, "turns 1 to"),
    ],
)
def test_an_annotation_that_cannot_be_recorded_is_refused(
    served: Any, signed_in: httpx.Client, form: dict[str, str], status: int, words: str
) -> None:
    page = f"{PAGES}/sessions/{served[2][0]}"
    form = {**form, "token": token_on(signed_in, page)}
    reply = signed_in.post(f"{page}/rewards", data=form)
    assert reply.status_code == status
    assert words in reply.text


def test_a_stranger_annotates_nothing(served: Any, client: httpx.Client) -> None:
    path = f"{PAGES}/sessions/{served[2][0]}/rewards"
    reply = client.post(path, data={"name": "stranger", "value": "1"})
    assert reply.headers["location"] == f"{PAGES}/login"
    with Reader(served[1]) as reader:
        assert "stranger" not in {reward.name for reward in reader.rewards(served[2][0])}


def test_the_sessions_of_a_filter_are_exported(served: Any, signed_in: httpx.Client) -> None:
    everything = signed_in.get(f"{PAGES}/export?format=chat")
    assert 'filename="sessions.jsonl"' in everything.headers["content-disposition"]
    rows = [json.loads(line) for line in everything.text.splitlines()]
    assert rows
    assert all(row["messages"] for row in rows)
    one = signed_in.get(f"{PAGES}/export?format=chat&harness=codex").text.splitlines()
    assert 0 < len(one) < len(rows)
    assert signed_in.get(f"{PAGES}/export?format=csv").text.startswith("session")
    none = signed_in.get(f"{PAGES}/export?format=chat&harness=none")
    assert (none.status_code, "nothing to export" in none.text) == (404, True)


def test_a_proxy_without_pages_has_none(served: Any) -> None:
    settings = ProxySettings("http://127.0.0.1:9", served[1] + ".other", admin_key=KEY)
    with ProxyServer(settings) as proxy:
        headers = {"authorization": f"Bearer {KEY}"}
        reply = httpx.get(f"{proxy.base_url}{PAGES}/sessions", headers=headers, trust_env=False)
    assert reply.status_code == 404


def _pages_pids(parent: int) -> list[int]:
    """The processes below this one that make pages."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            argv = (path / "cmdline").read_bytes().split(b"\0")
            stat = (path / "stat").read_text().rpartition(")")[2].split()
            if b"bridle.viewer.process" in argv and int(stat[1]) == parent and stat[0] != "Z":
                found.append(int(path.name))
    return found


def test_pages_are_made_by_a_process_without_keys(served: Any, signed_in: httpx.Client) -> None:
    assert signed_in.get(f"{PAGES}/sessions").status_code == 200
    (pid,) = _pages_pids(os.getpid())
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    argv = Path(f"/proc/{pid}/cmdline").read_bytes()
    for secret in (KEY.encode(), b"_KEY=", b"TOKEN", b"PGPASSWORD"):
        assert secret not in environment + argv


def test_the_end_of_the_process_costs_one_page(served: Any, signed_in: httpx.Client) -> None:
    assert signed_in.get(f"{PAGES}/runs").status_code == 200
    (pid,) = _pages_pids(os.getpid())
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    failed = []
    while (page := signed_in.get(f"{PAGES}/runs")).status_code != 200:
        failed.append(page)
        assert time.monotonic() < deadline
    assert len(failed) <= 1, [page.text for page in failed]
    assert _pages_pids(os.getpid()) != [pid]


def test_the_process_answers_its_proxy_alone(served: Any, signed_in: httpx.Client) -> None:
    assert signed_in.get(f"{PAGES}/runs").status_code == 200
    (pid,) = _pages_pids(os.getpid())
    inodes = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (port,) = {
        int(line[1].rpartition(":")[2], 16)
        for line in lines
        if line[3] == "0A" and f"socket:[{line[9]}]" in inodes
    }
    for headers in ({}, {"x-bridle-pages": "guess"}, {"authorization": f"Bearer {KEY}"}):
        reply = httpx.get(
            f"http://127.0.0.1:{port}{PAGES}/sessions", headers=headers, trust_env=False
        )
        assert reply.status_code == 404
        assert "gallery" not in reply.text
