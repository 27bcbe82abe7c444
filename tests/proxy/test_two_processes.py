"""Two proxies on one store: what one of them changes holds in the other when the reply is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.store.conftest import Postgres
from tests.store.conftest import postgres as postgres

from bridle.engine.scripted import ScriptedReply, Stall
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.store.errors import StoreUnavailable
from bridle.store.operations.gates import RESTING
from bridle.store.reading.queries import Reader

CHAT = "/s/shared/v1/chat/completions"
http = httpx.Client(timeout=60, trust_env=False)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., ProxyServer]]:
    """Start a proxy on the test's store."""
    store = str(tmp_path / "bridle.db")
    if request.param == "postgresql":
        server: Postgres = request.getfixturevalue("postgres")
        store = server.empty_database()
    running: list[ProxyServer] = []

    def run(upstream_url: str) -> ProxyServer:
        settings = ProxySettings(upstream_url=upstream_url, store_url=store)
        running.append(ProxyServer(settings, grace_s=1))
        running[-1].start()
        return running[-1]

    yield run
    for one in running:
        one.stop()


def deaf(proxy: ProxyServer) -> ProxyServer:
    """The proxy, which reads the gates no more unless a call asks for it."""
    services = proxy._app.services
    assert services is not None
    task = services.deployment._looks._task
    assert task is not None
    task.get_loop().call_soon_threadsafe(task.cancel)
    return proxy


def policy(proxy: ProxyServer) -> str:
    return f"{proxy.base_url}/bridle/v1/policy"


def ask_named(proxy: ProxyServer, name: str, ask: Any) -> httpx.Response:
    return http.post(f"{proxy.base_url}/s/{name}/v1/chat/completions", json=ask)


@pytest.mark.parametrize("hears", [True, False])
def test_no_call_starts_under_the_old_version_after_a_publish_elsewhere(
    stage: Any, start: Any, ask: Any, hears: bool
) -> None:
    here, there = start(stage.engine.base_url), start(stage.engine.base_url)
    if not hears:
        deaf(there)
    with Reader(there.settings.store_url) as reader:
        for version in range(1, 5):
            published = http.put(policy(here), json={"version": version})
            assert published.status_code == 200, published.text
            assert ask_named(there, f"v{version}", ask).status_code == 200
            session = reader.session_by_name(f"v{version}")
            assert session is not None
            (call,) = reader.calls(session.id)
            assert (call.version_start, call.version_end) == (version, version)


def test_a_stream_that_runs_elsewhere_has_the_new_version_after_a_publish(
    stage: Any, start: Any, ask: Any
) -> None:
    here, there = start(stage.engine.base_url), start(stage.engine.base_url)
    published = threading.Event()
    stage.play = lambda _: ScriptedReply("The answer is four.", fault=Stall(60, 1, published))
    streaming = threading.Thread(target=ask_named, args=(there, "stream", {**ask, "stream": True}))
    streaming.start()
    while http.get(policy(there)).json()["running"] == 0 or not stage.requests:
        pass
    with Reader(there.settings.store_url) as reader:
        assert http.put(policy(here), json={"version": 7}).status_code == 200
        published.set()
        streaming.join()
        session = reader.session_by_name("stream")
        assert session is not None
        (call,) = reader.calls(session.id)
        assert (call.version_start, call.version_end) == (0, 7)


def test_a_call_waits_during_a_pause_that_was_made_elsewhere(
    stage: Any, start: Any, ask: Any, until: Any
) -> None:
    here, there = start(stage.engine.base_url), start(stage.engine.base_url)
    deaf(there)
    assert http.post(f"{here.base_url}/bridle/v1/pause", json={"mode": "span"}).json()["paused"]
    waiting = threading.Thread(target=ask_named, args=(there, "waits", ask))
    waiting.start()
    until(lambda: http.get(policy(there)).json()["waiting"] == 1)
    assert not stage.requests
    http.post(f"{there.base_url}/bridle/v1/resume")
    waiting.join()
    assert len(stage.requests) == 1


def deployment_of(proxy: ProxyServer) -> Any:
    services = proxy._app.services
    assert services is not None
    return services.deployment


def rested(proxy: ProxyServer, until: Any) -> ProxyServer:
    """The proxy, which has no calls and rests, and then looks at nothing by itself."""
    until(lambda: deployment_of(proxy)._resting)
    return deaf(proxy)


