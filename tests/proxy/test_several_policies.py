"""Several trained policies behind one proxy: each with engines and versions of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bridle.engine.scripted import ScriptedEngine
from bridle.proxy.settings import OtherModel, ProxySettings
from bridle.reconstruct.episodes import episode_of
from bridle.reconstruct.session import LoadedSession

MODEL = "tiny-policy"

http = httpx.Client(timeout=60, trust_env=False)


@pytest.fixture
def engines(model_dir: Path) -> Iterator[dict[str, ScriptedEngine]]:
    """An engine for each policy, which gives the policy's name as its reply."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                ScriptedEngine(model_dir, lambda _, name=name: name, served_model_name=MODEL)
            )
            for name in ("policy", "planner", "worker")
        }


@pytest.fixture
def start(engines: dict[str, ScriptedEngine], start_proxy: Any) -> Any:
    """Starts proxies for the three policies; each keyword is a field of the settings."""
    further = {name: (engines[name].base_url,) for name in ("planner", "worker")}
    return lambda **fields: start_proxy(engines["policy"].base_url, policies=further, **fields)


def client(bench: Any, **headers: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{bench.url}/s/lamp/v1", api_key="x", max_retries=0, default_headers=headers
    )


def ask(bench: Any, model: str, messages: Any = None, **headers: str) -> str:
    messages = messages or [{"role": "user", "content": "who?"}]
    reply = client(bench, **headers).chat.completions.create(model=model, messages=messages)
    return reply.choices[0].message.content or ""


def publish(bench: Any, **body: Any) -> Any:
    return http.put(f"{bench.url}/bridle/v1/policy", json=body)


def versions(bench: Any) -> tuple[int, dict[str, int]]:
    state = http.get(f"{bench.url}/bridle/v1/policy").json()
    return state["version"], state["policies"]


def test_a_policy_answers_by_its_name_and_its_tokens_have_its_version(start: Any) -> None:
    bench = start()
    publish(bench, version=3).raise_for_status()
    publish(bench, version=7, policy="planner").raise_for_status()
    for model, asked in (("gpt-5", "policy"), ("planner", "planner"), ("worker", "worker")):
        assert ask(bench, model) == asked
    calls = bench.calls()
    assert [call.policy for call in calls] == [None, "planner", "worker"]
    assert [call.version_start for call in calls] == [3, 7, 0]
    with bench.reader.engine.connect() as store:
        turns = store.exec_driver_sql("SELECT policy FROM turns ORDER BY turn").scalars()
        assert list(turns) == ["policy", "planner", "worker"]
    assert versions(bench) == (3, {"planner": 7, "worker": 0})
    listed = {card.id for card in client(bench).models.list()}
    assert listed == {MODEL, "planner", "worker"}


def test_sub_agents_can_be_sent_to_another_policy(start: Any) -> None:
    bench = start(role_models={"subagent": "worker", "main-2": "policy"})
    session = {"x-claude-code-session-id": "s"}
    assert ask(bench, "opus", **session, **{"x-claude-code-agent-id": "search"}) == "worker"
    assert ask(bench, "planner", **session, **{"x-claude-code-agent-id": "main-2"}) == "policy"
    assert ask(bench, "opus", **session) == "policy"
    assert [call.policy for call in bench.calls()] == ["worker", None, None]


def test_a_conversation_is_continued_exactly_within_and_across_policies(
    start: Any, engines: Any, model_dir: Path
) -> None:
    bench = start(tokenizer_dir=model_dir)
    messages: list[Any] = [{"role": "user", "content": "who?"}]
    for model in ("planner", "planner", "worker"):
        messages.append({"role": "assistant", "content": ask(bench, model, messages)})
        messages.append({"role": "user", "content": "and then?"})
    calls = bench.calls()
    assert [call.break_reason for call in calls] == [None, None, None]
    for call, then in pairwise(calls):
        whole = [
            *bench.reader.prompt_token_ids(call.id).tolist(),
            *bench.reader.sampled(call.id)[0].token_ids.tolist(),
        ]
        assert bench.reader.prompt_token_ids(then.id)[: len(whole)].tolist() == whole
    (sample,) = episode_of(LoadedSession.load(bench.reader, calls[0].session_id)).samples
    assert sample.policies == ("planner", "planner", "worker")
    assert [len(engine.requests) for engine in engines.values()] == [0, 2, 1]


def test_a_restarted_proxy_restores_the_version_of_each_policy(start: Any) -> None:
    bench = start()
    publish(bench, version=3).raise_for_status()
    publish(bench, version=7, policy="planner").raise_for_status()
    bench.server.stop()
    again = start()
    assert versions(again) == (3, {"planner": 7, "worker": 0})
    assert ask(again, "planner") == "planner"
    assert again.call().version_start == 7


def test_a_pause_holds_the_calls_of_all_policies(start: Any, engines: Any, until: Any) -> None:
    bench = start()
    state = http.post(f"{bench.url}/bridle/v1/pause", json={"timeout_s": 10}).json()
    assert (state["paused"], state["running"]) == (True, 0)
    asking = [threading.Thread(target=ask, args=(bench, model)) for model in ("opus", "planner")]
    for thread in asking:
        thread.start()
    policy = f"{bench.url}/bridle/v1/policy"
    until(lambda: http.get(policy).json()["waiting"] == 2)
    assert not any(engine.requests for engine in engines.values())
    http.post(f"{bench.url}/bridle/v1/resume").raise_for_status()
    for thread in asking:
        thread.join(30)
    assert [len(engine.requests) for engine in engines.values()] == [1, 1, 0]


def test_a_publish_names_a_policy_and_an_engine_that_belong_together(
    start: Any, engines: Any
) -> None:
    bench = start()
    unknown = publish(bench, version=1, policy="critic")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == (
        "there is no policy critic; there are: policy, planner, worker"
    )
    worker = engines["worker"].base_url
    assert publish(bench, version=1, policy="planner", engine=worker).status_code == 404
    assert publish(bench, version=1, policy="worker", engine=worker).status_code == 200
    assert versions(bench) == (0, {"planner": 0, "worker": 1})
    added = http.post(f"{bench.url}/bridle/v1/engines", json={"url": worker})
    assert added.status_code == 422
    assert "serves the policy worker" in added.json()["error"]["message"]
    listed = http.get(f"{bench.url}/bridle/v1/engines").json()
    assert [one["url"] for one in listed] == [engine.base_url for engine in engines.values()]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policies": {"policy": ("http://p",)}}, "this is the name of the default policy"),
        ({"policies": {"judge": ("http://p",)}}, "policy judge: an other model has this name"),
        ({"policies": {"worker": ()}}, "policy worker: no engine serves it"),
        ({"role_models": {"subagent": "wroker"}}, "no policy or other model is wroker"),
    ],
)
def test_policies_that_cannot_be_told_apart_are_refused(fields: Any, message: str) -> None:
    others = {"judge": OtherModel(("http://j",))}
    with pytest.raises(ValueError, match=message):
        ProxySettings("http://e", "s.db", other_models=others, **fields)
