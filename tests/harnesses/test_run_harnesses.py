"""``bridle run`` with installed harnesses, as a person types them: nothing is configured first."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle.engine.scripted import ScriptedEngine
from bridle.engine.stand_in import stand_in
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus
from bridle.trainer.policy.tiny_tokenizer import train_tokenizer

pytestmark = pytest.mark.harness

QUESTION = "What is in this folder?"
TYPED = {
    "codex": ("codex", "exec", "--skip-git-repo-check", QUESTION),
    "claude-code": ("claude", "-p", QUESTION),
    "qwen-code": ("qwen", "-p", QUESTION),
    "gemini-cli": ("gemini", "-p", QUESTION),
    "pi": ("pi", "-p", QUESTION),
    "opencode": ("opencode", "run", QUESTION),
    "mini-swe-agent": ("mini", "-y", "--exit-immediately", "-t", QUESTION),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    train_tokenizer(directory, [QUESTION] * 20, vocab_size=600)
    return directory


@pytest.fixture
def proxy(model_dir: Path, tmp_path: Path) -> Iterator[str]:
    store = str(tmp_path / "bridle.db")
    with (
        ScriptedEngine(model_dir, stand_in, max_model_len=1 << 20) as engine,
        ProxyServer(ProxySettings(engine.base_url, store, tokenizer_dir=model_dir)) as running,
    ):
        yield running.base_url


@pytest.mark.parametrize("harness", TYPED)
def test_a_harness_is_recorded_as_it_is_typed(harness: str, proxy: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "lamp.txt").write_text("a lamp\n")
    argv = [sys.executable, "-m", "bridle", "run", "--proxy", proxy, "--", *TYPED[harness]]
    done = subprocess.run(
        argv,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    with Reader(str(tmp_path / "bridle.db")) as reader:
        (session,) = reader.sessions()
        calls = reader.calls(session.id)
    assert session.harness == harness
    assert calls, done.stderr[-2000:]
    assert {call.status for call in calls} == {CallStatus.COMPLETE}, done.stderr[-2000:]
    assert all(call.sampled_tokens for call in calls)
