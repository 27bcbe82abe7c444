"""Test a session's budget, and the error that each provider's clients get once it is spent."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest
from google import genai
from google.genai import errors as google_errors

from bridle.engine.scripted import ScriptedReply, Stall
from bridle.proxy.settings import Budget
from bridle.store.records import CallStatus

CHAT = "/v1/chat/completions"
http = httpx.Client(timeout=60, trust_env=False)


def opened(bench: Any, **budget: Any) -> dict[str, Any]:
    made = http.post(f"{bench.url}/bridle/v1/sessions", json={"settings": {"budget": budget}})
    assert made.status_code == 201, made.text
    return made.json()  # type: ignore[no-any-return]


def ask(session: dict[str, Any]) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": "two and two?"}]}
    return http.post(session["base_urls"]["openai"] + "/chat/completions", json=body)


@pytest.mark.parametrize(
    ("budget", "spent"),
    [({"calls": 2}, "2 calls"), ({"tokens": 7}, "7 sampled tokens")],
)
def test_what_is_spent_is_told_recorded_and_counted(
    bench: Any, budget: dict[str, int], spent: str
) -> None:
    session = opened(bench, **budget)
    assert [ask(session).status_code for _ in range(4)] == [200, 200, 429, 429]
    refused = ask(session)
    assert spent in refused.json()["error"]["message"]
    assert refused.headers["x-should-retry"] == "false"
    *_, last = bench.calls()
    assert (last.status, last.reason) == (CallStatus.FAILED, "budget")
    assert ("budget_exhausted", next(iter(budget))) in [(n.name, n.detail) for n in last.notes]
    metrics = http.get(f"{bench.url}/metrics").text
    assert 'bridle_events_total{name="budget_exhausted"} 3.0' in metrics
    assert 'bridle_calls_total{dialect="chat",status="failed"} 3.0' in metrics


def test_time_that_is_up_is_up(bench: Any) -> None:
    session = opened(bench, wall_s=0)
    assert ask(session).status_code == 429
    assert ask(opened(bench, wall_s=3600)).status_code == 200


def test_a_clock_that_is_set_takes_no_time_from_a_session(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, now = opened(bench, wall_s=3600), time.time
    monkeypatch.setattr(time, "time", lambda: now() + 24 * 3600)
    assert ask(session).status_code == 200


def test_concurrent_calls_cannot_overdraw(bench: Any, stage: Any) -> None:
    stage.play = lambda _: ScriptedReply("The answer is four.", fault=Stall(0.2))
    session = opened(bench, calls=3)
    with ThreadPoolExecutor(8) as threads:
        codes = [reply.status_code for reply in threads.map(lambda _: ask(session), range(8))]
    assert sorted(codes) == [200] * 3 + [429] * 5


def test_a_restarted_proxy_goes_on_with_the_account(stage: Any, start_proxy: Any) -> None:
    first = start_proxy(stage.engine.base_url, budget=Budget(calls=3))
    url = f"/s/lamp{CHAT}"
    body = {"model": "m", "messages": [{"role": "user", "content": "two?"}]}
    codes = [http.post(first.url + url, json=body).status_code for _ in range(2)]
    first.server.stop()
    second = start_proxy(stage.engine.base_url, budget=Budget(calls=3))
    codes += [http.post(second.url + url, json=body).status_code for _ in range(2)]
    assert codes == [200, 200, 200, 429]


def test_the_proxys_default_holds_unless_a_session_says_otherwise(
    stage: Any, start_proxy: Any
) -> None:
    bench = start_proxy(stage.engine.base_url, budget=Budget(calls=1))
    modest, generous = opened(bench), opened(bench, calls=2)
    assert [ask(modest).status_code for _ in range(2)] == [200, 429]
    assert [ask(generous).status_code for _ in range(3)] == [200, 200, 429]


def test_a_budget_that_is_none_is_refused_at_creation(bench: Any) -> None:
    for wrong in ({"calls": -1}, {"calls": "many"}, {"dollars": 3}):
        reply = http.post(f"{bench.url}/bridle/v1/sessions", json={"settings": {"budget": wrong}})
        assert reply.status_code == 422


def test_each_providers_client_raises_its_own_error(bench: Any) -> None:
    session = opened(bench, calls=0)
    urls, key = session["base_urls"], session["key"]
    chat = openai.OpenAI(base_url=urls["openai"], api_key=key)
    for ask_openai in (
        lambda: chat.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        ),
        lambda: chat.responses.create(model="m", input="hi"),
        lambda: chat.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        ),
    ):
        with pytest.raises(openai.RateLimitError) as raised:
            ask_openai()
        assert raised.value.code == "insufficient_quota"
    messages = anthropic.Anthropic(base_url=urls["anthropic"], api_key=key)
    with pytest.raises(anthropic.RateLimitError) as limited:
        messages.messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
        )
    assert limited.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
    google = genai.Client(api_key=key, http_options={"base_url": urls["google"]})
    with pytest.raises(google_errors.ClientError) as exhausted:
        google.models.generate_content(model="m", contents="hi")
    assert (exhausted.value.code, exhausted.value.status) == (429, "RESOURCE_EXHAUSTED")
    assert len(bench.calls()) == 5, "clients do not repeat what stays refused"
