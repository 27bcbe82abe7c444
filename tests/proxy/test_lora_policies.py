"""Policies that share an engine, as adapters of their own names (a real one: test_real_roles)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import pytest

from bridle.engine.serve.transport import ServerThread
from bridle.proxy.settings import Limits
from support.asgi import read_body

http = httpx.Client(timeout=60, trust_env=False)
CHAT = "/v1/chat/completions"


@dataclass
class Engine:
    """vLLM's routes, with a base model and adapters."""

    base_url: str = ""
    adapters: dict[str, str] = field(default_factory=dict)
    """Paths by name."""
    asked: list[str] = field(default_factory=list)
    """The model of each call."""
    replies: threading.Event = field(default_factory=threading.Event)
    """Replies wait for it."""
    reached: threading.Event = field(default_factory=threading.Event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body: dict[str, Any] = {}
        status = 200
        if scope["path"] == "/v1/models":
            cards = [{"id": name, "root": path, "parent": "base"} for name, path in self.own()]
            body = {"data": [{"id": "base", "root": "/base", "parent": None}, *cards]}
        elif scope["path"] == "/weight_info":
            body = {"weight_version": "0"}
        elif scope["path"] == CHAT:
            model = orjson.loads(await read_body(receive))["model"]
            self.asked.append(model)
            self.reached.set()
            await asyncio.to_thread(self.replies.wait, 30)
            body = reply(model)
        headers = [(b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": orjson.dumps(body)})

    def own(self) -> list[tuple[str, str]]:
        return list(self.adapters.items())


def reply(model: str) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "Hi"},
        "finish_reason": "stop",
        "token_ids": [7],
        "logprobs": {"content": [{"token": "Hi", "logprob": -0.5, "top_logprobs": []}]},
    }
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    return {"model": model, "prompt_token_ids": [1, 2], "choices": [choice], "usage": usage}


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    engine.replies.set()
    server = ServerThread(engine, host="127.0.0.1", port=0)
    server.start()
    engine.base_url = server.base_url
    yield engine
    server.stop()


@pytest.fixture
def bench(engine: Any, start_proxy: Any) -> Any:
    return start_proxy(
        engine.base_url, policies={"worker": (engine.base_url,)}, limits=Limits(health_check_s=0)
    )


def publish(bench: Any, **body: Any) -> None:
    http.put(f"{bench.url}/bridle/v1/policy", json=body).raise_for_status()


def ask(bench: Any, model: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "who?"}]}
    return http.post(f"{bench.url}/s/lamp{CHAT}", json=body)


def test_a_policy_that_shares_an_engine_is_asked_for_by_its_adapter_alone(
    bench: Any, engine: Engine
) -> None:
    assert ask(bench, "opus").status_code == 200
    early = ask(bench, "worker")
    assert early.status_code == 503
    assert "no adapter of the policy worker has been published" in early.text
    assert engine.asked == ["base"], "the model below is not that policy"
    engine.adapters |= {"worker-v1": "/w/1", "policy-v2": "/p/2"}
    publish(bench, version=1, model="worker-v1", policy="worker")
    publish(bench, version=2, model="policy-v2")
    for model in ("worker", "opus"):
        assert ask(bench, model).status_code == 200
    assert engine.asked == ["base", "worker-v1", "policy-v2"]
    recorded = [(one.policy, one.version_start, one.model_served) for one in bench.calls()]
    assert recorded[0] == (None, 0, "base")
    assert recorded[-2:] == [("worker", 1, "worker-v1"), (None, 2, "policy-v2")]
    listed = http.get(f"{bench.url}/bridle/v1/engines").json()
    assert [one["policy_version"] for one in listed] == [2, 1]
    assert len({one["name"] for one in listed}) == 2, "metrics tell them apart"


@pytest.mark.parametrize(("name", "first"), [("worker-v2", 1), ("worker-v1", 2)])
def test_a_call_in_flight_has_the_version_of_the_name_that_it_was_asked_for(
    bench: Any, engine: Engine, name: str, first: int
) -> None:
    """Weights that change under one name are newer when a whole reply arrives."""
    engine.adapters["worker-v1"] = "/w/1"
    publish(bench, version=1, model="worker-v1", policy="worker")
    engine.replies.clear()
    asking = threading.Thread(target=ask, args=(bench, "worker"))
    asking.start()
    engine.reached.wait(30)
    engine.adapters[name] = "/w/2"
    publish(bench, version=2, model=name, policy="worker")
    engine.replies.set()
    asking.join(30)
    assert ask(bench, "worker").status_code == 200
    assert engine.asked == ["worker-v1", name]
    begun, after = bench.calls()
    assert [begun.version_start, after.version_start] == [first, 2]
    noted = {note.name for note in begun.notes}
    assert ("version_changed_midway" in noted) == (first == 2)


def test_an_engine_that_has_lost_its_adapters_gets_no_calls(bench: Any, engine: Engine) -> None:
    engine.adapters |= {"worker-v1": "/w/1", "policy-v1": "/p/1"}
    publish(bench, version=1, model="worker-v1", policy="worker")
    publish(bench, version=1, model="policy-v1")
    assert ask(bench, "worker").status_code == 200
    lost = engine.adapters.pop("worker-v1")  # as by a restart
    assert ask(bench, "worker").status_code == 503
    assert ask(bench, "opus").status_code == 200, "the other's is there"
    engine.adapters["worker-v1"] = lost
    publish(bench, version=1, model="worker-v1", policy="worker")
    assert ask(bench, "worker").status_code == 200
