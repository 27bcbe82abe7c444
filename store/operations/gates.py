"""The gates of a deployment: the rows that its proxies read before a call may start.

A deployment is the proxies, on any host, that serve the same policies from one store. Each policy
has a row in ``gates``: the version that is served, and whether new calls wait. Each engine of a
policy has a row in ``served``: the version that was published to it last. A change writes these
rows in one transaction and gives them the next revision of the deployment. Each live proxy records
in its row of ``writers`` the newest revision that it has read, and its running calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Engine, delete, insert, select, update

from bridle.errors import BridleError
from bridle.store import processes
from bridle.store.errors import NotFound, StoreUnavailable
from bridle.store.schema.connections import idle_engine
from bridle.store.schema.database import transaction
from bridle.store.schema.tables import gates, served, writers

_REVISION: Final = "SELECT max(revision) FROM gates WHERE deployment = ?"
_SEALED: Final = "SELECT 1 FROM sessions WHERE id = ? AND sealed_at IS NOT NULL"
_SEALED_AMONG: Final = "SELECT id FROM sessions WHERE id = ANY(?) AND sealed_at IS NOT NULL"
_NAMED: Final = "SELECT 1 FROM sessions WHERE name = ?"
_NAMED_AMONG: Final = "SELECT name FROM sessions WHERE name = ANY(?)"

REST_S: Final = 2.0
"""Seconds between two reads of the rows by a process that rests."""
RESTING: Final = "resting"
"""The member of a report that is true while the process rests (:attr:`Member.resting`)."""


class StaleVersion(BridleError, ValueError):
    """The published policy version is older than the current one."""


@dataclass(frozen=True, slots=True)
class Gate:
    """The row of a policy."""

    version: int
    model: str | None
    """The served model name if it changes with the version, else ``None``."""
    paused: bool
    """True if new calls wait."""


@dataclass(frozen=True, slots=True)
class Served:
    """The row of an engine of a policy."""

    version: int
    weights_fingerprint: str | None
    """The engine's own fingerprint of the version's weights; ``None`` if it has reported none."""
    published: int
    """The revision in which the version was published."""


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows of a deployment at one revision."""

    revision: int
    gates: Mapping[str, Gate]
    """The gates by policy."""
    engines: Mapping[str, Mapping[str, Served]]
    """The engines of each policy, by base URL. One engine may serve several policies."""


@dataclass(frozen=True, slots=True)
class Member:
    """A live process of the deployment."""

    seen: int
    """The newest revision that it has read."""
    report: Mapping[str, Any]
    """The report on its running calls that the process gave after it had read that revision."""
    resting: bool
    """True if the process lets no call start before it has read the rows again. It has no calls."""


