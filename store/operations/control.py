"""The control log: changes that every proxy of one deployment applies in the same order.

A deployment is the proxies, on any host, that serve one policy from one store. Each change is a row
with a revision, and revisions become visible in their order. Each live proxy process records in its
row of ``writers`` the newest revision that it has applied, and a report on itself as of then. So
the process that appends a change can wait until all others have applied it. The log begins anew
when the first process of a deployment joins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, delete, insert, select, update

from bridle.store import processes
from bridle.store.schema.database import transaction
from bridle.store.schema.tables import control, writers


@dataclass(frozen=True, slots=True)
class Member:
    """A live process of the deployment."""

    id: str
    pid: int
    host: str
    revision: int
    """The newest change that it has applied."""
    report: Mapping[str, Any]
    """The report on itself that the process gave with that revision."""


class ControlLog:
    """One deployment's log; its methods may be called from any thread."""

    def __init__(self, engine: Engine, deployment: str) -> None:
        self._engine = engine
        self._deployment = deployment

    def join(self, writer_id: str) -> None:
        """Make the process with this row in ``writers`` a member that has applied nothing."""
        with self._locked() as connection:
            if not self._members(connection, writer_id):
                connection.execute(delete(control).where(control.c.deployment == self._deployment))
            self._acknowledge(connection, writer_id, 0, {})

    def append(self, change: Mapping[str, Any]) -> int:
        """Add a change and return its revision."""
        row = {"deployment": self._deployment, "change": dict(change)}
        with self._locked() as connection:
            added = insert(control).values(row).returning(control.c.revision)
            return int(connection.execute(added).scalar_one())

    def remove(self, revision: int) -> None:
        """Remove a change that has no effect on a process that starts later."""
        with transaction(self._engine) as connection:
            connection.execute(delete(control).where(control.c.revision == revision))

    def since(self, revision: int) -> list[tuple[int, dict[str, Any]]]:
        """Return the changes after ``revision``, in order."""
        query = (
            select(control.c.revision, control.c.change)
            .where(control.c.deployment == self._deployment, control.c.revision > revision)
            .order_by(control.c.revision)
        )
        with self._engine.connect() as connection:
            return [(row.revision, row.change) for row in connection.execute(query)]

    def acknowledge(self, writer_id: str, revision: int, report: Mapping[str, Any]) -> None:
        """Record that a member has applied all changes up to ``revision``."""
        with transaction(self._engine) as connection:
            self._acknowledge(connection, writer_id, revision, report)

    def others(self, writer_id: str) -> list[Member]:
        """Return the live members except one."""
        with self._engine.connect() as connection:
            return self._members(connection, writer_id)

    @contextmanager
    def _locked(self) -> Iterator[Connection]:
        """Open a transaction that excludes all others of this kind."""
        with transaction(self._engine) as connection:
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql("LOCK TABLE control IN SHARE ROW EXCLUSIVE MODE")
            yield connection

    def _acknowledge(
        self, connection: Connection, writer_id: str, revision: int, report: Mapping[str, Any]
    ) -> None:
        connection.execute(
            update(writers)
            .where(writers.c.id == writer_id)
            .values(
                deployment=self._deployment, control_revision=revision, control_report=dict(report)
            )
        )

    def _members(self, connection: Connection, except_for: str) -> list[Member]:
        query = select(writers).where(
            writers.c.deployment == self._deployment, writers.c.id != except_for
        )
        return [
            Member(row.id, row.pid, row.host, row.control_revision, row.control_report)
            for row in connection.execute(query)
            if processes.alive(row)
        ]
