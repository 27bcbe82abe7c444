"""Every command that starts a proxy gives it an admin key."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.errors import UsageError
from bridle.run.environment import admin_key_for, made_admin_key
from bridle.run.services import Service
from bridle.run.stack import proxy

CHAT = "/v1/chat/completions"
ASK = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 plus 2?"}]}


@pytest.fixture
def engine_url(model_dir: Any) -> Iterator[str]:
    with ScriptedEngine(
        model_dir, lambda _: ScriptedReply("4"), served_model_name="policy"
    ) as engine:
        yield engine.base_url


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BRIDLE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("BRIDLE_ADMIN_KEY", raising=False)
    return tmp_path / "home"


def test_bridle_proxy_makes_a_key_that_only_its_user_can_read(
    home: Path, engine_url: str, tmp_path: Path
) -> None:
    arguments = [
        "proxy",
        "--upstream",
        engine_url,
        "--store",
        str(tmp_path / "s.db"),
        "--port",
        "0",
    ]
    with Service(arguments, tmp_path / "proxy.log") as service:
        assert httpx.get(f"{service.url}/bridle/v1/sessions").status_code == 403
        assert httpx.post(service.url + CHAT, json=ASK).status_code == 200, "recording needs no key"
        key = admin_key_for(service.url)
        opened = httpx.get(
            f"{service.url}/bridle/v1/sessions", headers={"authorization": f"Bearer {key}"}
        )
        assert opened.status_code == 200
    assert stat.S_IMODE((home / "admin.key").stat().st_mode) == 0o600
    assert admin_key_for("http://elsewhere.example") is None, "it is sent to this machine only"
    assert made_admin_key() == key, "the next proxy has the same"


def test_a_folder_that_keeps_no_key_is_said_with_the_remedy(home: Path) -> None:
    home.write_text("a file")
    with pytest.raises(UsageError, match="set BRIDLE_ADMIN_KEY"):
        made_admin_key()


def test_a_run_s_own_proxy_asks_for_a_key_that_is_in_no_command_line_and_no_environment(
    engine_url: str, tmp_path: Path, model_dir: Path
) -> None:
    with proxy(engine_url, model_dir, str(tmp_path / "s.db"), tmp_path) as (url, key):
        assert httpx.get(f"{url}/bridle/v1/engines").status_code == 401
        assert httpx.post(url + CHAT, json=ASK).status_code == 401
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.get(f"{url}/bridle/v1/engines", headers=headers).status_code == 200
        for name in ("cmdline", "environ"):
            for entry in Path("/proc").glob(f"[0-9]*/{name}"):
                try:
                    assert key.encode() not in entry.read_bytes(), entry
                except OSError:
                    continue
