"""The re-entries of a proxy's sessions, those in use in memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec

from bridle.proxy.replay.judgement import judge
from bridle.proxy.replay.recorded import RecordedSession
from bridle.proxy.replay.replay import Replay
from bridle.proxy.session.rules import ReplayRules
from bridle.proxy.session.session import Session
from bridle.proxy.wire.canonical import ApiError
from bridle.store.errors import NotFound
from bridle.store.reading.queries import Reader
from bridle.store.records import SessionRecord

_KEPT: Final = 256
"""Maximum re-entries in memory; those longest out of use go first."""


class Replays:
    """The re-entries of a proxy's sessions."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._open: OrderedDict[str, Replay] = OrderedDict()
        self._opening = asyncio.Lock()

    async def of(self, session: Session) -> Replay | None:
        """Return the re-entry of a session, or ``None`` for a session without an origin.

        Raise :class:`ApiError` if its origin cannot be replayed.
        """
        record = session.record
        if record.origin_session_id is None:
            return None
        async with self._opening:
            found = self._open.get(session.id)
            if found is None:
                found = self._open[session.id] = await self.check(record)
                if len(self._open) > _KEPT:
                    self._open.popitem(last=False)
            self._open.move_to_end(session.id)
        return found

    async def check(self, record: SessionRecord) -> Replay:
        """Return the re-entry of a new session. Raise :class:`ApiError` if there can be none."""
        try:
            rules = msgspec.convert(record.settings.get("replay", {}), ReplayRules)
            return await asyncio.to_thread(self._made, record, rules)
        except (NotFound, ValueError) as error:
            message = f"session {record.origin_session_id} cannot be replayed: {error}"
            raise ApiError("invalid_request", message, status=422, param="origin") from error

    def _made(self, record: SessionRecord, rules: ReplayRules) -> Replay:
        origin = self._reader.session(record.origin_session_id or "")
        recorded = RecordedSession.load(self._reader, origin.id)
        if not recorded.calls:
            raise ValueError("it has no complete call")
        places: Sequence[tuple[str | None, str | None]] = (
            (origin.folder, record.folder),
            (origin.home, record.home),
        )
        known = [(was, now) for was, now in places if was is not None and now is not None]
        judging = judge(rules.noise, known)
        return Replay(recorded, record.origin_call_id, rules, judging, self._reader)
