"""The state of sessions that the writer caches, so that the cost of a call depends on its new part.

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
"""Maximum request bodies per session, the latest of each conversation. This is enough for a few
sub-agents that take turns."""


@dataclass(slots=True)
class CachedSession:
    """The state of a session: earlier request bodies, open calls and tool sets."""

    requests: OrderedDict[str, Earlier] = field(default_factory=OrderedDict)
    """The latest requests by call, oldest first."""
    open_calls: dict[str, int] = field(default_factory=dict)
    """Number of messages of each open call's request; the reply comes after them."""
    tools: dict[bytes, bytes] = field(default_factory=dict)
    """Identifiers of tool sets that are in the store, by lineage's digest of the tools."""

    def request_base(self, parent_call_id: str | None) -> tuple[str | None, Earlier | None]:
        """Return the parent's request and call id if cached, else those of the latest request."""
        if parent_call_id is not None and parent_call_id in self.requests:
            return parent_call_id, self.requests[parent_call_id]
        latest = next(reversed(self.requests), None)
        return latest, None if latest is None else self.requests[latest]

    def remember_request(
        self, call_id: str, request: Earlier, superseded: str | None = None
    ) -> None:
        """Cache a request.

        ``superseded`` is a call whose request this one contains; it is dropped, because later
        requests can be compared with this one as well.
        """
        if superseded is not None:
            self.requests.pop(superseded, None)
        self.requests[call_id] = request
        if len(self.requests) > _REQUESTS_KEPT:
            self.requests.popitem(last=False)

    @property
    def size(self) -> int:
        """Number of cached bytes, roughly."""
        return sum([len(one.data) + len(one.replies) for one in self.requests.values()])


def load_session(connection: Connection, session_id: str) -> CachedSession:
    """Read the state of a session that is not cached from the store."""
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
    """A cache of session states within ``limit`` bytes.

    States unused for longest are forgotten first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._states: OrderedDict[str, CachedSession] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self.size = 0

    def get(self, session_id: str, load: Callable[[], CachedSession]) -> CachedSession:
        """Return the session's state, from ``load`` if it is not cached."""
        state = self._states.get(session_id)
        if state is None:
            state = self._states[session_id] = load()
        self._states.move_to_end(session_id)
        return state

    def settle(self, session_id: str) -> None:
        """Add a session's growth to the size, and forget other sessions until the limit holds."""
        state = self._states.get(session_id)
        if state is None:
            return
        size = state.size
        self.size += size - self._sizes.get(session_id, 0)
        self._sizes[session_id] = size
        while self.size > self._limit and self._states:
            self.forget(next(iter(self._states)))

    def forget(self, session_id: str) -> None:
        """Drop a state, for room or because its transaction failed."""
        self._states.pop(session_id, None)
        self.size -= self._sizes.pop(session_id, 0)
