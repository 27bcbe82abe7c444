"""``bridle engine vllm`` and ``bridle doctor``, around the stand-in for vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bridle.engine.embedded import EmbeddedEngine
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from support.processes import bridle

pytestmark = pytest.mark.usefixtures("warm_start")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEngine]:
    """The engine that answers behind the stand-in."""
    directory = tmp_path_factory.mktemp("command") / "policy"
    size = train_tokenizer(directory, ["what is said and what is done"] * 4, vocab_size=320)
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=512)
    make_policy(directory, shape, vocab_size=size, seed=3)
    with EmbeddedEngine(directory) as running:
        yield running


@pytest.fixture
def arguments(
    fake_vllm: Path,
    model_dir: Path,
    tmp_path: Path,
    engine: EmbeddedEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:
    monkeypatch.setenv("FAKE_VLLM_ENGINE", engine.base_url)
    monkeypatch.setenv("BRIDLE_VLLM_PYTHON", str(fake_vllm))
    run_dir = str(tmp_path / "run")
    return ["engine", "vllm", "--model", str(model_dir), "--port", "0", "--run-dir", run_dir]


@contextlib.contextmanager
def running(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bridle", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.loop
def test_it_serves_what_passed_every_check_until_it_is_told_to_end(arguments: list[str]) -> None:
    with running([*arguments, "--set", "version=5", "--json"]) as process:
        said = json.loads(first_line(process))
        assert {check["outcome"] for check in said["checks"]} <= {"ok", "unknown"}
        assert [check["name"] for check in said["checks"]][:3] == ["serves", "context", "token ids"]
        info = httpx.get(f"{said['url']}/weight_info", trust_env=False).json()
        assert info == {"weight_version": "5"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{said['url']}/health", trust_env=False)


def test_a_person_reads_one_line_per_check(arguments: list[str]) -> None:
    with running(arguments) as process:
        assert first_line(process).startswith("ok      serves ")
        assert first_line(process) == "ok      context             512 tokens\n"


def test_a_vllm_that_asks_for_a_key_is_started_checked_and_stamped(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-key")
    with running([*arguments, "--set", "version=5", "--json"]) as process:
        url = json.loads(first_line(process))["url"]
        assert httpx.get(f"{url}/v1/models", trust_env=False).status_code == 401
        key = {"authorization": "Bearer a-key"}
        info = httpx.get(f"{url}/weight_info", headers=key, trust_env=False).json()
        started = httpx.get(f"{url}/x", headers=key, trust_env=False).json()["pid"]
        assert b"a-key" not in Path(f"/proc/{started}/environ").read_bytes()
    assert info == {"weight_version": "5"}


def test_a_failed_check_ends_it_with_the_remedy(arguments: list[str]) -> None:
    ended = bridle(*arguments, "--max-model-len", "1024")
    assert ended.returncode == 3
    assert "512 tokens, 1024 are needed: serve with --max-model-len 1024\n" in ended.stdout


def test_a_start_that_fails_ends_it_with_the_first_error(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "fail")
    ended = bridle(*arguments)
    assert ended.returncode == 1
    assert "bridle: vLLM was not started: ValueError: no such flag" in ended.stderr


def test_interrupted_while_vllm_starts_it_leaves_nothing_behind(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "mute")
    with running([*arguments, "--json"]) as process:
        log = tmp_path / "run" / "vllm.log"
        while not (log.exists() and "$ " in log.read_text()):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 130
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(tmp_path) not in listing.stdout


def test_deaths_are_told_and_too_many_end_it(arguments: list[str]) -> None:
    with running([*arguments, "--set", "restarts=1", "--json"]) as process:
        url = json.loads(first_line(process))["url"]
        assert process.stderr is not None
        for words in ("again, policy version 0", "vLLM keeps ending"):
            os.kill(httpx.get(f"{url}/x", trust_env=False).json()["pid"], signal.SIGKILL)
            assert process.stderr.readline() == "vLLM ended: killed by SIGKILL\n"
            assert words in process.stderr.readline()
        assert process.wait(20) == 1


def test_a_running_engine_is_adopted_after_the_same_checks(engine: EmbeddedEngine) -> None:
    ended = bridle("engine", "vllm", "--url", engine.base_url)
    assert ended.returncode == 0
    assert "ok      exact continuation" in ended.stdout
    needs_more = bridle("engine", "vllm", "--url", engine.base_url, "--max-model-len", "9999")
    assert needs_more.returncode == 3
    assert bridle("engine", "vllm", "--url", "http://127.0.0.1:9").returncode == 3


def test_neither_a_model_nor_a_url_is_a_mistake() -> None:
    assert bridle("engine", "vllm").returncode == 2
