"""Stores that are broken on purpose: the first finding names the cause."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from bridle.bench.gallery import EPOCH, Story, stories
from bridle.cli.program import app
from bridle.diagnosis.findings import findings_of_run, findings_of_session
from bridle.reconstruct.audit import audit
from bridle.reconstruct.samples.rules import DEFAULT_RULES, SampleRules
from bridle.store.reading.queries import Reader
from bridle.store.records import (
    BreakReason,
    CallStatus,
    Message,
    PolicyRecord,
    RunRecord,
    TaskRecord,
)
from bridle.store.reward import Reward, RewardSource
from bridle.store.writing.writer import Writer
from bridle.viewer.app import viewer_app
from bridle.viewer.rendering import Source

RUN = "run_broken"
METRICS = {
    "update/logprob_gap": 0.002,
    "sessions/collected": 16.0,
    "seconds/collect": 10.0,
    "seconds/update": 9.0,
}


class Broken:
    """A run of four groups of four sessions, healthy but for what a test changes."""

    def __init__(self, begin: Callable[..., Story]) -> None:
        self.begin = begin
        self.turns = 3
        self.group: Callable[[int], str | None] = lambda number: f"group-{number // 4}"
        self.reward: Callable[[int], float | None] = lambda number: float(number % 2)
        self.outcome = "completed"
        self.call: dict[str, Any] = {}
        self.later: dict[str, Any] = {}
        self.metrics = METRICS
        self.gap = 0.0004
        self.rules = DEFAULT_RULES

    def record(self, store: str) -> str:
        """Records it all; returns a session."""
        story: Story | None = None
        for number in range(16):
            story = self.begin(run_id=RUN, group_id=self.group(number), version=1 + number // 4)
            self._play(story)
            session, writer, at = story.session, story.writer, EPOCH + 1000
            value = self.reward(number)
            if value is not None:
                given = Reward(session.id, "score", value, at, source=RewardSource.VERIFIER)
                writer.add_sync(given)
            writer.update_session_sync(session.id, sealed_at=at, outcome=self.outcome)
        assert story is not None
        for step in range(4):
            story.writer.record_metrics(RUN, step, self.metrics)
            published = PolicyRecord(RUN, step + 1, EPOCH, verified=True, logprob_gap=self.gap)
            story.writer.add_sync(published)
        story.writer.configure_run(RUN, {"samples": {"rules": self.rules.as_data()}})
        with Reader(store) as reader:
            for _ in audit(reader):
                pass
        return story.session.id

    def _play(self, story: Story) -> None:
        last = None
        for turn in range(self.turns):
            tail = (Message("tool" if turn else "user", story.prose(200)),)
            more = self.later if turn else {}
            last = story.call(tail, story.prose(160), parent=last, **self.call, **more)


def equal_rewards(run: Broken) -> None:
    run.reward = lambda number: 0.0


def stripped_ids(run: Broken) -> None:
    run.call = {"ids": False}


def wrong_base_url(run: Broken) -> None:
    run.turns = 0
    run.reward = lambda number: 0.0


def wrong_engine_url(run: Broken) -> None:
    run.call = {"status": CallStatus.FAILED, "reason": "upstream_404: no route /chat/completions"}
    run.reward = lambda number: 0.0


def rewriting_template(run: Broken) -> None:
    run.later = {"broke": BreakReason.TEMPLATE_REWROTE_HISTORY}


def stale_tokens(run: Broken) -> None:
    run.rules = SampleRules(oldest_version=4)
    run.metrics = METRICS | {"sessions/dropped/stale": 12.0}


def dead_verifier(run: Broken) -> None:
    run.reward = lambda number: None
    run.outcome = "infrastructure"


def temperature_zero(run: Broken) -> None:
    run.call = {"temperature": 0.0}
    run.reward = lambda number: 1.0


def other_weights(run: Broken) -> None:
    run.metrics = METRICS | {"update/logprob_gap": 1.3}
    run.gap = 1.2


def everything_truncated(run: Broken) -> None:
    run.call = {"finish": "length"}
    run.reward = lambda number: 0.0


def no_group(run: Broken) -> None:
    run.group = lambda number: None


CAUSES = {
    "rewards_equal": equal_rewards,
    "no_token_ids": stripped_ids,
    "no_calls": wrong_base_url,
    "calls_failed": wrong_engine_url,
    "template_rewrites_history": rewriting_template,
    "stale_tokens": stale_tokens,
    "no_reward": dead_verifier,
    "temperature_zero": temperature_zero,
    "engine_weights_differ": other_weights,
    "truncated": everything_truncated,
    "no_groups": no_group,
}


def broken(tmp_path: Path, change: Callable[[Broken], None]) -> tuple[str, str]:
    """The store and a session."""
    store = str(tmp_path / "broken.db")
    for begin in stories(store, RunRecord(RUN, "train", EPOCH)):
        run = Broken(begin)
        change(run)
        session = run.record(store)
    return store, session


@pytest.mark.parametrize("cause", CAUSES)
def test_the_doctor_names_the_cause_first(cause: str, tmp_path: Path) -> None:
    store, _ = broken(tmp_path, CAUSES[cause])
    result = CliRunner().invoke(app, ["doctor", RUN, "--store", store, "--json"])
    found = json.loads(result.output)["findings"]
    assert found[0]["name"] == cause
    assert found[0]["evidence"]
    assert found[0]["remedy"]
    assert result.exit_code == (1 if found[0]["severity"] == "error" else 0)


def test_a_healthy_run_has_no_finding(tmp_path: Path) -> None:
    store, session = broken(tmp_path, lambda run: None)
    with Reader(store) as reader:
        assert findings_of_run(reader, RUN) == []
        assert findings_of_session(reader, session) == []


@pytest.mark.parametrize("cause", ["no_token_ids", "truncated", "template_rewrites_history"])
def test_a_session_by_itself_is_examined_too(cause: str, tmp_path: Path) -> None:
    store, session = broken(tmp_path, CAUSES[cause])
    result = CliRunner().invoke(app, ["doctor", "last", "--store", store])
    with Reader(store) as reader:
        first = findings_of_session(reader, session)[0]
        client = TestClient(viewer_app(Source(reader, store)))
        page = html.unescape(client.get(f"/sessions/{session}").text)
        run = html.unescape(client.get(f"/runs/{RUN}/findings").text)
    assert first.name == cause
    for shown in (page, run, " ".join(result.output.split())):
        plain = re.sub("</?code>|`", "", shown)
        assert first.cause.replace("`", "") in plain
        assert first.remedy.replace("`", "") in plain


def recorded(tmp_path: Path, *, task: TaskRecord | None = None, **call: Any) -> tuple[str, str]:
    """The store and a session of no run, which has ended without a reward."""
    store = str(tmp_path / "recorded.db")
    for begin in stories(store, RunRecord("run_of_another", "rollout", EPOCH)):
        named: dict[str, str] = {}
        if task is not None:
            with Writer(store) as writer:
                writer.add_sync(task)
            named = {"task_suite": task.suite, "task_split": task.split, "task_id": task.id}
        story = begin(run_id=None, **named)
        story.call((Message("user", "What is in this folder?"),), "Two files.", **call)
        ended = {"sealed_at": EPOCH + 1000, "outcome": "completed"}
        story.writer.update_session_sync(story.session.id, **ended)
    return store, story.session.id


@pytest.mark.parametrize("task", [None, TaskRecord("t", "s", "train", {}, EPOCH)])
def test_a_session_that_nobody_scores_has_no_finding(
    tmp_path: Path, task: TaskRecord | None
) -> None:
    store, session = recorded(tmp_path, task=task)
    result = CliRunner().invoke(app, ["doctor", session, "--store", store])
    assert result.exit_code == 0, result.output
    assert "nothing is wrong in the record" in result.output
    with Reader(store) as reader:
        page = TestClient(viewer_app(Source(reader, store))).get(f"/sessions/{session}").text
    assert "badge error" not in page


def test_temperature_0_is_a_warning_before_anybody_scores(tmp_path: Path) -> None:
    store, session = recorded(tmp_path, temperature=0.0)
    result = CliRunner().invoke(app, ["doctor", session, "--store", store, "--json"])
    (finding,) = json.loads(result.output)["findings"]
    assert (finding["name"], finding["severity"]) == ("temperature_zero", "warning")
    assert "bridle run --sampling policy" in finding["remedy"]


def test_a_session_whose_task_has_data_for_a_verifier_should_have_a_reward(tmp_path: Path) -> None:
    task = TaskRecord("t", "s", "train", {"answer": "5"}, EPOCH)
    store, session = recorded(tmp_path, task=task)
    result = CliRunner().invoke(app, ["doctor", session, "--store", store, "--json"])
    assert result.exit_code == 1
    assert [one["name"] for one in json.loads(result.output)["findings"]] == ["no_reward"]


def test_text_without_ids_is_no_error_for_a_recorder(tmp_path: Path) -> None:
    store, session = recorded(tmp_path, ids=False)
    result = CliRunner().invoke(app, ["doctor", session, "--store", store, "--json"])
    assert result.exit_code == 0
    (found,) = json.loads(result.output)["findings"]
    assert (found["name"], found["severity"]) == ("no_token_ids", "warning")


def test_an_engine_that_is_gone_has_a_remedy_of_its_own(tmp_path: Path) -> None:
    def engine_gone(run: Broken) -> None:
        run.call = {"status": CallStatus.FAILED, "reason": "upstream_unreachable"}

    store, _ = broken(tmp_path, engine_gone)
    with Reader(store) as reader:
        first = findings_of_run(reader, RUN)[0]
    assert first.name == "calls_failed"
    assert "Start the engine" in first.remedy
    assert "/v1/chat/completions" not in first.remedy


@pytest.mark.parametrize(("gap", "grows"), [(1e-3, {"gap_grows"}), (1e-7, set())])
def test_what_makes_a_run_slow_and_its_gap_grow_is_named(
    tmp_path: Path, gap: float, grows: set[str]
) -> None:
    store = str(tmp_path / "slow.db")
    for begin in stories(store, RunRecord(RUN, "train", EPOCH)):
        run = Broken(begin)
        run.metrics = METRICS | {"seconds/collect": 100.0}
        run.record(store)
        story = begin(run_id=RUN, group_id="group-0")
        for step in range(9):
            story.writer.record_metrics(RUN, step, {"update/logprob_gap": gap * 1.5**step})
    with Reader(store) as reader:
        found = {finding.name: finding for finding in findings_of_run(reader, RUN)}
    assert set(found) == {"slow_collect"} | grows
    assert "92 % of" in found["slow_collect"].evidence


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    store, _ = broken(tmp_path, lambda run: None)
    result = CliRunner().invoke(app, ["doctor", "nobody", "--store", store])
    assert result.exit_code == 1
    assert "no session 'nobody' in this store" in result.output
