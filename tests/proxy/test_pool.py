"""Several engines behind one proxy: who gets which call, and what happens when one is lost."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from bridle.engine.scripted import Cut, Refuse, ScriptedEngine, ScriptedReply, Stall
from bridle.proxy.engines.engine import PooledEngine
from bridle.proxy.engines.pool import EnginePool
from bridle.proxy.settings import Limits, ProxySettings, engine_base
from bridle.store.operations.gates import Served
from bridle.store.records import CallStatus

MODEL = "tiny-policy"
CHAT = "/v1/chat/completions"
http = httpx.Client(timeout=60, trust_env=False)
QUICK = Limits(health_check_s=0.05)
"""Health checks that a test does not have to wait for."""


class Member:
    """A scripted engine on a port that it keeps, so that it can die and come back."""

    def __init__(self, model_dir: Path) -> None:
        self.play: Callable[[Any], Any] = lambda _: ScriptedReply("The answer is four.")
        self._model_dir = model_dir
        self.engine = self._make(0)
        self.engine.__enter__()
        self.url = self.engine.base_url

    @property
    def name(self) -> str:
        return self.url.removeprefix("http://")

    @property
    def asked(self) -> int:
        return len(self.engine.requests)

    def stop(self) -> None:
        self.engine.__exit__()

    def start(self) -> None:
        self.engine = self._make(int(self.url.rpartition(":")[2]))
        self.engine.__enter__()

    def _make(self, port: int) -> ScriptedEngine:
        return ScriptedEngine(
            self._model_dir, lambda request: self.play(request), served_model_name=MODEL, port=port
        )


@pytest.fixture
def pair(model_dir: Path) -> Iterator[tuple[Member, Member]]:
    members = (Member(model_dir), Member(model_dir))
    yield members
    for member in members:
        member.stop()


@pytest.fixture
def pooled(pair: tuple[Member, Member], start_proxy: Any) -> Callable[..., Any]:
    """Starts a proxy before both engines."""
    first, second = pair
    return lambda **fields: start_proxy(first.url, more_engines=(second.url,), **fields)


def ask(url: str, session: str, **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": "two and two?"}], **fields}
    return http.post(f"{url}/s/{session}{CHAT}", json=body)


def states(bench: Any) -> dict[str, Any]:
    found = http.get(bench.url + "/bridle/v1/engines").json()
    return {state["name"]: state for state in found}


def notes(bench: Any) -> list[str]:
    return [note.name for call in bench.calls() for note in call.notes]


def test_a_session_stays_with_its_engine_and_sessions_spread(pair: Any, pooled: Any) -> None:
    bench = pooled()
    for _ in range(3):
        for number in range(12):
            assert ask(bench.url, f"s{number}").status_code == 200
    engine_of: dict[str, set[str]] = {}
    for member in pair:
        assert member.asked % 3 == 0, "all three calls of a session went to one engine"
        engine_of.setdefault(member.name, set())
    assert sum(member.asked for member in pair) == 36
    assert all(member.asked for member in pair)


def test_a_new_session_goes_where_the_fewest_calls_run(pair: Any, pooled: Any) -> None:
    bench = pooled()
    for member in pair:
        member.play = lambda _: ScriptedReply(
            "The answer is four.", fault=Stall(60, after_tokens=1)
        )
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    pieces = []  # kept: dropping one would hang up
    with ExitStack() as running:
        for number in range(6):
            url = f"{bench.url}/s/s{number}{CHAT}"
            reply = running.enter_context(http.stream("POST", url, json=body))
            pieces.append(reply.iter_raw())
            next(pieces[-1])
        assert [state["running"] for state in states(bench).values()] == [3, 3]


def test_a_session_moves_when_its_engine_dies_and_the_call_is_not_lost(
    pair: Any, pooled: Any
) -> None:
    bench = pooled(limits=Limits(health_check_s=0))
    assert ask(bench.url, "lamp").status_code == 200
    home, other = pair if pair[0].asked else pair[::-1]
    home.stop()
    try:
        assert ask(bench.url, "lamp").status_code == 200
        assert other.asked == 1
        first, second = bench.calls()
        assert second.status is CallStatus.COMPLETE
        (note,) = [note for note in second.notes if note.name == "upstream_retry"]
        assert note.detail.startswith(home.name)
        assert "upstream_retry" not in [note.name for note in first.notes]
        metrics = http.get(bench.url + "/metrics").text
        assert f'bridle_engine_retries_total{{engine="{home.name}"}} 1.0' in metrics
        assert 'bridle_events_total{name="upstream_retry"} 1.0' in metrics
        assert ask(bench.url, "lamp").status_code == 200
        assert notes(bench).count("upstream_retry") == 1, "it stays with the engine that answered"
    finally:
        home.start()


@pytest.mark.parametrize("status", [502, 503])
def test_an_engine_that_cannot_is_passed_over_before_the_first_byte(
    pair: Any, pooled: Any, status: int
) -> None:
    bench = pooled()
    pair[0].play = lambda _: Refuse(status, "not now")
    for number in range(4):
        assert ask(bench.url, f"s{number}", stream=True).status_code == 200
    assert pair[1].asked == 4
    assert set(notes(bench)) <= {"upstream_retry"}


@pytest.mark.parametrize("status", [400, 429, 500])
def test_what_another_engine_would_say_too_is_not_asked_twice(
    pair: Any, pooled: Any, status: int
) -> None:
    bench = pooled()
    for member in pair:
        member.play = lambda _: Refuse(status, "no")
    assert ask(bench.url, "lamp").status_code == status
    assert sum(member.asked for member in pair) == 1


def test_after_the_first_byte_nothing_is_asked_again(pair: Any, pooled: Any) -> None:
    bench = pooled()
    for member in pair:
        member.play = lambda _: ScriptedReply("The answer is four.", fault=Cut(after_tokens=1))
    reply = ask(bench.url, "lamp", stream=True)
    assert b"error" in reply.content
    assert sum(member.asked for member in pair) == 1
    assert bench.call().status is CallStatus.PARTIAL


def test_an_engine_that_breaks_off_every_reply_is_ejected(pair: Any, pooled: Any) -> None:
    bench = pooled()
    pair[0].play = lambda _: ScriptedReply("The answer is four.", fault=Cut(after_tokens=1))
    broken = 0
    for number in range(40):  # of which by chance too few would go to one engine once in 10^9 runs
        broken += b"error" in ask(bench.url, f"s{number}", stream=True).content
    assert 0 < broken == pair[0].asked
    assert states(bench)[pair[0].name]["ejections"] > 0
    assert states(bench)[pair[1].name]["ejections"] == 0


@pytest.mark.parametrize("fault", [Cut(after_tokens=1), Refuse(503, "no")])
def test_requests_that_an_engine_fails_on_do_not_take_it_from_other_sessions(
    pair: Any, pooled: Any, fault: Any
) -> None:
    def play(request: Any) -> Any:
        if "poison" not in str(request.messages):
            return ScriptedReply("The answer is four.")
        return fault if isinstance(fault, Refuse) else ScriptedReply("The answer", fault=fault)

    bench = pooled()
    for member in pair:
        member.play = play
    for _ in range(8):
        poison = [{"role": "user", "content": "poison"}]
        ask(bench.url, "hostile", messages=poison, stream=True)
    assert ask(bench.url, "other").status_code == 200
    assert [one["ejections"] for one in states(bench).values()] == [0, 0]


def test_a_dead_engine_is_ejected_by_its_checks_and_readmitted_when_it_is_back(
    pair: Any, pooled: Any, until: Any
) -> None:
    bench = pooled(limits=QUICK)
    pair[0].stop()
    until(lambda: states(bench)[pair[0].name]["circuit"] == "open")
    metrics = http.get(bench.url + "/metrics").text
    assert f'bridle_engine_circuit{{engine="{pair[0].name}",state="open"}} 1.0' in metrics
    assert http.get(bench.url + "/readyz").json()["circuits"] == ["open", "closed"]
    for number in range(4):
        assert ask(bench.url, f"s{number}").status_code == 200
    assert notes(bench) == [], "nobody had to find out"
    pair[0].start()
    until(lambda: states(bench)[pair[0].name]["circuit"] == "half_open")
    before = pair[0].asked
    with ThreadPoolExecutor(8) as threads:
        pair[1].play = lambda _: ScriptedReply("The answer is four.", fault=Stall(0.3))
        codes = [
            reply.status_code for reply in threads.map(lambda n: ask(bench.url, f"t{n}"), range(8))
        ]
    assert codes == [200] * 8
    assert pair[0].asked > before
    assert states(bench)[pair[0].name]["circuit"] == "closed"


async def test_an_engine_that_stays_away_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its trials and checks go on failing every second."""
    settings = ProxySettings("http://127.0.0.1:9", "unused.db", limits=Limits(failures_to_eject=1))
    engine = PooledEngine(settings, "http://127.0.0.1:9")
    engine.circuit.failed()
    engine.report()
    engine.report()
    assert [record.message for record in caplog.records] == ["engine_ejected"]


