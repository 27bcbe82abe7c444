"""Our own servers with keys, as a run starts them, for tests that play the attacker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.store.reading.queries import Reader

ADMIN = "admin-key-of-the-test-0123456789"
UPSTREAM = "upstream-key-of-the-test-0123456789"
CHAT = "/v1/chat/completions"
ASK = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 plus 2?"}]}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    train_tokenizer(directory, ["What is 2 plus 2? The answer is 4."] * 20, vocab_size=400)
    return directory


@dataclass
class Lab:
    """A proxy with an admin key and an upstream key, and its store."""

    proxy: ProxyServer
    engine: ScriptedEngine
    reader: Reader
    store: Path

    @property
    def url(self) -> str:
        return self.proxy.base_url

    def ask(self, method: str, path: str, key: str | None = None, **body: Any) -> httpx.Response:
        """A request with the key as a bearer token, or with none."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.request(method, self.url + path, headers=headers, **body)

    def session(self, **fields: Any) -> dict[str, Any]:
        made = self.ask("POST", "/bridle/v1/sessions", ADMIN, json=fields)
        assert made.status_code == 201, made.text
        return dict(made.json())


@pytest.fixture
def lab(request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path) -> Iterator[Lab]:
    """Its settings may be changed: ``parametrize("lab", [{…}], indirect=True)``."""
    store = tmp_path / "bridle.db"
    with ScriptedEngine(
        model_dir, lambda _: ScriptedReply("4"), served_model_name="policy"
    ) as engine:
        settings = ProxySettings(
            engine.base_url,
            f"sqlite:///{store}",
            tokenizer_dir=model_dir,
            admin_key=ADMIN,
            upstream_api_key=UPSTREAM,
            **getattr(request, "param", {}),
        )
        with ProxyServer(settings, grace_s=1) as proxy, Reader(str(store)) as reader:
            yield Lab(proxy, engine, reader, store)
