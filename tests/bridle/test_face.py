"""``import bridle``: the names that a program uses, each loaded when it is asked for."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages

import pytest

import bridle
from bridle.errors import BridleError
from bridle.harnesses.adapters import Command
from bridle.harnesses.tasks import Task
from bridle.harnesses.verifiers import Delivery

HEAVY = ("torch", "transformers", "fastapi")
NOT_HERE = (
    "bridle.bench",
    "bridle.engine.vllm.inside",
    "bridle.harnesses.tasks.environments.player",
    "bridle.proxy.interception",
    "bridle.trainer.sinks.mlflow",
    "bridle.trainer.sinks.trackio",
    "bridle.trainer.sinks.wandb",
)
"""Loaded by the Python of vLLM, mitmproxy or verifiers, without Bridle; in need of a tracker's
package; or no part of an installed Bridle."""


def test_every_name_is_there_and_no_other() -> None:
    for name in bridle.__all__:
        assert getattr(bridle, name).__name__ == name
        assert name in dir(bridle)
    with pytest.raises(AttributeError, match="no attribute 'evaluation'"):
        _ = bridle.evaluation  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["open_store", "Client", "Task", "rollout", "RunConfig"])
def test_recording_and_reading_load_no_torch(name: str) -> None:
    script = f"import bridle, sys; bridle.{name}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def errors() -> Iterator[type[Exception]]:
    for module in walk_packages(bridle.__path__, "bridle."):
        if not module.name.startswith(NOT_HERE) and not module.name.endswith("__main__"):
            for name, found in inspect.getmembers(import_module(module.name), inspect.isclass):
                own = found.__module__ == module.name and not name.startswith("_")
                if own and issubclass(found, Exception):
                    yield found


def test_every_error_of_ours_is_a_bridle_error() -> None:
    found = list(errors())
    assert len(found) > 40
    assert [error for error in found if not issubclass(error, BridleError)] == []


def test_a_program_runs_an_agent_on_tasks(proxy_url: str, tmp_path: object) -> None:
    def long_enough(delivery: Delivery) -> float:
        return float(len(delivery.answer))

    seen: list[str] = []
    (result,) = bridle.rollout(
        Command(("echo", "{prompt}")),
        [Task("t", "four")],
        long_enough,
        proxy=proxy_url,
        directory=f"{tmp_path}/sessions",
        on_result=lambda result: seen.append(result.task_id),
    )
    assert (result.outcome, result.answer, dict(result.scores)) == (
        "completed",
        "four",
        {"reward": 4.0},
    )
    assert seen == ["t"]
