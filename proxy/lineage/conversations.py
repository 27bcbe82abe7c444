"""The lineage state of sessions: in memory while in use, else rebuilt from the store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np

from bridle.proxy.lineage.lineage import Conversations, Link, Sampled, Turn
from bridle.proxy.wire.canonical import Request
from bridle.store.errors import NotFound
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import CallStatus, SessionRecord, Span, TokenIds, is_frozen

log = logging.getLogger("bridle.proxy")

_CARRY_TOKENS: Final = frozenset({CallStatus.COMPLETE, CallStatus.PARTIAL})
_TURN_BYTES: Final = 4000
"""What a turn takes beside its token ids, roughly."""
_LOBBY_SESSIONS: Final = 64
"""How many of the latest anonymous sessions a restarted proxy remembers."""


ECHO_WAIT_S: Final = 5.0
"""The longest that a request waits for the end of a call whose reply it echoes."""


def is_anonymous(session: SessionRecord) -> bool:
    """Nothing but its conversation leads to this session."""
    return session.name is None and session.key_hash is None


class _Held:
    """One session's turns, and which of its calls have been looked at."""

    __slots__ = ("calls", "conversations")

    def __init__(self, conversations: Conversations | None = None) -> None:
        self.conversations = Conversations() if conversations is None else conversations
        self.calls: set[str] = set()

    @property
    def size(self) -> int:
        """Bytes held, roughly."""
        return 4 * self.conversations.held_tokens + _TURN_BYTES * len(self.conversations)

    def find(self, request: Request, agent: str | None) -> Link:
        """By what is said; a prompt of token ids by its tokens."""
        link = self.conversations.find(request, agent=agent)
        if isinstance(request.prompt, tuple):
            link = self.conversations.find_tokens(link, request.prompt)
        return link


