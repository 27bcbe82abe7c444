"""``--minutes`` bounds the whole demo, what comes before GRPO included."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from bridle.recipes.demo import stages
from bridle.recipes.demo.run import Demo
from bridle.recipes.demo.settings import DemoSettings
from bridle.store.reading.queries import Reader

SETTINGS = dataclasses.replace(
    DemoSettings(), first_sessions=4, teacher_sessions=64, parallel=4, minutes=1e-6
)


@pytest.mark.sampled(0)
def test_no_demonstration_is_begun_and_no_lesson_goes_on_once_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "FEWEST_DEMONSTRATIONS", 8)
    demo = Demo(tmp_path, SETTINGS, Console(stderr=True))
    demo._stage("base", demo._make_base)
    demo._stage("teacher", demo._record_teacher)
    updates: list[object] = []
    monkeypatch.setattr("bridle.recipes.demo.run.progress", lambda *_: counted(updates))
    demo._stage("warm", demo._warm_start)
    with Reader(demo.places.store) as reader:
        recorded = list(reader.sessions(run=demo._state.runs["teacher"]))
    assert len(recorded) == 8
    assert len(updates) == len(SETTINGS.lessons)
    assert demo._seconds_to_train() == 0.0


class counted:
    """Progress that keeps each update."""

    def __init__(self, updates: list[object]) -> None:
        self._updates = updates

    def __enter__(self) -> object:
        return lambda done, _note: self._updates.append(done)

    def __exit__(self, *_: object) -> None:
        pass
