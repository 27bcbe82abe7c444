"""An engine that comes back with other weights than were published to it gets no calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.contract.client import EngineClient
from bridle.engine.embedded import EmbeddedEngine
from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.proxy.settings import Limits
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.store.records import CallStatus

MODEL = "tiny-policy"
CHAT = "/v1/chat/completions"
http = httpx.Client(timeout=60, trust_env=False)
CHECKED = Limits(health_check_s=0.05)
UNCHECKED = Limits(health_check_s=0)


class Member:
    """A scripted engine on a port that it keeps, so that it can die and come back as it began."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self.engine = self._make(0)
        self.engine.__enter__()
        self.url = self.engine.base_url
        self.name = self.url.removeprefix("http://")

    @property
    def asked(self) -> int:
        return len(self.engine.requests)

    def load(self, directory: Path) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        http.post(f"{self.url}/collective_rpc", json=reload).raise_for_status()

    def stop(self) -> None:
        self.engine.__exit__()

    def restart(self) -> None:
        self.stop()
        self.engine = self._make(int(self.url.rpartition(":")[2]))
        self.engine.__enter__()

    def _make(self, port: int) -> ScriptedEngine:
        return ScriptedEngine(
            self._model_dir, lambda _: ScriptedReply("The answer is four."),
            served_model_name=MODEL, port=port,
        )  # fmt: skip


@pytest.fixture
def make_member(model_dir: Path) -> Iterator[Callable[[], Member]]:
    members: list[Member] = []

    def make() -> Member:
        members.append(Member(model_dir))
        return members[-1]

    yield make
    for member in members:
        member.stop()


@pytest.fixture
def member(make_member: Callable[[], Member]) -> Member:
    return make_member()


def ask(url: str, session: str = "lamp") -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": "two and two?"}]}
    return http.post(f"{url}/s/{session}{CHAT}", json=body)


def publish(bench: Any, version: int, **fields: Any) -> None:
    reply = http.put(f"{bench.url}/bridle/v1/policy", json={"version": version, **fields})
    reply.raise_for_status()


def state(bench: Any, member: Member) -> dict[str, Any]:
    found = http.get(f"{bench.url}/bridle/v1/engines").json()
    return next(one for one in found if one["name"] == member.name)


def versions(bench: Any) -> list[int | None]:
    """Return the version that each complete call began with."""
    sampled = [call for call in bench.calls() if call.status is CallStatus.COMPLETE]
    return [call.version_start for call in sampled]


def test_calls_are_refused_when_the_engine_came_back_with_other_weights(
    member: Member, start_proxy: Any, tmp_path: Path, until: Any, caplog: Any
) -> None:
    bench = start_proxy(member.url, limits=CHECKED)
    member.load(tmp_path)
    publish(bench, 2)
    assert ask(bench.url).status_code == 200
    with caplog.at_level(logging.INFO, "bridle.proxy"):
        member.restart()
        until(lambda: state(bench, member)["changed"])
    lines = [line.message for line in caplog.records]
    assert lines.count("engine_changed") == 1
    assert not state(bench, member)["usable"]
    refused = ask(bench.url)
    assert refused.status_code == 503
    told = refused.json()["error"]["message"]
    assert told == "the engine has been restarted with other weights than policy version 2"
    assert member.name not in refused.text
    assert int(refused.headers["retry-after"]) >= 1
    assert member.asked == 0
    metrics = http.get(f"{bench.url}/metrics").text
    assert f'bridle_engine_changes_total{{engine="{member.name}"}} 1.0' in metrics
    assert f'bridle_engine_usable{{engine="{member.name}"}} 0.0' in metrics
    assert http.get(f"{bench.url}/readyz").status_code == 503
    member.load(tmp_path / "..")
    publish(bench, 3)
    assert ask(bench.url).status_code == 200
    assert versions(bench) == [2, 3]


