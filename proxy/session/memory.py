"""The sessions in memory, within one budget of bytes; the longest unused are removed first.

A session is found by its id, name or key, or by the conversation that a request continues. If
memory does not explain a request, another process may have recorded its session, so the store is
read. All anonymous sessions share one index of turns. With it, the next call of a harness that
sends no session id finds the call before it, and thereby its session.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from bridle.proxy.session.loading import load_calls
from bridle.proxy.session.search import Search
from bridle.proxy.session.session import Session
from bridle.proxy.session.trails import Trails
from bridle.proxy.session.turn import Link, Turn, TurnIndex
from bridle.proxy.wire.canonical import Request
from bridle.proxy.wire.histories import History
from bridle.store.errors import NotFound
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus, SessionRecord, token_array

_ANONYMOUS_SESSIONS: Final = 64
"""Number of the latest anonymous sessions that a proxy reads from the store."""

ECHO_WAIT_S: Final = 5.0
"""Maximum seconds that a request waits for the end of a call whose reply it echoes."""


def is_anonymous(session: SessionRecord) -> bool:
    """Return whether nothing but its conversation identifies the session."""
    return session.name is None and session.key_hash is None


class SessionMemory:
    """The sessions in memory, and their running calls. Call :meth:`start` before anything else."""

    def __init__(
        self, reader: Reader, limit: int, *, on_read: Callable[[], None] = lambda: None
    ) -> None:
        """``limit`` is in bytes.

        Sessions with running calls, and the one used last, are kept regardless of their size.
        ``on_read`` is called for each session whose calls were read from the store.
        """
        self._reader = reader
        self._limit = limit
        self._on_read = on_read
        self._size = 0
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._trailing: OrderedDict[str, Session] = OrderedDict()
        """The sessions with trails of their own, which are given up before any session is."""
        self._ids: dict[tuple[str, str], str] = {}
        """Session ids by ``("name" | "key", value)``."""
        self._anonymous = TurnIndex(unrelated=True)
        self.anonymous_trails = Trails(self._anonymous)
        """The latest requests of the anonymous sessions."""
        self._writers: frozenset[str] = frozenset()
        """Ids of the processes that had written to the store when the anonymous sessions were last
        read."""
        self._asked_again: dict[str, str] = {}
        """The failed call of each anonymous session that a request has asked again."""
        self._running: dict[str, asyncio.Event | None] = {}
        """The running calls by id, with an event that is set when the call is over. The event is
        made when a request waits for it."""

    async def start(self) -> None:
        await self._load_anonymous()

    # -- sessions --------------------------------------------------------------------------------

    def get(self, session_id: str | None) -> Session | None:
        session = self._sessions.get(session_id or "")
        if session is not None:
            self._sessions.move_to_end(session.id)
        return session

    def named(self, name: str) -> Session | None:
        session = self._sessions.get(self._ids.get(("name", name), ""))
        if session is not None:
            self._sessions.move_to_end(session.id)
        return session

    def keyed(self, key_hash: str) -> Session | None:
        return self.get(self._ids.get(("key", key_hash)))

    def add(self, record: SessionRecord, *, new: bool = False) -> Session:
        """Return the session of ``record``, which is added if it is not in memory.

        ``new`` means that the store has no calls of it.
        """
        session = self.get(record.id)
        if session is not None:
            return session
        trails = self.anonymous_trails if is_anonymous(record) else None
        session = self._sessions[record.id] = Session(record, trails, loaded=new)
        if record.name:
            self._ids["name", record.name] = record.id
        if record.key_hash:
            self._ids["key", record.key_hash] = record.id
        self._settle(session)
        return session

    def forget(self, session_id: str) -> None:
        """Remove a session, to make room or because it changed elsewhere."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        self._size -= session.size
        self._trailing.pop(session_id, None)
        self._asked_again.pop(session_id, None)
        self._ids.pop(("name", session.record.name or ""), None)
        self._ids.pop(("key", session.record.key_hash or ""), None)
        session.dissolve()

    def _settle(self, session: Session) -> None:
        """Count a session's growth and make room for it."""
        self._size += session.measure()
        if session.trails.size and not session.turns.unrelated:
            self._trailing[session.id] = session
            self._trailing.move_to_end(session.id)
        while self._size > self._limit and self._trailing:
            other = next(iter(self._trailing.values()))
            if other is session:
                break
            del self._trailing[other.id]
            other.trails.clear()
            self._size += other.measure()
        excess, idle = self._size - self._limit, []
        for other in self._sessions.values():
            if excess <= 0:
                break
            if other is not session and not other.running:
                idle.append(other.id)
                excess -= other.size
        for session_id in idle:
            self.forget(session_id)
        while self._size > self._limit and not session.turns.unrelated and session.trim():
            self._size += session.measure()

    # -- calls -----------------------------------------------------------------------------------

    def begin(self, session: Session, call_id: str) -> None:
        """Record that the call is at the engine from now on."""
        session.running.add(call_id)
        self._running[call_id] = None

    def end(self, session: Session, call_id: str, turn: Turn | None = None) -> None:
        """Record that the call is over. ``turn`` is given if the call is in the store."""
        session.running.discard(call_id)
        current = self._sessions.get(session.id)
        if turn is None:
            session.tree.drop(call_id)
        elif current is not None:
            # A session that was forgotten meanwhile has been, or will be, read from the store.
            current.add(turn)
            self._settle(current)
        over = self._running.pop(call_id)
        if over is not None:
            over.set()

    def running(self, call_ids: Iterable[str]) -> list[str]:
        """Return the ids of the given calls that are still at the engine."""
        return [call_id for call_id in call_ids if call_id in self._running]

    # -- lineage ---------------------------------------------------------------------------------

    async def find(
        self,
        session: Session,
        request: Request,
        agent: str | None = None,
        history: History | None = None,
    ) -> Link:
        """Return the place of ``request`` in its session.

        ``history`` is the body that its messages were read from, if a later one may go on from it.
        """
        await self.load(session)
        link = session.find(request, agent, history)
        if link.unknown and await self._were_running(link.unknown):
            link = session.find(request, agent, history)
        if link.unexplained and await self._grown(session):
            await self._load(session)
            link = session.find(request, agent, history)
        return link

    async def find_anonymous(
        self,
        request: Request,
        agent: str | None = None,
        history: History | None = None,
        *,
        begins: bool = True,
    ) -> tuple[Link, Session | None]:
        """Return the place of a request that names no session, and the session it continues.

        ``agent`` and ``history`` are as for :meth:`find`. ``begins`` is whether a call begins with
        it.
        """
        link = self._find_anonymous(request, agent, history)
        if link.unknown and await self._were_running(link.unknown):
            link = self._find_anonymous(request, agent, history)
        for call_id in reversed(link.unknown):
            session = await self.session_of(call_id)
            if session is not None:
                link = await self.find(session, request, agent)
                break
        if link.parent is None and link.unexplained and await self._others_wrote():
            await self._load_anonymous()
            link = self._find_anonymous(request, agent, history)
        return link, self._session_by(link, begins)

    def _session_by(self, link: Link, begins: bool) -> Session | None:
        """Return the session that an anonymous request shows, or ``None`` if it begins one.

        A session whose call failed gets one request that asks the same again. Another one, which
        comes before that call is over, belongs to another client.
        """
        if link.parent is not None:
            return self.get(link.parent.session_id)
        for turn in link.failed:
            session = self._sessions.get(turn.session_id)
            if session is not None and self._asked_again.get(session.id) != turn.call_id:
                if begins:
                    self._asked_again[session.id] = turn.call_id
                return self.get(session.id)
        return None if link.quoted is None else self.get(link.quoted.session_id)

    def find_first(self, request: Request, agent: str | None) -> Link:
        """Return the place of ``request`` in a session that it is the first call of."""
        return Search(TurnIndex(), request, agent).link()

    def _find_anonymous(self, request: Request, agent: str | None, history: History | None) -> Link:
        link = Search(self._anonymous, request, agent, self.anonymous_trails, history).link()
        if link.parent is not None or not isinstance(request.prompt, tuple):
            return link
        prompt = token_array(request.prompt)
        shared = [one for one in self._sessions.values() if one.turns is self._anonymous]
        found = [one.find_tokens(link, prompt) for one in reversed(shared)]
        return max(found, key=_reach, default=link)

    async def _were_running(self, call_ids: Iterable[str]) -> bool:
        """Wait for the calls that are still at the engine; return whether there were any.

        A client that cut a stream and goes on at once may echo a call whose end is not recorded
        yet. The wait takes at most :data:`ECHO_WAIT_S`.
        """
        running = self.running(call_ids)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ECHO_WAIT_S):
                for call_id in running:
                    await self._over(call_id)
        return bool(running)

    async def _over(self, call_id: str) -> None:
        if call_id in self._running:
            over = self._running[call_id]
            if over is None:
                over = self._running[call_id] = asyncio.Event()
            await over.wait()

    # -- the store -------------------------------------------------------------------------------

    async def load(self, session: Session) -> None:
        """Read the session's calls from the store, unless that has been done."""
        if not session.loaded:
            await self._load(session)
            if session.calls:
                self._on_read()

    async def _load(self, session: Session) -> None:
        """Add the session's recorded calls that are not in memory."""
        calls, spans = await asyncio.to_thread(
            lambda: (self._reader.calls(session.id), self._reader.spans(session.id))
        )
        load_calls(session, calls, spans)
        session.loaded = True
        self._settle(session)

    async def _grown(self, session: Session) -> bool:
        """Return whether the store has calls of the session that were not made here."""
        counts = await asyncio.to_thread(self._reader.call_counts, session.id)
        return _ended(counts) > len(session.calls)

    async def session_of(self, call_id: str) -> Session | None:
        try:
            row = await asyncio.to_thread(self._reader.call, call_id)
            record = await asyncio.to_thread(self._reader.session, row.session_id)
        except NotFound:
            return None
        return self.add(record)

    async def _load_anonymous(self) -> None:
        """Read the latest anonymous sessions that are in the store and not in memory."""
        self._writers = await asyncio.to_thread(self._reader.writer_ids)
        latest = await asyncio.to_thread(
            lambda: list(
                self._reader.sessions(
                    sealed=False, anonymous=True, newest_first=True, limit=_ANONYMOUS_SESSIONS
                )
            )
        )
        ids = [record.id for record in latest]
        counts = await asyncio.to_thread(self._reader.call_counts_of, ids)
        for record in reversed(latest):
            session = self.add(record)
            if _ended(counts[record.id]) > len(session.calls):
                await self._load(session)

    async def _others_wrote(self) -> bool:
        """Return whether another process may have begun an anonymous conversation.

        The conversation is one that goes on here.
        """
        writers = await asyncio.to_thread(self._reader.writer_ids)
        return len(writers) > 1 or writers != self._writers


def _ended(counts: Mapping[CallStatus, int]) -> int:
    """Return the number of calls that have ended. A running call has nothing to read yet."""
    return sum(counts.values()) - counts.get(CallStatus.OPEN, 0)


def _reach(link: Link) -> int:
    """Return the number of tokens up to the end of the link's parent, or 0 if there is none."""
    tip = None if link.parent is None else link.parent.tip(link.choice)
    return 0 if tip is None else tip.end