DIALECTS = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    ),
    "google": (
        "/v1beta/models/m:generateContent",
        {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_without_a_healthy_engine_it_is_a_503_that_says_when_to_come_back(
    pair: Any, pooled: Any, until: Any, dialect: str
) -> None:
    bench = pooled(limits=QUICK, model=MODEL)
    for member in pair:
        member.stop()
    until(lambda: all(state["circuit"] == "open" for state in states(bench).values()))
    path, body = DIALECTS[dialect]
    body = body if dialect == "google" else body | {"model": "m"}
    reply = http.post(bench.url + path, json=body)
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) >= 1
    error = reply.json()["error"]
    assert error["message"] == "no engine is healthy: the engine cannot be reached"
    assert not any(member.name in reply.text for member in pair)
    if dialect == "messages":
        assert error["type"] == "overloaded_error"
    if dialect == "google":
        assert error["status"] == "UNAVAILABLE"
    call = bench.call()
    assert (call.status, call.reason) == (CallStatus.FAILED, "upstream_unreachable")
    for member in pair:
        member.start()


def test_the_official_clients_wait_and_succeed_when_an_engine_comes_back(
    pair: Any, pooled: Any, until: Any
) -> None:
    bench = pooled(limits=QUICK, model=MODEL)
    for member in pair:
        member.stop()
    until(lambda: all(state["circuit"] == "open" for state in states(bench).values()))
    timer = threading.Timer(0.5, lambda: [member.start() for member in pair])
    timer.start()
    chat = openai.OpenAI(base_url=f"{bench.url}/v1", api_key="x", max_retries=4)
    told = chat.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert told.choices[0].message.content == "The answer is four."
    messages = anthropic.Anthropic(base_url=bench.url, api_key="x", max_retries=4)
    said = messages.messages.create(
        model="m", max_tokens=64, messages=[{"role": "user", "content": "hi"}]
    )
    assert said.content[0].text == "The answer is four."  # type: ignore[union-attr]
    timer.join()


def test_an_engine_of_an_older_policy_gets_no_calls_until_it_has_caught_up(
    pair: Any, pooled: Any
) -> None:
    bench = pooled()
    policy = f"{bench.url}/bridle/v1/policy"
    first, second = pair
    assert http.put(policy, json={"version": 1, "engine": first.name}).json()["version"] == 1
    for number in range(6):
        ask(bench.url, f"s{number}")
    assert (first.asked, second.asked) == (6, 0)
    assert not states(bench)[second.name]["usable"]
    assert {call.version_start for call in bench.calls()} == {1}
    assert http.put(policy, json={"version": 1, "engine": second.url}).status_code == 200
    for number in range(6, 24):
        ask(bench.url, f"s{number}")
    assert second.asked > 0
    assert http.put(policy, json={"version": 2, "engine": "nobody:1"}).status_code == 404
    assert http.get(policy).json()["version"] == 1


def test_when_every_healthy_engine_lags_the_client_is_told_so(pair: Any, pooled: Any) -> None:
    bench = pooled(limits=QUICK)
    first, second = pair
    policy = f"{bench.url}/bridle/v1/policy"
    http.put(policy, json={"version": 1, "engine": first.name})
    ask(bench.url, "lamp")
    bench_engines = f"{bench.url}/bridle/v1/engines"
    assert http.delete(f"{bench_engines}/{first.name}").status_code == 200
    reply = ask(bench.url, "lamp")
    assert reply.status_code == 503
    assert "no engine serves policy version 1 yet" in reply.text
    assert http.delete(f"{bench_engines}/{second.name}").status_code == 409
    assert http.delete(f"{bench_engines}/{first.name}").status_code == 404


@pytest.mark.parametrize("url", ["http://:80", "http://[::1", "http://engine:99999"])
def test_an_engine_without_a_usable_address_is_refused(pooled: Any, url: str) -> None:
    bench = pooled()
    engines = f"{bench.url}/bridle/v1/engines"
    reply = http.post(engines, json={"url": url})
    assert reply.status_code == 422
    assert reply.json()["error"]["param"] == "url"
    assert len(http.get(engines).json()) == 2


def test_a_token_has_the_version_of_the_engine_that_sampled_it(pair: Any, pooled: Any) -> None:
    """The weights change engine by engine.

    While the first serves the new weights, a running call of the second still comes from the old
    ones.
    """
    bench = pooled()
    policy = f"{bench.url}/bridle/v1/policy"
    told = threading.Event()
    for member in pair:
        member.play = lambda _: ScriptedReply("The answer is four.", fault=Stall(30, 2, told))
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    with http.stream("POST", f"{bench.url}/s/lamp{CHAT}", json=body) as reply:
        for piece in reply.iter_raw():
            if b"answer" in piece:
                home, other = pair if pair[0].asked else pair[::-1]
                http.put(policy, json={"version": 1, "engine": other.name})
                told.set()
    assert [
        (run.start, run.version) for run in bench.reader.sampled(bench.call().id)[0].versions
    ] == [(0, 0)]
    assert not states(bench)[home.name]["usable"]


def test_an_engine_that_comes_back_under_another_name_is_called_by_it(
    model_dir: Path, start_proxy: Any
) -> None:
    def engine(name: str, port: int = 0) -> ScriptedEngine:
        return ScriptedEngine(
            model_dir, lambda _: ScriptedReply("Here."), served_model_name=name, port=port
        )

    with engine("spring") as first:
        bench = start_proxy(first.base_url, limits=Limits(health_check_s=0))
        assert ask(bench.url, "a").status_code == 200
    with engine("autumn", int(first.base_url.rpartition(":")[2])):
        assert ask(bench.url, "a").status_code == 200
    assert [call.model_served for call in bench.calls()] == ["spring", "autumn"]


def test_an_engine_can_be_added_while_the_proxy_runs(pair: Any, start_proxy: Any) -> None:
    bench = start_proxy(pair[0].url)
    engines = f"{bench.url}/bridle/v1/engines"
    for _ in range(2):
        added = http.post(engines, json={"url": pair[1].url + "/v1"})
        assert [state["name"] for state in added.json()] == [member.name for member in pair]
    for number in range(12):
        assert ask(bench.url, f"s{number}").status_code == 200
    assert pair[1].asked > 0
    assert http.post(engines, json={"url": "file:///etc/passwd"}).status_code == 422


def test_a_version_goes_back_only_when_that_is_meant(bench: Any) -> None:
    policy = f"{bench.url}/bridle/v1/policy"
    http.put(policy, json={"version": 5})
    assert http.put(policy, json={"version": 4}).status_code == 409
    assert http.put(policy, json={"version": 4, "back": True}).json()["version"] == 4
    assert ask(bench.url, "lamp").status_code == 200
    assert bench.call().version_start == 4


def test_a_removed_engine_finishes_what_it_runs(pair: Any, pooled: Any, until: Any) -> None:
    bench = pooled()
    removed = threading.Event()
    for member in pair:
        member.play = lambda _: ScriptedReply("The answer is four.", fault=Stall(30, 1, removed))
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(ask, bench.url, "lamp")
        until(lambda: any(state["running"] for state in states(bench).values()))
        home = next(name for name, state in states(bench).items() if state["running"])
        threading.Timer(0.2, removed.set).start()
        assert http.delete(f"{bench.url}/bridle/v1/engines/{home}").status_code == 200
        assert removed.is_set(), "the removal waits for it"
        assert running.result(30).status_code == 200


async def test_an_engine_that_is_removed_while_it_is_to_be_checked_does_not_end_the_checks(
    pair: Any, tmp_path: Path
) -> None:
    first, second = pair
    settings = ProxySettings(
        first.url,
        str(tmp_path / "bridle.db"),
        more_engines=(second.url,),
        limits=Limits(health_check_s=0),
    )
    pool = EnginePool(settings, settings.engine_urls)
    await pool.start()
    checking = asyncio.create_task(pool.check())
    await asyncio.sleep(0)  # its questions are tasks that have not run yet
    (removed,) = pool.set_engines({first.url: Served(0, None, 0)})
    assert removed.name == second.name
    await removed.retired()
    assert await checking, "the other one is well"
    await pool.close()


def test_a_reset_before_the_reply_is_asked_again(start_proxy: Any) -> None:
    """A lone engine is asked again too; the second answer is the only one that counts."""
    good = b'{"choices":[{"index":0,"message":{"content":"Hi"},"finish_reason":"stop"}]}'
    asked: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while len(asked) < 2:
            connection, _address = listener.accept()
            with connection:
                request = connection.recv(65536)
                if not request.startswith(b"POST"):
                    continue
                asked.append(request)
                if len(asked) == 2:
                    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(good)
                    connection.sendall(head + good)

    server = threading.Thread(target=serve)
    server.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    bench = start_proxy(url, model="m", limits=Limits(health_check_s=0))
    assert ask(bench.url, "lamp").status_code == 200
    server.join(10)
    listener.close()
    assert len(asked) == 2
    assert notes(bench).count("upstream_retry") == 1
    assert bench.call().status is CallStatus.COMPLETE


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/models/"])
def test_an_engine_is_known_by_any_of_its_addresses(path: str) -> None:
    assert engine_base(f"http://127.0.0.1:8000/base{path}") == "http://127.0.0.1:8000/base"


def test_calls_reach_an_engine_whose_whole_route_was_given(stage: Any, start_proxy: Any) -> None:
    bench = start_proxy(f"{stage.engine.base_url}/v1/chat/completions")
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert http.post(f"{bench.url}/v1/chat/completions", json=body).status_code == 200
