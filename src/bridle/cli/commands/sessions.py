"""``bridle sessions``: list recorded sessions, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import typer

from bridle.cli.options import HarnessOption, JsonOption, RunOption, StoreOption
from bridle.cli.reading import nothing_found, reader, require_run
from bridle.cli.terminal import out, print_json, print_table
from bridle.diagnosis.pages import SessionLine, lines_of
from bridle.diagnosis.transcript import lasted
from bridle.reconstruct.rewards import CountedRewards, findings_in, role_rewards, session_rewards
from bridle.store.reading.queries import DamagedSession, Reader
from bridle.store.reading.run_states import run_state
from bridle.store.reading.session_filter import OPEN
from bridle.store.records import SessionRecord
from bridle.store.reward import Reward


def sessions(
    store: StoreOption,
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 20,
    run: RunOption = None,
    harness: HarnessOption = None,
    json: JsonOption = False,
) -> None:
    """List recorded sessions."""
    with reader(store) as source:
        require_run(source, run)
        found = list(source.sessions(run=run, harness=harness, limit=limit, newest_first=True))
        rows = summaries(source, found) if json else []
        lines = [] if json else lines_of(source, found, CountedRewards(source).number)
        none = None if found else nothing_found(source)
        state = None if run is None else run_state(source, source.run(run))
    if json:
        print_json(rows)
        return
    if state is not None and state.status != "completed":
        out.print(f"run {run}: {state.text}")
    if none is not None:
        out.print(f"{none.capitalize()}.")
        return
    print_table(
        ("session", "started", "outcome", "calls", "sampled", "took", "rewards"),
        [_cells(line) for line in lines],
        shrinks="rewards",
        spare=("sampled",),
        right=("calls", "sampled", "took"),
        under=[_about(line) for line in lines],
    )


def _cells(line: SessionLine) -> list[str]:
    record = line.record
    return [
        record.name or record.id,
        datetime.fromtimestamp(record.created_at).strftime("%m-%d %H:%M"),
        record.outcome or OPEN,
        f"{line.calls} ({line.failed} failed)" if line.failed else str(line.calls),
        str(line.sampled),
        lasted(line.seconds),
        " ".join(f"{name}={value:g}" for name, value in session_rewards(line.given).items()) or "–",
    ]


def _about(line: SessionLine) -> str:
    """Return the harness, model and title of a session, and the parts of it that cannot be read."""
    parts = (line.record.harness, line.model, line.title or line.record.task_id)
    damage = line.record.damage if isinstance(line.record, DamagedSession) else ()
    return " · ".join((*(part for part in parts if part), *map(str, damage)))


def summaries(source: Reader, records: Sequence[SessionRecord]) -> list[dict[str, Any]]:
    """Return a summary of each session.

    It has the session's identity, calls, tokens (each counted once), own rewards and findings.
    """
    ids = [record.id for record in records]
    calls, tokens = source.call_counts_of(ids), source.token_counts_of(ids)
    rewards = source.rewards_of(ids)
    return [
        _summary(one, sum(calls[one.id].values()), tokens[one.id], rewards[one.id])
        for one in records
    ]


def _summary(
    record: SessionRecord, calls: int, tokens: tuple[int, int], rewards: Sequence[Reward]
) -> dict[str, Any]:
    observed, sampled = tokens
    return {
        "id": record.id,
        "name": record.name,
        "run_id": record.run_id,
        "task_suite": record.task_suite,
        "task_split": record.task_split,
        "task_id": record.task_id,
        "group_id": record.group_id,
        "harness": record.harness,
        "created_at": record.created_at,
        "outcome": record.outcome,
        "calls": calls,
        "observed_tokens": observed,
        "sampled_tokens": sampled,
        "rewards": session_rewards(rewards),
        "role_rewards": role_rewards(rewards),
        "findings": {one.name: {"mode": one.mode, **one.detail} for one in findings_in(rewards)},
    }
