"""The demo's report, from stores made by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import orjson
import pytest
from rich.console import Console
from sqlalchemy import event

from bridle.recipes.demo.report import make_report, plot
from bridle.recipes.demo.run import Demo
from bridle.recipes.demo.settings import DemoSettings
from bridle.reconstruct.evaluation import wilson
from bridle.store.call import CallBegun
from bridle.store.reading.queries import Reader
from bridle.store.records import RunRecord, SessionRecord, TaskRecord
from bridle.store.reward import Reward, RewardSource
from bridle.store.schema.database import migrate
from bridle.store.writing.writer import Writer

STAGES = ("whole", "before", "greedy_before", "train", "after", "greedy_after")


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """A run per stage, each of three sessions of two calls."""
    path = str(tmp_path / "bridle.db")
    migrate(path)
    now = time.time()
    with Writer(path) as writer:
        writer.add_sync(*(TaskRecord(str(one), "demo", "test", {}, now) for one in range(3)))
        for stage in STAGES:
            writer.add_sync(RunRecord(stage, "eval", now))
            for number in range(3):
                session = f"{stage}-{number}"
                writer.add_sync(
                    SessionRecord(
                        session,
                        now,
                        run_id=stage,
                        task_suite="demo",
                        task_split="test",
                        task_id=str(number),
                        sealed_at=now,
                        outcome="completed",
                    )
                )
                writer.add_sync(
                    Reward(session, "reward", number % 2, now, source=RewardSource.VERIFIER)
                )
                for call in range(2):
                    writer.begin_call(
                        CallBegun(
                            id=f"{session}-{call}",
                            session_id=session,
                            dialect="chat",
                            started_at=now,
                            request_body=b"{}",
                            stream=False,
                            model_requested="m",
                        )
                    )
    with Reader(path) as opened:
        yield opened


def test_calls_are_counted_in_one_query_for_many_sessions(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridle.store.schema.database._AT_ONCE", 10)
    asked: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        asked.append(statement)

    event.listen(reader.engine, "before_cursor_execute", note)
    report = make_report(reader, {stage: stage for stage in STAGES})
    assert (report["sessions"], report["calls"]) == (18, 36)
    by_session = ["count(*)" in each and "GROUP BY calls.session_id" in each for each in asked]
    assert sum(by_session) == 2


@pytest.mark.parametrize("trials", [6, 8, 11, 20, 100])
def test_an_interval_holds_the_share_and_ends_at_0_and_1(trials: int) -> None:
    (none, above), (below, all_) = wilson(0, trials), wilson(trials, trials)
    assert (none, all_) == (0.0, 1.0)
    assert 0 < above < 1
    assert 0 < below < 1
    for right in range(1, trials):
        low, high = wilson(right, trials)
        assert 0 < low < right / trials < high < 1


def test_a_run_that_trained_nothing_is_shown_again(reader: Reader, tmp_path: Path) -> None:
    """All rewards of every group were equal."""
    report = make_report(reader, {stage: stage for stage in STAGES})
    told = StringIO()
    demo = Demo(tmp_path / "demo", DemoSettings(), Console(file=told, width=400))
    report |= {"model": "tiny"}
    for shown in (report, orjson.loads(orjson.dumps(report))):
        demo.show(shown)
    assert told.getvalue().count("engine and trainer differ by – nats per token") == 2


def test_a_policy_that_answers_everything_right_is_plotted(tmp_path: Path) -> None:
    """``--eval-tasks 100``: the interval's rounded end lay below the share."""
    report = {"reward_by_step": [0.5], "greedy_before": 0.5, "greedy_after": 1.0}
    for phase, right in (("before", 50), ("after", 100)):
        report |= {f"reward_{phase}": right / 100, f"reward_{phase}_interval": wilson(right, 100)}
    plot(report, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").stat().st_size