DIALECTS = {
    "responses": ("/v1/responses", {"model": "m", "input": "hi"}),
    "messages": (
        "/v1/messages",
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    ),
    "google": (
        "/v1beta/models/m:generateContent",
        {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    ),
}


def test_the_first_call_after_a_restart_finds_it_out_without_a_check(
    member: Member, start_proxy: Any, tmp_path: Path
) -> None:
    bench = start_proxy(member.url, model=MODEL, limits=UNCHECKED)
    member.load(tmp_path)
    publish(bench, 2)
    assert ask(bench.url).status_code == 200
    member.restart()
    assert ask(bench.url).status_code == 503
    for path, body in DIALECTS.values():
        reply = http.post(bench.url + path, json=body)
        assert reply.status_code == 503
        assert "other weights than policy version 2" in reply.json()["error"]["message"]
    assert member.asked == 0
    assert versions(bench) == [2]
    assert state(bench, member)["ejections"] == 0


def test_an_engine_that_tells_the_mark_again_is_used_again(
    member: Member, start_proxy: Any, tmp_path: Path, until: Any
) -> None:
    """Its supervisor gave it the right weights: before anybody noticed, or afterwards."""
    bench = start_proxy(member.url, limits=CHECKED)
    publish(bench, 2)
    member.restart()
    until(lambda: state(bench, member)["usable"])
    assert ask(bench.url).status_code == 200
    assert state(bench, member)["changes"] == 0
    member.load(tmp_path)
    publish(bench, 3)
    member.restart()
    until(lambda: state(bench, member)["changed"])
    member.load(tmp_path)
    until(lambda: state(bench, member)["usable"])
    assert ask(bench.url).status_code == 200
    assert versions(bench) == [2, 3]


def test_the_changed_engine_is_left_out_and_its_sessions_move(
    make_member: Any, start_proxy: Any, tmp_path: Path
) -> None:
    members = make_member(), make_member()
    bench = start_proxy(members[0].url, more_engines=(members[1].url,), limits=UNCHECKED)
    for member in members:
        member.load(tmp_path)
    publish(bench, 2)
    assert ask(bench.url).status_code == 200
    home, other = members if members[0].asked else members[::-1]
    home.restart()
    for _ in range(3):
        assert ask(bench.url).status_code == 200
    assert (home.asked, other.asked) == (0, 3)
    assert versions(bench) == [2] * 4
    home.load(tmp_path)
    publish(bench, 2, engine=home.name)
    assert state(bench, home)["usable"]


def test_a_restarted_proxy_remembers_the_mark(
    member: Member, start_proxy: Any, tmp_path: Path
) -> None:
    bench = start_proxy(member.url, limits=UNCHECKED)
    member.load(tmp_path)
    publish(bench, 2)
    bench.server.stop()
    again = start_proxy(member.url, limits=UNCHECKED)
    assert ask(again.url).status_code == 200
    again.server.stop()
    member.restart()
    last = start_proxy(member.url, limits=UNCHECKED)
    assert ask(last.url).status_code == 503
    assert versions(last) == [2]


def test_an_engine_that_nobody_published_to_may_change_as_it_likes(
    member: Member, start_proxy: Any, tmp_path: Path, until: Any
) -> None:
    bench = start_proxy(member.url, limits=CHECKED)
    assert ask(bench.url).status_code == 200
    member.load(tmp_path)
    member.restart()
    until(lambda: state(bench, member)["usable"])
    assert ask(bench.url).status_code == 200
    assert state(bench, member)["changes"] == 0


def test_an_added_engine_is_held_to_what_was_said_of_it(
    make_member: Any, start_proxy: Any, tmp_path: Path
) -> None:
    first, second = make_member(), make_member()
    bench = start_proxy(first.url, limits=UNCHECKED)
    second.load(tmp_path)
    http.post(f"{bench.url}/bridle/v1/engines", json={"url": second.url}).raise_for_status()
    http.delete(f"{bench.url}/bridle/v1/engines/{first.name}").raise_for_status()
    assert ask(bench.url).status_code == 200
    second.restart()
    assert ask(bench.url).status_code == 503


def test_an_embedded_engine_is_known_by_its_weights_and_not_by_a_count(
    start_proxy: Any, tmp_path: Path
) -> None:
    """It was started with version 7, and its restart counts its reloads from 0 again as well."""
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=512)
    first, seventh = tmp_path / "first", tmp_path / "seventh"
    for seed, directory in enumerate((first, seventh)):
        vocabulary = train_tokenizer(directory, ["The answer is four. two and two?"] * 20)
        make_policy(directory, shape, vocab_size=vocabulary, seed=seed)
    with EmbeddedEngine(seventh, served_model_name=MODEL) as engine:
        port = int(engine.base_url.rpartition(":")[2])
        bench = start_proxy(engine.base_url, limits=UNCHECKED)
        publish(bench, 7)
        assert ask(bench.url).status_code == 200
    with EmbeddedEngine(first, served_model_name=MODEL, port=port) as engine:
        assert engine.policy_version == 0
        assert ask(bench.url).status_code == 503
        with EngineClient(engine.base_url) as control:
            control.reload_weights(seventh)
        assert http.get(f"{bench.url}/readyz").status_code == 200
        assert ask(bench.url).status_code == 200
    with EmbeddedEngine(seventh, served_model_name=MODEL, port=port):
        assert ask(bench.url).status_code == 200
    assert versions(bench) == [7, 7, 7]
