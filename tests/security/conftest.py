"""Our own servers with keys, as a run starts them, for tests that play the attacker."""

from __future__ import annotations

import itertools
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.tiny import TinyShape, make_policy
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
        return httpx.request(method, self.url + path, headers=headers, timeout=60, **body)

    def session(self, **fields: Any) -> dict[str, Any]:
        made = self.ask("POST", "/bridle/v1/sessions", ADMIN, json=fields)
        assert made.status_code == 201, made.text
        return dict(made.json())


@contextmanager
def opened(model_dir: Path, store: Path, **settings: Any) -> Iterator[Lab]:
    """Yield a lab with a store at a path."""
    with ScriptedEngine(
        model_dir, lambda _: ScriptedReply("4"), served_model_name="policy"
    ) as engine:
        chosen = ProxySettings(
            engine.base_url,
            f"sqlite:///{store}",
            tokenizer_dir=model_dir,
            admin_key=ADMIN,
            upstream_api_key=UPSTREAM,
            **settings,
        )
        with ProxyServer(chosen, grace_s=1) as proxy, Reader(str(store)) as reader:
            yield Lab(proxy, engine, reader, store)


@pytest.fixture
def lab(request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path) -> Iterator[Lab]:
    """Its settings may be changed: ``parametrize("lab", [{…}], indirect=True)``."""
    with opened(model_dir, tmp_path / "bridle.db", **getattr(request, "param", {})) as made:
        yield made


@pytest.fixture(scope="session")
def attack_policy() -> Iterator[Path]:
    """A tiny policy that every user can read; a scripted engine needs its tokenizer alone."""
    with tempfile.TemporaryDirectory(prefix="bridle-policy-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        size = train_tokenizer(folder, ["Question one? 0123456789 abcdef"] * 4, vocab_size=320)
        shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=512)
        make_policy(folder, shape, vocab_size=size, seed=3)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        yield folder


@pytest.fixture
def attack_engine(attack_policy: Path) -> Iterator[str]:
    """The URL of an engine whose replies differ."""
    numbers = itertools.count()
    with ScriptedEngine(
        attack_policy,
        lambda _: ScriptedReply(str(next(numbers) % 10)),
        served_model_name="policy",
    ) as engine:
        yield engine.base_url
