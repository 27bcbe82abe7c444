"""The connections of a process to a PostgreSQL: two, unless the store's URL asks for more.

All stores of a process that name the same database share two small pools: one connection writes
records, and the rest (one of two) serves everything else. So a long read never holds a record up,
and the number of processes times two is the number of connections that the server needs. Whatever
finds no free connection waits for one; so does a process that the server refuses for a while,
because others have all of the server's connections.

``postgresql://HOST/DATABASE?connections=4`` lets each process open four.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, cast

import orjson
import sqlalchemy
from sqlalchemy import Dialect, Engine, ExceptionContext, event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.exc import TimeoutError as NoneFree
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection, QueuePool
from sqlalchemy.util.queue import Empty

from bridle.extras import missing_extra
from bridle.store.encoding.packing import dump_json
from bridle.store.errors import StoreUnavailable
from bridle.store.schema.columns import storable_json

CONNECTIONS: Final = 2
"""Connections of a process to one database, by default and at least: one to write, one to read."""
SETTING: Final = "connections"
"""The parameter of the store's URL that sets the number."""

_WAIT_S: Final = 30.0
"""Seconds that a thread waits for a free connection of its process."""
_LOOK_S: Final = 0.25
"""Seconds after which a thread that waits checks whether it may open a connection itself, because
another thread could not."""
_REFUSED_S: Final = 10.0
"""Seconds for which a server that has no connection left is asked again."""
_TOO_MANY: Final = ("too many clients", "too many connections", "connection slots")
"""Parts of PostgreSQL's messages for it. A connection that failed has no SQLSTATE."""
_OWN_ERRORS: Final = "bridle_own_errors"
"""The execution option of engines whose errors are translated."""

_engines: Final[dict[tuple[int, str, bool], Engine]] = {}
"""The engines by process id (a forked process must not use its parent's), URL, and whether they
write records."""
_lock: Final = threading.Lock()


def postgres_engine(url: sqlalchemy.URL, *, writes: bool) -> Engine:
    """Return an engine on this process's connections to a database.

    ``writes`` takes the connection that is kept for the writers of records. To dispose of the
    engine closes the connections that nobody uses at the moment.

    Raise :class:`StoreUnavailable` without the driver, and for a number of connections below two.
    """
    number = _number(url)
    url = url.difference_update_query([SETTING])
    key = (os.getpid(), url.render_as_string(hide_password=False), writes)
    with _lock:
        if key not in _engines:
            for_writers = _engines[*key[:2], True] = _engine(url, 1)
            _engines[*key[:2], False] = _engine(url, number - 1, spare=for_writers)
        return _engines[key].execution_options()


def with_own_errors(engine: Engine) -> Engine:
    """Return the engine, whose errors are :class:`StoreUnavailable` from now on.

    Other engines on the same connections keep SQLAlchemy's errors.
    """
    return engine.execution_options(**{_OWN_ERRORS: True})


def translate(context: ExceptionContext) -> StoreUnavailable | None:
    """Return the error of engines of :func:`with_own_errors`; a listener of ``handle_error``."""
    if context.engine is None or not context.engine.get_execution_options().get(_OWN_ERRORS):
        return None
    return StoreUnavailable(f"the store cannot be read: {context.original_exception}")


def idle_engine(engine: Engine) -> Engine:
    """Return an engine for a short query that must not wait behind long ones.

    It is ``engine`` unless all of its connections are in use; then it is the one that writes, whose
    transactions are short.
    """
    pool = engine.pool
    if not isinstance(pool, _SharedPool) or pool.checkedout() < pool.size():
        return engine
    return postgres_engine(engine.url, writes=True)


def _number(url: sqlalchemy.URL) -> int:
    given = url.query.get(SETTING, str(CONNECTIONS))
    if not isinstance(given, str) or not given.isdecimal() or int(given) < CONNECTIONS:
        raise StoreUnavailable(f"{SETTING} in the store's URL is a number from {CONNECTIONS} on")
    return int(given)


