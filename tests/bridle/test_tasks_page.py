"""Test that the examples of docs/tasks.md work as they stand there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.store.reading.queries import Reader

pytestmark = pytest.mark.usefixtures("warm_start")

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[number]


def run(script: str, directory: Path, url: str) -> str:
    (directory / "bridle").write_text(f'#!/bin/sh\nexec {sys.executable} -m bridle "$@"\n')
    (directory / "bridle").chmod(0o755)
    path = f"{directory}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PROXY": url, "BRIDLE_PROXY": url}
    environment["BRIDLE_ADMIN_KEY"] = "any"
    done = subprocess.run(
        ["bash", "-euc", script], cwd=directory, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.loop
@pytest.mark.sampled(0)
def test_its_tasks_and_its_verifier_are_run_by_its_command(
    proxy_url: str, store: str, tmp_path: Path
) -> None:
    (tmp_path / "tasks.jsonl").write_text(block("json"))
    (tmp_path / "checks.py").write_text(block("python"))
    said = run(block("console"), tmp_path, proxy_url)
    assert "2 completed" in said
    with Reader(store) as reader:
        rewards = [reader.rewards(session.id) for session in reader.sessions()]
    assert sorted(reward.value for (reward,) in rewards) == [0.0, 1.0]
    assert {reward.name for (reward,) in rewards} == {"reward"}
    (tmp_path / "repeats.py").write_text(block("python", 1))
    run(block("console", 1), tmp_path, proxy_url)
    with Reader(store) as reader:
        named = [[r.name for r in reader.rewards(session.id)] for session in reader.sessions()]
    assert sorted(named) == [["reward"], ["reward"], ["reward", "format"], ["reward", "format"]]


def test_a_session_is_opened_scored_and_sealed_by_http(proxy_url: str, tmp_path: Path) -> None:
    answers = run(block("console", 2), tmp_path, proxy_url)
    decoder, found, at = json.JSONDecoder(), list[Any](), 0
    while at < len(answers):
        value, at = decoder.raw_decode(answers, at)
        found.append(value)
    opened, reply, reward, sealed, state = found
    assert set(opened) >= {"id", "key", "base_urls", "environment"}
    assert reply["choices"]
    assert (reward["name"], reward["value"]) == ("reward", 1.0)
    assert sealed["outcome"] == state["outcome"] == "completed"
    assert state["calls"] == {"complete": 1}


def test_it_names_every_route(proxy_url: str) -> None:
    paths = httpx.get(f"{proxy_url}/openapi.json").json()["paths"]
    own = {path.removeprefix("/bridle/v1") for path in paths if path.startswith("/bridle/v1")}
    feed = {path for path in own if "/feed" in path or "trajector" in path}
    shown = {
        route.replace("/runs/ID", "/runs/{run_id}")
        .replace("/ID", "/{session_id}")
        .replace("/CALL", "/{call_id}")
        .replace("/NAME", "/{name}")
        for route in re.findall(r"(?:[A-Z]+ |, )(/[a-zA-Z/-]+)", PAGE.partition("| route under")[2])
    }
    assert own - feed <= shown
