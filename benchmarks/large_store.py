"""A store with as many calls as wanted, filled by bulk inserts in minutes.

Some sessions of the gallery, 10 to 40 calls each, are recorded as the proxy records them. Their
rows are then copied, in every table, under new identifiers and with other texts of the corpus in
their messages. Rows are copied as the tables declare them, so a new column needs no change here.
The exact bytes of bodies are those of the recorded sessions, so ``bridle audit --bodies`` does not
hold on such a store; everything else does.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, Table

from bridle.bench.corpus import corpus
from bridle.bench.gallery import EPOCH, GROUP, HARNESSES, add_session, fill
from bridle.store.operations.copying import copy_store
from bridle.store.schema.database import connect, migrate, transaction
from bridle.store.schema.derived import DERIVED
from bridle.store.schema.tables import metadata, writers
from bridle.store.writing.digest import Digester, lacking

TURNS: Final = (8, 12, 16, 20, 24, 28, 32)
"""Turns of the recorded sessions; each has some calls more, of sub-agents and for its title."""
RUNS: Final = 8
RUN_SHARE: Final = 0.7
"""The share of the sessions that belong to a run. The first run has half of these, the second a
quarter, and so on."""
_AT_ONCE: Final = 200
"""Sessions that are copied in one transaction."""
_SECONDS: Final = 30.0
"""Seconds between the beginnings of two sessions."""
_KEPT: Final = frozenset({"runs", "attempts", "tasks", "policies", "metrics"})
"""Tables that are copied as they are, once."""


@dataclass(frozen=True)
class Recorded:
    """The rows of one recorded session, by table."""

    calls: int
    rows: dict[str, list[tuple[Any, ...]]]


def fill_store(store: str, calls: int, say: Callable[[str], None] = print) -> int:
    """Fill a new store with at least ``calls`` calls, and return their number.

    A store in PostgreSQL is a copy of an SQLite file that is filled first, in the temporary folder.
    """
    if "://" in store:
        with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
            file = str(Path(folder) / "store.db")
            made = fill_store(file, calls, say)
            copy_store(file, store)
            target = connect(store)
            digest_all(target, say)
            target.dispose()
            return made
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        small = str(Path(folder) / "small.db")
        fill(small, GROUP)
        ids = [add_session(small, turns=turns) for turns in TURNS]
        origin = connect(small)
        recorded = [_recorded(origin, session_id) for session_id in ids]
        migrate(store)
        target = connect(store, synchronous="OFF", page_cache_kib=262_144)
        try:
            _copy_kept(origin, target)
            return _fill(target, recorded, calls, say)
        finally:
            origin.dispose()
            target.dispose()


def _fill(
    target: Engine, recorded: Sequence[Recorded], calls: int, say: Callable[[str], None]
) -> int:
    made = number = 0
    mean = sum(one.calls for one in recorded) / len(recorded)
    total = int(calls / mean) + 1
    while made < calls:
        with transaction(target) as connection:
            rows: dict[str, list[tuple[Any, ...]]] = {}
            for _ in range(_AT_ONCE):
                one = recorded[number % len(recorded)]
                for name, own in _copied(one, number, total):
                    rows.setdefault(name, []).extend(own)
                made, number = made + one.calls, number + 1
                if made >= calls:
                    break
            for table in metadata.sorted_tables:
                _insert(connection, table, rows.get(table.name, []))
        say(f"{made:,} calls in {number:,} sessions.")
    digest_all(target, say)
    return made


def digest_all(target: Engine, say: Callable[[str], None] = print) -> None:
    """Make the derived rows of all sealed sessions, in transactions of some seconds."""
    digester = Digester()
    with target.connect() as connection:
        digester.add(lacking(connection))
    while digester:
        with transaction(target) as connection:
            settle = digester.step(connection, seconds=5.0)
        settle()
        say(f"{len(digester):,} sessions to digest.")


def _recorded(origin: Engine, session_id: str) -> Recorded:
    rows: dict[str, list[tuple[Any, ...]]] = {}
    with origin.connect() as connection:

        def read(table: str, where: str) -> None:
            found = connection.exec_driver_sql(
                f"SELECT * FROM {table} WHERE {where}",  # noqa: S608 - names of our own tables
                (session_id,),
            )
            rows[table] = [tuple(row) for row in found]

        for table in metadata.sorted_tables:
            if table in DERIVED:
                continue
            if table.name == "sessions":
                read(table.name, "id = ?")
            elif "session_id" in table.c:
                read(table.name, "session_id = ?")
            elif "call_id" in table.c:
                read(table.name, "call_id IN (SELECT id FROM calls WHERE session_id = ?)")
    return Recorded(len(rows["calls"]), rows)


def _copy_kept(origin: Engine, target: Engine) -> None:
    """Copy the runs and their numbers, as many runs as :data:`RUNS`, and the tasks."""
    with origin.connect() as reading, transaction(target) as writing:
        for table in metadata.sorted_tables:
            if table.name not in _KEPT:
                continue
            found = [tuple(row) for row in reading.exec_driver_sql(f"SELECT * FROM {table.name}")]  # noqa: S608
            names = list(table.c.keys())
            run = {"runs": "id"}.get(table.name, "run_id")
            if run not in names:
                _insert(writing, table, found)
                continue
            at = names.index(run)
            first = [row for row in found if row[at] == "run_gallery1"]
            for number in range(RUNS):
                renamed = [(*row[:at], _run(number), *row[at + 1 :]) for row in first]
                _insert(writing, table, renamed)


def _run(number: int) -> str:
    return f"run_bench{number}"


def _run_of(rng: random.Random) -> str | None:
    if rng.random() >= RUN_SHARE:
        return None
    number = 0
    while number < RUNS - 1 and rng.random() < 0.5:
        number += 1
    return _run(number)


def _copied(one: Recorded, number: int, total: int) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """Yield the rows of a copy of a recorded session, by table."""
    group = number // GROUP
    run = _run_of(random.Random(group))
    task = f"task-{group % 12}" if group % 12 else "task-0"
    moved = _SECONDS * number
    place = {
        "run_id": run,
        "group_id": None if run is None else f"{run}/{task}/{group}",
        "harness": HARNESSES[group % len(HARNESSES)],
        "name": f"bench-{number}",
        "created_at": EPOCH + moved,
        "outcome": "timeout" if number % 11 == 10 else "completed",
        # The newest sessions still run.
        "sealed_at": None if number >= total - 50 else EPOCH + moved + 600,
    }
    if run is None:
        place |= {"task_suite": None, "task_split": None, "task_id": None}
    if place["sealed_at"] is None:
        place["outcome"] = None
    rng = random.Random(number)
    for table in metadata.sorted_tables:
        rows = one.rows.get(table.name)
        if rows:
            yield table.name, [_renamed(table, row, f"-{number}", place, rng) for row in rows]


def _renamed(
    table: Table, row: tuple[Any, ...], end: str, place: dict[str, Any], rng: random.Random
) -> tuple[Any, ...]:
    own = place if table.name == "sessions" else {}
    return tuple(
        own[column.name]
        if column.name in own
        else None
        if value is None
        else _value(table.name, column.name, value, end, place, rng)
        for column, value in zip(table.columns, row, strict=True)
    )


def _value(
    table: str, name: str, value: Any, end: str, place: dict[str, Any], rng: random.Random
) -> Any:
    """Return the value of a column in a copy whose identifiers get another ``end``."""
    match table, name:
        case ("calls" | "sessions" | "rewards", "id") | (_, "session_id"):
            return value + end
        case _, "call_id" | "parent_call_id" | "base_call_id":
            return value + end
        case _, "prompt_span_id":
            call_id, _, part = value.rpartition(".")
            return f"{call_id}{end}.{part}"
        case "calls", "started_at" | "ended_at" | "first_token_at":
            return (value - EPOCH) % 1000.0 + place["created_at"]
        case "call_messages", "content":
            return _text(len(value), rng)
        case "rewards", "value":
            return float(rng.random() < 0.5)
        case "token_fates", "run_id":
            return place["run_id"] or ""
        case "token_fates", "fate" if place["run_id"] and value == "trainable":
            return "trained"
    return value


def _text(length: int, rng: random.Random) -> str:
    """Return text of the corpus of this length, with a word that is nowhere else."""
    prose = corpus().prose
    at = rng.randrange(len(prose) - length - 1)
    word = f"{rng.getrandbits(40):010x} "
    return (word + prose[at : at + length])[:length]


def _insert(connection: Connection, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
    if not rows or table is writers:
        return
    names = ", ".join(f'"{name}"' for name in table.c.keys())  # noqa: SIM118 - not a dict
    marks = ", ".join("?" * len(table.c))
    sql = f'INSERT INTO "{table.name}" ({names}) VALUES ({marks})'  # noqa: S608
    connection.exec_driver_sql(sql, list(rows))
