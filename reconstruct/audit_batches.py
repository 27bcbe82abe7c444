"""The audit of many sessions, in batches that several processes share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select

from bridle.reconstruct.audit import SessionAudit, audit
from bridle.reconstruct.samples.rules import SampleRules
from bridle.store.reading.queries import Reader
from bridle.store.reading.session_filter import SessionFilter, matching
from bridle.store.schema.tables import sessions

BATCH: Final = 100
"""Sessions of a batch."""


@dataclass(frozen=True, slots=True)
class BatchedAudit:
    """An audit of the sessions of a store or of a run, oldest first."""

    reader: Reader
    run: str | None = None
    rules: SampleRules | None = None
    bodies: bool = False

    def session_ids(self) -> list[str]:
        """Return the ids of the sessions that are audited."""
        wanted = matching(SessionFilter(run=self.run), select(sessions.c.id), account=True)
        ordered = wanted.order_by(sessions.c.created_at, sessions.c.id)
        with self.reader.engine.connect() as connection:
            return list(connection.execute(ordered).scalars())

    def results(self, session_ids: Sequence[str], processes: int) -> Iterator[SessionAudit]:
        """Yield the audit of each session, in their order, whatever the number of processes."""
        batches = [session_ids[at : at + BATCH] for at in range(0, len(session_ids), BATCH)]
        if min(processes, len(batches)) < 2:
            for batch in batches:
                yield from self._audited(batch)
            return
        url = self.reader.engine.url.render_as_string(hide_password=False)
        # Spawned, because a fork would share the connections and threads of this process.
        with ProcessPoolExecutor(
            min(processes, len(batches)),
            multiprocessing.get_context("spawn"),
            initializer=_open,
            initargs=(url, self.run, self.rules, self.bodies),
        ) as pool:
            for audited in pool.map(_audit_batch, batches):
                yield from audited

    def _audited(self, batch: Sequence[str]) -> Iterator[SessionAudit]:
        return audit(
            self.reader, self.rules, bodies=self.bodies, run=self.run, sessions=list(batch)
        )


_own: list[BatchedAudit] = []
"""The audit of a process of the pool."""


def _open(url: str, run: str | None, rules: SampleRules | None, bodies: bool) -> None:
    _own.append(BatchedAudit(Reader(url), run, rules, bodies))


def _audit_batch(batch: Sequence[str]) -> list[SessionAudit]:
    return list(_own[0]._audited(batch))
