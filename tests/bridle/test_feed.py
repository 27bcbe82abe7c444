"""The trajectory feed: at least once, on leases, exact in both forms."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest

import bridle.run.feed
from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.harnesses.client import Client, ControlError
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.reconstruct.episodes import episode_of
from bridle.reconstruct.samples.rules import DEFAULT_RULES, SampleRules
from bridle.reconstruct.session import LoadedSession
from bridle.run.feed import feed
from bridle.store.operations import leases
from bridle.store.reading.queries import Reader


class Api(httpx.Client):
    def sealed(self, reward: float | None = None) -> str:
        """A session of one call, sealed."""
        opened = self.post("/bridle/v1/sessions", json={"harness": "pi"}).json()
        reply = self.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": "What is 2?"}]},
            headers={"authorization": f"Bearer {opened['key']}"},
        )
        assert reply.status_code == 200
        session: str = opened["id"]
        if reward is not None:
            score = {"name": "score", "value": reward}
            self.post(f"/bridle/v1/sessions/{session}/rewards", json=score)
        self.post(f"/bridle/v1/sessions/{session}/seal", json={})
        return session

    def lease(self, consumer: str = "verl", **query: Any) -> tuple[str | None, list[str]]:
        """The lease, and the ids of its sessions."""
        told = self.post(f"/bridle/v1/trajectories/{consumer}/lease", params=query)
        if told.status_code == 204:
            return None, []
        assert told.status_code == 200, told.text
        lines = [json.loads(line) for line in told.text.splitlines()]
        return told.headers["x-bridle-lease"], [line["session_id"] for line in lines]

    def ack(self, lease: str | None, consumer: str = "verl") -> int:
        return self.post(f"/bridle/v1/trajectories/{consumer}/leases/{lease}/ack").status_code


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealed a moment ago is long enough: there is one writer."""
    monkeypatch.setattr(leases, "SETTLE_S", -1.0)
    monkeypatch.setattr(bridle.run.feed, "SETTLE_S", -1.0)


@pytest.fixture
def settings(model_dir: Path, store: str) -> Iterator[ProxySettings]:
    with ScriptedEngine(
        model_dir, lambda _: ScriptedReply("It is 2."), served_model_name="m"
    ) as engine:
        yield ProxySettings(engine.base_url, store, tokenizer_dir=model_dir)


@pytest.fixture
def api(settings: ProxySettings) -> Iterator[Api]:
    with (
        ProxyServer(settings, routers=[feed]) as proxy,
        Api(base_url=proxy.base_url, timeout=30) as api,
    ):
        yield api


def test_what_is_leased_is_not_handed_out_again_and_acknowledged_never(api: Api) -> None:
    made = [api.sealed() for _ in range(3)]
    first, two = api.lease(limit=2)
    second, one = api.lease(limit=2)
    assert (two, one) == (made[:2], made[2:])
    assert api.lease() == (None, [])
    assert (api.ack(second), api.ack(first)) == (200, 200)
    assert api.lease() == (None, [])
    assert api.ack(first) == 404


async def test_the_client_leases_acknowledges_and_gives_back(api: Api) -> None:
    made = [api.sealed(), api.sealed(reward=0.5)]
    async with Client(str(api.base_url)) as client:
        first = await client.lease("own", rewarded=True)
        assert first is not None
        assert [one["session_id"] for one in first.sessions] == made[1:]
        assert first.sessions[0]["samples"][0]["token_ids"]
        await client.acknowledge(first)
        second = await client.lease("own", limit=1)
        assert second is not None
        assert [one["session_id"] for one in second.sessions] == made[:1]
        assert await client.lease("own") is None
        await client.release(second)
        with pytest.raises(ControlError, match="there is no lease"):
            await client.release(second)
        again = await client.lease("own", run=None)
        assert again is not None
        assert await client.lease("own", run="none") is None
        await client.acknowledge(again)
        assert await client.lease("own") is None


async def test_a_lease_from_another_web_server_is_refused() -> None:
    async with Client("http://other.example") as client:
        client._http._transport = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>"))
        with pytest.raises(ControlError, match="not as Bridle does"):
            await client.lease("own")


def test_each_consumer_gets_everything(api: Api) -> None:
    made = [api.sealed()]
    assert api.lease("trl")[1] == api.lease("verl")[1] == made


