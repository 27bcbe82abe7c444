"""Re-entry of sessions whose upstream speaks the client's dialect and enforces its rules."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from tests.support.native_providers import KEY, TURNS, NativeProvider
from tests.support.tool_loops import (
    FIELDS,
    Ask,
    ToolLoop,
    by_google,
    by_messages,
    by_previous_response,
    by_responses,
)

from bridle.proxy.settings import OtherModel
from bridle.reconstruct.audit import audit_session

WAYS = [
    ("messages", by_messages),
    ("responses", by_responses),
    ("responses", by_previous_response),
    ("google", by_google),
]
BRANCH = 3
"""Number of replayed calls."""


@pytest.fixture
def others(provider: NativeProvider, dialect: str) -> dict[str, OtherModel]:
    return {"*": OtherModel((provider.base_url,), None, KEY, external=True, dialects=(dialect,))}


def loop_of(url: str, dialect: str, stream: bool, result: str) -> ToolLoop:
    return ToolLoop(url, stream, fields=FIELDS.get(dialect, {}), result=result)


def re_entered(bench: Any, call: Any, **rules: Any) -> str:
    """Return the base URL of a new session that goes on live at ``call``."""
    origin = {"session": call.session_id, "call": call.id}
    body = {"origin": origin, "settings": {"replay": rules}}
    reply = httpx.post(f"{bench.url}/bridle/v1/sessions", json=body, timeout=60)
    assert reply.status_code == 201, reply.text
    return f"{bench.url}/s/{reply.json()['id']}"


@pytest.mark.parametrize("streams_again", [False, True], ids=["then-plain", "then-streamed"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize(("dialect", "ask"), WAYS, ids=[way.__name__ for _, way in WAYS])
def test_the_upstream_gets_the_recorded_words_and_the_client_its_own(
    stage: Any,
    start_proxy: Any,
    provider: NativeProvider,
    others: dict[str, OtherModel],
    dialect: str,
    ask: Ask,
    stream: bool,
    streams_again: bool,
) -> None:
    """Durations are noise; the process has another name on each side, in both directions.

    The upstream refuses a turn without the signatures and the sealed reasoning of earlier ones.
    """
    bench = start_proxy(stage.engine.base_url, other_models=others)
    first = "Process running with session ID 8001, took 3 s"
    then = loop_of(f"{bench.url}/s/first", dialect, stream, first)
    assert ask(then) == f"Step {TURNS - 1}."
    assert [made.get("session_id") for made in then.made] == [None, *[8001] * (TURNS - 2)]
    recorded, asked = bench.calls(), [json.loads(one.body) for one in provider.asked]
    url = re_entered(bench, recorded[BRANCH])
    now = loop_of(url, dialect, streams_again, first.replace("3 s", "9 s"))
    now.result = now.result.replace("8001", "9081")
    assert ask(now) == f"Step {TURNS - 1}."
    assert [made.get("session_id") for made in now.made] == [None, *[9081] * (TURNS - 2)]
    live = [json.loads(one.body) for one in provider.asked[TURNS:]]
    for body in (*asked, *live):
        body.pop("stream", None)
    expected = json.dumps(asked[BRANCH:], sort_keys=True).replace("took 3 s", "took 9 s")
    assert json.dumps(live, sort_keys=True).replace("took 3 s", "took 9 s") == expected
    assert "took 9 s" not in json.dumps(live[0])
    calls = bench.reader.calls(now.url.rpartition("/")[2])
    assert [call.replayed_call_id for call in calls[:BRANCH]] == [
        call.id for call in recorded[:BRANCH]
    ]
    notes = [{note.name for note in call.notes} for call in calls]
    assert "replay_live" in notes[BRANCH]
    assert all("replay_reworded" in names for names in notes[BRANCH:])
    assert [call.parent_call_id for call in calls] == [None, *(call.id for call in calls[:-1])]
    assert audit_session(bench.reader, calls[0].session_id).clean


@pytest.mark.parametrize(("dialect", "ask"), WAYS[:1])
def test_another_process_knows_the_recorded_words(
    stage: Any, start_proxy: Any, provider: Any, others: Any, dialect: str, ask: Ask
) -> None:
    bench = start_proxy(stage.engine.base_url, other_models=others)
    results = ["done, took 3 s", "done, took 9 s"]
    ask(loop_of(f"{bench.url}/s/first", dialect, False, results[0]))
    url = re_entered(bench, bench.calls()[BRANCH])
    ask(loop_of(url, dialect, False, results[1]))
    sent = json.loads(provider.asked[-1].body)
    other = start_proxy(stage.engine.base_url, other_models=others)
    again = url.replace(bench.url, other.url)
    body = bench.reader.request_body(bench.reader.calls(url.rpartition("/")[2])[-1].id)
    assert results[0] not in body.decode()
    headers = {"anthropic-version": "2023-06-01"}
    assert httpx.post(f"{again}/v1/messages", content=body, headers=headers).status_code == 200
    assert json.loads(provider.asked[-1].body) == sent
    assert results[0] in json.dumps(sent)


@pytest.mark.parametrize(("dialect", "ask"), WAYS[:1])
def test_a_re_entry_that_asks_another_model_is_translated_for_it(
    stage: Any, start_proxy: Any, provider: Any, others: Any, dialect: str, ask: Ask
) -> None:
    others["frozen"] = OtherModel((stage.engine.base_url,))
    bench = start_proxy(stage.engine.base_url, other_models=others)
    ask(loop_of(f"{bench.url}/s/first", dialect, False, "done, took 3 s"))
    asked = len(provider.asked)
    url = re_entered(bench, bench.calls()[BRANCH], model="frozen")
    assert ask(loop_of(url, dialect, False, "done, took 9 s")) == "The answer is four."
    assert len(provider.asked) == asked
    (live,) = stage.requests
    results = [message["content"] for message in live.messages if message["role"] == "tool"]
    assert results == ["done, took 3 s"] * BRANCH


@pytest.mark.parametrize("choice", ["stop", "live"])
@pytest.mark.parametrize(("dialect", "ask"), WAYS[:1])
def test_a_request_that_only_the_upstream_reads_follows_no_record(
    stage: Any, start_proxy: Any, provider: Any, others: Any, dialect: str, ask: Ask, choice: str
) -> None:
    bench = start_proxy(stage.engine.base_url, other_models=others)
    ask(loop_of(f"{bench.url}/s/first", dialect, False, "done"))
    url = re_entered(bench, bench.calls()[BRANCH], on_divergence=choice)
    asked = len(provider.asked)
    body = {"model": "the-model", "max_tokens": 9, "messages": []}
    headers = {"anthropic-version": "2023-06-01"}
    reply = httpx.post(f"{url}/v1/messages", json=body, headers=headers)
    assert reply.status_code == (400 if choice == "stop" else 200)
    assert len(provider.asked) == asked + (choice == "live")
    (call,) = bench.reader.calls(url.rpartition("/")[2])
    assert (
        "messages: must not be empty" in {n.name: n.detail for n in call.notes}["replay_diverged"]
    )


@pytest.mark.parametrize(("dialect", "ask"), WAYS[:1])
def test_a_turn_whose_service_gets_the_agents_own_requests_is_not_edited(
    stage: Any, start_proxy: Any, provider: Any, others: Any, dialect: str, ask: Ask
) -> None:
    bench = start_proxy(stage.engine.base_url, other_models=others)
    ask(loop_of(f"{bench.url}/s/first", dialect, False, "done"))
    asked = len(provider.asked)
    url = re_entered(bench, bench.calls()[BRANCH], edit={"tool_results": {"toolu_01Abc2XyZ": "x"}})
    with pytest.raises(anthropic.BadRequestError, match="service gets the agent's own requests"):
        ask(loop_of(url, dialect, False, "done"))
    assert len(provider.asked) == asked
