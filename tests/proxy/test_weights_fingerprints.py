"""Test an engine's report of its weights against its report when they were published."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
import orjson
import pytest

from bridle.engine.serve.transport import ServerThread
from bridle.proxy.engines.pool import EnginePool, Policy
from bridle.proxy.settings import Limits, OtherModel, ProxySettings
from bridle.store.operations.gates import Gates, Served

CHAT = "/v1/chat/completions"
UNCHECKED = Limits(health_check_s=0)
http = httpx.Client(timeout=60, trust_env=False)


@dataclass
class Talker:
    """The routes of a vLLM, or of an engine that tells nothing of its weights."""

    base_url: str = ""
    told: Any = "default"
    """``weight_version``; ``None`` for no such route, a number for a failure's status."""
    asked: list[str] = field(default_factory=list)
    keeps_alive: bool = True
    held: threading.Event | None = None
    """Answers about weights wait for it, and tell what held when they were asked."""
    replies: threading.Event | None = None
    """Chat replies wait for it."""
    reached: threading.Event = field(default_factory=threading.Event)
    """Something waits."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.asked.append(scope["path"])
        body: dict[str, Any] = {}
        status = 200
        if scope["path"] == "/weight_info":
            told, held = self.told, self.held
            if held is not None:
                self.reached.set()
                await asyncio.to_thread(held.wait, 30)
            body = {"weight_version": told}
            status = told if isinstance(told, int) else 404 if told is None else 200
        elif scope["path"] == "/version":
            body = {"version": "0.32.0"}
        elif scope["path"] == CHAT:
            if (replies := self.replies) is not None:
                self.reached.set()
                await asyncio.to_thread(replies.wait, 30)
            message = {"role": "assistant", "content": "Hi"}
            body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        headers = [] if self.keeps_alive else [(b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": orjson.dumps(body)})


@contextmanager
def serving(talker: Talker, port: int = 0) -> Iterator[Talker]:
    server = ServerThread(talker, host="127.0.0.1", port=port)
    server.start()
    talker.base_url = server.base_url
    try:
        yield talker
    finally:
        server.stop()


@pytest.fixture
def talker() -> Iterator[Talker]:
    with serving(Talker()) as talker:
        yield talker


@contextmanager
def started(talker: Talker) -> Iterator[Any]:
    """``run(coroutine function of the pool)`` in one event loop, with a pool before ``talker``."""
    with asyncio.Runner() as runner:

        async def start() -> EnginePool:
            settings = ProxySettings(talker.base_url, "unused", limits=UNCHECKED)
            pool = EnginePool(settings, [talker.base_url], model="m")
            await pool.start()
            return pool

        pool = runner.run(start())
        yield lambda work: runner.run(work(pool))
        runner.run(pool.close())


_revisions = count(1)


async def announce(pool: EnginePool, version: int) -> None:
    pool.gate.set(Policy(version), paused=False)
    row = Served(version, None, next(_revisions))
    pool.set_engines(dict.fromkeys(pool.urls(), row))
    await pool.learn_fingerprints()


def test_a_vllm_is_held_to_the_version_that_it_was_stamped_with(talker: Talker) -> None:
    with started(talker) as run:
        talker.told = "3"
        run(lambda pool: announce(pool, 3))
        assert run(EnginePool.check)
        talker.told = "default"  # started again, and nobody has stamped it
        assert not run(EnginePool.check)
        talker.told = "3"
        assert run(EnginePool.check)
        talker.told = None
        assert not run(EnginePool.check)
        talker.told = "4"
        run(lambda pool: announce(pool, 4))
        assert run(EnginePool.check)


@pytest.mark.parametrize("status", [500, 503, 401, 429])
def test_a_check_that_cannot_read_the_mark_decides_nothing(talker: Talker, status: int) -> None:
    with started(talker) as run:
        talker.told = "3"
        run(lambda pool: announce(pool, 3))
        talker.told = status
        assert run(EnginePool.check)
        talker.told = "default"
        assert not run(EnginePool.check)
        talker.told = status
        assert not run(EnginePool.check)


def test_an_engine_without_a_mark_is_believed_and_not_asked_again(talker: Talker) -> None:
    talker.told = None
    with started(talker) as run:
        run(lambda pool: announce(pool, 3))
        talker.asked.clear()
        assert run(EnginePool.check)
        assert talker.asked == ["/health"]


def test_a_mark_that_cannot_be_read_at_a_publish_is_the_last_of_the_same_version(
    talker: Talker, caplog: Any
) -> None:
    with started(talker) as run:
        talker.told = "3"
        run(lambda pool: announce(pool, 3))
        talker.told = 500
        run(lambda pool: announce(pool, 3))
        assert [line.message for line in caplog.records] == ["weights_fingerprint_unread"]
        talker.told = "default"
        assert not run(EnginePool.check)
        talker.told = 500
        run(lambda pool: announce(pool, 4))
        talker.told = "default"
        assert run(EnginePool.check), "nothing is known that could be compared"


@pytest.mark.parametrize("before", ["2", "default"])
def test_a_check_that_began_before_a_publish_does_not_undo_it(talker: Talker, before: str) -> None:
    async def race(pool: EnginePool) -> None:
        talker.told, talker.held = before, threading.Event()
        check = asyncio.create_task(pool.check())
        await asyncio.to_thread(talker.reached.wait, 30)
        held, talker.held = talker.held, None
        talker.told = "3"
        await announce(pool, 3)
        held.set()
        await check
        assert pool.states()[0].usable
        assert pool.states()[0].changes == 0

    with started(talker) as run:
        talker.told = "2"
        run(lambda pool: announce(pool, 2))
        run(race)


def test_a_publish_that_is_overtaken_does_not_bring_its_mark(talker: Talker) -> None:
    async def race(pool: EnginePool) -> None:
        talker.told, talker.held = "2", threading.Event()
        slow = asyncio.create_task(announce(pool, 2))
        await asyncio.to_thread(talker.reached.wait, 30)
        held, talker.held = talker.held, None
        talker.told = "3"
        await announce(pool, 3)
        held.set()
        await slow
        assert await pool.check()

    with started(talker) as run:
        run(race)


def test_a_publish_that_is_overtaken_is_not_what_a_restarted_proxy_begins_with(
    talker: Talker, start_proxy: Any
) -> None:
    bench = start_proxy(talker.base_url, model="m", limits=UNCHECKED)

    def publish(version: int) -> None:
        policy = {"version": version, "back": True}
        http.put(f"{bench.url}/bridle/v1/policy", json=policy).raise_for_status()

    talker.told, talker.held = "2", threading.Event()
    slow = threading.Thread(target=publish, args=(2,))
    slow.start()
    talker.reached.wait(30)
    held, talker.held = talker.held, None
    talker.told = "1"
    publish(1)
    held.set()
    slow.join()
    rows = Gates(bench.reader.engine, bench.settings.deployment).read()
    (served,) = rows.engines["policy"].values()
    assert (served.version, served.weights_fingerprint) == (1, "1")


def test_a_change_before_its_publish_arrives_is_undone_by_it(talker: Talker) -> None:
    with started(talker) as run:
        talker.told = "2"
        run(lambda pool: announce(pool, 2))
        talker.told = "3"
        assert not run(EnginePool.check)
        run(lambda pool: announce(pool, 3))
        assert run(EnginePool.check)


def ask(url: str) -> int:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return http.post(f"{url}{CHAT}", json=body).status_code


def test_calls_cost_no_question_while_a_connection_stays_open(
    talker: Talker, start_proxy: Any
) -> None:
    bench = start_proxy(talker.base_url, model="m", limits=UNCHECKED)
    talker.told, talker.replies = "3", threading.Event()
    http.put(f"{bench.url}/bridle/v1/policy", json={"version": 3}).raise_for_status()
    running = threading.Thread(target=ask, args=(bench.url,))
    running.start()
    talker.reached.wait(30)
    held, talker.replies = talker.replies, None
    talker.asked.clear()
    assert [ask(bench.url) for _ in range(5)] == [200] * 5
    assert talker.asked == [CHAT] * 5
    held.set()
    running.join()


def test_an_engine_that_keeps_no_connection_is_asked_before_each_call(
    talker: Talker, start_proxy: Any
) -> None:
    talker.keeps_alive, talker.told = False, "3"
    bench = start_proxy(talker.base_url, model="m", limits=UNCHECKED)
    http.put(f"{bench.url}/bridle/v1/policy", json={"version": 3}).raise_for_status()
    talker.asked.clear()
    assert [ask(bench.url) for _ in range(2)] == [200] * 2
    assert talker.asked == ["/version", "/weight_info", CHAT] * 2
    talker.told = "default"
    assert ask(bench.url) == 503
    assert talker.asked[6:] == ["/version", "/weight_info"]


def test_an_engine_that_may_be_another_and_cannot_say_gets_no_call(
    talker: Talker, start_proxy: Any
) -> None:
    talker.keeps_alive, talker.told = False, "3"
    bench = start_proxy(talker.base_url, model="m", limits=Limits(health_check_s=0, retries=0))
    http.put(f"{bench.url}/bridle/v1/policy", json={"version": 3}).raise_for_status()
    talker.told = 500
    talker.asked.clear()
    assert ask(bench.url) == 502
    assert CHAT not in talker.asked


def test_frozen_models_are_not_asked_for_their_weights(talker: Talker, start_proxy: Any) -> None:
    others = {"judge": OtherModel((talker.base_url,), model="m")}
    with serving(Talker(told="3")) as policy:
        quick = Limits(health_check_s=0.05)
        bench = start_proxy(policy.base_url, model="m", other_models=others, limits=quick)
        http.put(f"{bench.url}/bridle/v1/policy", json={"version": 3}).raise_for_status()
        body = {"model": "judge", "messages": [{"role": "user", "content": "hi"}]}
        assert http.post(f"{bench.url}{CHAT}", json=body).status_code == 200
        assert not {"/version", "/weight_info"} & set(talker.asked)
