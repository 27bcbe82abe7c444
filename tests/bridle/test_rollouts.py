"""Rollouts from synchronous code, also from a thread that collects ahead of a trainer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from bridle.rollouts import Rollouts
from harnesses.adapters.command import Command
from harnesses.rollout import Job, Settings
from harnesses.runtimes.local import LocalRuntime
from harnesses.tasks import Task
from harnesses.verifiers import ExactAnswer
from reconstruct.samples import Episode
from store.queries import Reader
from trainer.collector import Collector


def test_a_collection_that_runs_ahead_is_cancelled_and_sealed_at_the_end(
    proxy_url: str, store: str, tmp_path: Path
) -> None:
    jobs = [Job(Task("t", "a long one", payload={"answer": "x"}))]
    settings = Settings(directory=tmp_path / "sessions")
    began = time.monotonic()
    with Rollouts(proxy_url, LocalRuntime(), ExactAnswer()) as rollouts:

        def collect(step: int, version: int) -> Sequence[Episode]:
            adapter = Command(("sh", "-c", "echo" if step == 0 else "exec sleep 60"))
            rollouts.sessions(adapter, jobs, settings)
            return []

        collector = Collector(collect, ahead=1, steps=2, version=lambda: 0)
        collector.take(0)
        with Reader(store) as reader:
            while len(list(reader.sessions())) < 2:
                time.sleep(0.05)
        collector.close()
    assert time.monotonic() - began < 30
    with Reader(store) as reader:
        assert [session.outcome for session in reader.sessions()] == ["completed", "cancelled"]
