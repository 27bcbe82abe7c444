"""The judgement of a run of attempts, from outside: the store, the machine, the run's end."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from security.attempts import ATTEMPTS
from security.attempts.declaration import reached
from security.stage.play import FULL, Cell

from bridle.store.reading.queries import Reader
from bridle.store.records import SessionRecord
from bridle.store.reward import RewardSource


def judge(cell: Cell) -> None:
    """Assert that no attempt had success, that each was made, and that sessions met each other."""
    done, world = cell.done, cell.world
    assert done is not None
    logs = world.sessions.glob("*/outputs/agent.stderr")
    said = done.stderr[-6000:] + "\n".join(log.read_text()[-2000:] for log in logs)
    assert done.returncode == 0, said
    with Reader(str(world.store)) as reader:
        ran = [one for one in reader.sessions() if one.run_id is not None]
        reports = {}
        for one in ran:
            report = report_of(reader, one)
            assert_rewards(reader, one, report is not None and "attempts" in report)
            if report is not None and "attempts" in report:
                assert one.outcome == "completed", (one.outcome, said)
                reports[one.id] = report
        assert len(reports) == FULL, said
        if cell.proxy:
            neighbour = reader.session(world.neighbour["session"])
            assert neighbour.sealed_at is None
            assert len(reader.call_ids(neighbour.id)) == 1
            assert reader.rewards(neighbour.id) == []
        assert len(ran) >= FULL + len(cell.alone)
        assert len(list(reader.sessions())) == len(ran) + bool(cell.proxy)
        if cell.entry != "rollout":
            assert_the_trainer_read_these(reader, ran)
    for report in reports.values():
        assert_no_success(cell, report)
    assert_they_met(list(reports.values()))
    changes = world.changes(cell.before)
    assert not changes, changes
    assert world.alive(), "the neighbour was ended"
    assert not (running := world.processes()), running
    # The folder of a session that failed stays, with its logs, for whoever looks for the reason.
    kept = {one.id for one in ran if one.outcome != "completed"} | {"neighbour"}
    left = {path.name for path in world.sessions.iterdir()} - kept
    assert not left, left
    shared = ATTEMPTS["leave_in_tmp"].open_in(cell.sandbox, cell.user)
    assert shared or not world.left_on_the_machine(), world.left_on_the_machine()


def report_of(reader: Reader, session: SessionRecord) -> dict[str, Any] | None:
    """Return the report that a session's only call has, or ``None`` without a call."""
    calls = reader.call_ids(session.id)
    assert len(calls) <= 1, "another session recorded a call here"
    for call in calls:
        return dict(json.loads(reader.request_body(call))["metadata"])
    return None


def assert_rewards(reader: Reader, session: SessionRecord, complete: bool) -> None:
    """Assert that a session has its verifier's reward alone, which its reply decides."""
    rewards = reader.rewards(session.id)
    assert all(one.source is RewardSource.VERIFIER for one in rewards)
    assert all(one.value in (0.0, 1.0) for one in rewards), rewards
    if complete:
        (reward,) = rewards
        (call,) = reader.call_ids(session.id)
        reply = json.loads(reader.response_body(call))["choices"][0]["message"]["content"]
        assert reward.value == sum(map(ord, reply)) % 2


def assert_the_trainer_read_these(reader: Reader, ran: list[SessionRecord]) -> None:
    (run,) = reader.runs("train")
    (mean,) = reader.metrics(run.id, "reward/mean")
    values = [one.value for session in ran for one in reader.rewards(session.id)]
    assert abs(mean.value - sum(values) / len(values)) < 1e-6


def assert_no_success(cell: Cell, report: dict[str, Any]) -> None:
    made = {name: (refused, got) for name, refused, got in report["attempts"]}
    wanted = {name for name, one in ATTEMPTS.items() if one.meant_in(cell.sandbox)}
    wanted -= {name for name, one in ATTEMPTS.items() if one.ends_itself_in(cell.sandbox)}
    assert made.keys() == wanted, "each was made"
    inherited = {name for name, text in report["inherited"].items() if cell.world.token in text}
    successes = {name for name, (_, got) in made.items() if succeeded(name, got)} | inherited
    open_here = {n for n, one in ATTEMPTS.items() if one.open_in(cell.sandbox, cell.user)}
    assert successes <= open_here, {name: made[name] for name in successes - open_here}


def succeeded(name: str, got: str) -> bool:
    """Return whether the record of an attempt shows success; other signs are looked for outside."""
    return ATTEMPTS[name].sign == "secret" and reached(got)


def assert_they_met(reports: list[dict[str, Any]]) -> None:
    """Assert that a session ran beside another, and another one after it."""
    spans = sorted((report["began"], report["ended"]) for report in reports)
    assert any(second[0] < first[1] for first, second in pairwise(spans)), "none ran beside another"
    first_end = min(end for _, end in spans)
    assert any(begin > first_end for begin, _ in spans), "none ran after another"
