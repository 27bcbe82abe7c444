"""Sessions are sealed by hand or when they are idle, and exported one by one without surprises."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from click.testing import Result

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.reconstruct.conditions import Condition
from bridle.run.feed import feed
from bridle.store.operations import leases
from bridle.store.reading.queries import Reader

Bridle = Callable[..., Result]


def said(base_url: str, session: str = "") -> httpx.Response:
    path = f"/s/{session}/v1/chat/completions" if session else "/v1/chat/completions"
    asked = {"model": "m", "messages": [{"role": "user", "content": f"Hello from {session}"}]}
    return httpx.post(f"{base_url}{path}", json=asked, timeout=30, trust_env=False)


def test_a_sealed_session_takes_no_more_calls(
    bridle: Bridle, store: str, recorded: str, proxy_url: str
) -> None:
    assert said(proxy_url, recorded).status_code == 200
    sealed = bridle("seal", "last", "--outcome", "done", "--store", store, "--proxy", proxy_url)
    assert sealed.stdout.endswith(" is sealed: done\n")
    assert said(proxy_url, recorded).status_code == 403
    again = bridle("seal", recorded, "--store", store)
    assert again.stdout.endswith(" is sealed already: done\n")
    other = said(proxy_url, "other").headers["x-bridle-session"]
    nobody = ("--proxy", "http://127.0.0.1:9", "--store", store)
    assert bridle("seal", "other", *nobody).stdout == f"{other} is sealed: completed\n"
    assert bridle("seal", recorded, "--outcome", "x" * 40, "--store", store).exit_code == 2


def test_an_idle_session_without_a_key_is_sealed_and_reaches_the_feed(
    model_dir: Path, store: str, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    monkeypatch.setattr(leases, "SETTLE_S", -1.0)
    with (
        ScriptedEngine(model_dir, lambda _: ScriptedReply("It is 5.")) as engine,
        ProxyServer(
            ProxySettings(engine.base_url, store, seal_idle_s=0.5), routers=[feed]
        ) as proxy,
        Reader(store) as reader,
    ):
        opened = httpx.post(f"{proxy.base_url}/bridle/v1/sessions", json={}).json()
        key = {"authorization": f"Bearer {opened['key']}"}
        asked = {"model": "m", "messages": [{"role": "user", "content": "with a key"}]}
        httpx.post(f"{proxy.base_url}/v1/chat/completions", json=asked, headers=key)
        idle = said(proxy.base_url).headers["x-bridle-session"]
        until(lambda: reader.session(idle).outcome == "idle")
        assert reader.session(opened["id"]).sealed_at is None
        lease = httpx.post(f"{proxy.base_url}/bridle/v1/trajectories/me/lease", timeout=30)
        assert [json.loads(line)["session_id"] for line in lease.text.splitlines()] == [idle]


def test_one_session_is_exported_and_no_file_is_replaced_unasked(
    bridle: Bridle, store: str, recorded: str, proxy_url: str, tmp_path: Path
) -> None:
    said(proxy_url, "other")
    path = tmp_path / "one.jsonl"
    done = bridle("export", path, "--session", recorded, "--store", store)
    assert done.stdout.startswith(f"{path}: 1 row of 1 session\n")
    before = path.read_bytes()
    refused = bridle("export", path, "--store", store)
    assert refused.exit_code == 1
    assert refused.stderr == f"bridle: {path} is there already: --force replaces it\n"
    assert path.read_bytes() == before
    assert bridle("export", path, "--force", "--store", store).exit_code == 0
    assert len(path.read_text().splitlines()) == 2
    assert bridle("export", tmp_path / "x.jsonl", "--session", "nope", "--store", store).exit_code


def test_a_table_has_a_row_for_each_message_and_no_invented_number(
    bridle: Bridle, store: str, recorded: str, tmp_path: Path
) -> None:
    path = tmp_path / "talk.csv"
    assert bridle("export", path, "--store", store).exit_code == 0
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["role"] for row in rows] == ["user", "assistant", "tool", "assistant"]
    assert json.loads(rows[1]["tool_calls"])[0]["function"]["name"] == "add"
    assert [row["trained"] for row in rows] == ["False", "True", "False", "True"]
    assert {row["rewards"] for row in rows} == {"{}"}
    assert {row["outcome"] for row in rows} == {""}


def test_two_equals_signs_mean_one() -> None:
    assert Condition.parse("harness==pi") == Condition.parse("harness=pi")