@pytest.mark.postgres
@pytest.mark.parametrize("start", ["postgresql"], indirect=True)
def test_a_publish_waits_for_no_process_that_rests_and_its_next_call_has_the_version(
    stage: Any, start: Any, ask: Any, until: Any
) -> None:
    here, there = start(stage.engine.base_url), start(stage.engine.base_url)
    took = []
    rested(there, until)
    for version in (1, 2):
        began = time.monotonic()
        assert http.put(policy(here), json={"version": version}).status_code == 200
        took.append(time.monotonic() - began)
        if version == 1:
            assert http.get(policy(there)).json()["version"] == 1
        assert ask_named(there, f"v{version}", ask).status_code == 200
        assert not deployment_of(there)._resting
    with Reader(there.settings.store_url) as reader:
        for version in (1, 2):
            session = reader.session_by_name(f"v{version}")
            assert session is not None
            (call,) = reader.calls(session.id)
            assert (call.version_start, call.version_end) == (version, version)
    assert took[0] < took[1], "the second waits for a process that works and hears nothing"


@pytest.mark.postgres
@pytest.mark.parametrize("start", ["postgresql"], indirect=True)
def test_a_process_that_cannot_know_whether_it_rests_notes_that_it_works_before_a_call(
    stage: Any, start: Any, ask: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = start(stage.engine.base_url), start(stage.engine.base_url)
    store = deployment_of(there)._store
    report, noted, lost = store.report, [], []

    def unconfirmed(writer: str, seen: int, note: dict[str, Any]) -> None:
        report(writer, seen, note)
        noted.append(bool(note.get(RESTING)))
        if note.get(RESTING):
            lost.append(note)
            raise StoreUnavailable("the answer was lost")

    monkeypatch.setattr(store, "report", unconfirmed)
    until(lambda: bool(lost))
    deaf(there)
    assert http.put(policy(here), json={"version": 5}).status_code == 200
    assert ask_named(there, "after", ask).status_code == 200
    assert noted[-1] is False, "the call noted that the process works"
    with Reader(there.settings.store_url) as reader:
        session = reader.session_by_name("after")
        assert session is not None
        assert [call.version_start for call in reader.calls(session.id)] == [5]


@pytest.mark.parametrize("way", ["name", "key"])
def test_a_sealed_session_takes_no_call_in_another_process(
    stage: Any, start: Any, ask: Any, way: str
) -> None:
    here, there = start(stage.engine.base_url), start(stage.engine.base_url)
    path, headers = CHAT, {}
    if way == "key":
        made = http.post(f"{here.base_url}/bridle/v1/sessions", json={}).json()
        path, headers = "/v1/chat/completions", {"authorization": f"Bearer {made['key']}"}

    def call(proxy: ProxyServer) -> httpx.Response:
        return http.post(proxy.base_url + path, json=ask, headers=headers)

    session = call(here).headers["x-bridle-session"]
    assert call(there).headers["x-bridle-session"] == session
    sealed = http.post(f"{here.base_url}/bridle/v1/sessions/{session}/seal", json={})
    assert sealed.status_code == 200
    refused = call(there)
    assert (refused.status_code, "is sealed" in refused.text) == (403, True)
    state = http.get(f"{there.base_url}/bridle/v1/sessions/{session}").json()
    assert state["outcome"] == sealed.json()["outcome"]
    assert len(stage.requests) == 2


def test_a_conversation_whose_session_was_sealed_elsewhere_goes_on_in_another(
    stage: Any, start: Any, ask: Any
) -> None:
    here, there = start(stage.engine.base_url), start(stage.engine.base_url)
    first = http.post(f"{there.base_url}/v1/chat/completions", json=ask)
    session = first.headers["x-bridle-session"]
    http.post(f"{here.base_url}/bridle/v1/sessions/{session}/seal", json={}).raise_for_status()
    reply = first.json()["choices"][0]["message"]
    more = [*ask["messages"], reply, {"role": "user", "content": "And now?"}]
    second = http.post(f"{there.base_url}/v1/chat/completions", json={**ask, "messages": more})
    assert second.status_code == 200
    assert second.headers["x-bridle-session"] != session


def test_a_seal_at_another_proxy_on_the_store_stays_the_first(
    stage: Any, start: Any, ask: Any
) -> None:
    here, there = start(stage.engine.base_url), start(stage.engine.base_url)
    session = http.post(here.base_url + CHAT, json=ask).headers["x-bridle-session"]
    path = f"/bridle/v1/sessions/{session}"
    assert http.get(there.base_url + path).json()["sealed_at"] is None

    sealed = http.post(f"{here.base_url}{path}/seal", json={"outcome": "done"}).json()
    assert sealed["outcome"] == "done"
    assert http.post(f"{there.base_url}{path}/seal", json={"outcome": "late"}).json() == sealed