def test_a_lease_that_runs_out_or_is_released_is_handed_out_again(api: Api) -> None:
    made = [api.sealed()]
    lease, _ = api.lease(lease_s=0.05)
    time.sleep(0.1)
    assert api.ack(lease) == 404, "it is another's by now"
    again, sessions = api.lease()
    assert sessions == made
    assert api.delete(f"/bridle/v1/trajectories/verl/leases/{again}").status_code == 204
    assert api.delete(f"/bridle/v1/trajectories/verl/leases/{again}").status_code == 404
    assert api.lease()[1] == made


def test_a_restarted_proxy_goes_on_with_the_leases_and_what_was_acknowledged(
    settings: ProxySettings,
) -> None:
    with ProxyServer(settings, routers=[feed]) as proxy, Api(base_url=proxy.base_url) as api:
        made = [api.sealed() for _ in range(4)]
        held, _ = api.lease(limit=1)
        second, _ = api.lease(limit=1)
        lost, _ = api.lease(limit=1, lease_s=0.05)
        assert api.ack(second) == 200
    time.sleep(0.1)
    with ProxyServer(settings, routers=[feed]) as proxy, Api(base_url=proxy.base_url) as api:
        assert api.lease()[1] == [made[2], made[3]]
        assert (api.ack(lost), api.ack(held)) == (404, 200)


def test_two_proxies_on_one_store_share_a_consumers_sessions_out(settings: ProxySettings) -> None:
    with (
        ProxyServer(settings, routers=[feed]) as here,
        ProxyServer(settings, routers=[feed]) as there,
        Api(base_url=here.base_url, timeout=30) as one,
        Api(base_url=there.base_url, timeout=30) as two,
    ):
        made = [one.sealed(), two.sealed(), one.sealed()]
        first, sessions = one.lease(limit=2)
        second, others = two.lease(limit=2)
        assert (sessions, others) == (made[:2], made[2:])
        assert one.lease() == two.lease() == (None, [])
        assert two.ack(first) == 200, "whichever proxy is asked"
        assert one.delete(f"/bridle/v1/trajectories/verl/leases/{second}").status_code == 204
        assert two.lease()[1] == made[2:]


@pytest.fixture
def two_stores(settings: ProxySettings, tmp_path: Path) -> Iterator[tuple[Api, Api, Path]]:
    """A proxy whose feed has the store of another one too, and that other one."""
    other_store = tmp_path / "other.db"
    other_settings = replace(settings, store_url=str(other_store))
    with ProxyServer(other_settings, routers=[feed]) as other:
        both_settings = replace(settings, feed_stores=(str(other_store),))
        with (
            ProxyServer(both_settings, routers=[feed]) as both,
            Api(base_url=both.base_url, timeout=30) as feeds,
            Api(base_url=other.base_url, timeout=30) as other_api,
        ):
            yield feeds, other_api, other_store


def test_sessions_of_several_stores_come_once_through_one_feed(
    two_stores: tuple[Api, Api, Path],
) -> None:
    feeds, other, _ = two_stores
    made = {feeds.sealed(), feeds.sealed(), other.sealed(), other.sealed()}
    held = [feeds.lease(limit=2) for _ in range(2)]
    assert {session for _, sessions in held for session in sessions} == made
    assert {len(sessions) for _, sessions in held} == {2}, "a lease is of one store"
    assert feeds.lease() == other.lease() == (None, [])
    (acknowledged, done), (given_up, again) = held
    assert feeds.ack(acknowledged) == 200
    assert feeds.delete(f"/bridle/v1/trajectories/verl/leases/{given_up}").status_code == 204
    assert feeds.lease()[1] == again
    assert feeds.lease() == (None, []), done
    assert feeds.ack("0123456789ab.lease_x") == 404, "a store that is not behind this feed"


def test_a_store_that_is_away_does_not_hold_up_the_others_of_a_feed(
    two_stores: tuple[Api, Api, Path],
) -> None:
    feeds, _, store = two_stores
    own = feeds.sealed()
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("ALTER TABLE leases RENAME TO leases_elsewhere")
    assert feeds.lease()[1] == [own]
    away = feeds.post("/bridle/v1/trajectories/verl/lease")
    assert away.status_code == 503, "there may be sessions in the other one"


def test_open_sessions_wait_and_unrewarded_ones_when_asked(api: Api) -> None:
    api.post("/bridle/v1/sessions", json={})
    plain, scored = api.sealed(), api.sealed(reward=0.5)
    assert api.lease("a", rewarded=True)[1] == [scored]
    assert api.lease("a")[1] == [plain]
    late = {"name": "score", "value": 1.0}
    api.post(f"/bridle/v1/sessions/{plain}/rewards", json=late)
    assert api.lease("b", rewarded=True)[1] == [plain, scored]


