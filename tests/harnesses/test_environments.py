"""Environments of the verifiers package: their tasks, their agents, their rewards."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bridle.bench.shell_policy import train_bench_tokenizer
from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.harnesses.episode import Outcome
from bridle.harnesses.install import NotLaunchable
from bridle.harnesses.tasks import Task, TaskError, tasks_from
from bridle.harnesses.tasks.environments.loader import PYTHON_VARIABLE
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.reconstruct.audit import audit_session
from bridle.run.rollouts import rollout
from bridle.store.reading.queries import Reader


def test_a_python_without_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    with pytest.raises(TaskError, match=f"capitals cannot be listed: .*{PYTHON_VARIABLE}"):
        list(tasks_from("verifiers:capitals"))


def test_a_python_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, "/nowhere/python")
    with pytest.raises(TaskError, match="BRIDLE_VERIFIERS_PYTHON names no Python"):
        list(tasks_from("verifiers:capitals"))


def test_its_agent_plays_no_other_tasks(tmp_path: Path) -> None:
    model = tmp_path / "model"
    train_bench_tokenizer(model)
    with ScriptedEngine(model, lambda _: ScriptedReply("Paris.")) as engine:
        settings = ProxySettings(engine.base_url, str(tmp_path / "bridle.db"), tokenizer_dir=model)
        with (
            ProxyServer(settings) as proxy,
            pytest.raises(NotLaunchable, match="--tasks verifiers:NAME"),
        ):
            rollout("verifiers", [Task("t", "Prompt")], "exact", proxy=proxy.base_url)


@pytest.mark.harness
@pytest.mark.skipif(PYTHON_VARIABLE not in os.environ, reason=f"{PYTHON_VARIABLE} is not set")
def test_an_environment_is_played_through_the_proxy_and_scores_by_its_trace(tmp_path: Path) -> None:
    model, store = tmp_path / "model", str(tmp_path / "bridle.db")
    train_bench_tokenizer(model)

    with ScriptedEngine(model, lambda _: ScriptedReply("Paris, surely.")) as engine:
        settings = ProxySettings(engine.base_url, store, tokenizer_dir=model)
        with ProxyServer(settings) as proxy, Reader(store) as reader:
            results = rollout(
                "verifiers",
                "verifiers:capitals",
                "task",
                proxy=proxy.base_url,
                directory=tmp_path / "runs",
            )
            sessions = {session.id: session for session in reader.sessions()}
            audits = [audit_session(reader, each) for each in sessions]

    by_task = {result.task_id: result for result in results}
    assert by_task["0-France"].scores == {"right": 1.0, "reward": 2.0}
    assert by_task["1-Norway"].scores == {"right": 0.0, "reward": 0.0}
    unfit = by_task["2-Atlantis"]
    assert (unfit.outcome, unfit.scores, unfit.attempts) == (Outcome.INFRASTRUCTURE, {}, 1)
    assert "nobody knows the capital of Atlantis" in unfit.error
    assert all(session.harness == "verifiers" for session in sessions.values())
    assert all(audit.clean for audit in audits)