class Gates:
    """The rows of one deployment; the methods may be called from any thread.

    With SQLite, :meth:`revision`, :meth:`is_sealed` and :meth:`is_named` use a connection of their
    own, without SQLAlchemy. Once it is open, they take some 5 µs and fail at once if the file is
    locked, so that an event loop may call them.
    """

    def __init__(self, engine: Engine, deployment: str) -> None:
        self._engine = engine
        self._deployment = deployment
        self._sqlite = engine.dialect.name == "sqlite"
        self.remote = not self._sqlite
        """True if each read is a round trip to a server."""
        self._lock = threading.Lock()
        self._pooled: Any = None
        self._driver: Any = None
        """The driver's connection for :meth:`_query`, opened at the first use, and the pool's hold
        on it."""

    @property
    def ready(self) -> bool:
        """Return whether an event loop may call the methods with that connection now."""
        return self._driver is not None

    def close(self) -> None:
        with self._lock:
            if self._pooled is not None:
                self._pooled.invalidate()
                self._pooled = self._driver = None

    # -- reading ---------------------------------------------------------------------------------

    def revision(self) -> int:
        """Return the deployment's newest revision, 0 before it has any.

        Raise :class:`StoreUnavailable`.
        """
        ((newest,),) = self._query(_REVISION, self._deployment)
        return newest or 0

    def read(self) -> Rows:
        """Return all rows. Raise :class:`StoreUnavailable`."""
        with self._engine.connect() as connection:
            return self._rows(connection)

    def is_sealed(self, session_id: str) -> bool:
        """Return whether a session is sealed. Raise :class:`StoreUnavailable`."""
        return bool(self._query(_SEALED, session_id))

    def sealed_among(self, session_ids: Sequence[str]) -> frozenset[str]:
        """Return the ids of those sessions, in a server's database, that are sealed.

        Raise :class:`StoreUnavailable`.
        """
        return frozenset(row[0] for row in self._query(_SEALED_AMONG, list(session_ids)))

    def is_named(self, name: str) -> bool:
        """Return whether a session has the name. Raise :class:`StoreUnavailable`."""
        return bool(self._query(_NAMED, name))

    def named_among(self, names: Sequence[str]) -> frozenset[str]:
        """Return the names that sessions in a server's database have.

        Raise :class:`StoreUnavailable`.
        """
        return frozenset(row[0] for row in self._query(_NAMED_AMONG, list(names)))

    def others(self, writer_id: str) -> list[Member]:
        """Return the live processes except one."""
        with self._engine.connect() as connection:
            return self._members(connection, writer_id)

    # -- changes, each of which returns the revision that it makes --------------------------------

    def join(self, writer_id: str, engines: Mapping[str, Sequence[str]]) -> None:
        """Make the process with this row in ``writers`` a member.

        ``engines`` has the base URLs of each policy's engines, by the policy's name. They become
        the deployment's if no other process lives; a pause is then over. Otherwise only policies
        that are new bring their engines.
        """
        with self._change() as (connection, rows, revision):
            first = not self._members(connection, writer_id)
            if first:
                self._update_gates(connection, revision, paused=False)
                for policy, known in rows.engines.items():
                    for url in known.keys() - set(engines.get(policy, ())):
                        self._remove(connection, policy, url)
            paused = not first and any(gate.paused for gate in rows.gates.values())
            for policy, urls in engines.items():
                new = policy not in rows.gates
                if new:
                    row = {"policy": policy, "version": 0, "paused": paused, "revision": revision}
                    connection.execute(insert(gates).values(deployment=self._deployment, **row))
                if first or new:
                    for url in set(urls) - rows.engines.get(policy, {}).keys():
                        self._add(connection, policy, url, 0, revision)
            self._report(connection, writer_id, 0, {})

    def publish(
        self, policy: str, version: int, model: str | None, engine: str | None, *, back: bool
    ) -> int:
        """Record that ``engine`` serves ``version`` from now on.

        ``None`` means every engine of the policy. The version becomes the policy's unless an engine
        is given and the version is not newer.

        Raise :class:`StaleVersion` if the version is older than the policy's and ``back`` is not
        set, and :class:`NotFound` for an unknown engine.
        """
        with self._change() as (connection, rows, revision):
            urls = rows.engines.get(policy, {})
            current = rows.gates[policy].version
            if engine is not None and engine not in urls:
                raise NotFound(f"there is no engine {engine}")
            if engine is None and version < current and not back:
                raise StaleVersion(f"policy version {version} is older than {current}")
            fields: dict[str, Any] = {}
            if engine is None or version > current:
                fields = {"version": version, "model": model}
            self._update_gates(connection, revision, policy, **fields)
            for url in urls if engine is None else [engine]:
                fingerprint = {"weights_fingerprint": None, "reported_at": time.time()}
                fields = {"version": version, "published": revision, **fingerprint}
                self._update(connection, policy, url, **fields)
        return revision

    def set_fingerprints(self, policy: str, published: int, found: Mapping[str, str | None]) -> int:
        """Record the fingerprints that engines reported, by base URL.

        They are for the version that was published in the revision ``published``. Engines of a
        later publish are skipped.
        """
        with self._change() as (connection, rows, revision):
            self._update_gates(connection, revision, policy)
            known = rows.engines.get(policy, {})
            for url, fingerprint in found.items():
                if url in known and known[url].published == published:
                    self._update(connection, policy, url, weights_fingerprint=fingerprint)
        return revision

    def set_paused(self, paused: bool) -> int:
        """Close or open the gates of all policies."""
        with self._change() as (connection, _, revision):
            self._update_gates(connection, revision, paused=paused)
        return revision

    def add_engine(self, policy: str, url: str, version: int) -> int:
        """Add an engine that serves ``version``; a known engine stays as it is.

        Raise ``ValueError`` for an engine of another policy.
        """
        with self._change() as (connection, rows, revision):
            policies = [name for name, known in rows.engines.items() if url in known]
            if policies and policy not in policies:
                raise ValueError(f"{url} serves the policy {policies[0]}")
            if not policies:
                self._update_gates(connection, revision, policy)
                self._add(connection, policy, url, version, revision)
        return revision

    def remove_engine(self, policy: str, url: str) -> int:
        """Remove an engine.

        Raise :class:`NotFound` for an unknown engine, and ``ValueError`` for the policy's last one.
        """
        with self._change() as (connection, rows, revision):
            urls = rows.engines.get(policy, {})
            if url not in urls:
                raise NotFound(f"there is no engine {url}")
            if len(urls) == 1:
                raise ValueError("the last engine cannot be removed")
            self._update_gates(connection, revision, policy)
            self._remove(connection, policy, url)
        return revision

    def report(self, writer_id: str, seen: int, report: Mapping[str, Any]) -> None:
        """Record that a member has read the revision ``seen``, and its report as of then."""
        with transaction(self._engine) as connection:
            self._report(connection, writer_id, seen, report)

    # -- plumbing --------------------------------------------------------------------------------

    def _query(self, sql: str, *values: Any) -> Sequence[Sequence[Any]]:
        return self._query_file(sql, values) if self._sqlite else self._query_server(sql, values)

    def _query_server(self, sql: str, values: tuple[Any, ...]) -> Sequence[Sequence[Any]]:
        """Run a query in one round trip, on whichever connection of the process is free."""
        driver_errors = self._engine.dialect.loaded_dbapi.Error
        try:
            pooled = idle_engine(self._engine).raw_connection()
        except driver_errors as error:
            raise StoreUnavailable(f"the store cannot be read: {error}") from error
        driver: Any = pooled.driver_connection
        try:
            driver.autocommit = True
            found: Sequence[Sequence[Any]] = driver.execute(
                sql.replace("?", "%s"), values
            ).fetchall()
            driver.autocommit = False
        except driver_errors as error:
            pooled.invalidate()
            raise StoreUnavailable(f"the store cannot be read: {error}") from error
        pooled.close()
        return found

    def _query_file(self, sql: str, values: tuple[Any, ...]) -> Sequence[Sequence[Any]]:
        with self._lock:
            try:
                if self._driver is None:
                    self._pooled = self._engine.raw_connection()
                    self._driver = self._pooled.driver_connection
                    self._driver.execute("PRAGMA busy_timeout=0")
                return list(self._driver.execute(sql, values).fetchall())
            except self._engine.dialect.loaded_dbapi.Error as error:
                if self._pooled is not None:
                    self._pooled.invalidate()
                self._pooled = self._driver = None
                raise StoreUnavailable(f"the store cannot be read: {error}") from error

    @contextmanager
    def _change(self) -> Iterator[tuple[Connection, Rows, int]]:
        """Open a transaction that excludes all other changes of the deployment.

        Yield its connection, the rows before the change, and the revision that the change makes.
        """
        with transaction(self._engine) as connection:
            if not self._sqlite:
                connection.exec_driver_sql(
                    "SELECT pg_advisory_xact_lock(hashtextextended(%(key)s, 0))",
                    {"key": f"bridle gates {self._deployment}"},
                )
            rows = self._rows(connection)
            yield connection, rows, rows.revision + 1

    def _rows(self, connection: Connection) -> Rows:
        # The gates are read first: engines of a later revision are read again with its gates.
        own_gates = select(gates).where(gates.c.deployment == self._deployment)
        found = connection.execute(own_gates).all()
        own_engines = select(served).where(served.c.deployment == self._deployment)
        engines: dict[str, dict[str, Served]] = {}
        for row in connection.execute(own_engines.order_by(served.c.engine)):
            one = Served(row.version, row.weights_fingerprint, row.published)
            engines.setdefault(row.policy, {})[row.engine] = one
        return Rows(
            max((row.revision for row in found), default=0),
            {row.policy: Gate(row.version, row.model, row.paused) for row in found},
            engines,
        )

    def _update_gates(
        self, connection: Connection, revision: int, policy: str | None = None, **fields: Any
    ) -> None:
        """Set ``fields`` of one policy's row, or of all policies' rows."""
        changed = update(gates).where(gates.c.deployment == self._deployment)
        if policy is not None:
            changed = changed.where(gates.c.policy == policy)
        connection.execute(changed.values(revision=revision, **fields))

    def _add(
        self, connection: Connection, policy: str, url: str, version: int, revision: int
    ) -> None:
        row = {"engine": url, "policy": policy, "version": version, "published": revision}
        row |= {"deployment": self._deployment, "reported_at": time.time()}
        connection.execute(insert(served).values(row))

    def _update(self, connection: Connection, policy: str, url: str, **fields: Any) -> None:
        own = update(served).where(*self._row(policy, url))
        connection.execute(own.values(**fields))

    def _remove(self, connection: Connection, policy: str, url: str) -> None:
        connection.execute(delete(served).where(*self._row(policy, url)))

    def _row(self, policy: str, url: str) -> tuple[ColumnElement[bool], ...]:
        """Return the condition of the row of an engine of a policy."""
        columns = served.c
        return (
            columns.deployment == self._deployment,
            columns.policy == policy,
            columns.engine == url,
        )

    def _report(
        self, connection: Connection, writer_id: str, seen: int, report: Mapping[str, Any]
    ) -> None:
        fields = {"deployment": self._deployment, "seen": seen, "report": dict(report)}
        connection.execute(update(writers).where(writers.c.id == writer_id).values(**fields))

    def _members(self, connection: Connection, except_for: str) -> list[Member]:
        query = select(writers).where(
            writers.c.deployment == self._deployment, writers.c.id != except_for
        )
        found = connection.execute(query)
        return [
            Member(row.seen, row.report, bool(row.report.get(RESTING)))
            for row in found
            if processes.alive(row)
        ]