class SessionConversations:
    """An LRU of :class:`Conversations` by session; all anonymous sessions share one.

    In the anonymous_sessions the next call of a harness that sends no session id finds the call
    before it, and by that its session.
    """

    def __init__(
        self,
        reader: Reader,
        capacity: int,
        limit: int = 16 << 20,
        *,
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        """At most ``capacity`` sessions, and as many as fit into ``limit`` bytes (one always
        does). ``on_read`` is told of each session whose calls were read from the store."""
        self._reader = reader
        self._on_read = on_read
        self._writers: frozenset[str] = frozenset()
        """Who wrote to the store when the anonymous_sessions was last read from it."""
        self._lobby_counts: dict[str, int] = {}
        """Calls of the anonymous sessions that were over when they were last read."""
        self._capacity = capacity
        self._limit = limit
        self._size = 0
        self._sizes: dict[str, int] = {}
        self._lobby = _Held(Conversations(max_turns=4096, max_tokens=4_194_304, unrelated=True))
        self._lobby_sessions: OrderedDict[str, str] = OrderedDict()
        """Call id -> session id, for the calls in the anonymous_sessions."""
        self._sessions: OrderedDict[str, _Held] = OrderedDict()
        self._in_flight: dict[str, asyncio.Event | None] = {}
        """Call id -> set when the call is over; made for who waits for it."""

    async def start(self) -> None:
        """Takes the latest anonymous sessions into the anonymous_sessions."""
        await self._load_lobby()

    async def _load_lobby(self) -> None:
        """Reads the latest anonymous sessions that are in the store and not in memory."""
        self._writers = await asyncio.to_thread(self._reader.writer_ids)
        latest = await asyncio.to_thread(
            lambda: list(
                self._reader.sessions(
                    sealed=False, anonymous=True, newest_first=True, limit=_LOBBY_SESSIONS
                )
            )
        )
        ids = [session.id for session in latest]
        counts = await asyncio.to_thread(self._reader.call_counts_of, ids)
        for session in reversed(latest):
            calls = _ended(counts[session.id])
            if self._lobby_counts.get(session.id) != calls:
                await self._load(session.id, self._lobby)
            self._lobby_counts[session.id] = calls
        known = {session.id for session in latest}
        for gone in self._lobby_counts.keys() - known:
            del self._lobby_counts[gone]

    def opened(self, session: SessionRecord) -> None:
        """The session is new: there is nothing of it in the store."""
        if not is_anonymous(session):
            self._keep(session.id, _Held())

    async def find(self, session_id: str, request: Request, agent: str | None) -> Link:
        """Where ``request`` belongs in its session.

        What memory does not explain another process may have recorded, so the store is asked.
        """
        held = self._sessions.get(session_id)
        if held is None:
            held = _Held()
            await self._load(session_id, held)
            if held.calls:
                self._on_read()
            held = self._sessions.setdefault(session_id, held)
            self._keep(session_id, held)
            return await self._find_over(held, request, agent)
        self._sessions.move_to_end(session_id)
        link = await self._find_over(held, request, agent)
        if _unexplained(link) and await self._grown(session_id, held):
            await self._load(session_id, held)
            link = held.find(request, agent)
        return link

    async def find_anonymous(self, request: Request) -> tuple[Link, str | None]:
        """Where a request without any session belongs, and the session that it continues."""
        link = await self._find_over(self._lobby, request, None)
        for call_id in reversed(link.unknown):
            try:
                row = await asyncio.to_thread(self._reader.call, call_id)
            except NotFound:
                continue
            await self._load(row.session_id, self._lobby)
            link = self._lobby.find(request, None)
            break
        if link.parent is None and _unexplained(link) and await self._others_wrote():
            await self._load_lobby()
            link = self._lobby.find(request, None)
        continued = link.parent.call_id if link.parent is not None else None
        return link, self._lobby_sessions.get(continued or "")

    def find_first(self, request: Request) -> Link:
        """Where ``request`` belongs in a session that it is the first call of."""
        return _Held().find(request, None)

    async def _others_wrote(self) -> bool:
        """Whether an anonymous conversation that goes on here may have been begun elsewhere."""
        writers = await asyncio.to_thread(self._reader.writer_ids)
        return len(writers) > 1 or writers != self._writers

    def held_tokens(self, session_id: str) -> int:
        """Token ids of the session in memory, four bytes each; 0 when it is not held."""
        held = self._sessions.get(session_id)
        return 0 if held is None else held.conversations.held_tokens

    def begin(self, call_id: str) -> None:
        """The call is at the engine from now on."""
        self._in_flight[call_id] = None

    def end(self, call_id: str) -> None:
        """The call is over, remembered or not."""
        over = self._in_flight.pop(call_id)
        if over is not None:
            over.set()

    async def _over(self, call_id: str) -> None:
        if call_id in self._in_flight:
            over = self._in_flight[call_id]
            if over is None:
                over = self._in_flight[call_id] = asyncio.Event()
            await over.wait()

    def in_flight(self, call_ids: Iterable[str]) -> list[str]:
        """Those of the calls that are still at the engine."""
        return [call_id for call_id in call_ids if call_id in self._in_flight]

    async def _find_over(self, held: _Held, request: Request, agent: str | None) -> Link:
        """Where ``request`` belongs, when the calls that it echoes are over.

        A client that cut a stream and goes on at once may echo a call whose end is not recorded
        yet; that end is near.
        """
        link = held.find(request, agent)
        running = self.in_flight(link.unknown)
        if not running:
            return link
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ECHO_WAIT_S):
                for call_id in running:
                    await self._over(call_id)
        return held.find(request, agent)

    def add(self, session: SessionRecord, turn: Turn) -> None:
        """A call of the session is over and recorded."""
        held = self._lobby if is_anonymous(session) else self._sessions.get(session.id)
        if held is not None:
            self._put(held, session.id, turn)

    def _put(self, held: _Held, session_id: str, turn: Turn) -> None:
        held.conversations.add(turn)
        held.calls.add(turn.call_id)
        if held is self._lobby:
            self._lobby_sessions[turn.call_id] = session_id
            while len(self._lobby_sessions) > 2 * held.conversations.max_turns:
                gone, _ = self._lobby_sessions.popitem(last=False)
                held.calls.discard(gone)
        elif session_id in self._sessions:
            self._settle(session_id, held)

    def _keep(self, session_id: str, held: _Held) -> None:
        self._sessions[session_id] = held
        self._sessions.move_to_end(session_id)
        self._settle(session_id, held)

    def _settle(self, session_id: str, held: _Held) -> None:
        """Counts a session's growth and forgets others, longest out of use first, for room."""
        size = held.size
        self._size += size - self._sizes.get(session_id, 0)
        self._sizes[session_id] = size
        while len(self._sessions) > 1 and (
            len(self._sessions) > self._capacity or self._size > self._limit
        ):
            forgotten, _ = self._sessions.popitem(last=False)
            self._size -= self._sizes.pop(forgotten, 0)

    async def _grown(self, session_id: str, held: _Held) -> bool:
        """Whether the store has calls of the session that were not made here."""
        counts = await asyncio.to_thread(self._reader.call_counts, session_id)
        return _ended(counts) > len(held.calls)

    async def _load(self, session_id: str, held: _Held) -> None:
        """Adds the session's recorded calls that ``held`` does not know."""
        rows, spans = await asyncio.to_thread(self._read, session_id)
        for row in rows:
            if row.status is CallStatus.OPEN or row.id in held.calls:
                continue
            turn = _turn(row, spans, held.conversations)
            if turn is None:
                held.calls.add(row.id)
            else:
                self._put(held, session_id, turn)

    def _read(self, session_id: str) -> tuple[list[CallRow], dict[str, Span]]:
        rows = self._reader.calls(session_id)
        return rows, {span.id: span for span in self._reader.spans(session_id)}


