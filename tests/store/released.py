"""Keeps a store as a release wrote it, for the tests of every later one.

``python tests/store/released.py`` writes ``data/written_by_REVISION.json.gz`` with the SQL of the
tables, the rows of a small store, and what this release reads from it. Run it when a release is
made.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
import tempfile
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from sqlalchemy import JSON, Boolean, DateTime, Dialect, Float, MetaData, insert
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from bridle.store.call import CallBegun, CallEnded
from bridle.store.reading.queries import Reader
from bridle.store.records import (
    CallStatus,
    Choice,
    Conversation,
    LineageState,
    Message,
    Note,
    RequestDigests,
    SessionRecord,
    TaskRecord,
    ToolCall,
    VersionRun,
)
from bridle.store.reward import Reward
from bridle.store.schema.database import connect, migrate, newest_revision, transaction
from bridle.store.schema.derived import CREATE_INDEX, INDEX
from bridle.store.schema.derived import DERIVED as DERIVED_TABLES
from bridle.store.schema.tables import metadata
from bridle.store.tree import TokenTree
from bridle.store.writing.writer import Writer

DATA = Path(__file__).parent / "data"
TOOLS = ({"type": "function", "function": {"name": "look"}},)


def fill(url: str) -> None:
    """A session of three turns, its reward, and a call that never ended."""
    with Writer(url) as writer:
        writer.add_sync(TaskRecord("1", "shop", "train", {"n": 1}, 1.0))
        session = SessionRecord(
            "session_a", 2.0, name="first", task_suite="shop", task_split="train", task_id="1"
        )
        writer.add_sync(session)
        history = [Message("system", "Be brief."), Message("user", "What is there? é")]
        tail, prompt, parent = tuple(history), np.arange(40, dtype=np.uint32), None
        tree = TokenTree(session.id)
        for turn in range(4):
            digests = RequestDigests(b"s" * 16, b"f" * 16, b"t" * 16, b"a" * 16, (), (), turn)
            body = {"tools": TOOLS, "messages": [message.to_chat() for message in history]}
            begun = CallBegun(
                id=f"call_{turn}",
                session_id=session.id,
                dialect="chat",
                started_at=3.0 + turn,
                request_body=orjson.dumps(body),
                stream=True,
                model_requested="policy",
                parent_call_id=parent,
                headers={"x-session-id": "7"},
                conversation=Conversation(
                    tail, TOOLS, len(history), lineage=LineageState(digests, parent)
                ),
            )
            writer.begin_call(begun)
            if turn == 3:
                break
            reply = Message("assistant", "I look.", "hm", (ToolCall(f"c{turn}", "look", "{}"),))
            ids = np.array([90, 91, turn], dtype=np.uint32)
            logprobs = np.array([-0.5, -1.25, -2.0], dtype=np.float32)
            choices = (Choice(ids, logprobs, (VersionRun(0, 1),), "tool_calls"),)
            ended = CallEnded(
                id=begun.id,
                session_id=session.id,
                status=CallStatus.COMPLETE,
                ended_at=3.5 + turn,
                prompt_token_ids=prompt,
                choices=choices,
                growth=tree.grow(begun.id, prompt, choices),
                response_body=orjson.dumps(reply.to_chat()),
                model_served="policy",
                usage={"prompt_tokens": len(prompt), "completion_tokens": 3},
                sampling={"temperature": 0.7},
                replies=(reply,),
                notes=(Note("a_note", "of it"),),
            )
            writer.end_call_sync(ended)
            tail = (Message("tool", "a file", tool_call_id=f"c{turn}"),)
            history += [reply, *tail]
            prompt, parent = np.concatenate([prompt, ids, ids]), begun.id
        writer.add_sync(Reward(session.id, "solved", 1.0, 9.0))


def read(url: str) -> dict[str, Any]:
    """Everything that is read of the store, as plain values."""
    found: dict[str, Any] = {}
    with Reader(url) as reader:
        for session in reader.sessions():
            found[session.id] = [reward.value for reward in reader.rewards(session.id)]
            for call in reader.calls(session.id):
                said, prompt = call.conversation, reader.prompt_token_ids(call.id)
                answered = call.response_sha256 is not None
                found[call.id] = {
                    "status": call.status.value,
                    "request": reader.request_body(call.id).decode(),
                    "response": reader.response_body(call.id).decode() if answered else None,
                    "tail": None if said is None else [m.to_chat() for m in said.tail],
                    "base": None if said is None or said.lineage is None
                    else said.lineage.base_call_id,
                    "replies": [message.to_chat() for message in call.replies],
                    "prompt": None if prompt is None else prompt.tolist(),
                    "sampled": [
                        [choice.token_ids.tolist(), choice.logprobs.tolist()]
                        for choice in reader.sampled(call.id)
                    ],
                    "sampling": dict(call.sampling),
                    "notes": [[note.name, note.detail] for note in call.notes],
                }  # fmt: skip
    return found


DERIVED = frozenset(table.name for table in DERIVED_TABLES)


def rows(path: str) -> dict[str, list[dict[str, Any]]]:
    """Every row of an SQLite store as it is, bytes as hex."""
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        tables = [row["name"] for row in connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table'"
            " AND name NOT IN ('writers', 'sqlite_sequence')"
        ) if row["name"] not in DERIVED and not row["name"].startswith(INDEX)]  # fmt: skip
        return {
            name: [{key: _kept(row[key]) for key in row.keys()} for row in connection.execute(  # noqa: SIM118
                f"SELECT * FROM {name}"  # noqa: S608
            )]
            for name in tables
        }  # fmt: skip


def schema(dialect: Dialect) -> list[str]:
    """The SQL that makes the tables and indexes of this release."""
    statements = []
    for table in metadata.sorted_tables:
        indexes = sorted(table.indexes, key=lambda index: str(index.name))
        statements.append(str(CreateTable(table).compile(dialect=dialect)))
        statements += [str(CreateIndex(index).compile(dialect=dialect)) for index in indexes]
    statements.append(CREATE_INDEX[dialect.name])
    revisions = (
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL,"
        " CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
    )
    return [*statements, revisions]


def restore(url: str, stored: dict[str, Any]) -> None:
    """Makes the store of a release in an empty database."""
    engine = connect(url, create=True)
    found, kept = MetaData(), stored["rows"]
    with transaction(engine) as connection:
        for statement in stored["schema"][connection.dialect.name]:
            connection.exec_driver_sql(statement)
        found.reflect(connection)
        for table in found.sorted_tables:
            for column in table.c:
                if isinstance(column.type, JSON):
                    column.type = JSON(none_as_null=True)
            values = [
                {key: _plain(value, table.c[key].type) for key, value in row.items()}
                for row in kept.get(table.name, ())
            ]
            if values:
                connection.execute(insert(table), values)
    engine.dispose()


def _kept(value: Any) -> Any:
    return {"bytes": value.hex()} if isinstance(value, bytes) else value


def _plain(value: Any, kind: Any) -> Any:
    if isinstance(value, dict):
        return bytes.fromhex(value["bytes"])
    if isinstance(kind, JSON) and value is not None:
        return json.loads(value)
    if isinstance(kind, Float) and value is not None:
        return float(value)
    if isinstance(kind, DateTime) and value is not None:
        return datetime.fromtimestamp(value, UTC)
    return bool(value) if isinstance(kind, Boolean) and value is not None else value


def kept() -> dict[str, Any]:
    """A store as this version writes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/bridle.db"
        migrate(path)
        fill(path)
        tables = {"sqlite": schema(sqlite.dialect()), "postgresql": schema(postgresql.dialect())}
        return {"schema": tables, "rows": rows(path), "read": read(path)}


def main() -> None:
    DATA.mkdir(exist_ok=True)
    target = DATA / f"written_by_{newest_revision()}.json.gz"
    target.write_bytes(gzip.compress(json.dumps(kept()).encode(), mtime=0))


if __name__ == "__main__":
    main()