def test_both_forms_carry_the_samples_exactly(api: Api, store: str) -> None:
    session = api.sealed(reward=0.1 + 0.2)
    with Reader(store) as reader:
        (sample,) = episode_of(LoadedSession.load(reader, session)).samples
    line = json.loads(api.post("/bridle/v1/trajectories/a/lease").text)
    told = line["samples"][0]
    assert line["rewards"] == {"score": 0.1 + 0.2}
    assert SampleRules.from_data(line["rules"]) == DEFAULT_RULES
    assert line["tokens"]["trainable"] == int(sample.mask.sum()) > 0
    arrow = api.post("/bridle/v1/trajectories/b/lease", params={"format": "arrow"})
    assert arrow.headers["content-type"] == "application/vnd.apache.arrow.stream"
    table = pa.ipc.open_stream(arrow.content).read_all()
    assert json.loads(table.schema.metadata[b"bridle.rules"]) == line["rules"]
    (row,) = table.to_pylist()
    assert row["reward.score"] == 0.1 + 0.2
    for found in (told, row):
        assert found["token_ids"] == sample.token_ids.tolist()
        assert found["mask"] == sample.mask.tolist()
        assert np.float32(found["logprobs"]).tobytes() == sample.logprobs.tobytes()
        assert found["versions"] == sample.versions.tolist()


def test_a_cursor_pages_through_everything_and_keeps_no_account(api: Api) -> None:
    made = [api.sealed() for _ in range(3)]
    seen: list[str] = []
    query: dict[str, Any] = {"limit": 2}
    while (page := api.get("/bridle/v1/trajectories", params=query)).status_code == 200:
        seen += [json.loads(line)["session_id"] for line in page.text.splitlines()]
        query["cursor"] = page.headers["x-bridle-cursor"]
    assert seen == made
    late = api.sealed()
    page = api.get("/bridle/v1/trajectories", params=query)
    assert json.loads(page.text)["session_id"] == late
    assert api.get("/bridle/v1/trajectories", params={"cursor": "%%"}).status_code == 422


def test_the_cursor_of_a_feed_that_has_nothing_yet_pages_from_the_beginning(api: Api) -> None:
    cursor = None
    for _ in range(2):
        page = api.get("/bridle/v1/trajectories", params={"cursor": cursor})
        assert page.status_code == 204, page.text
        cursor = page.headers["x-bridle-cursor"]
    made = api.sealed()
    page = api.get("/bridle/v1/trajectories", params={"cursor": cursor})
    assert json.loads(page.text)["session_id"] == made


def test_the_feed_is_not_for_a_sessions_own_key(settings: ProxySettings) -> None:
    closed = replace(settings, admin_key="secret")
    with ProxyServer(closed, routers=[feed]) as proxy, Api(base_url=proxy.base_url) as api:
        admin = {"authorization": "Bearer secret"}
        opened = api.post("/bridle/v1/sessions", json={}, headers=admin).json()
        own = {"authorization": f"Bearer {opened['key']}"}
        assert api.post("/bridle/v1/trajectories/a/lease", headers=own).status_code == 403
        assert api.get("/bridle/v1/trajectories", headers=admin).status_code == 204
        paths = api.get("/openapi.json").json()["paths"]
        assert "/bridle/v1/trajectories/{consumer}/lease" in paths


@pytest.mark.parametrize(
    ("path", "allow"),
    [("/{}", "GET"), ("/{}/a/lease", "POST"), ("/{}/a/leases/b", "DELETE")],
)
def test_a_method_that_the_feed_does_not_serve_is_refused(api: Api, path: str, allow: str) -> None:
    refused = api.put(f"/bridle/v1{path.format('trajectories')}")
    assert (refused.status_code, refused.headers["allow"]) == (405, allow)
    assert "PUT is not served at" in refused.json()["error"]["message"]


def test_the_openapi_names_the_forms_of_the_feed_and_that_there_may_be_none(api: Api) -> None:
    paths = api.get("/openapi.json").json()["paths"]
    lease = paths["/bridle/v1/trajectories/{consumer}/lease"]["post"]["responses"]
    assert set(lease["200"]["content"]) == {
        "application/x-ndjson",
        "application/vnd.apache.arrow.stream",
    }
    assert "204" in lease
