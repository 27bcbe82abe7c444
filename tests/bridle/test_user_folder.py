"""A user's folder whose files are named like Bridle's rooms: every command works from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.store.reading.queries import Reader

pytestmark = pytest.mark.loop

ROOMS = ("store", "proxy", "engine", "harnesses", "recipes", "bridle_run", "typer", "json")
"""Also of a library that Bridle needs, and of the standard library."""
TRAINER = """
from dataclasses import dataclass
from bridle import Delivery

@dataclass
class Grade:
    value: float

def check(delivery: Delivery) -> float:
    return Grade(float(sum(map(ord, delivery.answer)) % 2)).value
"""
AGENT = """
import os, sys
import urllib.request

body = '{"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": "%s"}]}'
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    (body % sys.argv[1]).encode(),
    {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
print(urllib.request.urlopen(request).read().decode()[-40:].replace("\\n", " "))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The user's folder: an agent, tasks, a verifier, and files of their own."""
    for room in ROOMS:
        (tmp_path / f"{room}.py").write_text(
            "raise RuntimeError('this file is the user\\'s own')\n"
        )
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "agent.py").write_text(AGENT)
    lines = [{"id": f"t{n}", "prompt": f"Question {n}?"} for n in range(2)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    directory = tmp_path / "policy"
    size = train_tokenizer(directory, ["Which question is this? 0123456789"] * 4, vocab_size=320)
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=512)
    make_policy(directory, shape, vocab_size=size, seed=3)
    return directory


def command(*arguments: str) -> list[str]:
    """The installed program's own line: no folder of the user's is on its path."""
    start = "from bridle.cli.program import app; app(prog_name='bridle')"
    return [sys.executable, "-P", "-c", start, *arguments]


def bridle(folder: Path, arguments: Sequence[str]) -> str:
    done = subprocess.run(
        arguments, cwd=folder, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextmanager
def proxy(folder: Path, engine_url: str) -> Iterator[str]:
    """``bridle proxy`` as the user starts it; its base URL."""
    argv = command("proxy", "--engine", engine_url, "--store", "calls.db", "--port", "0", "--json")
    with subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def test_recording_commands_work(folder: Path, model_dir: Path) -> None:
    with (
        ScriptedEngine(
            model_dir, lambda _: ScriptedReply("Yes."), served_model_name="policy"
        ) as engine,
        proxy(folder, engine.base_url) as url,
    ):
        agent = f"{sys.executable} agent.py"
        ran = bridle(folder, command("run", "--proxy", url, "--", *agent.split(), "Who?"))
        assert "calls: 1 complete" in ran
        work = ["--agent", "agent.py", "--tasks", "tasks.jsonl"]
        work += ["--verifier", "trainer.py:check", "--set", "agent.directory=sessions"]
        rolled = bridle(folder, command("rollout", "--proxy", url, *work))
        assert "2 completed" in rolled
    with Reader(str(folder / "calls.db")) as reader:
        assert len(list(reader.sessions())) == 3
    assert "3 sessions" in bridle(folder, command("audit", "--store", "calls.db"))


def test_training_works(folder: Path, policy: Path) -> None:
    work = ["--policy", str(policy), "--agent", "agent.py", "--tasks", "tasks.jsonl"]
    size = [
        "--steps",
        "1",
        "--set",
        "groups.per_step=2",
        "--set",
        "groups.size=2",
        "--set",
        "agent.parallel=2",
    ]
    done = bridle(
        folder,
        command("train", *work, "--verifier", "trainer.py:check", "--out", "out", *size),
    )
    assert "after 1 of 1 steps" in done


def test_python_m_bridle_works_where_only_our_rooms_have_namesakes(folder: Path) -> None:
    """``python -m`` puts the folder first on the path, before the standard library."""
    for other in ("typer", "json"):
        (folder / f"{other}.py").unlink()
    environment = {**os.environ, "BRIDLE_STORE": str(folder / "none.db")}
    done = subprocess.run(
        [sys.executable, "-m", "bridle", "doctor"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ok" in done.stdout
