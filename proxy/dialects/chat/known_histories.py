"""What was read of the latest requests, so that the next one of the same conversation is read from
where it goes on."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from bridle.proxy.dialects.chat.dialect import ChatDialect
from bridle.proxy.dialects.chat.history import ParsedHistory
from bridle.proxy.wire.canonical import DialectName, Request

_SHORTEST: Final = 16_384
"""Bodies that are shorter cost less to read than to remember."""
_PER_OWNER: Final = 8
"""Conversations that one session leads at the same time, sub-agents and side calls included."""

_REWRITTEN: Final = 2
"""So many messages at the end of a history may be other ones and it still is the same one."""


class KnownHistories:
    """The latest chat requests of each owner, within a bound of bytes.

    Which owner asked only narrows the search: a history is gone on from when its bytes are the
    same, whoever sent them.
    """

    dialect: Final[DialectName] = "chat"
    """Whose requests these are: only here does a client send its whole history in the same bytes
    as before."""

    def __init__(self, capacity: int = 24 << 20, *, shortest: int = _SHORTEST) -> None:
        self.capacity = capacity
        self.shortest = shortest
        self.held = 0
        """Bytes."""
        self._dialect = ChatDialect()
        self._histories: OrderedDict[str, list[ParsedHistory]] = OrderedDict()
        """By owner; the latest is the last, in both orders."""

    def parse(self, body: bytes, owner: str) -> Request:
        """The chat request that ``body`` is. Raises as the dialect does."""
        if len(body) < self.shortest:
            return self._dialect.parse(body, {}, {})
        known, count = self._closest(body, owner)
        request, history = self._dialect.parse_on(body, known if count else None)
        if history is not None:
            led_on = known is not None and count >= len(known.ends) - _REWRITTEN
            self._keep(owner, history, known if led_on else None)
        return request

    def _closest(self, body: bytes, owner: str) -> tuple[ParsedHistory | None, int]:
        """The owner's history that most messages of ``body`` are the same as, and how many."""
        best, most = None, 0
        for known in reversed(self._histories.get(owner, [])):
            count = known.shared(body)
            if count > most:
                best, most = known, count
            if count >= len(known.ends) - _REWRITTEN:
                break
        return best, most

    def _keep(self, owner: str, history: ParsedHistory, before: ParsedHistory | None) -> None:
        """``history`` in the place of the one it goes on from, else of the owner's oldest."""
        mine = self._histories.setdefault(owner, [])
        self._histories.move_to_end(owner)
        gone = before if before is not None or len(mine) < _PER_OWNER else mine[0]
        if gone is not None:
            mine.remove(gone)
            self.held -= gone.size
        mine.append(history)
        self.held += history.size
        while self.held > self.capacity:
            _, oldest = self._histories.popitem(last=False)
            self.held -= sum(one.size for one in oldest)
