"""The liveness of writers. Several processes may write to one store, and any of them may die.

Every writer has a row in ``writers`` and renews ``seen_at`` every third of its lease, in a server's
database also with each transaction. A call that is open belongs to the writer in
``calls.writer_id``. It is interrupted when that writer is gone: its row is missing, its lease has
run out, or its process no longer exists on this host. A writer that was judged too early (a long
pause) loses nothing, because the end of a call overwrites ``interrupted``.

An attempt of a run belongs to the writer in ``attempts.writer_id``, and has failed when that writer
is gone (``attempts.py``). It goes on if the writer was judged too early.
"""

from __future__ import annotations

import os
import time
from typing import Final

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from bridle.store.processes import alive, host, process
from bridle.store.records import CallStatus, new_id
from bridle.store.schema.tables import calls, writers
from bridle.store.writing import attempts

_REASON: Final = "the process that ran it died"


def register(connection: Connection, lease: float, before: str | None = None) -> str:
    """Add a writer for this process and return its identifier.

    ``before`` is the process's earlier writer, whose attempts the new one takes over.
    """
    writer_id, now = new_id("writer"), time.time()
    connection.execute(
        insert(writers).values(
            id=writer_id,
            host=host(),
            pid=os.getpid(),
            process=process(os.getpid()),
            started_at=now,
            seen_at=now,
            lease=lease,
            batch=0,
        )
    )
    if before is not None:
        attempts.adopt(connection, before, writer_id, _REASON)
    return writer_id


RENEW: Final = (
    update(writers)
    .where(writers.c.id == bindparam("writer"))
    .values(seen_at=bindparam("now"), batch=bindparam("number"))
)
"""The statement that renews a writer's lease and records the number of its latest transaction."""


def interrupt_orphans(connection: Connection) -> int:
    """Mark the open calls and attempts of writers that are gone.

    Return the number of these calls.
    """
    known = list(connection.execute(select(writers)))
    living = [row.id for row in known if alive(row)]
    orphaned = (
        update(calls)
        .where(calls.c.status == CallStatus.OPEN, calls.c.writer_id.not_in(living))
        .values(status=CallStatus.INTERRUPTED, reason=_REASON, ended_at=time.time())
    )
    count = connection.execute(orphaned).rowcount
    attempts.end_lost(connection, living, {row.id: row.seen_at for row in known}, _REASON)
    connection.execute(delete(writers).where(writers.c.id.not_in(living)))
    return count


def retire(connection: Connection, writer_id: str) -> int:
    """Remove a writer and interrupt the calls and attempts that it left open.

    Return the number of interrupted calls.
    """
    connection.execute(delete(writers).where(writers.c.id == writer_id))
    return interrupt_orphans(connection)