def _engine(url: sqlalchemy.URL, size: int, spare: Engine | None = None) -> Engine:
    named = {} if "application_name" in url.query else {"application_name": _application_name()}
    try:
        engine = sqlalchemy.create_engine(
            url,
            json_serializer=_dumps,
            json_deserializer=orjson.loads,
            poolclass=_SharedPool,
            pool_size=size,
            max_overflow=0,
            pool_timeout=_LOOK_S,
            hide_parameters=True,
            connect_args=named,
        )
    except ModuleNotFoundError as error:
        cause = missing_extra("PostgreSQL needs the extra postgres", "postgres", error)
        raise StoreUnavailable(cause) from error
    event.listen(engine, "handle_error", translate)
    event.listen(engine, "do_connect", _connect)
    event.listen(engine, "checkout", _check)
    if spare is not None:
        pool = cast("_SharedPool", engine.pool)
        pool.spare = spare
        event.listen(engine, "checkout", pool.taken)
        event.listen(engine, "checkin", pool.returned)
    return engine


def _application_name() -> str:
    """Return the name by which ``pg_stat_activity`` shows the connections of this process."""
    return f"bridle {os.getpid()}"


class _SharedPool(QueuePool):
    """A pool of several engines, which lives on when one of them is disposed of."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._holders: dict[int, int] = {}
        """The thread of each connection that is in use, by the identity of its entry."""
        self.spare: Engine | None = None
        """The engine whose connections are for threads that have one of these in use already. They
        would wait for themselves."""

    def connect(self) -> PoolProxiedConnection:
        """Return a connection. Raise the driver's error if none is free for a long time."""
        if self.spare is not None and threading.get_ident() in list(self._holders.values()):
            return self.spare.pool.connect()
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                return super().connect()
            except NoneFree as error:
                if time.monotonic() > deadline:
                    driver = cast("Dialect", self._dialect).loaded_dbapi
                    raise driver.OperationalError(
                        f"no connection of this process was free for {_WAIT_S:g} s;"
                        f" {SETTING}=N in the store's URL lets it open more"
                    ) from error

    def dispose(self) -> None:
        """Close the connections that are not in use. Those that are stay valid."""
        resting: list[ConnectionPoolEntry] = []
        with suppress(Empty):
            while True:
                resting.append(self._pool.get(block=False))
        for entry in resting:
            entry.invalidate()
            self._pool.put(entry, block=False)

    def recreate(self) -> _SharedPool:
        return self

    def taken(self, _connection: object, entry: ConnectionPoolEntry, _proxy: object) -> None:
        """Record the thread that has a connection. A thread may return another's."""
        self._holders[id(entry)] = threading.get_ident()

    def returned(self, _connection: object, entry: ConnectionPoolEntry) -> None:
        self._holders.pop(id(entry), None)


def _connect(dialect: Any, _record: object, arguments: Sequence[Any], named: Any) -> Any:
    """Connect, and ask a server again whose connections are all in use.

    PostgreSQL's compiler is off in the connection: it takes seconds for queries of milliseconds.
    """
    deadline, pause = time.monotonic() + _REFUSED_S, 0.1
    while True:
        try:
            connection = dialect.connect(*arguments, **named)
        except dialect.loaded_dbapi.OperationalError as error:
            if not any(part in str(error) for part in _TOO_MANY):
                raise
            if time.monotonic() > deadline:
                raise type(error)(
                    f"{error}\nAll connections of the server are in use. Each process of Bridle"
                    f" keeps {CONNECTIONS} ({SETTING}=N in its store's URL): start fewer processes,"
                    f" or raise max_connections of the server."
                ) from error
        else:
            connection.execute("SET jit = off")
            connection.commit()
            return connection
        time.sleep(pause)
        pause = min(1.0, 2 * pause)


def _check(connection: Any, _entry: object, _proxy: object) -> None:
    """Replace a connection that the server has closed.

    A server sends nothing on a connection that rests, unless it closes it. So this takes no round
    trip.
    """
    if not connection.closed:
        waiting = select.poll()
        waiting.register(connection.fileno(), select.POLLIN)
        if not waiting.poll(0):
            return
    raise DisconnectionError


def _dumps(value: Any) -> str:
    return storable_json(dump_json(value).decode())
