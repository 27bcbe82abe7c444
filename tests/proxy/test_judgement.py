"""A break is committed with its evidence, and judged from the record when its session is sealed."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedReply
from bridle.reconstruct.verdicts import judge
from bridle.store.records import Continuation

TURNS = "SELECT kind, break_reason FROM turns ORDER BY turn"


def break_(bench: Any) -> str:
    """Two calls, of which the second drops the reasoning of the first; their session."""
    url = f"{bench.url}/s/lamp/v1/chat/completions"
    messages: list[Any] = [{"role": "user", "content": "one?"}]
    for _ in range(2):
        reply = httpx.post(url, json={"model": "m", "messages": messages}).raise_for_status()
        said = reply.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
    return reply.headers["x-bridle-session"]


def turns(bench: Any) -> list[tuple[str, str | None]]:
    """Kind and reason of each turn, as a reader with SQL alone gets them."""
    with closing(sqlite3.connect(bench.store_path)) as connection:
        return connection.execute(TURNS).fetchall()


def seal(bench: Any, session: str) -> None:
    httpx.post(
        f"{bench.url}/bridle/v1/sessions/{session}/seal", json={}, timeout=60
    ).raise_for_status()


def test_sql_reads_kinds_and_reasons_once_a_session_is_sealed(stage: Any, start_proxy: Any) -> None:
    stage.play = lambda _: ScriptedReply("one", reasoning="Hm.")
    bench = start_proxy(stage.engine.base_url, continuation=Continuation.RENDERED, judge=judge)
    session = break_(bench)
    assert turns(bench) == [("unknown", None), ("unknown", "unexplained")]
    assert 'bridle_breaks_total{reason="unexplained"} 1.0' in httpx.get(f"{bench.url}/metrics").text
    seal(bench, session)
    assert turns(bench) == [("main", None), ("main", "reasoning_dropped")]
    seal(bench, session)
    assert turns(bench) == [("main", None), ("main", "reasoning_dropped")]


def test_a_session_that_cannot_be_judged_is_sealed_and_logged(
    stage: Any, start_proxy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no words")

    bench = start_proxy(stage.engine.base_url, judge=fails)
    session = break_(bench)
    seal(bench, session)
    assert bench.reader.session(session).sealed_at is not None
    (record,) = [one for one in caplog.records if one.message == "session_not_judged"]
    assert record.session == session
