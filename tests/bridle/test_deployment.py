"""``bridle doctor --deployment`` and ``bridle config``: what runs here, and with what."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import jsonschema
import msgspec
import pytest
from click.testing import Result

from bridle.run.config import RunConfig
from bridle.run.deployment import examine_clock, examine_disk, examine_keys

Bridle = Callable[..., Result]
RUN = '[tasks]\nsource = "t.jsonl"\n[agent]\nname = "codex"\n[policy]\nmodel = "m"\n'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BRIDLE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_deployment_in_order_is_examined_part_by_part(
    bridle: Bridle, proxy_url: str, store: str
) -> None:
    result = bridle("doctor", "--deployment", "--proxy", proxy_url, "--store", store, "--json")
    found = json.loads(result.output)
    assert (result.exit_code, found["broken"]) == (0, [])
    assert {"store", "keys", "disk", "versions", "clock"} <= found.keys()
    assert "the clock of" in found["clock"]["lines"][0]


def test_a_proxy_that_does_not_answer_is_broken(bridle: Bridle, store: str) -> None:
    result = bridle("doctor", "--deployment", "--proxy", "http://127.0.0.1:9", "--store", store)
    assert result.exit_code == 1
    assert "BROKEN  clock" in result.output
    assert "name it by --proxy" in result.output


def test_a_key_that_others_can_read_or_nobody_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir()
    (home / "admin.key").write_text("secret")
    (home / "admin.key").chmod(0o644)
    monkeypatch.setenv("BRIDLE_UPSTREAM_API_KEY_FILE", str(home / "nothing"))

    found = examine_keys()

    assert f"chmod o= {home / 'admin.key'}" in found["broken"]
    assert "BRIDLE_UPSTREAM_API_KEY_FILE cannot be read" in found["broken"]
    assert "secret" not in str(found)


def test_a_disk_that_is_nearly_full_is_broken(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    found = examine_disk("sqlite:///elsewhere/bridle.db")
    assert "has 1.0 GB free, less than 2" in found["broken"]


def test_clocks_that_are_apart_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    request = httpx.Request("GET", "http://elsewhere")
    late = httpx.Response(200, json={"status": "ok", "time": 1.0}, request=request)
    monkeypatch.setattr(httpx, "get", lambda *_, **__: late)
    assert "behind: set both by NTP" in examine_clock("http://elsewhere")["broken"]


def test_settings_are_shown_without_secrets_and_meet_their_schema(
    bridle: Bridle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIDLE_ADMIN_KEY", "very secret")
    monkeypatch.setenv("BRIDLE_STORE", "postgresql://user:password@host/db")
    file = tmp_path / "run.toml"
    file.write_text(RUN)

    result = bridle("config", file, "--set", "groups.size=4")

    assert result.exit_code == 0, result.output
    assert "secret" not in result.output
    assert "password" not in result.output
    found = json.loads(result.output)
    assert found["environment"]["BRIDLE_ADMIN_KEY"] == "set"
    assert found["run"]["groups"]["size"] == 4
    schema = json.loads(bridle("config", "--schema").output)
    jsonschema.validate(found["run"], schema)
    assert msgspec.convert(found["run"], RunConfig).groups.size == 4
    found["run"]["groups"]["size"] = 0
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found["run"], schema)
