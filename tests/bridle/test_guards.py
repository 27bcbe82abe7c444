"""Test the way from an agent's act to its training and figures: a guard's finding never pays."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import Result

from bridle.diagnosis.findings import findings_of_run
from bridle.engine.scripted import ScriptedCall, ScriptedReply, ScriptedRequest
from bridle.reconstruct import open_store
from bridle.reconstruct.episodes import episodes
from bridle.store.reading.queries import Reader
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.config import GrpoConfig
from support.rollouts import ScriptedRollout, scripted_proxy

Bridle = Callable[..., Result]

AGENT = """
print(work(f"{sys.argv[1]} {uuid.uuid4()}", "bash", "commit 1"))
"""
VERIFIER = """
def check(delivery):
    return {"reward": float(delivery.answer.strip() == "right"), "length": 2.0}
"""


class HalfCheat:
    """A policy whose every other session looks at the history and answers wrong.

    Such a session looks three times. The others are right.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, request: ScriptedRequest) -> ScriptedReply:
        asked = next(m["content"] for m in request.messages if m["role"] == "user")
        with self._lock:
            number = self._sessions.setdefault(asked, len(self._sessions))
        looks = sum(message["role"] == "tool" for message in request.messages)
        if number % 2:
            return ScriptedReply("right")
        if looks < 3:
            return ScriptedReply(tool_calls=(ScriptedCall("bash", {"command": "git log -p"}),))
        return ScriptedReply("wrong")


@pytest.fixture
def proxy(model_dir: Path, store: str) -> Iterator[str]:
    with scripted_proxy(model_dir, store, HalfCheat()) as url:
        yield url


@pytest.fixture
def rollout(bridle: Bridle, proxy: str, tmp_path: Path) -> ScriptedRollout:
    return ScriptedRollout(bridle, proxy, tmp_path, AGENT, VERIFIER, {"prompt": "What is right?"})


def test_a_session_that_cheats_gains_nothing_whatever_the_mode(
    bridle: Bridle, rollout: ScriptedRollout, store: str
) -> None:
    for mode in ("warn", "zero", "quarantine"):
        done = rollout("check", "--group-size", 4, "--set", f"agent.guards={mode}")
        assert done.exit_code == 0, done.output
        assert "mean reward 0.500" in done.stdout
        assert f"git_history ({mode}) in 2" in done.stdout
        said = [line for line in done.stderr.splitlines() if "a session's reward is" in line]
        assert len(said) == 1
        assert "the one named reward" in said[0]
        assert said[0].endswith("not counted: length")
        with Reader(store) as reader:
            run = reader.runs("rollout")[-1].id
            trained = list(episodes(reader, run=run))
            assert "guard_findings" in {one.name for one in findings_of_run(reader, run)}
        prepared = prepare(trained, 0, GrpoConfig())
        right = {
            episode.session.id: not any(one.is_finding for one in episode.rewards)
            for episode in trained
        }
        assert sorted(right.values()) == [False, False, True, True]
        if mode == "quarantine":
            # The cheaters are left out, and two that are equally right teach nothing.
            assert prepared.sessions_dropped == {"infrastructure": 2, "zero_variance": 2}
        else:
            for item in prepared.items:
                advantage = 0.866 if right[item.sample.session_id] else -0.866
                assert item.credit[item.sample.mask] == pytest.approx(advantage, abs=1e-3)
            assert {item.session for item in prepared.items} == {0, 1, 2, 3}
        measured = bridle("eval", "--store", store, "--run", run, "--json")
        figures = json.loads(measured.stdout)["all"]
        assert (figures["attempts"], figures["pass_at"]["1"]["value"]) == (4, 0.5)
        assert figures["mean_at"]["4"]["value"] == 0.5
        assert measured.stderr.count("a session's reward is the one named reward") == 1


def test_a_finding_is_in_no_export_feed_or_table_as_a_reward(
    bridle: Bridle, rollout: ScriptedRollout, store: str, proxy: str, tmp_path: Path
) -> None:
    assert rollout("check", "--group-size", 2, "--set", "agent.guards=zero").exit_code == 0
    for name in ("all.parquet", "all.jsonl", "all.csv"):
        assert bridle("export", tmp_path / name, "--store", store).exit_code == 0
        card = json.loads((tmp_path / f"{name}.card.json").read_text())
        assert set(card["rewards"]) == {"reward", "length"}
    good = bridle(
        "export", tmp_path / "good.jsonl", "--min-reward", 0.5, "--store", store, "--json"
    )
    assert json.loads(good.stdout)["sessions"] == 1
    with open_store(store) as opened:
        table = opened.samples_table()
        assert [name for name in table.column_names if name.startswith("reward.")] == [
            "reward.length",
            "reward.reward",
        ]
        by_finding = {bool(one.findings): one for one in opened.sessions()}
        assert by_finding[True].reward() == 0.0 < by_finding[False].reward() == 1.0
        assert by_finding[True].rewards == {"reward": 0.0, "length": 0.0}
        shown = opened.query("SELECT name, max(value) AS value FROM scores GROUP BY name")
        assert shown.to_pydict() == {"name": ["length", "reward"], "value": [2.0, 1.0]}
    listed = json.loads(bridle("sessions", "--store", store, "--json").stdout)
    assert sorted(len(line["findings"]) for line in listed) == [0, 1]
    text = bridle("show", by_finding[True].id, "--store", store).stdout
    assert "finding git_history (zero) in turns 1, 2, 3" in " ".join(text.split())


def test_a_verifier_and_the_operator_may_record_findings_by_http(
    recorded: str, proxy_url: str, store: str
) -> None:
    at = f"{proxy_url}/bridle/v1/sessions/{recorded}/rewards"
    found = httpx.post(at, json={"name": "copied", "value": 1.0, "kind": "finding"})
    assert (found.status_code, found.json()["kind"], found.json()["mode"]) == (
        201,
        "finding",
        "warn",
    )
    zero = {"name": "copied", "value": 1.0, "kind": "finding", "mode": "zero", "turn": 2}
    assert httpx.post(at, json=zero).json()["mode"] == "zero"
    refused = httpx.post(at, json={"name": "reward", "value": 1.0, "mode": "zero"})
    assert refused.status_code == 422
    assert "only a finding has a mode" in refused.text
    assert httpx.post(at, json={"name": "reward", "value": 1.0, "kind": "x"}).status_code == 422
    with open_store(store) as opened:
        session = opened.session(recorded)
        assert (session.reward(), len(session.findings)) == (None, 2)
