"""A session that another proxy on the same store has sealed takes no more calls here."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from bridle.proxy.session.seal_watch import SealWatch
from bridle.store.errors import StoreUnavailable

CHAT = "/s/shared/v1/chat/completions"


def test_a_seal_is_found_out_by_another_proxy_on_the_store(
    stage: Any, start_proxy: Any, ask: Any, until: Any
) -> None:
    here, there = (start_proxy(stage.engine.base_url) for _ in range(2))
    session = httpx.post(here.url + CHAT, json=ask).headers["x-bridle-session"]
    assert httpx.post(there.url + CHAT, json=ask).headers["x-bridle-session"] == session

    sealed = httpx.post(f"{there.url}/bridle/v1/sessions/{session}/seal", json={"outcome": "done"})
    assert sealed.status_code == 200

    until(lambda: httpx.post(here.url + CHAT, json=ask).status_code == 403)
    state = httpx.get(f"{here.url}/bridle/v1/sessions/{session}").json()
    assert state["outcome"] == "done"


def test_a_seal_at_another_proxy_on_the_store_stays_the_first(
    stage: Any, start_proxy: Any, ask: Any
) -> None:
    here, there = (start_proxy(stage.engine.base_url) for _ in range(2))
    session = httpx.post(here.url + CHAT, json=ask).headers["x-bridle-session"]
    path = f"/bridle/v1/sessions/{session}"
    assert httpx.get(there.url + path).json()["sealed_at"] is None

    sealed = httpx.post(f"{here.url}{path}/seal", json={"outcome": "done"}).json()
    assert httpx.post(f"{there.url}{path}/seal", json={"outcome": "late"}).json() == sealed
    assert here.reader.session(session).outcome == "done"


class _Store:
    """One that cannot be read at first; others write to it when ``shared``."""

    def __init__(self, *, shared: bool) -> None:
        self.writers = frozenset({"a", "b"} if shared else {"a"})
        self.failures = 2
        self.asked: list[list[str]] = []

    def writer_ids(self) -> frozenset[str]:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("locked")
        return self.writers

    def sealed_among(self, session_ids: list[str]) -> set[str]:
        self.asked.append(session_ids)
        return {"sealed"} & {*session_ids}


class _Sessions:
    def __init__(self) -> None:
        self.held = ["open", "sealed"]

    def latest_open(self, limit: int) -> list[str]:
        return self.held[:limit]

    def forget(self, session_id: str) -> None:
        self.held.remove(session_id)


async def _watched(store: _Store) -> _Sessions:
    sessions = _Sessions()
    watch = SealWatch(sessions, store, every_s=0.005)  # type: ignore[arg-type]
    watch.start()
    await asyncio.sleep(0.3)
    await watch.close()
    return sessions


async def test_a_store_that_cannot_be_read_is_asked_again() -> None:
    store = _Store(shared=True)
    sessions = await _watched(store)
    assert sessions.held == ["open"]
    assert store.asked[0] == ["open", "sealed"]


async def test_a_store_that_nobody_else_writes_to_is_not_asked_for_seals() -> None:
    store = _Store(shared=False)
    sessions = await _watched(store)
    assert sessions.held == ["open", "sealed"]
    assert not store.asked
    assert not store.failures
