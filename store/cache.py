"""What the writer remembers of a session so that a call is stored in proportion to what is new.

Losing an entry costs a read, never a record: everything here is in the database.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from store.bodies import Body, Wrapping
from store.tree import TokenTree

_REQUESTS_KEPT: Final = 6
"""Latest request bodies per session: enough for a few sub-agents that take turns."""


@dataclass(slots=True)
class SessionState:
    """One session's token tree and the bodies that its next ones are compared with."""

    tree: TokenTree
    requests: OrderedDict[str, Body] = field(default_factory=OrderedDict)
    """By call, oldest first."""
    responses: Wrapping | None = None
    """The latest response that was stored whole."""
    additions: dict[str, bytes] = field(default_factory=dict)
    """What the request rows of open calls add (``BodyRow.addition``), by call."""
    unknown_parents: set[str] = field(default_factory=set)
    """Parents looked for in the database in vain: calls without tokens."""

    def request_base(self, parent_call_id: str | None) -> Body | None:
        """The parent's request when it is at hand, else the latest one."""
        if parent_call_id is not None and parent_call_id in self.requests:
            return self.requests[parent_call_id]
        return next(reversed(self.requests.values()), None)

    def remember_request(self, call_id: str, body: Body) -> None:
        self.requests[call_id] = body
        if len(self.requests) > _REQUESTS_KEPT:
            self.requests.popitem(last=False)

    @property
    def size(self) -> int:
        """Bytes held, roughly."""
        bodies = sum(len(body.data) for body in self.requests.values())
        response = len(self.responses.base.data) if self.responses else 0
        additions = sum(map(len, self.additions.values()))
        return self.tree.size + bodies + response + additions


class SessionCache:
    """Session states, the longest unused forgotten first, within ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._states: OrderedDict[str, SessionState] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self.size = 0

    def get(self, session_id: str, load: Callable[[], SessionState]) -> SessionState:
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