def _ended(counts: Mapping[CallStatus, int]) -> int:
    """How many of the counted calls have ended: of one that runs there is nothing to read yet."""
    return sum(counts.values()) - counts.get(CallStatus.OPEN, 0)


def _unexplained(link: Link) -> bool:
    """Whether the request shows a history that memory does not hold."""
    return bool(link.unknown) or any(message.role == "assistant" for message in link.tail)


def _turn(row: CallRow, spans: Mapping[str, Span], conversations: Conversations) -> Turn | None:
    """A recorded call as a turn; ``None`` when its state cannot be used, which is logged."""
    state = None if row.conversation is None else row.conversation.lineage
    if state is None:
        return None
    base = None if state.base_call_id is None else conversations.get(state.base_call_id)
    # Else: its echo is recognised, nothing built on it.
    trusted = row.status in _CARRY_TOKENS and not is_frozen(row.notes)
    try:
        return Turn.from_state(
            state,
            call_id=row.id,
            parent_call_id=row.parent_call_id,
            status=row.status,
            base=base,
            choices=_choices(row, spans),
            prompt_token_ids=_prompt(row, spans) if trusted else None,
        )
    except ValueError as error:
        fields = {"session": row.session_id, "call": row.id, "error": str(error)}
        log.warning("lineage_state_unusable", extra=fields)
        return None


def _choices(row: CallRow, spans: Mapping[str, Span]) -> list[Sampled]:
    sampled: list[Sampled] = []
    for index, message in enumerate(row.replies):
        span = spans.get(f"{row.id}.s{index}")
        ids = np.empty(0, dtype=np.uint32) if span is None else span.token_ids
        sampled.append(Sampled(message, ids))
    return sampled


def _prompt(row: CallRow, spans: Mapping[str, Span]) -> TokenIds | None:
    """The call's prompt ids from its path in the tree; ``None`` when they are not there."""
    if row.prompt_tokens is None or row.prompt_span_id is None:
        return None
    pieces: list[TokenIds] = []
    end, link = row.prompt_tokens, row.prompt_span_id
    while end and link in spans:
        span = spans[link]
        if span.start < end:
            pieces.append(span.token_ids[: end - span.start])
            end = span.start
        if span.parent_id is None:
            break
        link = span.parent_id
    return np.concatenate(pieces[::-1]) if pieces and not end else None
