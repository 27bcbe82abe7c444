"""``bridle sessions``: what has been recorded, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import typer

from bridle.cli.options import HarnessOption, JsonOption, RunOption, StoreOption
from bridle.cli.reading import nothing_found, reader, require_run
from bridle.cli.terminal import out, print_json, print_table
from bridle.reconstruct.conditions import OPEN
from bridle.reconstruct.rewards import session_rewards
from bridle.store.reading.queries import Reader
from bridle.store.records import Reward, SessionRecord


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
        found = source.sessions(run=run, harness=harness, limit=limit, newest_first=True)
        rows = summaries(source, list(found))
        none = None if rows else nothing_found(source)
    if json:
        print_json(rows)
        return
    if none is not None:
        out.print(f"{none.capitalize()}.")
        return
    counts = ("calls", "observed", "sampled")
    print_table(
        ("session", "started", "harness", "outcome", *counts, "rewards"),
        [_cells(row) for row in rows],
        shrinks="rewards",
        spare=("observed", "sampled", "harness"),
        right=counts,
    )


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["name"] or row["id"],
        datetime.fromtimestamp(row["created_at"]).strftime("%m-%d %H:%M:%S"),
        row["harness"] or "–",
        row["outcome"] or OPEN,
        str(row["calls"]),
        str(row["observed_tokens"]),
        str(row["sampled_tokens"]),
        " ".join(f"{name}={value:g}" for name, value in row["rewards"].items()) or "–",
    ]


def summaries(source: Reader, records: Sequence[SessionRecord]) -> list[dict[str, Any]]:
    """Each session in a line: its identity, calls, tokens (each counted once) and own rewards."""
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
    }
