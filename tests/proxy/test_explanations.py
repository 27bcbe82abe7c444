"""A break is in the record at once, and explained a moment later."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedReply
from bridle.proxy.continuation import explanations
from bridle.store.records import BreakReason, Continuation

EXPLAIN = "bridle.proxy.continuation.explanations.explain"
UNEXPLAINED = 'bridle_breaks_total{reason="unexplained"} 1.0'


@pytest.fixture
def bench(stage: Any, start_proxy: Any, model_dir: Path) -> Any:
    stage.play = lambda _: ScriptedReply("one", reasoning="Hm.")
    return start_proxy(
        stage.engine.base_url, tokenizer_dir=model_dir, continuation=Continuation.RENDERED
    )


def break_(bench: Any) -> str:
    """Two calls, of which the second drops the reasoning of the first; their session."""
    url = f"{bench.url}/s/lamp/v1/chat/completions"
    messages: list[Any] = [{"role": "user", "content": "one?"}]
    for _ in range(2):
        reply = httpx.post(url, json={"model": "m", "messages": messages}).raise_for_status()
        said = reply.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
    return reply.headers["x-bridle-session"]


def reason(bench: Any, session: str) -> BreakReason | None:
    return bench.reader.calls(session)[-1].break_reason


def test_a_call_is_acknowledged_before_its_break_is_explained_and_sealed_after_it(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, go_on = explanations.explain, threading.Event()
    monkeypatch.setattr(EXPLAIN, lambda *args: go_on.wait(10) and real(*args))
    session = break_(bench)
    assert reason(bench, session) is BreakReason.UNEXPLAINED
    sealed: list[httpx.Response] = []
    seal = threading.Thread(
        target=lambda: sealed.append(
            httpx.post(f"{bench.url}/bridle/v1/sessions/{session}/seal", json={}, timeout=20)
        )
    )
    seal.start()
    seal.join(0.3)
    assert not sealed
    go_on.set()
    seal.join()
    assert sealed[0].is_success
    assert reason(bench, session) is BreakReason.REASONING_DROPPED
    assert 'bridle_breaks_total{reason="reasoning_dropped"} 1.0' in metrics(bench)
    assert UNEXPLAINED not in metrics(bench)


def test_a_break_that_cannot_be_explained_stays_so_and_is_counted(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no words")

    monkeypatch.setattr(EXPLAIN, fails)
    session = break_(bench)
    assert UNEXPLAINED in metrics(bench)
    assert reason(bench, session) is BreakReason.UNEXPLAINED


def metrics(bench: Any) -> str:
    return httpx.get(f"{bench.url}/metrics").text
