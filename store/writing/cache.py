"""What the writer remembers of a session so that a call is stored in proportion to what is new.

Losing an entry costs a read, never a record: everything here is in the database.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Connection, select

from bridle.store.encoding.bodies import Earlier
from bridle.store.reading import loading
from bridle.store.schema.tables import calls

_REQUESTS_KEPT: Final = 6
"""Latest request bodies per session, one per line: enough for a few sub-agents that take turns."""


@dataclass(slots=True)
class CachedSession:
    """The bodies that a session's next ones are compared with."""

    requests: OrderedDict[str, Earlier] = field(default_factory=OrderedDict)
    """By call, oldest first."""
    open_calls: dict[str, int] = field(default_factory=dict)
    """How many messages the request of each open call had: its reply follows them."""
    tools: dict[bytes, bytes] = field(default_factory=dict)
    """Identifiers of tool sets that are in the store, by lineage's digest of the tools."""

    def request_base(self, parent_call_id: str | None) -> tuple[str | None, Earlier | None]:
        """The parent's request when it is at hand, else the latest one; and whose it is."""
        if parent_call_id is not None and parent_call_id in self.requests:
            return parent_call_id, self.requests[parent_call_id]
        latest = next(reversed(self.requests), None)
        return latest, None if latest is None else self.requests[latest]

    def remember_request(
        self, call_id: str, request: Earlier, superseded: str | None = None
    ) -> None:
        """``superseded`` is the call whose request this one contains: what comes after it is
        compared with this one as well."""
        if superseded is not None:
            self.requests.pop(superseded, None)
        self.requests[call_id] = request
        if len(self.requests) > _REQUESTS_KEPT:
            self.requests.popitem(last=False)

    @property
    def size(self) -> int:
        """Bytes held, roughly."""
        return sum([len(one.data) + len(one.replies) for one in self.requests.values()])


def load_session(connection: Connection, session_id: str) -> CachedSession:
    """Read from the store the state of a session that is not in memory."""
    loaded = CachedSession()
    latest = connection.execute(
        select(calls.c.id)
        .where(calls.c.session_id == session_id)
        .order_by(calls.c.started_at.desc())
        .limit(1)
    ).scalar()
    if latest is not None:
        loaded.remember_request(latest, loading.request(connection, latest))
    return loaded


class SessionCache:
    """Session states, the longest unused forgotten first, within ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._states: OrderedDict[str, CachedSession] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self.size = 0

    def get(self, session_id: str, load: Callable[[], CachedSession]) -> CachedSession:
        """The session's state, from ``load`` when it is not at hand."""
        state = self._states.get(session_id)
        if state is None:
            state = self._states[session_id] = load()
        self._states.move_to_end(session_id)
        return state

    def settle(self, session_id: str) -> None:
        """Counts a session's growth and forgets others until the limit holds."""
        state = self._states.get(session_id)
        if state is None:
            return
        size = state.size
        self.size += size - self._sizes.get(session_id, 0)
        self._sizes[session_id] = size
        while self.size > self._limit and self._states:
            self.forget(next(iter(self._states)))

    def forget(self, session_id: str) -> None:
        """Drops a state, for room or because its transaction failed."""
        self._states.pop(session_id, None)
        self.size -= self._sizes.pop(session_id, 0)
