"""A recorded store as Python sees it: typed objects, and the same as Arrow and pandas tables.

>>> with open_store("runs/bridle.db") as store:
...     for session in store.sessions(harness="codex"):
...         print(session.record.id, session.rewards, len(session.samples()))
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from sqlalchemy import text

from bridle.reconstruct.audit import SessionAudit, audit_session
from bridle.reconstruct.kinds.kinds import with_kinds
from bridle.reconstruct.rewards import Aggregation, session_rewards
from bridle.reconstruct.samples.builders import Built, build
from bridle.reconstruct.samples.policy import DEFAULT_POLICY, TrainablePolicy
from bridle.reconstruct.samples.sample import Sample
from bridle.reconstruct.session import SessionTree
from bridle.reconstruct.tables import call_table, sample_row, sample_schema, session_table
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import Reward, SessionRecord


class RecordedSession:
    """One session; everything is read when it is first asked for."""

    def __init__(self, reader: Reader, record: SessionRecord) -> None:
        self._reader = reader
        self.record = record

    @property
    def id(self) -> str:
        return self.record.id

    @cached_property
    def calls(self) -> list[CallRow]:
        """In the order of their start, their kinds told."""
        return with_kinds(self._reader.calls(self.id))

    @cached_property
    def tree(self) -> SessionTree:
        """The token tree, with the calls of its own moment: a session that goes on may have had
        fewer when :attr:`calls` was read. Raises :class:`bridle.reconstruct.session.BrokenTree`."""
        return SessionTree.load(self._reader, self.id)

    @cached_property
    def all_rewards(self) -> list[Reward]:
        """Of the session, its calls and turns, oldest first."""
        return self._reader.rewards(self.id)

    @property
    def rewards(self) -> dict[str, float]:
        """The session's own, by name: of several the latest."""
        return session_rewards(self.all_rewards)

    def reward(self, aggregation: Aggregation | None = None) -> float | None:
        """All of them as one number; ``None`` when there is none."""
        return (aggregation or Aggregation()).value(self.all_rewards)

    def build(self, policy: TrainablePolicy = DEFAULT_POLICY, builder: str = "tree") -> Built:
        """The samples, and where every sampled token went."""
        return build(self.tree, policy, builder)

    def samples(
        self, policy: TrainablePolicy = DEFAULT_POLICY, builder: str = "tree"
    ) -> tuple[Sample, ...]:
        """What a trainer sees."""
        return self.build(policy, builder).samples

    def audit(self, *, bodies: bool = False) -> SessionAudit:
        """Whether it holds together; with ``bodies`` every recorded body is proved as well."""
        return audit_session(self._reader, self.id, bodies=bodies)

    def request(self, call: CallRow) -> bytes:
        """The client's request, byte for byte."""
        return self._reader.request_body(call.id)

    def response(self, call: CallRow) -> bytes | None:
        """What the client was sent, byte for byte."""
        return None if call.response_sha256 is None else self._reader.response_body(call.id)


class RecordedStore:
    """A store, opened for reading; close it, or use it as a context."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __enter__(self) -> RecordedStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.reader.close()

    def session(self, wanted: str) -> RecordedSession:
        """By id or name. Raises :class:`bridle.store.errors.NotFound`."""
        named = self.reader.session_by_name(wanted)
        return RecordedSession(self.reader, named or self.reader.session(wanted))

    def sessions(self, **filters: Any) -> Iterator[RecordedSession]:
        """Those that match ``filters`` (of ``Reader.sessions``), oldest first, one at a time."""
        for record in self.reader.sessions(**filters):
            yield RecordedSession(self.reader, record)

    def sessions_table(self, **filters: Any) -> pa.Table:
        """A row per session, with a column ``reward.NAME`` for each name of reward."""
        names = self.reader.reward_names()
        return session_table(((s.record, s.rewards) for s in self.sessions(**filters)), names)

    def calls_table(self, **filters: Any) -> pa.Table:
        """A row per call of the sessions that match."""
        return call_table(call for session in self.sessions(**filters) for call in session.calls)

    def samples_table(
        self,
        policy: TrainablePolicy = DEFAULT_POLICY,
        builder: str = "tree",
        **filters: Any,
    ) -> pa.Table:
        """A row per sample: the columns of ``bridle export``'s Parquet."""
        names = self.reader.reward_names()
        rows = [
            sample_row(session.record, sample, names, session.rewards)
            for session in self.sessions(**filters)
            for sample in session.samples(policy, builder)
        ]
        return pa.Table.from_pylist(rows, sample_schema(names))

    def query(self, sql: str, **values: Any) -> pa.Table:
        """The result of an SQL query, ``:name`` taken from ``values``."""
        with self.reader.engine.connect() as connection:
            result = connection.execute(text(sql), values)
            columns, rows = list(result.keys()), result.all()
        return pa.table({name: [row[i] for row in rows] for i, name in enumerate(columns)})


def open_store(source: str | Path) -> RecordedStore:
    """Opens a store for reading: an SQLite file, or a database URL.

    Raises :class:`FileNotFoundError` where there is no such file; looking never makes a store.
    """
    address = str(source)
    if "://" not in address and not Path(address).exists():
        raise FileNotFoundError(f"there is no store at {address}")
    return RecordedStore(Reader(address))
